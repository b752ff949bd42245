"""Tokens drawn by inverse transform have the probabilities they should."""

from __future__ import annotations

import pytest
import torch

from raysessions.actors.engines.cpu_sampler import BLOCK, draw


@pytest.mark.parametrize("vocab", [3, BLOCK, 2 * BLOCK, 1000])
def test_each_token_is_drawn_as_often_as_its_probability_says(vocab):
    """Against the sum by which inverse transform is defined, at 100,000 evenly spaced numbers."""
    probs = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).mul(2).softmax(0)
    uniform = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1]
    drawn = draw(probs.expand(len(uniform), vocab), uniform)
    counts = torch.bincount(drawn, minlength=vocab)
    assert (counts / len(uniform) - probs).abs().max() < 3e-5
    expected = torch.searchsorted(probs.double().cumsum(0), uniform, right=True).clamp_max(vocab - 1)
    assert (drawn == expected).float().mean() > 0.995  # sums in another order differ at the edges
    assert (drawn - expected).abs().max() <= 1


def test_a_token_without_probability_is_never_drawn():
    probs = torch.zeros(1000)
    probs[[5, 300, 700, 999]] = 0.25
    edges = torch.tensor([0.0, 1 - 2**-53, 0.25, 0.5, 0.75, 0.25 - 1e-17, 0.5 - 2**-53], dtype=torch.float64)
    uniform = torch.cat([torch.rand(5000, dtype=torch.float64), edges])
    assert set(draw(probs.expand(len(uniform), 1000), uniform).tolist()) == {5, 300, 700, 999}
    last = torch.zeros(1, 700)
    last[0, 0] = 1.0
    assert draw(last, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 0


def test_a_token_rarer_than_float32_can_count_is_still_drawn():
    probs = torch.tensor([[1.0 - 1e-9, 1e-9]])
    assert draw(probs, torch.tensor([1 - 1e-10], dtype=torch.float64)).item() == 1
    assert draw(probs, torch.tensor([1 - 1e-8], dtype=torch.float64)).item() == 0
