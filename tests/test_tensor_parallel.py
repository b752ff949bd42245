"""One replica over two processes."""

from __future__ import annotations

import numpy as np
from datums import supervised
from pools import NO_CPU, PROMPT, TRAINING

import raysessions as rs


def test_a_replica_of_two_processes_binds_the_adapter_and_agrees_with_the_trainer(service, resident, tiny_model):
    config = rs.SamplingConfig(tensor_parallel_size=2, kv_cache_gib=0.25, actor_options=NO_CPU)
    settings = {"training": TRAINING, "sampling": config}
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0, **settings) as training:
        training.forward_backward(supervised([40, 25]))
        training.optim_step(rs.AdamParams(learning_rate=2e-2)).result()
        sampler = training.save_weights_and_get_sampling_client("split")
        tokens = PROMPT.to_ints()
        datum = rs.datum_for_supervised(tokens, [1.0] * len(tokens))
        trainer = training.forward([datum]).result().loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(sampler.compute_logprobs(PROMPT).result()[1:], trainer, atol=1e-4)
