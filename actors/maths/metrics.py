"""Metrics of parts merged into metrics of the whole. The suffix after the last colon says how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part's share of a metric."""

    value: float
    weight: float = 1.0
    """How much a mean counts it; the other kinds do not look at it."""


def _mean(parts: list[Part]) -> float:
    total = sum(part.weight for part in parts)
    return sum(part.value * part.weight for part in parts) / total if total else 0.0


MERGES: dict[str, Callable[[list[Part]], float]] = {
    "sum": lambda parts: sum(part.value for part in parts),
    "mean": _mean,
    "min": lambda parts: min(part.value for part in parts),
    "max": lambda parts: max(part.value for part in parts),
}


RATIO, RATIO_SQUARE, ESS = "ratio:mean", "ratio_square:mean", "ess:mean"


def merge(parts: Iterable[dict[str, Part]]) -> dict[str, float]:
    """Merges each name over all parts that have it. Raises `ValueError` on a name without a known suffix.

    The effective share of samples, (Σr)² / (n·Σr²), is no mean of its parts: it is made here, of the two means.
    """
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        for name, value in part.items():
            by_name.setdefault(name, []).append(value)
    merged = {name: MERGES[_suffix(name)](values) for name, values in by_name.items()}
    if RATIO_SQUARE in merged:
        merged[ESS] = merged[RATIO] ** 2 / merged.pop(RATIO_SQUARE)
    return merged


def _suffix(name: str) -> str:
    suffix = name.rpartition(":")[2]
    if ":" not in name or suffix not in MERGES:
        raise ValueError(f"Metric {name!r} must end in one of {', '.join(':' + known for known in MERGES)}.")
    return suffix
