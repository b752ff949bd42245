"""Our types through Tinker's protobuf, read and written by the tinker package itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

import raysessions as rs
from raysessions.gateway.tinker_api.wire import (
    parse_forward_backward,
    read_forward_backward,
    write_forward_backward,
    write_sample,
)


def request_of(*data: tinker.Datum, **fields) -> bytes:
    given = ForwardBackwardInput(data=list(data), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9})
    return forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=3, **fields)
    ).SerializeToString()


def read(message: bytes):
    return read_forward_backward(parse_forward_backward(message))


def tensor(array, dtype: str) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(np.asarray(array, dtype))


def test_a_request_is_read_as_the_sdk_writes_it():
    inputs = {"target_tokens": tensor([6, 7, 8], "int64"), "advantages": tensor([0.5, -1, 2], "float32")}
    call = read(request_of(tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)))
    assert (call.model_id, call.seq_id, call.loss_fn, call.forward_only) == ("s:train:0", 3, "ppo", False)
    assert call.loss_fn_config == pytest.approx({"clip_low_threshold": 0.9})
    (datum,) = call.data
    assert datum.model_input.to_ints() == [5, 6, 7]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7, 8]
    assert datum.loss_fn_inputs["advantages"] == rs.TensorData.from_numpy(np.array([0.5, -1, 2]))


def test_outputs_are_read_by_the_sdk_as_they_were_also_with_several_targets():
    rng = np.random.default_rng(0)
    shapes = [(3,), (1,), (2, 4), (5, 4), (2, 3), (4,)]
    outputs = [{"logprobs": rs.TensorData.from_numpy(rng.normal(size=shape))} for shape in shapes]
    read = deserialize_forward_backward_output(
        write_forward_backward(rs.ForwardBackwardOutput(outputs, {"loss:sum": 1.5, "kl:mean": 0.25}))
    )
    assert read.metrics == {"loss:sum": 1.5, "kl:mean": 0.25}
    for ours, theirs in zip(outputs, read.loss_fn_outputs, strict=True):
        array = np.asarray(theirs["logprobs"].to_numpy()).reshape(theirs["logprobs"].shape)
        assert np.array_equal(array, ours["logprobs"].to_numpy())


def test_no_datum_is_no_output():
    assert deserialize_forward_backward_output(write_forward_backward(rs.ForwardBackwardOutput([], {}))).loss_fn_outputs == []


def test_samples_are_read_by_the_sdk_as_they_were():
    sequences = [rs.SampledSequence([5, 6], [-0.5, -1.25], "stop"), rs.SampledSequence([7], [-2.0], "length")]
    response = rs.SampleResponse(sequences, [None, -0.75], [None, [(9, -0.25), (4, -3.0)]])
    read = deserialize_sample_response(write_sample(response))
    assert [(list(s.tokens), list(s.logprobs), s.stop_reason) for s in read.sequences] == [
        ([5, 6], [-0.5, -1.25], "stop"),
        ([7], [-2.0], "length"),
    ]
    first, second = read.prompt_logprobs
    assert first is None or math.isnan(first)
    assert second == -0.75
    assert read.topk_prompt_logprobs[1] == [(9, -0.25), (4, -3.0)]


@pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))])
def test_garbage_is_refused(garbage):
    with pytest.raises(rs.ValidationError):
        read(garbage)


def test_a_sparse_matrix_is_read_and_one_that_claims_too_much_is_refused():
    from tinker.proto import tinker_public_pb2 as pb

    def message(shape, crow, col, values):
        request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray([5, 6], np.int32).tobytes()
        weights = datum.loss_fn_inputs["weights"]
        weights.dtype = pb.DTYPE_FLOAT32
        weights.shape.extend(shape)
        weights.sparse_csr.values = np.asarray(values, np.float32).tobytes()
        weights.sparse_csr.crow_indices = np.asarray(crow, np.int64).tobytes()
        weights.sparse_csr.col_indices = np.asarray(col, np.int64).tobytes()
        return request.SerializeToString()

    (datum,) = read(message((2, 3), [0, 1, 3], [2, 0, 1], [1, 2, 3])).data
    assert datum.loss_fn_inputs["weights"].tolist() == [[0, 0, 1], [2, 3, 0]]
    for shape in ((2**20, 2**20), (-1, 3), (2,)):
        with pytest.raises(rs.DatumError, match="weights"):
            read(message(shape, [0, 1, 3], [2, 0, 1], [1, 2, 3]))
    with pytest.raises(rs.DatumError):
        read(message((2, 3), [0, 1, 3], [2, 0, 7], [1, 2, 3]))


def test_weights_that_are_left_out_are_ones_for_cross_entropy_only():
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": tensor([6, 7], "int64")}
    )
    request = parse_forward_backward(request_of(datum))
    assert "weights" not in read_forward_backward(request).data[0].loss_fn_inputs
    request.loss_fn = "cross_entropy"
    assert read_forward_backward(request).data[0].loss_fn_inputs["weights"].tolist() == [1, 1]


def test_top_k_rows_that_are_all_missing_stay_so():
    response = rs.SampleResponse([rs.SampledSequence([5], [-0.5], "stop")], [None], [None])
    assert deserialize_sample_response(write_sample(response)).topk_prompt_logprobs == [None]
