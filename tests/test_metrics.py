"""Metrics of parts merged into metrics of the whole."""

import numpy as np
import pytest

from raysessions.actors.maths.metrics import Part, merge


def test_each_suffix_merges_its_way():
    parts = [
        {"loss:sum": Part(1.5), "kl:mean": Part(2.0, 3), "length:min": Part(4.0), "norm:max": Part(-1.0)},
        {"loss:sum": Part(-0.5), "kl:mean": Part(5.0, 1), "length:min": Part(2.0), "norm:max": Part(-3.0)},
        {"loss:sum": Part(4.0), "kl:mean": Part(-1.0, 4), "length:min": Part(9.0), "norm:max": Part(-2.0)},
    ]
    mean = np.average([2.0, 5.0, -1.0], weights=[3, 1, 4])
    assert merge(parts) == {"loss:sum": 5.0, "kl:mean": pytest.approx(mean), "length:min": 2.0, "norm:max": -1.0}


def test_a_mean_counts_each_part_by_its_tokens_whatever_the_split():
    values = np.random.default_rng(0).normal(size=20)
    for bounds in ([20], [1, 20], [3, 4, 11, 20], list(range(1, 21))):
        chunks = np.split(values, bounds[:-1])
        merged = merge({"kl:mean": Part(chunk.mean(), len(chunk))} for chunk in chunks)
        assert merged["kl:mean"] == pytest.approx(values.mean(), rel=1e-12)


def test_weights_change_means_only():
    parts = [{"a:sum": Part(1.0, 0), "b:min": Part(1.0, 0), "c:max": Part(1.0, 0)}, {"a:sum": Part(2.0, 5)}]
    assert merge(parts) == {"a:sum": 3.0, "b:min": 1.0, "c:max": 1.0}


def test_a_part_of_weight_0_does_not_move_a_mean():
    assert merge([{"kl:mean": Part(7.0, 2)}, {"kl:mean": Part(1e9, 0)}]) == {"kl:mean": 7.0}


def test_a_mean_of_no_weight_at_all_is_0():
    assert merge([{"kl:mean": Part(3.0, 0)}, {"kl:mean": Part(4.0, 0)}]) == {"kl:mean": 0.0}


def test_a_metric_that_only_some_parts_have_is_merged_over_those():
    assert merge([{"loss:sum": Part(1.0)}, {"kl:mean": Part(2.0)}, {"loss:sum": Part(3.0)}]) == {
        "loss:sum": 4.0,
        "kl:mean": 2.0,
    }
    assert merge([]) == {}


def test_the_last_colon_of_a_name_decides():
    assert merge([{"reward:max:sum": Part(1.0)}, {"reward:max:sum": Part(2.0)}]) == {"reward:max:sum": 3.0}


@pytest.mark.parametrize("name", ["loss", "loss:total", "loss:", "loss:Sum", "sum", ""])
def test_a_name_without_a_known_suffix_is_refused_with_the_known_ones(name: str):
    with pytest.raises(ValueError, match=f"Metric '{name}' must end in one of :sum, :mean, :min, :max"):
        merge([{"fine:sum": Part(1.0)}, {name: Part(1.0)}])
