"""What raysessions adds to vLLM's worker process."""

from __future__ import annotations

from raysessions.actors.engines import vllm_plugin

vllm_plugin.register()


class AdapterWorker:
    """Mixed into vLLM's Worker through its `worker_extension_cls`; called with `collective_rpc`."""

    def answer(self) -> None:
        """Says that the worker is there, between two steps."""

    def count_bound_modules(self, adapter_id: int) -> int:
        """Linear layers of the model that the adapter `adapter_id` changes; 0 when it is not loaded.

        A fused layer (qkv_proj, gate_up_proj) counts once for each of its parts that has weights.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        adapter = manager.get_adapter(adapter_id)
        if adapter is None:
            return 0
        found = (manager._get_lora_layer_weights(adapter, name) for name in manager.modules)
        return sum(_count_parts(weights.lora_a) for weights in found if weights is not None)


def _count_parts(lora_a: object) -> int:
    return sum(part is not None for part in lora_a) if isinstance(lora_a, list | tuple) else int(lora_a is not None)
