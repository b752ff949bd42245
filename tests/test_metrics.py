"""What Ray exports for Prometheus: operations, tokens, queues, versions, the gateway's requests, vLLM's KV cache."""

from __future__ import annotations

import re

import httpx
import ray
from pools import PROMPT, greedy
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_for

import raysessions as rs


def exported() -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of each of our metrics, and vLLM's, on this node."""
    port = ray.nodes()[0]["MetricsExportPort"]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics").text):
        for sample in family.samples:
            name = re.sub(r"^ray_|_total$", "", sample.name)
            if name.startswith(("raysessions", "vllm")):
                found.setdefault(re.sub(r"_total$", "", name), []).append((sample.labels, sample.value))
    return found


def total(metrics, name: str, **labels: str) -> float:
    return sum(value for found, value in metrics.get(name, []) if labels.items() <= found.items())


def test_what_happens_is_measured(gateway):
    config = gateway.service._settings.sampling.model_copy(update={"engine_metrics": True})
    with gateway.service.create_lora_training_client(gateway.base_model, rank=4, sampling=config) as training:
        whose = {"tenant": gateway.service._settings.tenant, "base_model": gateway.base_model}
        before = exported()
        sampler = training.save_weights_and_get_sampling_client()
        sampler.sample(PROMPT, 2, greedy(10)).result()
        training.forward_backward([rs.datum_for_supervised([5, 6, 7], [1.0] * 3)]).result()
        training.optim_step().result()
        httpx.get(f"{gateway.url}/v1/models", headers=gateway.headers)
        httpx.get(f"{gateway.url}/v1/models")

        def grown(name: str, **labels: str) -> float:
            return total(exported(), name, **labels) - total(before, name, **labels)

        wait_for(lambda: grown("raysessions_operations", kind="optim_step", **whose) == 1, 60)
        wait_for(lambda: grown("raysessions_tokens", kind="sampled", **whose) == 20, 60)
        assert grown("raysessions_tokens", kind="trained", **whose) == 2
        assert grown("raysessions_tokens", kind="prefilled", **whose) == PROMPT.length
        now = exported()
        assert total(now, "raysessions_sessions", state="running") >= 1
        assert total(now, "raysessions_live_versions", base_model=gateway.base_model) >= 1
        assert "raysessions_queued_requests" in now
        wait_for(lambda: grown("raysessions_gateway_requests", route="/v1/models", status="200") == 1, 60)
        assert grown("raysessions_gateway_requests", route="/v1/models", status="401") == 1
        wait_for(lambda: any("kv_cache_usage" in name for name in exported()), 60)
