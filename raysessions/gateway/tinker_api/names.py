"""Tinker's names for things, and ours. A training run is a session here, and the group of the versions that it saves."""

from __future__ import annotations

import re
import secrets
from typing import Literal

from raysessions.errors import ConfigError
from raysessions.uris import SCHEME, VersionUri

TINKER_SCHEME = "tinker://"
_SDK_SESSION = r"tinker-[0-9a-f]{16}"
_MODEL_ID = re.compile(rf"({_SDK_SESSION}):train:(\d{{1,9}})")
_SESSION = re.compile(rf"({_SDK_SESSION})-train-(\d{{1,9}})")
_OPERATION = re.compile(rf"(?P<model>{_SDK_SESSION}:train:\d{{1,9}}):(?P<seq>\d{{1,12}})(:sample:(?P<sampler>\d{{1,12}}))?")
_PATH = re.compile(rf"{TINKER_SCHEME}(?P<run>[^/]+)/(?P<kind>weights|sampler_weights)/v(?P<version>[1-9]\d*)")

PathKind = Literal["weights", "sampler_weights"]


def new_sdk_session_id() -> str:
    """Of what the SDK calls a session: one ServiceClient. Nobody can guess it."""
    return f"tinker-{secrets.token_hex(8)}"


def is_sdk_session_id(name: str) -> bool:
    return re.fullmatch(_SDK_SESSION, name) is not None


def model_id_of(sdk_session_id: str, model_seq_id: int) -> str:
    """As the SDK makes it too."""
    return f"{sdk_session_id}:train:{model_seq_id}"


def operation_name(model_id: str, seq_id: int, sampler_seq_id: int | None = None) -> str:
    """Of a future: it says what it is of, so that a gateway which was started again finds operations that its predecessor
    passed on. `sampler_seq_id`: of the sampling session that a save makes. Number 0 is the model's creation."""
    return f"{model_id}:{seq_id}" + ("" if sampler_seq_id is None else f":sample:{sampler_seq_id}")


def parse_operation_name(name: str) -> tuple[str, int, int | None] | None:
    match = _OPERATION.fullmatch(name)
    return match and (match["model"], int(match["seq"]), int(match["sampler"]) if match["sampler"] else None)


def session_name(model_id: str) -> str:
    """Our name of a training run, or of a session that was not started here."""
    match = _MODEL_ID.fullmatch(model_id)
    return model_id if match is None else f"{match[1]}-train-{match[2]}"


def run_id(name: str) -> str:
    """Tinker's name of one of our sessions or groups."""
    match = _SESSION.fullmatch(name)
    return name if match is None else model_id_of(match[1], int(match[2]))


def sdk_session_of(name: str) -> str | None:
    """The SDK's session that one of our sessions was started by."""
    match = _SESSION.fullmatch(name)
    return None if match is None else match[1]


def tinker_path(uri: VersionUri, kind: PathKind) -> str:
    return f"{TINKER_SCHEME}{run_id(uri.group)}/{kind}/v{uri.version}"


def kind_of(path: str) -> PathKind | None:
    """What a path of Tinker's says that it is of; None for one of ours."""
    match = _PATH.fullmatch(path)
    return None if match is None else ("weights" if match["kind"] == "weights" else "sampler_weights")


def version_uri(path: str) -> VersionUri:
    """Of a path of Tinker's or of ours."""
    if path.startswith(SCHEME):
        return VersionUri.parse(path)
    match = _PATH.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"{path!r} is not a saved version: expected {TINKER_SCHEME}RUN/weights/vN or …/sampler_weights/vN, as the saving "
            "calls return."
        )
    return VersionUri.parse(f"{SCHEME}{session_name(match['run'])}/v{match['version']}")
