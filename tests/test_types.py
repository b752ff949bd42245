"""The words of the API: what people type, what travels, and the shift by one."""

import pickle
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raysessions import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SessionInfo,
    TensorData,
    datum_for_rl,
    datum_for_supervised,
)
from raysessions.types import TypedModel, as_model_input, as_typed


def test_defaults_are_those_of_the_documentation():
    assert SamplingParams().model_dump() == {
        "max_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": None,
        "stop": None,
    }
    assert AdamParams().model_dump() == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (SamplingParams, "max_token", 5),
        (SamplingParams, "max_tokens", 0),
        (SamplingParams, "temperature", -0.1),
        (SamplingParams, "temperature", float("nan")),
        (SamplingParams, "temperature", "hot"),
        (SamplingParams, "top_p", 0.0),
        (SamplingParams, "top_p", 1.1),
        (SamplingParams, "top_k", -2),
        (SamplingParams, "stop", 3),
        (AdamParams, "lr", 1e-4),
        (AdamParams, "learning_rate", -1e-4),
        (AdamParams, "learning_rate", float("nan")),
        (AdamParams, "learning_rate", None),
        (AdamParams, "beta1", 1.0),
        (AdamParams, "beta1", -0.1),
        (AdamParams, "beta2", 1.0),
        (AdamParams, "eps", -1e-8),
        (AdamParams, "weight_decay", -0.1),
        (AdamParams, "grad_clip_norm", -1.0),
    ],
)
def test_an_unknown_field_or_a_value_out_of_range_is_refused_by_name(cls: type[TypedModel], field: str, value: Any):
    with pytest.raises(ValueError, match=field):
        cls(**{field: value})


def test_the_edges_of_the_ranges_are_allowed():
    params = SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, stop=[])
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.stop) == (1, 0.0, 1.0, 0, [])
    assert [SamplingParams(stop=stop).stop for stop in ("a", ["a", "b"], [1, 2])] == ["a", ["a", "b"], [1, 2]]
    adam = AdamParams(learning_rate=0, beta1=0, beta2=0, eps=0, weight_decay=0, grad_clip_norm=0)
    assert set(adam.model_dump().values()) == {0.0}


def test_what_people_type_and_what_travels_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        AdamParams().learning_rate = 1.0
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().temperature = 0.5
    for record, name in [
        (TensorData.from_numpy(np.zeros(2)), "data"),
        (ModelInput.from_ints([1]), "chunks"),
        (Datum(ModelInput.from_ints([1])), "model_input"),
        (SampledSequence([1], [-0.5], "stop"), "tokens"),
    ]:
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, None)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([[1.5, -2.0], [0.0, 3.25]], dtype=np.float64), "float32"),
        (np.array([1.5, -2.0], dtype=np.float16), "float32"),
        (np.array([1, -2, 3], dtype=np.int32), "int64"),
        (np.array([7, 200], dtype=np.uint8), "int64"),
        (np.array(0.5, dtype=np.float32), "float32"),
        (np.empty((0,), dtype=np.float32), "float32"),
    ],
)
def test_tensor_data_gives_back_the_numbers_of_numpy_as_float32_or_int64(array: np.ndarray, dtype: str):
    tensor = TensorData.from_numpy(array)
    assert tensor.dtype == dtype
    assert tensor.shape == array.shape
    assert tensor.to_numpy().dtype == dtype
    np.testing.assert_array_equal(tensor.to_numpy(), array)
    assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.int64])
def test_tensor_data_gives_back_the_numbers_of_torch(dtype: torch.dtype):
    # Small multiples of 1/8 are exact in every one of these types.
    tensor = (torch.arange(-6, 6).reshape(3, 4) / (8 if dtype.is_floating_point else 1)).to(dtype)
    back = TensorData.from_torch(tensor).to_torch()
    assert back.dtype == (torch.float32 if dtype.is_floating_point else torch.int64)
    assert torch.equal(back, tensor.to(back.dtype))


def test_tensor_data_takes_a_tensor_that_has_a_graph_and_gives_out_a_copy():
    weights = torch.tensor([1.0, 2.0], requires_grad=True)
    tensor = TensorData.from_torch(weights * 2)
    assert tensor.tolist() == [2.0, 4.0]
    tensor.to_torch().zero_()
    assert tensor.tolist() == [2.0, 4.0]
    assert len(tensor) == 2


def test_tensor_data_is_equal_where_its_numbers_are():
    assert TensorData.from_numpy(np.array([1.0, 2.0])) == TensorData.from_torch(torch.tensor([1.0, 2.0]))
    assert TensorData.from_numpy(np.array([1.0, 2.0])) != TensorData.from_numpy(np.array([1.0, 2.5]))
    assert TensorData.from_numpy(np.array([1.0])) != [1.0]


def test_a_model_input_is_its_chunks_one_after_the_other():
    assert ModelInput.from_ints(np.array([3, 1, 2])).to_ints() == [3, 1, 2]
    assert ModelInput(chunks=[EncodedTextChunk([4, 5]), EncodedTextChunk([]), EncodedTextChunk([6])]).to_ints() == [4, 5, 6]
    assert ModelInput(chunks=[EncodedTextChunk([4, 5]), EncodedTextChunk([6])]).length == 3
    assert ModelInput().length == 0
    assert ModelInput.from_ints([1, 2]) == ModelInput.from_ints(iter([1, 2]))


def test_a_model_input_may_be_given_as_a_list_or_a_look_alike():
    ours = ModelInput.from_ints([1, 2, 3])
    assert as_model_input(ours) is ours
    assert as_model_input([1, 2, 3]) == ours
    assert as_model_input(np.array([1, 2, 3])) == ours
    assert as_model_input(SimpleNamespace(to_ints=lambda: [1, 2, 3])) == ours


def test_params_may_be_given_as_a_look_alike_and_nothing_means_the_defaults():
    assert as_typed(AdamParams, None) == AdamParams()
    ours = AdamParams(learning_rate=3e-4)
    assert as_typed(AdamParams, ours) is ours
    theirs = SimpleNamespace(learning_rate=3e-4, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    assert as_typed(AdamParams, theirs).model_dump() == vars(theirs)
    partly = SimpleNamespace(max_tokens=7, stop=["\n"], temperature=0.5)
    assert as_typed(SamplingParams, partly) == SamplingParams(max_tokens=7, stop=["\n"], temperature=0.5)


def test_a_look_alike_out_of_range_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        as_typed(SamplingParams, SimpleNamespace(temperature=-1.0))


def columns(datum: Datum) -> dict[str, list[float]]:
    return {key: np.asarray(value).tolist() for key, value in datum.loss_fn_inputs.items()}


def test_a_supervised_datum_is_shifted_by_one():
    datum = datum_for_supervised([10, 11, 12, 13], weights=[9.0, 0.0, 0.5, 1.0])
    # Position 0 sees 10 and predicts 11, whose weight is 0; position 2 sees 10, 11, 12 and predicts 13, weight 1.
    assert datum.model_input.to_ints() == [10, 11, 12]
    assert columns(datum) == {"target_tokens": [11, 12, 13], "weights": [0.0, 0.5, 1.0]}
    assert datum.loss_fn_inputs["target_tokens"].dtype == np.int64
    assert datum.loss_fn_inputs["weights"].dtype == np.float32


def test_a_reinforcement_datum_is_shifted_by_one_and_trains_the_sampled_tokens_only():
    sequence = SampledSequence(tokens=[8, 9], logprobs=[-0.5, -0.25], stop_reason="stop")
    datum = datum_for_rl([5, 6, 7], sequence, advantage=2.0)
    # Positions 0 and 1 predict the prompt's 6 and 7; position 2 is the prompt's last token and predicts the sampled 8.
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert columns(datum) == {
        "target_tokens": [6, 7, 8, 9],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "advantages": [0.0, 0.0, 2.0, 2.0],
        "weights": [0.0, 0.0, 1.0, 1.0],
    }


def test_a_reinforcement_datum_takes_an_advantage_per_sampled_token():
    sequence = SampledSequence(tokens=[8, 9, 10], logprobs=[-0.5, -0.25, -4.0], stop_reason="length")
    datum = datum_for_rl([5], sequence, advantage=[1.0, -1.0, 0.5])
    assert datum.model_input.to_ints() == [5, 8, 9]
    assert columns(datum) == {
        "target_tokens": [8, 9, 10],
        "logprobs": [-0.5, -0.25, -4.0],
        "advantages": [1.0, -1.0, 0.5],
        "weights": [1.0, 1.0, 1.0],
    }


def test_the_loss_of_an_output_is_its_sum_and_its_mean_is_per_weight():
    output = ForwardBackwardOutput([], {"loss:sum": 6.0, "weight:sum": 4.0})
    assert output.loss == 6.0
    assert output.mean_loss == 1.5


def test_every_record_survives_pickling():
    tensor = TensorData.from_numpy(np.array([[1.0, 2.0]]))
    sequence = SampledSequence([1, 2], [-0.5, -0.25], "stop")
    records = [
        AdamParams(learning_rate=3e-4),
        SamplingParams(stop=["\n"], seed=3),
        tensor,
        EncodedTextChunk([1, 2]),
        ModelInput.from_ints([1, 2]),
        sequence,
        SampleResponse([sequence], [None, -0.5], [None, [(3, -0.1)]]),
        ForwardBackwardOutput([{"logprobs": tensor}], {"loss:sum": 1.0}),
        OptimStepResponse({"grad_norm:max": 1.0}),
        SaveWeightsForSamplerResponse("raysessions://s/v1", 1, "first"),
        SessionInfo("s", "tiny", 8, 32.0, 1, ("q_proj",), 10, 259, 512, "float32", 1, 0, ("other",)),
    ]
    for record in records:
        copy = pickle.loads(pickle.dumps(record))
        assert type(copy) is type(record)
        assert copy == record
    datum = pickle.loads(pickle.dumps(datum_for_rl([5, 6], sequence, 1.0)))
    assert datum.model_input.to_ints() == [5, 6, 1]
    assert columns(datum)["logprobs"] == [0.0, -0.5, -0.25]
