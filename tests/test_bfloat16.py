"""Sampler against trainer on the real base model in bfloat16. Conformance D1."""

from __future__ import annotations

import numpy as np

import raysessions as rs

ANYWHERE = {"num_cpus": 0}
"""Beside the resident session, which has the machine's CPUs."""


def test_sampler_and_trainer_agree_within_bfloat16_rounding(service):
    with service.create_lora_training_client(
        "smollm2-135m-instruct",
        rank=16,
        seed=0,
        training=rs.TrainingConfig(actor_options=ANYWHERE),
        sampling=rs.SamplingConfig(actor_options=ANYWHERE, kv_cache_gib=0.5, max_model_len=1024),
    ) as training:
        tokenizer = training.get_tokenizer()
        texts = ["The lighthouse stands on a cliff above the bay.", "Name three rivers in Europe.", "Count: 1, 2, 3,"]
        prompts = [tokenizer(text).input_ids for text in texts]
        taught = [rs.datum_for_supervised(prompt, [1.0] * len(prompt)) for prompt in prompts]
        for _ in range(2):
            training.forward_backward(taught)
            training.optim_step(rs.AdamParams(learning_rate=3e-4)).result()
        sampler = training.save_weights_and_get_sampling_client("trained")
        # Without the tail: rounding moves the logprob of a token that is rarer than e⁻³ by 0.05 on average, of a likely one by
        # 0.01, so that with it the mean says how strange the text is.
        params = rs.SamplingParams(max_tokens=48, seed=0, top_p=0.9, stop=[])
        differences = []
        for prompt in prompts:
            for sequence in sampler.sample(rs.ModelInput.from_ints(prompt), 4, params).result().sequences:
                datum = rs.datum_for_supervised([*prompt, *sequence.tokens], [1.0] * (len(prompt) + len(sequence.tokens)))
                trainer = training.forward([datum]).result().loss_fn_outputs[0]["logprobs"].to_numpy()
                differences.append(np.array(sequence.logprobs) - trainer[len(prompt) - 1 :])
    difference = np.concatenate(differences)
    assert np.abs(difference).mean() < 0.03
    assert abs(difference.mean()) < 0.01
