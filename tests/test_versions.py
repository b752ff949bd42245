"""Many versions at once, of one session and of two: none answers for another. Conformance D8; one replica and two."""

from __future__ import annotations

from pools import PROMPT, greedy, teach, tokens_of

import raysessions as rs


def test_more_versions_than_a_batch_or_an_engine_holds_all_answer_and_none_crosses(training_by_replicas):
    """They take turns, and evicted ones are loaded again."""
    training = training_by_replicas
    samplers = {}
    for token in range(100, 190, 10):
        teach(training, token)
        samplers[token] = training.save_weights_and_get_sampling_client(str(token))
    futures = [(token, sampler.sample(PROMPT, 1, greedy())) for _ in range(12) for token, sampler in samplers.items()]
    assert all(future.result(timeout=120).sequences[0].tokens == [token] * 20 for token, future in futures)


def test_marker_tokens_never_cross_while_versions_come_and_go(owner_by_replicas, training_by_replicas, tiny_model):
    with owner_by_replicas.create_lora_training_client(str(tiny_model), rank=4, seed=5) as other:
        sessions = {training_by_replicas: 100, other: 200}
        for session, token in sessions.items():
            teach(session, token)
        futures: list[tuple[int, rs.APIFuture]] = []  # type: ignore[type-arg]
        samplers = {session: session.save_weights_and_get_sampling_client("first") for session in sessions}
        for step in range(25):
            for session, token in sessions.items():
                futures += [(token, samplers[session].sample(PROMPT, 1, greedy(8))) for _ in range(10)]
                if step % 2:
                    samplers[session] = session.save_weights_and_get_sampling_client(f"step-{step}")
        assert len(futures) == 500
        for token, future in futures:
            assert tokens_of([future]) == [[token] * 8]
