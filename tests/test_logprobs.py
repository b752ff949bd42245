"""The logprobs that a loss is given, against plain torch: values and gradients."""

import pytest
import torch

from raysessions.actors.maths.logprobs import CHUNK_TOKENS, target_logprobs


@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 77])
def test_target_logprobs_equal_log_softmax_in_value_and_gradient(num_tokens: int):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 24, generator=generator)
    weight = torch.randn(131, 24, generator=generator)
    targets = torch.randint(131, (num_tokens,), generator=generator)
    coefficients = torch.randn(num_tokens, generator=generator)

    ours = hidden.clone().requires_grad_()
    logprobs = target_logprobs(ours, weight, torch.arange(num_tokens), targets, torch.ones(num_tokens, dtype=torch.bool))
    (logprobs * coefficients).sum().backward()
    theirs = hidden.clone().requires_grad_()
    expected = (theirs @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    (expected * coefficients).sum().backward()

    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5)


def test_only_trained_tokens_get_a_gradient_and_all_get_their_logprob():
    num_tokens = 2 * CHUNK_TOKENS + 40
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 16, generator=generator)
    weight = torch.randn(97, 16, generator=generator)
    targets = torch.randint(97, (num_tokens,), generator=generator)
    trained = torch.rand(num_tokens, generator=generator) < 0.3
    trained[CHUNK_TOKENS : 2 * CHUNK_TOKENS] = False  # a chunk that nobody trains

    ours = hidden.clone().requires_grad_()
    logprobs = target_logprobs(ours, weight, torch.arange(num_tokens), targets, trained)
    logprobs.sum().backward()
    theirs = hidden.clone().requires_grad_()
    expected = (theirs @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    expected[trained].sum().backward()

    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5)
    assert ours.grad[~trained].abs().max() == 0
    assert (ours.grad[trained].abs().amax(-1) > 0).all()


def test_a_position_may_have_many_targets_none_or_one():
    num_positions = CHUNK_TOKENS + 30
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_positions, 16, generator=generator)
    weight = torch.randn(97, 16, generator=generator)
    counts = torch.randint(0, 6, (num_positions,), generator=generator)
    position = torch.repeat_interleave(torch.arange(num_positions), counts)
    targets = torch.randint(97, (len(position),), generator=generator)
    trained = torch.rand(len(position), generator=generator) < 0.5
    coefficients = torch.randn(len(position), generator=generator)

    ours = hidden.clone().requires_grad_()
    logprobs = target_logprobs(ours, weight, position, targets, trained)
    (logprobs * coefficients).sum().backward()
    theirs = hidden.clone().requires_grad_()
    expected = (theirs @ weight.T).log_softmax(-1)[position, targets]
    (expected * coefficients)[trained].sum().backward()

    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5)


def test_target_logprobs_without_gradient_are_the_same():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.tensor([0, 10, 3, 3, 7])
    logprobs = target_logprobs(hidden, weight, torch.arange(5), targets, torch.zeros(5, dtype=torch.bool))
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, (hidden @ weight.T).log_softmax(-1)[torch.arange(5), targets])
