"""What the tests do with the tinker package. Also run by another version of it, as a script: `URL KEY BASE_MODEL`."""

from __future__ import annotations

import json
import sys

TOKENS = list(range(40, 60))
LORA = {"rank": 8, "seed": 0, "train_unembed": False}


def datum(tokens=TOKENS, weight: float = 1.0):
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)},
    )


def run(client, base_model: str, steps: int = 4) -> dict:
    """Trains, saves, goes on from the state, samples."""
    from tinker import types

    adam = types.AdamParams(learning_rate=2e-2)
    training = client.create_lora_training_client(base_model, **LORA)
    losses = []
    for _ in range(steps):
        done = training.forward_backward([datum(), datum(TOKENS[:9])], "cross_entropy"), training.optim_step(adam)
        losses.append(done[0].result().metrics["loss:sum"])
        done[1].result()
    state = training.save_state("state").result().path
    resumed = client.create_training_client_from_state_with_optimizer(state)
    for one in (training, resumed):
        one.forward_backward([datum()], "cross_entropy").result()
        one.optim_step(adam).result()
        losses.append(one.forward([datum()], "cross_entropy").result().metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, temperature=0)
    prompt = types.ModelInput.from_ints(TOKENS[:5])
    samples = [sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(8)]
    return {"losses": losses, "samples": [list(sample.result().sequences[0].tokens) for sample in samples]}


if __name__ == "__main__":
    import tinker

    url, key, base_model = sys.argv[1:]
    with tinker.ServiceClient(base_url=url, api_key=key) as client:
        print(json.dumps({"version": tinker.__version__, **run(client, base_model)}))
