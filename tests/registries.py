"""Adapters and versions to write."""

from __future__ import annotations

import time

import numpy as np

from raysessions.adapter_weights import AdapterWeights, to_peft_files
from raysessions.registry import Registry
from raysessions.responses import CheckpointInfo
from raysessions.uris import VersionUri

ENTRIES = (("b.q.lora_A.weight", (2, 5)), ("b.q.lora_B.weight", (4, 2)), ("a.k.lora_A.weight", (2, 5)))


def adapter(dtype: type = np.float32, seed: int = 0) -> AdapterWeights:
    rng = np.random.default_rng(seed)
    flat = rng.normal(size=28).astype(np.float32) if dtype is np.float32 else rng.integers(0, 2**16, 28).astype(np.uint16)
    return AdapterWeights(flat, ENTRIES, 2, 16.0, ("k", "q"), 2)


def info(**fields) -> CheckpointInfo:  # type: ignore[no-untyped-def]
    values = {
        "path": "", "kind": "sampler", "name": "test", "session_id": "session-1", "tenant": "me", "created_at": time.time(),
        "expires_at": None, "base_model": "base", "base_fingerprint": "f" * 64, "rank": 2, "alpha": 16.0,
        "target_modules": ("k", "q"), "step": 3, "parent": None, "user_metadata": {"why": "a test"}, "num_bytes": 0,
        "encrypted": False,
    }  # fmt: skip
    return CheckpointInfo(**{**values, **fields})


def write(registry: Registry, group: str = "default", seed: int = 0, **fields) -> VersionUri:  # type: ignore[no-untyped-def]
    """A new version with an adapter."""
    uri = registry.claim(group)
    registry.write(uri, info(**fields), to_peft_files(adapter(seed=seed), "base").items())
    return uri
