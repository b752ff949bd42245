"""What operations answer, as the SDK reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from raysessions.errors import (
    BackPressureError,
    CheckpointError,
    ConfigError,
    EmptyGradientError,
    ModelNotFoundError,
    RequestCancelledError,
    SessionStoppedError,
    ValidationError,
)
from raysessions.gateway.errors import as_http
from raysessions.gateway.tinker_api.names import run_id, tinker_path
from raysessions.gateway.tinker_api.wire import write_forward_backward, write_sample
from raysessions.responses import (
    LoadStateResponse,
    OptimStepResponse,
    SaveStateResponse,
    SaveWeightsForSamplerResponse,
    SessionInfo,
)
from raysessions.types import ForwardBackwardOutput, SampleResponse
from raysessions.uris import VersionUri

JSON, PROTOBUF = "application/json", "application/x-protobuf"
CALLERS_FAULT = (ValidationError, CheckpointError, EmptyGradientError, ModelNotFoundError, RequestCancelledError)
GONE = (SessionStoppedError, BackPressureError)
"""Nothing was done: the SDK samples again, and ends a training run."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Of a future."""

    content: bytes
    media_type: str = JSON
    status: int = 200


def reply_of(response: Any) -> Reply:
    match response:
        case ForwardBackwardOutput():
            return Reply(write_forward_backward(response), PROTOBUF)
        case SampleResponse():
            return Reply(write_sample(response), PROTOBUF)
        case OptimStepResponse():
            return _json(metrics=response.metrics)
        case SaveStateResponse():
            return _json(type="save_weights", path=tinker_path(VersionUri.parse(response.path), "weights"))
        case SaveWeightsForSamplerResponse():
            path = tinker_path(VersionUri.parse(response.path), "sampler_weights")
            return _json(type="save_weights_for_sampler", path=path)
        case LoadStateResponse():
            return _json(type="load_weights", path=response.path)
        case SessionInfo():
            return _json(model_id=run_id(response.session_id))  # of create_model, or of load_weights
    raise ConfigError(f"A {type(response).__name__} has no place in Tinker's API.")


def sampler_reply(sampling_session_id: str) -> Reply:
    """Of a save that makes a sampling session."""
    return _json(type="save_weights_for_sampler", sampling_session_id=sampling_session_id)


def failure_of(error: Exception) -> Reply:
    """As a failed future, or a status by which the SDK knows that the future is gone."""
    if isinstance(error, GONE):
        return Reply(json.dumps({"detail": str(error)}).encode(), status=410)
    if isinstance(error, CALLERS_FAULT):
        return _json(error=str(error), category="user")
    told = as_http(error)
    return _json(error=str(told), category="user" if told.status < 500 else "server")


def _json(**content: Any) -> Reply:
    return Reply(json.dumps(content).encode())
