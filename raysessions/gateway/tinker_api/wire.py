"""Between Tinker's protobuf messages and our types. The messages are the `tinker` package's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from raysessions.errors import DatumError, ValidationError
from raysessions.types import Datum, EncodedTextChunk, ForwardBackwardOutput, ModelInput, SampleResponse, TensorData

DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
    pb.DTYPE_BFLOAT16: np.dtype(np.uint16),
}
NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""In the cells of a top-k matrix that have none."""
MAX_ELEMENTS = 2**26
"""Of one tensor: a sparse one of a few bytes may claim any shape."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardCall:
    """`forward_backward`, or `forward`."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, Any]
    forward_only: bool


def parse_forward_backward(message: bytes) -> pb.ForwardBackwardRequest:
    """Raises `ValidationError` when it is not one."""
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        raise ValidationError(
            "The body is not a ForwardBackwardRequest in protobuf, as the tinker package sends it since 0.25."
        ) from error
    if not request.model_id or request.seq_id < 1:
        raise ValidationError("model_id and seq_id are missing: they say which operation this is.")
    return request


def read_forward_backward(request: pb.ForwardBackwardRequest) -> ForwardBackwardCall:
    """Raises `DatumError` when a datum is not one of tokens."""
    newer = {key: _config_value(value) for key, value in request.loss_fn_config_v2.items()}
    data = [_datum(index, datum) for index, datum in enumerate(request.data)]
    return ForwardBackwardCall(
        request.model_id,
        request.seq_id,
        [_weighted(datum) for datum in data] if request.loss_fn == "cross_entropy" else data,
        request.loss_fn,
        newer or dict(request.loss_fn_config),
        request.forward_only,
    )


def write_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """One record for each run of datums whose tensors have the same trailing shapes."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=output.metrics)
    for _, run in groupby(output.loss_fn_outputs, key=_trailing_shapes):
        datums = list(run)
        record = message.loss_fn_outputs.add(num_datums=len(datums))
        for name in datums[0]:
            record.fields[name].CopyFrom(_batched([datum[name].to_numpy() for datum in datums]))
    return message.SerializeToString()


def write_sample(response: SampleResponse) -> bytes:
    message = pb.SampleResponse()
    for sequence in response.sequences:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
    if response.prompt_logprobs is not None:
        known = [math.nan if logprob is None else logprob for logprob in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(known, np.float32).tobytes()
    if response.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(response.topk_prompt_logprobs))
    return message.SerializeToString()


def _config_value(value: pb.LossConfigValue) -> float | str:
    return value.text if value.HasField("text") else value.number


def _datum(index: int, datum: pb.Datum) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise DatumError(f"data[{index}].model_input has a chunk of {kind or 'nothing'}: only tokens are supported.")
        chunks.append(EncodedTextChunk(_array(index, "model_input", chunk.encoded_text.tokens, np.dtype(np.int32)).tolist()))
    inputs = {name: TensorData(_tensor(index, name, tensor)) for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(ModelInput(tuple(chunks)), inputs)


def _weighted(datum: Datum) -> Datum:
    """Every token counts alike where nothing else is said."""
    inputs = datum.loss_fn_inputs
    if "weights" in inputs or "target_tokens" not in inputs:
        return datum
    weights = TensorData(np.ones(inputs["target_tokens"].shape, np.float32))
    return Datum(datum.model_input, {**inputs, "weights": weights})


def _tensor(index: int, name: str, tensor: pb.Tensor) -> np.ndarray:
    """float32 or int64."""
    if tensor.dtype not in DTYPES:
        raise DatumError(f"data[{index}].loss_fn_inputs[{name!r}] has the unknown dtype {tensor.dtype}.")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    is_sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    flat = _array(index, name, tensor.sparse_csr.values if is_sparse else tensor.dense, dtype)
    if tensor.dtype == pb.DTYPE_BFLOAT16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    flat = flat.astype(np.float32 if flat.dtype.kind == "f" else np.int64)
    try:
        if is_sparse:
            return _dense(flat, tensor.sparse_csr, shape)
        return flat.reshape(shape) if shape else flat
    except (ValueError, IndexError) as error:
        raise DatumError(f"data[{index}].loss_fn_inputs[{name!r}] is not a tensor of shape {shape}: {error}") from error


def _dense(values: np.ndarray, csr: pb.SparseCsr, shape: tuple[int, ...]) -> np.ndarray:
    """A sparse matrix, with zeros where it has nothing."""
    rows, columns = shape
    if min(shape) < 0 or rows * columns > MAX_ELEMENTS:
        raise ValueError(f"at most {MAX_ELEMENTS} elements are taken")
    bounds, where = (np.frombuffer(part, np.int64) for part in (csr.crow_indices, csr.col_indices))
    if len(bounds) != rows + 1 or len(where) != len(values):
        raise ValueError("its indices do not fit")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(bounds)), where] = values
    return dense


def _array(index: int, name: str, content: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise DatumError(f"data[{index}]: {name} has {len(content)} bytes, which are not whole numbers of {dtype}.")
    return np.frombuffer(content, dtype)


def _trailing_shapes(datum: dict[str, TensorData]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tensor.shape[1:]) for name, tensor in datum.items()]


def _batched(arrays: list[np.ndarray]) -> pb.BatchedTensor:
    """Offsets are in bytes."""
    arrays = [np.ascontiguousarray(array, np.float32) for array in arrays]
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:],
    )


def _topk(rows: list[list[tuple[int, float]] | None]) -> pb.TopkLogprobs:
    width = max((len(row) for row in rows if row), default=1)  # 0 would be read as no matrix
    cells = list(_padded(rows, width))
    return pb.TopkLogprobs(
        token_ids=np.asarray([token for token, _ in cells], np.int32).tobytes(),
        logprobs=np.asarray([logprob for _, logprob in cells], np.float32).tobytes(),
        k=width,
        length=len(rows),
    )


def _padded(rows: Iterable[list[tuple[int, float]] | None], width: int) -> Iterator[tuple[int, float]]:
    for row in rows:
        known = row or []
        yield from known
        yield from [(NO_TOKEN, NO_LOGPROB)] * (width - len(known))
