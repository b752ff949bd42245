"""A batch on its way to the trainer: flat arrays, checked at the door.

The flat layout goes through Ray's object store without a copy: every rank maps the same memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysessions.errors import DatumError
from raysessions.losses import LossSpec
from raysessions.types import TensorData, as_model_input


@dataclass(frozen=True, slots=True)
class Batch:
    """Datums laid end to end."""

    tokens: np.ndarray
    """int64, shape (num_tokens,): every model_input, one after the other."""
    offsets: np.ndarray
    """int64, shape (num_datums + 1,): datum i owns tokens[offsets[i]:offsets[i + 1]]."""
    target_tokens: np.ndarray
    """int64, shape (num_tokens,), or (num_tokens, K) where each position has K targets."""
    inputs: dict[str, np.ndarray]
    """The loss's other inputs by name, float32, each of the shape of target_tokens."""

    def digest(self) -> str:
        """The same for batches of the same content."""
        state = hashlib.blake2b(digest_size=16)
        for name, column in (
            ("tokens", self.tokens),
            ("offsets", self.offsets),
            ("targets", self.target_tokens),
            *self.inputs.items(),
        ):
            state.update(name.encode())
            state.update(np.ascontiguousarray(column).data)
        return state.hexdigest()

    @property
    def num_bytes(self) -> int:
        columns = (self.tokens, self.offsets, self.target_tokens, *self.inputs.values())
        return sum(column.nbytes for column in columns)

    @property
    def num_datums(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def pack(data: Sequence[Any], spec: LossSpec, *, vocab_size: int, context_length: int) -> Batch:
    """Checks `data` for the loss `spec` and lays it flat.

    Raises `DatumError` naming the datum's index and the key; then nothing has been sent.
    """
    if isinstance(data, str | bytes) or not isinstance(data, Sequence):
        raise DatumError(f"data must be a list of Datum, not {type(data).__name__}.")
    if not data:
        raise DatumError("data is empty: give at least one Datum.")
    tokens: list[np.ndarray] = []
    columns: dict[str, list[np.ndarray]] = {key: [] for key in ("target_tokens", *spec.all_inputs)}
    for index, datum in enumerate(data):
        sequence = _tokens(index, datum, context_length)
        tokens.append(sequence)
        inputs = _loss_inputs(index, datum, spec, len(sequence))
        num_targets = inputs["target_tokens"].shape[1:]
        if index and num_targets != columns["target_tokens"][0].shape[1:]:
            raise DatumError(
                f"data[{index}].loss_fn_inputs['target_tokens'] has shape {inputs['target_tokens'].shape}, data[0]'s has "
                f"{columns['target_tokens'][0].shape}: all datums of a call need as many targets per position. Pad with "
                "targets of weight 0, or make two calls."
            )
        for key, value in inputs.items():
            columns[key].append(value)
    flat = {key: np.concatenate(values) for key, values in columns.items()}
    batch = Batch(
        tokens=np.concatenate(tokens),
        offsets=np.concatenate([[0], np.cumsum([len(sequence) for sequence in tokens])]).astype(np.int64),
        target_tokens=flat.pop("target_tokens"),
        inputs=flat,
    )
    _check_values(batch, vocab_size)
    return batch


def _tokens(index: int, datum: Any, context_length: int) -> np.ndarray:
    if not (hasattr(datum, "model_input") and hasattr(datum, "loss_fn_inputs")):
        raise DatumError(f"data[{index}] is a {type(datum).__name__}, not a Datum.")
    try:
        sequence = np.asarray(as_model_input(datum.model_input).to_ints(), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise DatumError(f"data[{index}].model_input is not a ModelInput of whole token ids: {error}.") from error
    if len(sequence) == 0:
        raise DatumError(f"data[{index}].model_input is empty: give at least one token.")
    if len(sequence) > context_length:
        raise DatumError(
            f"data[{index}].model_input has {len(sequence)} tokens; the model's context is {context_length}. Shorten it."
        )
    return sequence


def _loss_inputs(index: int, datum: Any, spec: LossSpec, length: int) -> dict[str, np.ndarray]:
    given = datum.loss_fn_inputs
    if not isinstance(given, Mapping):
        raise DatumError(f"data[{index}].loss_fn_inputs must be a dict, not {type(given).__name__}.")
    if unknown := set(given) - {"target_tokens", *spec.all_inputs}:
        known = ", ".join(("target_tokens", *spec.all_inputs))
        raise DatumError(f"data[{index}].loss_fn_inputs[{min(unknown, key=str)!r}] is not an input of {spec.name!r}: {known}.")
    columns: dict[str, np.ndarray] = {}
    for key in ("target_tokens", *spec.all_inputs):
        if key not in given and key not in spec.optional_inputs:
            raise DatumError(f"data[{index}].loss_fn_inputs has no {key!r}, which {spec.name!r} needs.")
        shape = columns["target_tokens"].shape if columns else (length,)
        if key not in given:
            columns[key] = np.full(shape, spec.optional_inputs[key], dtype=np.float32)
            continue
        value = _array(index, key, given[key])
        has_many = key == "target_tokens" and spec.many_targets and value.ndim == 2 and value.shape[1] > 0
        if value.shape != shape and not (has_many and len(value) == length):
            raise DatumError(
                f"data[{index}].loss_fn_inputs[{key!r}] has shape {value.shape}; model_input has {length} tokens, "
                f"so it must be {shape}."
            )
        columns[key] = value
    return columns


def _array(index: int, key: str, value: Any) -> np.ndarray:
    """`value` as int64 (target_tokens) or float32 (all else)."""
    where = f"data[{index}].loss_fn_inputs[{key!r}]"
    if not isinstance(value, TensorData):
        # tinker's TensorData has to_numpy(); lists and the like numpy reads by itself.
        value = value.to_numpy() if hasattr(value, "to_numpy") else value
        try:
            value = TensorData.from_torch(value) if hasattr(value, "detach") else TensorData.from_numpy(np.asarray(value))
        except ValueError as error:
            raise DatumError(f"{where} is not a rectangular array of numbers: {error}.") from error
    array = value.to_numpy()
    if array.dtype.kind not in "fiu":
        raise DatumError(f"{where} must hold numbers, not {array.dtype}.")
    if key != "target_tokens":
        return array.astype(np.float32, copy=False)
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and np.array_equal(array, np.floor(array))):
        raise DatumError(f"{where} must hold token ids, but has fractions or numbers that are not finite.")
    return array.astype(np.int64, copy=False)


def _check_values(batch: Batch, vocab_size: int) -> None:
    """One vectorised look at each column; the index is searched for only when something is wrong."""
    for key, column in (("model_input", batch.tokens), ("target_tokens", batch.target_tokens)):
        wrong = (column < 0) | (column >= vocab_size)
        if wrong.any():
            index, position = _locate(batch, wrong)
            where = f"data[{index}].model_input" if key == "model_input" else f"data[{index}].loss_fn_inputs[{key!r}]"
            token = int(column[wrong][0])
            raise DatumError(f"{where} has token id {token} at position {position}; the vocabulary has {vocab_size}.")
    for key, column in batch.inputs.items():
        wrong = ~np.isfinite(column)
        if wrong.any():
            index, position = _locate(batch, wrong)
            value = column[wrong][0]
            raise DatumError(f"data[{index}].loss_fn_inputs[{key!r}] is {value} at position {position}; give finite numbers.")


def _locate(batch: Batch, wrong: np.ndarray) -> tuple[int, int]:
    """Datum index and position in it of the first True."""
    flat = int(np.argmax(wrong.reshape(len(batch.tokens), -1).any(axis=1)))
    index = int(np.searchsorted(batch.offsets, flat, side="right")) - 1
    return index, flat - int(batch.offsets[index])
