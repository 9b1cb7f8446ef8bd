"""vLLM's V1 scheduler as a pure class: which request gets how many tokens in the next step. No clock, no I/O.

A step has a budget of tokens. The running requests come first, in the order they were admitted (never sorted by
priority): a decode takes one token, an unfinished prefill what is left of its prompt. A running request that needs a
block when none is free takes it from a victim, which is preempted: its blocks go, its tokens are computed again later.
Then, if nobody was preempted, waiting requests are admitted from the head while tokens, slots and blocks last; a head
that does not fit blocks all behind it. A waiting request never preempts a running one (policies.py has some that do).

    running pass, each:     n = min(known − computed, threshold, budget, max_model_len − 1 − computed)
    admission pass, head:   n = min(known − cached prefix, threshold, budget); its whole prompt must fit the free blocks

Synchronous use: `step = schedule()`, let the step's time pass, `update(step)`. Asynchronous (`async_scheduling`):
schedule step k + 1 before `update` of step k; tokens in flight are *placeholders*, known to exist but not yet known.

Semantics of vLLM 0.32 and 0.33 (`engine_version`). When a request preempts itself under a priority policy, 0.32 ends
the running pass and 0.33 goes on with the next. And 0.33 has a cadence (`prefill_schedule_interval` N): while somebody
decodes, no prefill, begun or waiting, gets tokens until N steps after the latest step that carried prefill; unless that
release left somebody waiting, then the engine is bound by prefill and holds nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from replay.engine.blocks import BlockPool
from replay.engine.config import SchedulerConfig
from replay.engine.policies import POLICIES, WaitingQueue
from replay.engine.request import EngineRequest, Kind, Scheduled, Step


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
        self._executed = 0  # steps that had tokens
        self._prefilled = -config.prefill_interval  # the latest of them that carried prefill; the first is never held
        self._prefill_bound = False  # that one left somebody waiting

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
        hold = self._holds_prefill()
        budget = self._running_pass(step, threshold, hold=hold)
        if step.preempted:
            step.stop = "preempted"
        else:
            self._admission_pass(step, budget, threshold, hold=hold)
        self._note_cadence(step)
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

    def _holds_prefill(self) -> bool:
        """Whether the cadence keeps this step for decodes (`v1/core/sched/scheduler.py` of 0.33, `schedule`)."""
        interval = self.config.prefill_interval
        if interval == 1 or self._prefill_bound or self._executed + 1 - self._prefilled >= interval:
            return False
        return any(not request.prefilling for request in self.running)

    def _note_cadence(self, step: Step) -> None:
        if self.config.prefill_interval == 1 or not step.scheduled:
            return
        self._executed += 1
        if any(
            row.request.prefilling if row.kind == "running" else row.computed < row.request.known_tokens - 1
            for row in step.scheduled
        ):
            self._prefilled = self._executed

    def _running_pass(self, step: Step, threshold: int, *, hold: bool) -> int:
        """Give tokens to the running requests in admission order; returns what is left of the budget."""
        budget = self.config.token_budget
        granted: dict[EngineRequest, int] = {}
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = 0 if hold and request.prefilling else self._wanted(request, budget, threshold)
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

    def _admission_pass(self, step: Step, budget: int, threshold: int, *, hold: bool) -> None:
        """Admit waiting requests from the head while tokens, slots and blocks last; with `hold` none that prefills."""
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
                if 0 < threshold < tokens and not hold:
                    tokens = threshold
                if hold and tokens > 1:
                    step.stop = "budget"  # the cadence keeps the step's tokens for decodes
                elif not config.enable_chunked_prefill and tokens > budget:
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
        if not hold:
            self._prefill_bound = len(self.waiting) > len(set_aside)
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
            request.prefilling = not samples
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
