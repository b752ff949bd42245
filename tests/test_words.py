"""Names, settings and errors: what they take, what they refuse, and in which words."""

import pickle
import re
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from raysessions import ConfigError, DatumError, RaySessionsError, RequestCancelledError, SessionStoppedError, errors
from raysessions.config import ACTOR_OPTIONS, VLLM_LORA_RANKS, LoraConfig, SamplingConfig, TrainingConfig, round_up_rank
from raysessions.future import own_error
from raysessions.types import TypedModel
from raysessions.uris import VersionUri, check_name, new_session_id


@pytest.mark.parametrize(
    ("text", "group", "version"),
    [("raysessions://session-0a1b/v1", "session-0a1b", 1), ("raysessions://my_run/v120", "my_run", 120)],
)
def test_a_version_is_written_as_it_is_read(text: str, group: str, version: int):
    uri = VersionUri.parse(text)
    assert (uri.group, uri.version) == (group, version)
    assert str(uri) == text
    assert VersionUri.parse(str(uri)) == uri
    assert pickle.loads(pickle.dumps(uri)) == uri
    assert {uri: 1}[VersionUri(group, version)] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "my-run",
        "my-run/v1",
        "tinker://my-run/v1",
        "raysessions://my-run",
        "raysessions://my-run/1",
        "raysessions://my-run/v0",
        "raysessions://my-run/v01",
        "raysessions://my-run/v-1",
        "raysessions://my-run/v1/",
        "raysessions://my-run/v1\n",
        "raysessions://my/run/v1",
        "raysessions:///v1",
        " raysessions://my-run/v1",
    ],
)
def test_what_is_not_a_version_is_refused_with_the_form_of_one(text: str):
    with pytest.raises(ConfigError) as refusal:
        VersionUri.parse(text)
    assert repr(text) in str(refusal.value)
    assert "expected raysessions://GROUP/vN" in str(refusal.value)


@pytest.mark.parametrize("name", ["a", "7", "my-run_2", "x" * 64])
def test_a_good_session_name_is_given_back(name: str):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "x" * 65, "-a", "a-", "_a", "a_", "A", "my run", "a.b", "a/b", "ä", "a\n"])
def test_a_session_name_that_could_not_name_a_file_is_refused_with_the_rule(name: str):
    with pytest.raises(ConfigError, match="use 1 to 64 small letters, digits, '-' or '_'"):
        check_name(name)


def test_made_up_session_names_are_good_and_differ():
    names = [new_session_id() for _ in range(50)]
    assert len(set(names)) == 50
    assert [name for name in names if check_name(name) != name or not name.startswith("session-")] == []
    assert new_session_id("sampler").startswith("sampler-")


def test_a_rank_is_rounded_up_to_one_that_vllm_takes():
    ranks = {1: 1, 2: 8, 8: 8, 9: 16, 16: 16, 17: 32, 33: 64, 65: 128, 129: 256, 257: 320, 321: 512, 512: 512}
    assert {rank: round_up_rank(rank) for rank in ranks} == ranks
    assert set(ranks.values()) == set(VLLM_LORA_RANKS)


@pytest.mark.parametrize("rank", [0, -8, 513, 8.0, "8", None])
def test_an_impossible_rank_is_refused_with_the_possible_ones(rank: Any):
    with pytest.raises(ConfigError, match=re.escape(f"LoRA rank {rank!r}: choose 1…512")):
        round_up_rank(rank)


def test_room_for_a_rank_is_32_or_what_the_session_needs():
    assert {rank: SamplingConfig().for_rank(rank).max_lora_rank for rank in (1, 32, 33, 200)} == {
        1: 32,
        32: 32,
        33: 64,
        200: 256,
    }
    config = SamplingConfig(max_live_versions=3, max_loras=2)
    assert config.for_rank(8) == SamplingConfig(max_live_versions=3, max_loras=2, max_lora_rank=32)
    assert config.max_lora_rank is None


def test_room_for_a_rank_that_was_chosen_is_kept_or_found_too_small():
    config = SamplingConfig(max_lora_rank=16)
    assert config.for_rank(16) == config
    with pytest.raises(ConfigError, match=r"LoRA rank 17 is above SamplingConfig.max_lora_rank=16: raise that to 32"):
        config.for_rank(17)


@pytest.mark.parametrize(
    ("cls", "fields", "words"),
    [
        (TrainingConfig, {"num_thread": 2}, "num_thread"),
        (TrainingConfig, {"num_threads": 0}, "num_threads"),
        (TrainingConfig, {"dtype": "float8"}, "dtype"),
        (TrainingConfig, {"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch"),
        (TrainingConfig, {"placement_timeout_s": 0}, "placement_timeout_s"),
        (TrainingConfig, {"actor_options": {"num_cpu": 2}}, r"unknown actor_options \['num_cpu'\]; known: .*'num_cpus'"),
        (SamplingConfig, {"max_lora": 2}, "max_lora"),
        (SamplingConfig, {"max_lora_rank": 24}, r"vLLM takes one of \(1, 8, 16, 32"),
        (SamplingConfig, {"max_live_versions": 0}, "max_live_versions"),
        (SamplingConfig, {"max_model_len": 1}, "max_model_len"),
        (SamplingConfig, {"kv_cache_gib": 0}, "kv_cache_gib"),
        (SamplingConfig, {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        (SamplingConfig, {"actor_options": {"max_concurrency": 2}}, r"unknown actor_options \['max_concurrency'\]"),
        (LoraConfig, {"rank": 0, "alpha": 32, "seed": 1}, "LoRA rank 0: choose 1…512"),
        (LoraConfig, {"rank": 8, "alpha": 0, "seed": 1}, "alpha"),
    ],
)
def test_an_unknown_or_impossible_setting_is_refused_by_name(cls: type[TypedModel], fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        cls(**fields)


def test_every_known_actor_option_is_taken_as_given():
    options = dict.fromkeys(ACTOR_OPTIONS, 1)
    assert TrainingConfig(actor_options=options).actor_options == options
    del options["max_restarts"]  # a pool replaces its replicas by itself
    assert SamplingConfig(actor_options=options).actor_options == options


def test_settings_cannot_be_changed_and_survive_pickling():
    config = SamplingConfig(max_lora_rank=64, actor_options={"num_cpus": 2})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.max_loras = 9


def drawn_tree() -> dict[str, str]:
    """Parent of each error by name, as drawn in the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"(?P<stem>[│├└─ ]*)(?P<name>[A-Za-z]+Error)\b", line)
        if drawn:
            depth, odd = divmod(len(drawn["stem"]), 4)
            assert not odd
            path = [*path[:depth], drawn["name"]]
            parents[drawn["name"]] = path[-2] if depth else "Exception"
    return parents


ERROR_CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_the_tree_of_errors_is_as_drawn():
    assert {cls.__name__: cls.__bases__[0].__name__ for cls in ERROR_CLASSES} == drawn_tree()
    assert len(ERROR_CLASSES) > 10


@pytest.mark.parametrize("cls", ERROR_CLASSES)
def test_every_error_is_ours_and_keeps_its_class_and_message_when_pickled(cls: type[Exception]):
    assert issubclass(cls, RaySessionsError)
    copy = pickle.loads(pickle.dumps(cls("What to do next.")))
    assert type(copy) is cls
    assert str(copy) == "What to do next."
    assert copy.args == ("What to do next.",)


def test_errors_are_also_what_python_calls_such_an_error():
    kinds = {"ValidationError": ValueError, "RequestTimeoutError": TimeoutError, "ClusterUnreachableError": ConnectionError}
    assert [name for name, kind in kinds.items() if not issubclass(getattr(errors, name), kind)] == []


def test_an_error_raised_in_an_actor_reaches_the_user_as_itself():
    cause = DatumError("data[3] is wrong.")
    assert own_error(RayTaskError("submit", "a traceback", cause)) is cause
    assert own_error(RayTaskError("submit", "a traceback", RayTaskError("run_loss", "deeper", cause))) is cause


def test_a_dead_actor_and_a_cancelled_task_become_sentences():
    for error in (RayActorError(), RayTaskError("submit", "a traceback", RayActorError())):
        meaning = own_error(error)
        assert type(meaning) is SessionStoppedError
        assert "Create a new session" in str(meaning)
        assert "\n" not in str(meaning)
    assert type(own_error(TaskCancelledError())) is RequestCancelledError
    assert type(own_error(RayTaskError("sample", "a traceback", TaskCancelledError()))) is RequestCancelledError
