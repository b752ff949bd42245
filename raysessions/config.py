"""Settings of a session's actors. Every field is honoured or refused; none is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raysessions.errors import ConfigError
from raysessions.models import checkpoint_dtype
from raysessions.types import TypedModel

Dtype = Literal["auto", "float32", "bfloat16"]

ACTOR_OPTIONS = frozenset(
    {
        "accelerator_type",
        "label_selector",
        "max_restarts",
        "memory",
        "num_cpus",
        "num_gpus",
        "resources",
        "runtime_env",
        "scheduling_strategy",
    }
)
"""Ray's actor options that `actor_options` passes through `.options(...)`."""

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes as max_lora_rank."""


class ActorConfig(TypedModel):
    """What training ranks and sampling replicas have in common."""

    dtype: Dtype = "auto"
    """Of the base model's weights. "auto": as the checkpoint says."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of one actor's mathematics. None: all cores of its node, shared by the training ranks on it; right for a
    loop in which training and sampling take turns. Where they overlap, give each its share: two pools on the same cores
    slow each other down."""
    placement_timeout_s: float = Field(default=60.0, gt=0)
    """How long the cluster may take to offer the resources."""
    actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray's own options: num_cpus, num_gpus, resources, label_selector, runtime_env, scheduling_strategy, …"""

    def dtype_for(self, folder: Path) -> str:
        """`dtype` with "auto" decided by the checkpoint in `folder`."""
        return checkpoint_dtype(folder) if self.dtype == "auto" else self.dtype

    @field_validator("actor_options")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if unknown := set(options) - ACTOR_OPTIONS:
            raise ValueError(f"unknown actor_options {sorted(unknown)}; known: {sorted(ACTOR_OPTIONS)}")
        return options


class TrainingConfig(ActorConfig):
    """Settings of the training actors that hold one base model."""

    num_workers: int = Field(default=1, ge=1)
    """Ranks: processes that share each batch. `actor_options` are those of one rank."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What the ranks split instead of holding it each: 1 an adapter's optimizer state, 2 also its gradient, 3 also the base
    model's weights (for models that do not fit on one rank: gathering them costs time). Results are the same."""
    offload_param: bool = False
    """Keep the base model's weights in CPU memory between uses. Needs zero_stage=3 and a GPU."""
    gradient_checkpointing: bool = False
    """Keep one activation per layer and compute the rest again in backward: less memory, about a third more time."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens of one packed forward and backward. More is faster until memory or attention costs bite; a longer
    sequence gets a micro-batch of its own. None: 2048 on CPU, 8192 on GPU."""

    snapshot_every: int = Field(default=1, ge=1)
    """Optimizer steps from one copy of the session's state, kept outside the ranks, to the next. When a rank dies, all are
    replaced and do again what came after the copy: more steps cost less time now and more then."""
    max_recoveries: int = Field(default=3, ge=0)
    """How often the ranks may die under one operation, and be replaced, before it is given up (`TrainingGroupError`). 0: not at
    all, and no copies are kept."""
    operation_timeout_s: float = Field(default=3600.0, gt=0)
    """How long the ranks may take to load, or for an operation from when it is sent to them; up to two may be before it. Ranks
    that take longer are held to hang, and are replaced as if they had died."""

    @model_validator(mode="after")
    def _offload_needs_stage_3(self) -> TrainingConfig:
        if self.offload_param and self.zero_stage != 3:
            raise ValueError("offload_param=True needs zero_stage=3: the other stages keep the weights whole on every rank")
        return self


class SamplingConfig(ActorConfig):
    """Settings of the sampling pool that serves one base model and its adapters."""

    num_replicas: int = Field(default=1, ge=1)
    """Engines that share the requests, each with `actor_options`; `service.scale_samplers` changes it while they run. Replicas
    on one node share its cores, or take `num_threads` each."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs, or on CPU processes, that one replica splits the model over."""
    max_live_versions: int = Field(default=8, ge=1)
    """Newest versions of one session that answer. Older ones do while somebody holds a sampling client of them, then they are
    retired (`SamplerExpiredError`)."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters in one batch of the engine. More live versions than that are served in turns."""
    max_queued_requests: int = Field(default=8192, ge=1, le=8192)
    """Requests that may wait for a replica; one more is refused (`BackPressureError`)."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """From a sample's arrival to its answer, waiting included; then it is given up (`RequestTimeoutError`)."""
    max_lora_rank: int | None = None
    """The largest LoRA rank that the engine makes room for. None: 32, or the session's rank if that is higher."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that one replica decodes at the same time."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt and new tokens together at most. None: the model's context."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory for the KV cache of one replica on CPU, GiB. None: 2. On GPU use gpu_memory_utilization."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of one GPU's memory that a replica takes. None: vLLM's default. Has no meaning on CPU."""
    sleep: bool = False
    """Training and sampling take turns: while operations train, samples wait and vLLM's memory on the GPU is free for the
    ranks on it (vLLM's sleep level 1, weights go to CPU memory); training begins when the samples begun have been answered.
    On CPU they take turns alike, and memory is kept."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls for OpenAI's API ("hermes", "llama3_json", "qwen3_xml", …). None: requests with tools are
    refused."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning for OpenAI's API ("qwen3", "deepseek_r1", …). None: thoughts are part of the text."""
    engine_metrics: bool = False
    """vLLM's own metrics (use of the KV cache, requests that run and wait, time to the first token) go out as Ray's."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs."""

    @field_validator("max_lora_rank")
    @classmethod
    def _allowed_rank(cls, rank: int | None) -> int | None:
        if rank is not None and rank not in VLLM_LORA_RANKS:
            raise ValueError(f"vLLM takes one of {VLLM_LORA_RANKS}")
        return rank

    @field_validator("actor_options")
    @classmethod
    def _restarts_are_the_pools(cls, options: dict[str, Any]) -> dict[str, Any]:
        if "max_restarts" in options:
            raise ValueError("max_restarts is for training: a sampling pool replaces its replicas by itself; leave it out")
        return options

    @property
    def max_resident_loras(self) -> int:
        """Adapters that one replica keeps loaded, on CPU memory. One more than a batch has, so that the next can be loaded."""
        return max(self.max_loras + 1, self.max_live_versions)

    def for_rank(self, rank: int) -> SamplingConfig:
        """This config with `max_lora_rank` decided for a session of LoRA rank `rank`."""
        if self.max_lora_rank is None:
            return self.model_copy(update={"max_lora_rank": max(32, round_up_rank(rank))})
        if rank > self.max_lora_rank:
            raise ConfigError(
                f"LoRA rank {rank} is above SamplingConfig.max_lora_rank={self.max_lora_rank}: raise that to "
                f"{round_up_rank(rank)} or leave it None."
            )
        return self


def round_up_rank(rank: int) -> int:
    """The smallest rank vLLM takes that holds `rank`. Raises `ConfigError` outside 1…512."""
    if not isinstance(rank, int) or not 1 <= rank <= VLLM_LORA_RANKS[-1]:
        raise ConfigError(f"LoRA rank {rank!r}: choose 1…{VLLM_LORA_RANKS[-1]} (8–64 is usual).")
    return next(allowed for allowed in VLLM_LORA_RANKS if allowed >= rank)


class LoraConfig(TypedModel):
    """A session's adapter."""

    rank: int
    alpha: float = Field(gt=0)
    seed: int
    """Of the initial weights: the same seed gives the same adapter, bit for bit."""
    train_mlp: bool = True
    train_attn: bool = True
    target_modules: tuple[str, ...] | None = None
    """Names of linear layers, without their path; instead of train_mlp and train_attn."""

    @field_validator("rank")
    @classmethod
    def _possible_rank(cls, rank: int) -> int:
        round_up_rank(rank)
        return rank
