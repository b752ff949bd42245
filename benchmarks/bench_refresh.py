"""From save_weights_for_sampler called to the first token sampled with the new weights, and the bytes put into Ray's store.

SmolLM2-135M, LoRA rank 32 on every linear layer; one replica, then two and four on the same cores.
"""

from __future__ import annotations

import numpy as np
import ray
from measure import report, seconds, summary

import raysessions as rs

REPLICAS = (1, 2, 4)
REPEATS = 10
PROMPT = rs.ModelInput.from_ints(range(100, 132))
SAMPLING = rs.SamplingConfig(kv_cache_gib=0.5, actor_options={"num_cpus": 0.1})


def main() -> None:
    times: dict[int, list[float]] = {}
    stored: dict[int, list[float]] = {}
    with (
        rs.ServiceClient(sampling=SAMPLING) as service,
        service.create_lora_training_client("smollm2-135m-instruct", rank=32, seed=0) as training,
    ):
        adapter_bytes = 2 * training.get_info().num_trainable_parameters  # bfloat16
        training.create_sampling_client()
        for count in REPLICAS:
            service.scale_samplers(count)
            for _ in range(3):
                _refresh(training)
            times[count] = [seconds(lambda: _refresh(training)) for _ in range(REPEATS)]
            stored[count] = [_bytes_stored_by(lambda: training.save_weights_for_sampler("new").result()) for _ in range(3)]
            print(f"refresh: {count} replicas: {np.median(times[count]):.3f} s", flush=True)
    median = {count: float(np.median(values)) for count, values in times.items()}
    most = REPLICAS[-1]
    report(
        "refresh",
        {
            **{f"refresh_s_{count}_replicas": summary(values) for count, values in times.items()},
            **{f"object_store_bytes_{count}_replicas": summary(values) for count, values in stored.items()},
            "adapter_bytes": adapter_bytes,
        },
        {
            "save to first token, one replica, median s": (median[1], -0.5),
            f"save to first token, {most} replicas on the same cores, s a replica": (median[most] / most, -0.25),
            "bytes stored, one replica, over the adapter's in bfloat16": (float(np.median(stored[1])) / adapter_bytes, -1.05),
            f"bytes stored, {most} replicas, over the adapter's": (float(np.median(stored[most])) / adapter_bytes, -1.05),
        },
    )


def _refresh(training: rs.TrainingClient) -> None:
    params = rs.SamplingParams(max_tokens=1, temperature=0.0)
    training.save_weights_and_get_sampling_client("new").sample(PROMPT, 1, params).result()


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
