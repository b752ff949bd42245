"""From save_weights_for_sampler called to the first token sampled with the new weights, and the bytes put into Ray's store.

SmolLM2-135M, LoRA rank 32 on every linear layer, one replica.
"""

from __future__ import annotations

import numpy as np
import ray
from measure import report, seconds, summary

import raysessions as rs

REPEATS = 10
PROMPT = rs.ModelInput.from_ints(range(100, 132))


def main() -> None:
    with (
        rs.ServiceClient() as service,
        service.create_lora_training_client("smollm2-135m-instruct", rank=32, seed=0) as training,
    ):
        params = rs.SamplingParams(max_tokens=1, temperature=0.0)

        def refresh() -> None:
            training.save_weights_and_get_sampling_client("new").sample(PROMPT, 1, params).result()

        for _ in range(3):
            refresh()
        times = [seconds(refresh) for _ in range(REPEATS)]
        stored = [_bytes_stored_by(lambda: training.save_weights_for_sampler("new").result()) for _ in range(3)]
        adapter_bytes = 2 * training.get_info().num_trainable_parameters  # bfloat16
    report(
        "refresh",
        {"refresh_s": summary(times), "object_store_bytes": summary(stored), "adapter_bytes": adapter_bytes},
        {
            "save to first token, median s": (float(np.median(times)), -0.5),
            "bytes stored, over the adapter's in bfloat16": (float(np.median(stored)) / adapter_bytes, -1.05),
        },
    )


def _bytes_stored_by(function) -> int:  # type: ignore[no-untyped-def]
    """Bytes that `function` adds to the node's object store, counted by the store itself, which only ever adds up."""
    before = _created_bytes()
    function()
    return _created_bytes() - before


def _created_bytes() -> int:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.cumulative_created_bytes


if __name__ == "__main__":
    main()
