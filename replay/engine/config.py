"""The settings of an engine, under the names vLLM gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from replay.engine.policies import POLICIES

ENGINE_VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The engine's settings under the names vLLM uses; defaults are those of `vllm serve` on an A100.

    Attributes:
        scheduling_policy: one of `policies.POLICIES`.
        max_num_batched_tokens: token budget of a step; `max_num_scheduled_tokens` narrows it.
        max_num_seqs: slots; `max_num_active_seqs` narrows it.
        num_gpu_blocks: KV blocks, one reserved block included.
        prefill_schedule_interval: 0.33 only; steps between two that carry prefill while others decode; 1 = off.
        long_prefill_token_threshold: most prompt tokens one request may get in a step while others exist; 0 = off.
        watermark: share of the blocks kept free at admission while something runs.
        scheduler_reserve_full_isl: admit only what fits with its whole prompt.
        max_num_queued_reqs, max_num_queued_tokens: what may be in the engine; more is refused with 503 (`refusal`).
        engine_version: "0.32" or "0.33".
        preemption_threshold: `sglang` only; a head preempts those less urgent by more than this.
        ageing_s: `ageing` only; seconds of waiting that count as one rank.
        tenant_weights: `fair` only; 1 where a tenant is not named.
    """

    scheduling_policy: str = "fcfs"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_gpu_blocks: int = 28_000
    block_size: int = 16
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefill_schedule_interval: int = 1
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_model_len: int = 131_072
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    async_scheduling: bool = False
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    engine_version: str = "0.33"
    preemption_threshold: int = 10
    ageing_s: float = 10.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no engine would start with. Raises ValueError."""
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"unknown scheduling policy {self.scheduling_policy!r}: one of {', '.join(POLICIES)}")
        if self.engine_version not in ENGINE_VERSIONS:
            raise ValueError(f"unknown engine version {self.engine_version!r}: one of {', '.join(ENGINE_VERSIONS)}")
        positive = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_gpu_blocks",
            "block_size",
            "max_model_len",
            "prefill_schedule_interval",
            "ageing_s",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is a share from 0 to below 1, not {self.watermark}")

    @property
    def token_budget(self) -> int:
        """Tokens a step may hold."""
        return min(self.max_num_batched_tokens, self.max_num_scheduled_tokens or self.max_num_batched_tokens)

    @property
    def slots(self) -> int:
        """Requests that may run at once."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def prefill_interval(self) -> int:
        """Executed steps from one that carries prefill to the next; 0.32 has the option and ignores it."""
        return self.prefill_schedule_interval if self.engine_version != "0.32" else 1
