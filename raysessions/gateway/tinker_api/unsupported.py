"""What Tinker's API has and this gateway has not, with a sentence for each. 404, since the SDK asks again for minutes after a
501."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from fastapi import APIRouter

from raysessions.gateway.access import Key
from raysessions.gateway.errors import HttpError

UNSUPPORTED = {
    ("POST", "/auth/token"): "Tokens are not issued: give an API key of `raysessions keys create`.",
    ("POST", "/copy_weights"): "Versions are not copied: a key reaches all of its tenant's.",
    ("POST", "/create_custom_loss"): "Losses do not run on the server: forward_backward_custom runs them at the caller.",
    ("POST", "/retrieve_futures"): "Futures are fetched one by one.",
    ("POST", "/sessions/search"): "Sessions are not searched: list them.",
    ("PUT", "/sessions/{session_id}/project"): "There are no projects: keys have tenants.",
    ("GET", "/sessions/{session_id}/trace_export"): "Traces are not kept.",
    ("POST", "/training_runs/{run}/checkpoints/{kind}/{name}/publish"): "Versions are their tenant's own, and not published.",
    ("DELETE", "/training_runs/{run}/checkpoints/{kind}/{name}/publish"): "Versions are their tenant's own, and not published.",
    ("GET", "/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"): (
        "Versions are not handed out over HTTP: export_checkpoint of a ServiceClient on the cluster writes a PEFT folder."
    ),
    ("DELETE", "/training_runs/{run}/checkpoints/{name}"): "Give the checkpoint's id: weights/vN or sampler_weights/vN.",
    ("GET", "/training_runs/{run}/checkpoints/{kind}/{name}/archive"): (
        "Versions are not handed out over HTTP: export_checkpoint of a ServiceClient on the cluster writes a PEFT folder."
    ),
    ("POST", "/forward"): "forward is sent as forward_backward since tinker 0.25: use 0.36 or newer.",
    ("POST", "/unload_model"): "A run ends with its session: close the ServiceClient.",
    ("GET", "/audit"): "There is no audit log: the gateway's access log has its requests.",
    ("GET", "/billing/usage/events"): "There is no billing: ServiceClient.usage() on the cluster has the ledger.",
    ("GET", "/billing/usage/checkpoints/current"): "There is no billing: each version's size_bytes is in the listings.",
}

router = APIRouter()


def _refusal(sentence: str) -> Callable[..., None]:
    def refuse(key: Key) -> None:
        raise HttpError(HTTPStatus.NOT_FOUND, f"Not supported by raysessions. {sentence}")

    return refuse


for (method, path), sentence in UNSUPPORTED.items():
    router.add_api_route(path, _refusal(sentence), methods=[method])
