"""What the door lets through, and how it lays datums end to end."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from raysessions import LOSSES, Datum, DatumError, ModelInput, TensorData
from raysessions.batch import Batch, pack

VOCAB_SIZE = 100
CONTEXT_LENGTH = 8


@dataclass
class LookAlikeInput:
    """Shaped like tinker's ModelInput."""

    tokens: list[int]

    def to_ints(self) -> list[int]:
        return self.tokens


@dataclass
class LookAlikeTensor:
    """Shaped like tinker's TensorData: it also has `data`, `dtype` and `shape`, flat and as words."""

    data: list[float]
    dtype: str

    def to_numpy(self) -> np.ndarray:
        return np.array(self.data, dtype=self.dtype)


@dataclass
class LookAlikeDatum:
    """Shaped like tinker's Datum."""

    model_input: LookAlikeInput
    loss_fn_inputs: dict[str, LookAlikeTensor]


def packed(data: Any, loss_fn: str = "cross_entropy") -> Batch:
    return pack(data, LOSSES[loss_fn], vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)


def supervised(tokens: list[int], **inputs: Any) -> Datum:
    """A good datum for cross_entropy but for what `inputs` replace; None leaves an input out."""
    given = {"target_tokens": [token + 1 for token in tokens], "weights": [1.0] * len(tokens), **inputs}
    return Datum(ModelInput.from_ints(tokens), {key: value for key, value in given.items() if value is not None})


def assert_same(batch: Batch, expected: Batch) -> None:
    assert batch.inputs.keys() == expected.inputs.keys()
    pairs = [(getattr(batch, name), getattr(expected, name)) for name in ("tokens", "offsets", "target_tokens")]
    pairs += [(batch.inputs[key], expected.inputs[key]) for key in expected.inputs]
    for array, other in pairs:
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


def test_three_datums_lie_end_to_end():
    data = [
        supervised([1, 2, 3], weights=[0.0, 0.5, -1.0]),
        supervised([7], target_tokens=[99], weights=[2.0]),
        supervised([4, 5], weights=[0.25, 1.0]),
    ]
    batch = packed(data)
    expected = Batch(
        tokens=np.array([1, 2, 3, 7, 4, 5], dtype=np.int64),
        offsets=np.array([0, 3, 4, 6], dtype=np.int64),
        target_tokens=np.array([2, 3, 4, 99, 5, 6], dtype=np.int64),
        inputs={"weights": np.array([0.0, 0.5, -1.0, 2.0, 0.25, 1.0], dtype=np.float32)},
    )
    assert_same(batch, expected)
    assert batch.num_datums == 3
    assert batch.lengths.tolist() == [3, 1, 2]


def test_weights_of_a_policy_gradient_loss_are_1_where_not_given():
    given = {"target_tokens": [2, 3], "logprobs": [-0.5, -1.5], "advantages": [1.0, -2.0]}
    data = [Datum(ModelInput.from_ints([1, 2]), given), Datum(ModelInput.from_ints([4, 5]), {**given, "weights": [0.0, 0.5]})]
    batch = packed(data, "importance_sampling")
    assert list(batch.inputs) == ["logprobs", "advantages", "weights"]
    assert batch.inputs["weights"].tolist() == [1.0, 1.0, 0.0, 0.5]
    assert batch.inputs["weights"].dtype == np.float32
    assert batch.inputs["logprobs"].tolist() == [-0.5, -1.5, -0.5, -1.5]
    assert batch.inputs["advantages"].tolist() == [1.0, -2.0, 1.0, -2.0]


def test_lists_numpy_torch_and_look_alikes_give_the_same_batch():
    tokens, targets, weights = [5, 6, 7], [6, 7, 8], [0.5, 0.0, -2.0]
    expected = packed([supervised(tokens, target_tokens=targets, weights=weights)])
    inputs = [
        (np.array(targets, dtype=np.int32), np.array(weights, dtype=np.float64)),
        (np.array(targets, dtype=np.float32), np.array(weights, dtype=np.float16)),
        (torch.tensor(targets), torch.tensor(weights, requires_grad=True)),
        (torch.tensor(targets, dtype=torch.int16), torch.tensor(weights, dtype=torch.float64)),
        (TensorData.from_numpy(np.array(targets)), TensorData.from_torch(torch.tensor(weights, dtype=torch.bfloat16))),
        (tuple(targets), tuple(weights)),
    ]
    for target_tokens, weight in inputs:
        assert_same(packed([supervised(tokens, target_tokens=target_tokens, weights=weight)]), expected)
    named = {"target_tokens": LookAlikeTensor(targets, "int64"), "weights": LookAlikeTensor(weights, "float32")}
    assert_same(packed([LookAlikeDatum(LookAlikeInput(tokens), named)]), expected)
    assert_same(packed([Datum(tokens, {"target_tokens": targets, "weights": weights})]), expected)


def test_a_tuple_of_datums_is_as_good_as_a_list():
    data = [supervised([1, 2]), supervised([3])]
    assert_same(packed(tuple(data)), packed(data))


def test_no_datums_are_refused():
    with pytest.raises(DatumError, match="data is empty: give at least one Datum"):
        packed([])


@pytest.mark.parametrize(
    "data", [supervised([1]), "text", {0: supervised([1])}, (datum for datum in [supervised([1])]), None, 7]
)
def test_what_is_not_a_list_is_refused(data: Any):
    with pytest.raises(DatumError, match=f"data must be a list of Datum, not {type(data).__name__}"):
        packed(data)


POLICY_GRADIENT = {"target_tokens": [2], "logprobs": [-0.5], "advantages": [1.0]}
TARGETS, WEIGHTS = "loss_fn_inputs['target_tokens']", "loss_fn_inputs['weights']"
BAD_DATUMS = {
    "not a datum": ([1, 2, 3], ["is a list, not a Datum"]),
    "empty prompt": (supervised([]), ["model_input", "empty"]),
    "longer than the context": (supervised([1] * 9), ["model_input", "9 tokens", "context is 8"]),
    "short weights": (supervised([1, 2, 3], weights=[1.0, 1.0]), [WEIGHTS, "(2,)", "(3,)"]),
    "long targets": (supervised([1, 2], target_tokens=[1, 2, 3]), [TARGETS, "(3,)", "(2,)"]),
    "one number for all": (supervised([1, 2], weights=1.0), [WEIGHTS, "()", "(2,)"]),
    "two numbers per position": (supervised([1, 2], weights=[[1.0, 1.0]] * 2), [WEIGHTS, "(2, 2)", "(2,)"]),
    "ragged": (supervised([1, 2], weights=[[1.0], [1.0, 2.0]]), [WEIGHTS, "rectangular"]),
    "words": (supervised([1], weights=["much"]), [WEIGHTS, "numbers"]),
    "nothing in it": (supervised([1], weights=[None]), [WEIGHTS, "numbers"]),
    "NaN": (supervised([1, 2], weights=[1.0, float("nan")]), [WEIGHTS, "is nan at position 1"]),
    "infinite": (supervised([1, 2], weights=[float("inf"), 1.0]), [WEIGHTS, "is inf at position 0"]),
    "minus infinite": (supervised([1, 2], weights=[0.0, -float("inf")]), [WEIGHTS, "is -inf at position 1"]),
    "NaN as a target": (supervised([1], target_tokens=[float("nan")]), [TARGETS]),
    "unknown key": (supervised([1], weigths=[1.0]), ["loss_fn_inputs['weigths']", "target_tokens, weights"]),
    "key of another loss": (supervised([1], advantages=[1.0]), ["loss_fn_inputs['advantages']", "'cross_entropy'"]),
    "missing weights": (supervised([1], weights=None), ["'weights'", "'cross_entropy'"]),
    "missing targets": (supervised([1], target_tokens=None), ["'target_tokens'", "'cross_entropy'"]),
    "prompt token too large": (supervised([1, 100], target_tokens=[1, 2]), ["model_input", "id 100 at position 1", "has 100"]),
    "prompt token negative": (supervised([-1]), ["model_input", "id -1 at position 0"]),
    "target too large": (supervised([1, 99]), [TARGETS, "id 100 at position 1", "has 100"]),
    "target negative": (supervised([1, 2], target_tokens=[-100, 2]), [TARGETS, "id -100 at position 0"]),
    "fraction of a target": (supervised([1, 2], target_tokens=[2.0, 3.5]), [TARGETS, "fractions"]),
}


@pytest.mark.parametrize(("bad", "words"), BAD_DATUMS.values(), ids=BAD_DATUMS.keys())
def test_a_bad_datum_is_refused_by_index_and_key(bad: Any, words: list[str]):
    good = supervised([1, 2, 3])
    for index, data in [(0, [bad, good]), (2, [good, good, bad])]:
        with pytest.raises(DatumError) as refusal:
            packed(data)
        message = str(refusal.value)
        assert f"data[{index}]" in message
        assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("key", ["logprobs", "advantages"])
def test_every_input_of_a_policy_gradient_loss_is_checked(key: str):
    wrong = {
        f"has no '{key}'": {name: value for name, value in POLICY_GRADIENT.items() if name != key},
        f"loss_fn_inputs['{key}'] is nan at position 0": {**POLICY_GRADIENT, key: [float("nan")]},
        f"loss_fn_inputs['{key}'] has shape (2,)": {**POLICY_GRADIENT, key: [0.0, 0.0]},
    }
    good = Datum(ModelInput.from_ints([1]), POLICY_GRADIENT)
    for words, inputs in wrong.items():
        with pytest.raises(DatumError) as refusal:
            packed([good, Datum(ModelInput.from_ints([1]), inputs)], "importance_sampling")
        assert "data[1]" in str(refusal.value)
        assert words in str(refusal.value)


def test_a_datum_as_long_as_the_context_and_the_last_token_of_the_vocabulary_pass():
    batch = packed([supervised([99] * 8, target_tokens=[0] * 8)])
    assert batch.tokens.tolist() == [99] * 8
    assert batch.target_tokens.tolist() == [0] * 8
