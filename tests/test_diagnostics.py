"""compare_logprobs shows how far sampler and trainer are apart."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import raysessions as rs
from raysessions.diagnostics import NumericsWarning, compare_logprobs

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def test_right_after_a_save_they_differ_by_arithmetic_only(training, capsys):
    training.forward_backward([rs.datum_for_supervised(PROMPTS[0] * 5, [1.0] * 20)])
    training.optim_step(rs.AdamParams(learning_rate=0.01)).result()
    sampler = training.save_weights_and_get_sampling_client("now")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comparison = compare_logprobs(training, sampler, PROMPTS, max_tokens=20, num_worst=3)
    assert comparison.max_abs < 1e-4
    assert comparison.kl_v2 <= 0.5 * comparison.max_abs**2
    assert len(comparison.worst) == 3
    printed = capsys.readouterr().out
    assert f"over {comparison.num_tokens} tokens" in printed
    assert len(printed.splitlines()) == 4


def test_an_old_version_shows_its_distance_and_warns(training):
    old = training.save_weights_and_get_sampling_client("old")
    rng = np.random.default_rng(0)
    for _ in range(6):
        training.forward_backward([rs.datum_for_supervised(rng.integers(3, 259, 60).tolist(), [1.0] * 60)])
        training.optim_step(rs.AdamParams(learning_rate=0.03))
    with pytest.warns(NumericsWarning, match="is the sampling client of the trainer's newest"):
        comparison = compare_logprobs(training, old, [rs.ModelInput.from_ints(prompt) for prompt in PROMPTS], max_tokens=40)
    differences = [abs(token.difference) for token in comparison.worst]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] == comparison.max_abs > 0.5
    # The worst token again, from the trainer alone.
    worst = comparison.worst[0]
    assert worst.position >= len(PROMPTS[worst.prompt_index])
    assert worst.trainer_logprob - worst.sampler_logprob == worst.difference
    assert comparison.kl_v1 > 0.1


def test_no_prompt_is_refused(training):
    sampler = training.create_sampling_client()
    with pytest.raises(rs.ConfigError, match="at least one prompt"):
        compare_logprobs(training, sampler, [])
