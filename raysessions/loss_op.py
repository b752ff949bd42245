"""Loss operations made ready to send."""

from __future__ import annotations

import functools
import inspect
import sysconfig
from pathlib import Path
from types import ModuleType

import ray
from ray import cloudpickle

from raysessions.batch import Batch
from raysessions.losses import FUNCTIONS
from raysessions.operations import Loss, LossOp

INLINE_BYTES = 64 * 1024
"""A batch up to this size travels with its operation; Ray itself inlines arguments up to 100 KiB."""


def loss_op(batch: Batch, loss: Loss, *, backward: bool) -> LossOp:
    """Puts a large batch into the object store; a small one travels with the operation."""
    sent = batch if batch.num_bytes <= INLINE_BYTES else (ray.put(batch),)
    return LossOp(sent, batch.digest(), loss, tuple(batch.lengths.tolist()), backward)


def pickled_function(name: str) -> bytes | None:
    """The function of a registered loss, to travel to the training ranks; None for a built-in loss."""
    return _pickled(FUNCTIONS[name]) if name in FUNCTIONS else None


@functools.lru_cache(maxsize=64)
def _pickled(function: object) -> bytes:
    """By value where its module is the user's own file, which the ranks cannot import."""
    module = inspect.getmodule(function)
    if module is None or module.__name__ == "__main__" or _is_installed(module):
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or any(Path(file).is_relative_to(folder) for folder in sysconfig.get_paths().values())
