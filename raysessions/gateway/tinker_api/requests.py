"""Reading the SDK's requests."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import pydantic
from fastapi import Depends, Request

from raysessions.errors import ValidationError
from raysessions.gateway.bodies import json_body
from raysessions.gateway.tinker_api.desk import TinkerDesk

R = TypeVar("R", bound=pydantic.BaseModel)


def _desk(request: Request) -> TinkerDesk:
    desk: TinkerDesk = request.app.state.tinker
    return desk


Desk = Annotated[TinkerDesk, Depends(_desk)]


async def read(request: Request, desk: TinkerDesk, kind: type[R]) -> R:
    """The body as one of the SDK's own types. Raises `ValidationError` for what that does not know."""
    return parse(kind, await json_body(request, desk.backend.config.max_body_bytes))


def parse(kind: type[R], body: dict[str, Any]) -> R:
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValidationError(f"{kind.__name__}: {where}: {first['msg']}") from error
