"""The table of losses: what each needs and how it may be configured. Formulas are in `actors/maths/losses.py`.

All losses are sums over tokens and datums, never means: then one call of 8 datums, 8 calls of one, and any split over
micro-batches or ranks give the same gradient. To normalise, scale the weights or the advantages.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from raysessions.errors import LossError

ENTRY_POINTS = "raysessions.losses"
"""A distribution offers a loss under this entry-point group: the loss's name, and a function without arguments that calls
`register_loss`. It is loaded when the name is first used."""


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
    many_targets: bool = False
    """Whether target_tokens, and with them the other inputs, may have K numbers per position: shape (length, K)."""

    @property
    def all_inputs(self) -> tuple[str, ...]:
        return (*self.inputs, *self.optional_inputs)


def _policy_loss(name: str, gates: tuple[str, ...] = ("advantages", "weights"), **config: float) -> LossSpec:
    inputs, optional = ("logprobs", "advantages"), {"weights": 1.0}
    return LossSpec(name, inputs, optional_inputs=optional, gates=gates, config=config)


LOSSES: dict[str, LossSpec] = {
    spec.name: spec
    for spec in [
        LossSpec("cross_entropy", inputs=("weights",), gates=("weights",), many_targets=True),
        _policy_loss("importance_sampling"),
        _policy_loss("ppo", clip_low_threshold=0.8, clip_high_threshold=1.2),
        _policy_loss("cispo", clip_low_threshold=0.0, clip_high_threshold=4.0),
        _policy_loss("dro", gates=("weights",), beta=0.05),
        # The bounds of the paper's experiments (Zheng et al. 2025, "Group Sequence Policy Optimization", section 5.1).
        _policy_loss("gspo", clip_low_threshold=0.9997, clip_high_threshold=1.0004),
    ]
}
"""The losses known in this process by name: the built-in ones, and what `register_loss` added."""

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What `register_loss` was given. It travels to the training ranks with each call that uses it."""


def register_loss(spec: LossSpec, fn: Callable[..., Any]) -> None:
    """Adds a loss to this process's table; `forward_backward(data, spec.name)` then works as with a built-in one.

    Args:
        spec: its name, inputs and config keys.
        fn: `fn(logprobs_T, inputs, config)` returns the loss of each token, float32 of shape (T,), or that and a dict of
            metrics. It runs on the training ranks, with torch tensors: `logprobs_T` carries the gradient, `inputs["weights"]`
            and so on are the datums' inputs end to end, `inputs.sequence_T` says which datum a token belongs to. A metric's
            name says how it is merged: `clip_fraction:mean`, `loss_extra:sum`, `ratio:max`.

    Return sums' terms, not means: what is differentiated is the sum over all tokens. Registering a name again replaces
    it (a notebook cell runs twice); the built-in names are refused with `LossError`.
    """
    if not isinstance(spec, LossSpec) or not callable(fn):
        raise LossError("register_loss takes a LossSpec and a function (logprobs_T, inputs, config).")
    if spec.name in LOSSES and spec.name not in FUNCTIONS:
        raise LossError(f"{spec.name!r} is a built-in loss: choose another name.")
    if clash := set(spec.all_inputs) & {"target_tokens"}:
        raise LossError(f"Loss {spec.name!r}: every loss has {min(clash)!r} already; leave it out of the inputs.")
    if unknown := set(spec.gates) - set(spec.all_inputs):
        raise LossError(f"Loss {spec.name!r}: gates {sorted(unknown)} are none of its inputs.")
    LOSSES[spec.name] = spec
    FUNCTIONS[spec.name] = fn


def get_loss(name: str) -> LossSpec:
    """The spec of `name`. Raises `LossError` that lists the known ones."""
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)} if name not in LOSSES else {}
    if name in offered:
        offered[name].load()()
        if name not in LOSSES:
            raise LossError(f"The entry point {offered[name].value!r} did not register a loss {name!r}.")
    if name not in LOSSES:
        known = sorted({*LOSSES, *offered})
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise LossError(f"Unknown loss {name!r}{hint}. Known: {', '.join(known)}.")
    return LOSSES[name]


def resolve_config(spec: LossSpec, config: Mapping[str, float] | None) -> dict[str, float]:
    """The defaults of `spec` with the caller's values over them. Raises `LossError` on an unknown key or no number."""
    for key, value in (config or {}).items():
        if key not in spec.config:
            known = ", ".join(sorted(spec.config)) or "none"
            raise LossError(f"Loss {spec.name!r} has no config key {key!r}. Its keys: {known}.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise LossError(f"Loss {spec.name!r}: {key} must be a finite number, not {value!r}.")
    resolved = {**spec.config, **(config or {})}
    low, high = resolved.get("clip_low_threshold"), resolved.get("clip_high_threshold")
    if low is not None and high is not None and low > high:
        raise LossError(f"Loss {spec.name!r}: clip_low_threshold {low:g} is above clip_high_threshold {high:g}.")
    return resolved
