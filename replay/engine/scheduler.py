"""vLLM's V1 scheduler as a pure class: which request gets how many tokens in the next step. No clock, no I/O.

A step has a budget of tokens. The running requests come first, in the order they were admitted (never sorted by
priority): a decode takes one token, an unfinished prefill what is left of its prompt. A running request that needs a
block when none is free takes it from a victim, which is preempted: its blocks go, its tokens are computed again later.
Then, if nobody was preempted, waiting requests are admitted from the head while tokens, slots and blocks last; a head
that does not fit blocks all behind it. A waiting request never preempts a running one (policies.py has some that do).

    running pass:   for r in running:  n = min(known(r) − computed(r), threshold, budget, max_model_len − 1 −
    computed(r)) admission pass: head of the queue: n = min(known(r) − cached prefix, threshold, budget);  whole prompt
    must fit the
    free blocks

Synchronous use: `step = schedule()`, let the step's time pass, `update(step)`. Asynchronous (`async_scheduling`):
schedule step k + 1 before `update` of step k; tokens in flight are *placeholders*, known to exist but not yet known.

Semantics of vLLM 0.32 and 0.33 (`engine_version`); they differ in what follows when a request preempts itself under
a priority policy: 0.32 ends the running pass, 0.33 goes on with the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from replay.engine.blocks import BlockPool
from replay.engine.policies import POLICIES, WaitingQueue

ENGINE_VERSIONS = ("0.32", "0.33")

Kind = Literal["new", "resumed", "running"]
Status = Literal["waiting", "running", "preempted", "finished"]
Stop = Literal["preempted", "empty", "kv", "budget", "seqs", "chunk"]

_serial = itertools.count()


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The engine's settings under the names vLLM uses; defaults are those of `vllm serve` on an A100.

    Attributes:
        scheduling_policy: one of `policies.POLICIES`.
        max_num_batched_tokens: token budget of a step; `max_num_scheduled_tokens` narrows it.
        max_num_seqs: slots; `max_num_active_seqs` narrows it.
        num_gpu_blocks: KV blocks, one reserved block included.
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


class EngineRequest:
    """One request inside the engine: what was asked, and how far it is.

    Args:
        request_id: unique among the unfinished ones; breaks ties of a priority queue as a string.
        prompt_tokens: token ids, or just how many (then nobody shares its prefix, except through `prefix_hashes`).
        max_tokens: output limit.
        priority: smaller is more urgent.
        arrival_time: seconds on any clock; orders a priority queue and chooses victims.
        tenant, tag: whose it is; anything the caller wants back.
        ends_after: output tokens after which it ends by itself (an end-of-sequence token); None: at `max_tokens`.
        output_ids: k → id of the k-th output token, for those who hit this request's blocks in a later turn.
        prefix_hashes, prefix_block_size: chained hashes of the prompt's blocks of that many tokens, as traces keep
        them.
    """

    __slots__ = (
        "_keys",
        "_prefix_block_size",
        "_prefix_hashes",
        "_token_at",
        "arrival_time",
        "blocks",
        "cached_tokens",
        "computed",
        "ends_after",
        "finish",
        "hashed_blocks",
        "in_flight",
        "max_tokens",
        "output_tokens",
        "placeholders",
        "preemptions",
        "priority",
        "prompt_tokens",
        "request_id",
        "serial",
        "stale",
        "status",
        "tag",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt_tokens: int | Sequence[int],
        max_tokens: int,
        priority: int = 0,
        arrival_time: float = 0.0,
        tenant: str = "default",
        tag: Any = None,
        ends_after: int | None = None,
        output_ids: Callable[[int], int] | None = None,
        prefix_hashes: Sequence[int] | None = None,
        prefix_block_size: int = 16,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival_time = arrival_time
        self.tenant = tenant
        self.tag = tag
        self.ends_after = ends_after
        self.serial = next(_serial)
        self._token_at: Callable[[int], int] | None = None
        if isinstance(prompt_tokens, int):
            self.prompt_tokens = prompt_tokens
        else:
            self.prompt_tokens = len(prompt_tokens)
            self._token_at = _token_reader(prompt_tokens, output_ids, self.serial)
        if self.prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(f"request {request_id}: at least one prompt token and one output token are needed")
        self._prefix_hashes = prefix_hashes
        self._prefix_block_size = prefix_block_size
        self._keys: list[Hashable] = []
        self.output_tokens = 0
        self.computed = 0  # tokens whose KV is computed or scheduled to be
        self.placeholders = 0  # output tokens in flight (asynchronous)
        self.in_flight = 0  # tokens scheduled and not yet updated
        self.stale = 0  # of those, scheduled before the latest preemption
        self.status: Status = "waiting"
        self.finish: Literal["length", "stop", "abort"] | None = None
        self.preemptions = 0
        self.cached_tokens: int | None = None  # prefix hit at first admission
        self.blocks: list[int] = []
        self.hashed_blocks = 0

    def __repr__(self) -> str:
        return f"<EngineRequest {self.request_id} {self.status} {self.computed}/{self.known_tokens}>"

    @property
    def known_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return self.prompt_tokens + self.output_tokens

    def block_key(self, index: int, block_size: int) -> Hashable:
        """The prefix key of full block `index`: equal keys mean equal tokens up to the block's end."""
        keys = self._keys
        while len(keys) <= index:
            keys.append(self._next_key(len(keys), block_size))
        return keys[index]

    def _next_key(self, index: int, block_size: int) -> Hashable:
        end = (index + 1) * block_size
        if self._token_at is not None:
            parent = self._keys[index - 1] if index else None
            return hash((parent, *[self._token_at(position) for position in range(end - block_size, end)]))
        if self._prefix_hashes is not None and end <= self.prompt_tokens:
            covering = (end - 1) // self._prefix_block_size
            if covering < len(self._prefix_hashes):
                return ("prefix", self._prefix_hashes[covering], index)
        return (self.serial, index)


def _token_reader(prompt: Sequence[int], output_ids: Callable[[int], int] | None, serial: int) -> Callable[[int], int]:
    """Position → token id over prompt and output; without `output_ids` the outputs are nobody else's."""
    length = len(prompt)
    private = -2 - (serial << 32)

    def token_at(position: int) -> int:
        if position < length:
            return prompt[position]
        k = position - length
        return output_ids(k) if output_ids is not None else private - k

    return token_at


class Scheduled(NamedTuple):
    """One row of a step: `tokens` of `request` on top of `computed`; it samples when all it knows is computed."""

    request: EngineRequest
    tokens: int
    kind: Kind
    computed: int
    samples: bool


@dataclass(slots=True)
class Step:
    """What one step does. `emitted` and `finished` are filled by `update`.

    Attributes:
        scheduled: rows in the order they were granted: running ones, then admissions.
        preempted: victims in order; `refunded` of them had tokens in this step and lost them.
        cached: (request, tokens taken from the prefix cache) of each admission.
        stop: why admission ended; `head` is the request that did not get in (None when nobody waits).
        tokens, decodes, context, area, samples: the step's load for the step-time model: all tokens; decode rows and
        their context
            lengths, summed; Σ chunk · (computed before + chunk/2) of the prefill rows; rows that sample.
    """

    index: int
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    refunded: list[EngineRequest] = field(default_factory=list)
    cached: list[tuple[EngineRequest, int]] = field(default_factory=list)
    stop: Stop = "empty"
    head: EngineRequest | None = None
    tokens: int = 0
    decodes: int = 0
    context: int = 0
    area: float = 0.0
    samples: int = 0
    emitted: list[EngineRequest] = field(default_factory=list)
    finished: list[EngineRequest] = field(default_factory=list)


class Refusal(NamedTuple):
    """A request that a full queue turns away with 503: the newcomer, or a waiting one it displaces."""

    request: EngineRequest
    message: str


class Scheduler:
    """The state of one engine: who waits, who runs, which blocks they hold.

    Args:
        config: the engine's settings.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = POLICIES[config.scheduling_policy]
        self.pool = BlockPool(config.num_gpu_blocks, prefix_caching=config.enable_prefix_caching)
        self.waiting = WaitingQueue(self.policy, config)
        self.running: list[EngineRequest] = []
        self.requests: dict[str, EngineRequest] = {}
        self.steps = 0
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.requests)

    def refusal(self, request: EngineRequest, n: int = 1) -> Refusal | None:
        """Whom a full queue would turn away if `request` (and n - 1 like it) came now, or None.

        vLLM limits the unfinished requests, running ones included, and the prompt tokens of those without a first token
        (`v1/engine/async_llm.py`, `check_admission`); SGLang limits those that wait, and there a more urgent newcomer
        displaces the least urgent of them, which the caller aborts.
        """
        config = self.config
        most = config.max_num_queued_reqs
        if config.scheduling_policy == "sglang":
            if most is None or len(self.waiting) < most:
                return None
            worst = max(self.waiting, key=lambda waiter: (waiter.priority, waiter.arrival_time), default=None)
            if worst is not None and request.priority < worst.priority:
                return Refusal(worst, "The request is aborted by a higher priority request.")
            return Refusal(request, "The request queue is full.")
        again = " Please try again later or on a different instance."
        if most is not None and self.unfinished + n > most:
            return Refusal(request, "The engine is currently busy and cannot accept new requests." + again)
        limit = config.max_num_queued_tokens
        if limit is not None:
            backlog = sum(other.prompt_tokens for other in self.requests.values() if not other.output_tokens)
            if backlog >= limit:
                return Refusal(request, "The engine has reached its prefill token backlog limit." + again)
        return None

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError when its id is in use.

        A prompt that leaves no room below max_model_len is the caller's to refuse, as in the real engine.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request between steps and free what it holds; False when it is unknown or finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.status == "running":
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request, "abort")
        return True

    def schedule(self) -> Step:
        """Decide the next step and count its tokens as computed."""
        step = Step(self.steps)
        self.steps += 1
        threshold = self._threshold()
        budget = self._running_pass(step, threshold)
        if step.preempted:
            step.stop = "preempted"
        else:
            self._admission_pass(step, budget, threshold)
        step.head = self.waiting.peek() if len(self.waiting) else None
        self._advance(step)
        return step

    def update(self, step: Step) -> list[EngineRequest]:
        """Apply a step's outcome after its time has passed: append tokens, free what ended; returns the finished."""
        for row in step.scheduled:
            request = row.request
            stale = request.stale > 0
            request.in_flight -= row.tokens
            if stale:
                request.stale -= row.tokens
            if request.status == "finished" or not row.samples:
                continue
            request.output_tokens += 1
            step.emitted.append(request)
            finish = self._finish_of(request)
            if self.config.async_scheduling:
                if not stale:
                    request.placeholders -= 1
                if request.status == "running":
                    self._hash_blocks(request, request.computed - request.placeholders)
            if finish is not None:
                if request.status == "preempted":
                    self.waiting.remove(request)
                self._end(request, finish)
                step.finished.append(request)
        if step.finished:
            self.running = [request for request in self.running if request.status == "running"]
        if self.policy.lanes:
            for request in step.emitted:
                self.waiting.serve(request.tenant, 0, 1)
        return step.finished

    def restore(self, request: EngineRequest, *, computed: int, output_tokens: int) -> None:
        """Put a running request back at a point it has reached elsewhere, with the blocks it holds there."""
        self.requests[request.request_id] = request
        self.running.append(request)
        request.status = "running"
        request.cached_tokens = 0
        request.computed = computed
        request.output_tokens = output_tokens
        request.blocks = self.pool.take(-(-computed // self.config.block_size))
        self._hash_blocks(request, computed)

    def decode_all(self, steps: int) -> None:
        """Give every running request `steps` tokens, one a step: for callers who know that nothing else can happen.

        All must be decoding, none may end, the blocks must be free, and no waiting one may get in meanwhile.
        """
        size = self.config.block_size
        for request in self.running:
            request.computed += steps
            request.output_tokens += steps
            request.blocks.extend(self.pool.take(-(-request.computed // size) - len(request.blocks)))
            self._hash_blocks(request, request.computed)
            if self.policy.lanes:
                self.waiting.serve(request.tenant, 0, steps)
        self.steps += steps

    def _threshold(self) -> int:
        """Most tokens for one request in this step; 0 = no limit. A request alone in the engine has none."""
        config = self.config
        eligible = len(self.running) + len(self.waiting)
        if config.long_prefill_token_threshold <= 0 or eligible <= 1:
            return 0
        if config.long_prefill_token_threshold_adaptive:
            return max(config.long_prefill_token_threshold, config.max_num_batched_tokens // eligible)
        return config.long_prefill_token_threshold

    def _running_pass(self, step: Step, threshold: int) -> int:
        """Give tokens to the running requests in admission order; returns what is left of the budget."""
        budget = self.config.token_budget
        granted: dict[EngineRequest, int] = {}
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = self._wanted(request, budget, threshold)
            if tokens <= 0:
                index += 1
                continue
            allocated = True
            while not self._allocate(request, tokens):
                victim = self.policy.victim(self.running, self.config)
                position = self.running.index(victim)
                del self.running[position]
                if position < index:
                    index -= 1
                if self.policy.refunds and victim in granted:
                    budget += granted.pop(victim)
                    step.refunded.append(victim)
                self._preempt(victim)
                step.preempted.append(victim)
                if victim is request:
                    allocated = False
                    break
            if allocated:
                granted[request] = tokens
                budget -= tokens
                index += 1
            elif not self.policy.refunds or self.config.engine_version == "0.32":
                break
        step.scheduled = [self._row(request, tokens, "running") for request, tokens in granted.items()]
        return budget

    def _wanted(self, request: EngineRequest, budget: int, threshold: int) -> int:
        """Tokens a running request asks for in this step."""
        outputs_in_flight = request.placeholders
        if outputs_in_flight and request.computed + 2 - outputs_in_flight >= request.prompt_tokens + request.max_tokens:
            return 0  # what is in flight reaches max_tokens for sure
        tokens = request.known_tokens + outputs_in_flight - request.computed
        if 0 < threshold < tokens:
            tokens = threshold
        return min(tokens, budget, self.config.max_model_len - 1 - request.computed)

    def _admission_pass(self, step: Step, budget: int, threshold: int) -> None:
        """Admit waiting requests from the head while tokens, slots and blocks last."""
        config = self.config
        set_aside: list[EngineRequest] = []
        while len(self.waiting):
            head = self.waiting.peek()
            if budget <= 0:
                step.stop = "budget"
            elif len(self.running) >= config.slots:
                step.stop = "seqs"
            elif head.stale:
                self.waiting.remove(head)  # its last tokens are still in flight: tried again next step
                set_aside.append(head)
                continue
            else:
                hits = self._prefix_hits(head)
                cached = len(hits) * config.block_size
                tokens = head.known_tokens - cached
                if 0 < threshold < tokens:
                    tokens = threshold
                if not config.enable_chunked_prefill and tokens > budget:
                    step.stop = "chunk"
                else:
                    tokens = min(tokens, budget)
                    if self._allocate(head, tokens, hits, admission=True):
                        self._admit(step, head, tokens, cached)
                        budget -= tokens
                        continue
                    step.stop = "kv"
            refunded = self._unseat_for(head, step)
            if refunded is None:
                break
            budget += refunded
        for request in reversed(set_aside):
            self.waiting.put_back(request)
        if not len(self.waiting):
            step.stop = "empty"

    def _unseat_for(self, head: EngineRequest, step: Step) -> int | None:
        """Preempt whom the policy lets the waiting head preempt; tokens they give back, None when nobody goes."""
        missing = self._blocks_missing(head)
        victims = self.policy.unseat(head, self.running, step.stop, missing, self.config)
        if not victims:
            return None
        refunded = 0
        for victim in victims:
            self.running.remove(victim)
            kept = [row for row in step.scheduled if row.request is not victim]
            if len(kept) < len(step.scheduled):
                refunded += sum(row.tokens for row in step.scheduled if row.request is victim)
                step.refunded.append(victim)
                step.scheduled = kept
                step.cached = [entry for entry in step.cached if entry[0] is not victim]
            self._preempt(victim)
            step.preempted.append(victim)
        return refunded

    def _blocks_missing(self, head: EngineRequest) -> int:
        size = self.config.block_size
        wanted = head.known_tokens if self.config.scheduler_reserve_full_isl else min(head.known_tokens, size)
        return -(-wanted // size) - len(self.pool.free)

    def _admit(self, step: Step, request: EngineRequest, tokens: int, cached: int) -> None:
        self.waiting.pop()
        kind: Kind = "resumed" if request.status == "preempted" else "new"
        request.status = "running"
        request.computed = cached
        if request.cached_tokens is None:
            request.cached_tokens = cached
        self.running.append(request)
        step.scheduled.append(self._row(request, tokens, kind))
        step.cached.append((request, cached))
        if self.policy.lanes and kind == "new":
            self.waiting.serve(request.tenant, request.prompt_tokens, 0)

    def _row(self, request: EngineRequest, tokens: int, kind: Kind) -> Scheduled:
        samples = request.computed + tokens >= request.known_tokens + request.placeholders
        return Scheduled(request, tokens, kind, request.computed, samples)

    def _advance(self, step: Step) -> None:
        """Count the scheduled tokens as computed and sum up the step's load."""
        asynchronous = self.config.async_scheduling
        for request, tokens, _, computed, samples in step.scheduled:
            request.computed += tokens
            request.in_flight += tokens
            step.tokens += tokens
            if samples:
                step.samples += 1
                if asynchronous:
                    request.placeholders += 1
            if tokens == 1 and computed >= request.prompt_tokens:
                step.decodes += 1
                step.context += computed + 1
            else:
                step.area += tokens * (computed + tokens / 2)

    def _prefix_hits(self, request: EngineRequest) -> list[int]:
        """The longest run of cached full blocks that leaves at least one token to compute."""
        if not self.config.enable_prefix_caching:
            return []
        hits = []
        size = self.config.block_size
        for index in range((request.known_tokens - 1) // size):
            block = self.pool.holder(request.block_key(index, size))
            if block is None:
                break
            hits.append(block)
        return hits

    def _allocate(
        self, request: EngineRequest, tokens: int, hits: Sequence[int] = (), *, admission: bool = False
    ) -> bool:
        """Give a request the blocks for `tokens` more, or nothing at all."""
        config, pool = self.config, self.pool
        size = config.block_size
        if tokens == 1 and not admission and request.computed % size:  # a decode within its last block
            if (request.computed + 1) % size == 0:
                self._hash_blocks(request, min(request.computed + 1, request.known_tokens))
            return True
        free = len(pool.free)
        held = len(request.blocks) + len(hits)
        revived = pool.unreferenced(hits) if hits else 0
        reserve = self._watermark_blocks if admission and self.running else 0
        if admission and config.scheduler_reserve_full_isl:
            whole = min(request.known_tokens, config.max_model_len)
            if max(0, -(-whole // size) - held) + revived + reserve > free:
                return False
        computed = request.computed + len(hits) * size
        needed = max(0, -(-min(computed + tokens, config.max_model_len) // size) - held)
        if needed + revived + reserve > free:
            return False
        if hits:
            pool.share(hits)
            request.blocks.extend(hits)
            request.hashed_blocks = len(hits)
        if needed:
            request.blocks.extend(pool.take(needed))
        self._hash_blocks(request, min(computed + tokens, request.known_tokens))
        return True

    def _hash_blocks(self, request: EngineRequest, tokens: int) -> None:
        """Register the blocks that `tokens` fill."""
        size = self.config.block_size
        if not self.config.enable_prefix_caching:
            return
        full = min(tokens // size, len(request.blocks))  # a prompt beyond max_model_len has fewer blocks than it fills
        for index in range(request.hashed_blocks, full):
            self.pool.hold(request.blocks[index], request.block_key(index, size))
            request.hashed_blocks = index + 1

    def _preempt(self, request: EngineRequest) -> None:
        self._free(request)
        request.status = "preempted"
        request.computed = 0
        request.placeholders = 0
        request.stale = request.in_flight
        request.preemptions += 1
        self.waiting.put_back(request)

    def _finish_of(self, request: EngineRequest) -> Literal["length", "stop"] | None:
        if request.ends_after is not None and request.output_tokens >= request.ends_after:
            return "stop"
        if request.known_tokens >= self.config.max_model_len or request.output_tokens >= request.max_tokens:
            return "length"
        return None

    def _end(self, request: EngineRequest, finish: Literal["length", "stop", "abort"]) -> None:
        request.status = "finished"
        request.finish = finish
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: EngineRequest) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.hashed_blocks = 0
