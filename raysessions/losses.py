"""The table of losses: what each needs and how it may be configured. Formulas are in `actors/maths/losses.py`.

All losses are sums over tokens and datums, never means: then one call of 8 datums, 8 calls of one, and any split over
micro-batches give the same gradient. To normalise, scale the weights or the advantages.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from raysessions.errors import LossError


@dataclass(frozen=True, slots=True)
class LossSpec:
    """One loss, as the clients see it."""

    name: str
    inputs: tuple[str, ...]
    """Names that each datum must have besides target_tokens, float32, one number per position."""
    optional_inputs: dict[str, float] = field(default_factory=dict)
    """Names a datum may have, with the value used where it has not."""
    gates: tuple[str, ...] = ()
    """Inputs that, where 0, make the token's gradient 0: such tokens' backward is skipped."""
    config: dict[str, float] = field(default_factory=dict)
    """Keys of loss_fn_config with their defaults."""

    @property
    def all_inputs(self) -> tuple[str, ...]:
        return (*self.inputs, *self.optional_inputs)


LOSSES: dict[str, LossSpec] = {
    spec.name: spec
    for spec in [
        LossSpec("cross_entropy", inputs=("weights",), gates=("weights",)),
        LossSpec(
            "importance_sampling",
            inputs=("logprobs", "advantages"),
            optional_inputs={"weights": 1.0},
            gates=("advantages", "weights"),
        ),
    ]
}


def get_loss(name: str) -> LossSpec:
    """The spec of `name`. Raises `LossError` that lists the known ones."""
    if name not in LOSSES:
        raise LossError(f"Unknown loss {name!r}{_did_you_mean(name, LOSSES)}. Known: {', '.join(sorted(LOSSES))}.")
    return LOSSES[name]


def resolve_config(spec: LossSpec, config: Mapping[str, float] | None) -> dict[str, float]:
    """The defaults of `spec` with the caller's values over them. Raises `LossError` on an unknown key or no number."""
    for key, value in (config or {}).items():
        if key not in spec.config:
            known = ", ".join(sorted(spec.config)) or "none"
            raise LossError(f"Loss {spec.name!r} has no config key {key!r}. Its keys: {known}.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise LossError(f"Loss {spec.name!r}: {key} must be a finite number, not {value!r}.")
    return {**spec.config, **(config or {})}


def _did_you_mean(name: str, known: Mapping[str, LossSpec]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
