"""One simulated engine in closed form: the same decisions and times as step by step, at a cost per event, not per step.

In a vLLM step every running decode gets one token, so one counter of steps stands for all of them:

    D        steps so far; a decode that got its first token in step s ends when D = s + its output tokens
    n, S     decodes, and the sum of their context lengths: S grows by n a step
    R[r]     decodes that need a new block in the steps with D ≡ r (mod block size)

Admission and prefill are worked out request by request as the scheduler does; between them the engine leaps to the
next end, the next arrival, or the last step whose blocks are free. Costs do not grow with the number of running
requests.

This holds while nobody is preempted, nobody starves for tokens and nobody shares a prefix. Where that ends (a running
request finds no free block, more rows than tokens), the state is handed to `StepReplica`, which goes on with the
real scheduler until no preempted request is left, and is then taken back.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush

from replay.engine.config import SchedulerConfig
from replay.engine.ledger import ABORT, LENGTH, Ledger
from replay.engine.replica import FOREVER, Asked, StepReplica, steps_to_cover
from replay.engine.scheduler import Scheduler
from replay.engine.steptime import PicoClock

POLICIES = {"fcfs", "priority", "ageing"}
_SEQS, _BUDGET, _KV, _, _CHUNK = range(5)  # as in ledger.CAUSES
_NOWHERE, _WAITING, _PREFILL, _DECODE, _GONE = range(5)
HOLD_STEPS = 8  # steps in the real scheduler before coming back is considered


def is_closed_form(config: SchedulerConfig, asked: Asked) -> bool:
    """Whether `LeapReplica` knows this policy and load; otherwise take `StepReplica`."""
    known = config.scheduling_policy in POLICIES and not config.async_scheduling and config.prefill_interval == 1
    return known and asked.prefixes is None


class LeapReplica(StepReplica):
    """As `StepReplica`, many steps at a time. `is_closed_form` says for what."""

    def __init__(
        self, config: SchedulerConfig, clock: PicoClock, asked: Asked, ledger: Ledger, *, number: int = 0
    ) -> None:
        super().__init__(config, clock, asked, ledger, number=number)
        self.leaping = True
        self.handovers = 0
        self._state = bytearray(len(asked.inputs))
        self._base = array("q", [0]) * len(asked.inputs)  # a decode has D − base output tokens
        self._ordered = config.scheduling_policy != "fcfs"
        self._budget, self._slots, self._size = config.token_budget, config.slots, config.block_size
        self._watermark = int(config.watermark * config.num_gpu_blocks)
        self._reset()

    def _reset(self) -> None:
        self._queue: deque[int] | list[tuple[float, int, int]] = [] if self._ordered else deque()
        self._queued = 0
        self._running: dict[int, int] = {}  # in admission order → admission number
        self._partial: dict[int, int] = {}  # prefilling → tokens computed
        self._ends: list[tuple[int, int]] = []
        self._decodes = 0
        self._context = 0
        self._free = self.config.num_gpu_blocks - 1
        self._residue = [0] * self.config.block_size
        self._latest_decode = -1  # largest admission number among the decodes, or an old one
        self._admissions = 0
        self._blocked = -1  # what stops the head until something ends
        self._rows = [0] * len(self.served)  # decodes of each tenant, and their context
        self._contexts = [0] * len(self.served)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return self._queued + len(self._running) if self.leaping else self.scheduler.unfinished

    def add(self, index: int, at_ps: int) -> None:
        """Request `index` arrives at `at_ps`; decisions before that time have been taken."""
        if not self.leaping:
            super().add(index, at_ps)
            return
        if not self._queued and not self._running and self.now_ps < at_ps:
            self.now_ps = at_ps
        self.asked.arrival_ps[index] = at_ps
        self.meet(index, at_ps)
        self._enqueue(index)

    def _enqueue(self, index: int) -> None:
        self._state[index] = _WAITING
        self._queued += 1
        self._blocked = -1
        if isinstance(self._queue, deque):
            self._queue.append(index)
            return
        arrival_ps = self.asked.arrival_ps[index]
        rank: float = self.asked.priority[index]
        if self.config.scheduling_policy == "ageing":
            rank += arrival_ps / 1e12 / self.config.ageing_s
        heappush(self._queue, (rank, arrival_ps, index))

    def abort(self, index: int) -> bool:
        """The client of `index` gives up; False when it is no longer here."""
        if not self.leaping:
            return super().abort(index)
        state = self._state[index]
        if state not in {_WAITING, _PREFILL, _DECODE}:
            return False
        self.ledger.output_tokens[index] = self.steps - self._base[index] if state == _DECODE else 0
        if state == _WAITING:
            self._queued -= 1
        elif state == _PREFILL:
            self._free += -(-self._partial.pop(index) // self.config.block_size)
            del self._running[index]
        else:
            self.ledger.last_ps[index] = self.now_ps
            self._drop_decode(index)
        self._state[index] = _GONE
        self._blocked = -1
        self._leave_queue(index)
        self._served_at.pop(index, None)
        self.ledger.end_ps[index] = self.now_ps
        self.ledger.finish[index] = ABORT
        return True

    def refuse(self, index: int, at_ps: int) -> int | None:
        """`index` when the queue is full: a plain queue turns away who comes last."""
        if not self.leaping:
            return super().refuse(index, at_ps)
        config = self.config
        if config.max_num_queued_reqs is not None and self.unfinished >= config.max_num_queued_reqs:
            return index
        if config.max_num_queued_tokens is not None:
            without_token = [*self._waiting(), *self._partial]
            if sum(self.asked.inputs[i] for i in without_token) >= config.max_num_queued_tokens:
                return index
        return None

    def _waiting(self) -> list[int]:
        """Who waits, in the queue's order."""
        entries = self._queue if isinstance(self._queue, deque) else [entry[2] for entry in sorted(self._queue)]
        return [index for index in entries if self._state[index] == _WAITING]

    def run(self, until_ps: int, *, stop_at_finish: bool = False) -> None:
        """Take every decision before `until_ps`; with `stop_at_finish` up to the first step that ends a request."""
        while self.now_ps < until_ps and self.unfinished:
            if self.leaping and not self._leap(until_ps, stop_at_finish):
                return
            if self.leaping:
                self._hand_over()
            if not self._step_through(until_ps, stop_at_finish):
                return

    def _step_through(self, until_ps: int, stop_at_finish: bool) -> bool:
        """Go on with the real scheduler until leaping is possible again (True), or there is nothing more to do."""
        taken = 0
        while self.now_ps < until_ps and self.scheduler.unfinished:
            if taken > HOLD_STEPS + len(self.scheduler.waiting) // 8 and self._can_leap():
                self._take_back()
                return True
            if not self._synchronous(until_ps):
                self._stall(until_ps)
                return False
            taken += 1
            if stop_at_finish and self.finished:
                return False
        return False

    def _leap(self, until_ps: int, stop_at_finish: bool) -> bool:
        """Advance in closed form; True when the real scheduler has to take over."""
        while self.now_ps < until_ps:
            if self._partial or (self._queued and self._blocked < 0):
                moved = self._prefill_step()
            elif self._decodes:
                moved = self._stretch(until_ps)
            elif self._queued:
                self._stall(until_ps)
                return False
            else:
                return False
            if not moved:
                return True
            self.moves += 1
            if stop_at_finish and self.finished:
                return False
        return False

    def _stretch(self, until_ps: int) -> bool:
        """Decode until the first end or the first decision at or after `until_ps`; False when blocks run out before."""
        rows, context, clock = self._decodes, self._context, self.clock
        if rows > self._budget:
            return False
        ends = self._ends
        while self._state[ends[0][1]] != _DECODE:
            heappop(ends)
        steps = ends[0][0] - self.steps
        total = clock.decoding_ps(rows, context, steps)
        if self.now_ps + total > until_ps:
            steps = min(steps, steps_to_cover(clock, rows, context, until_ps - self.now_ps))
            total = clock.decoding_ps(rows, context, steps)
        needed = self._blocks_for(steps)
        if needed > self._free:
            return False
        self._free -= needed
        first = clock.decode_ps(rows) + clock.context_ps * context
        self.timeline.add(self.steps, self.now_ps, first, clock.context_ps * rows)
        if self._queued:
            self.waited[self._blocked] += total
        if len(self.served) == 1:
            self.served[0] += total
            self.last_ps = first + clock.context_ps * rows * (steps - 1)
            self.last_served = [self.last_ps]
        else:
            self.serve_stretch(self._rows, self._contexts, steps)
            for tenant, count in enumerate(self._rows):
                self._contexts[tenant] += count * steps
        self.steps += steps
        self.now_ps += total
        self.busy_ps += total
        self._context = context + rows * steps
        self._end_decodes()
        return True

    def _blocks_for(self, steps: int) -> int:
        """Blocks that the decodes take in the next `steps` steps."""
        size = self._size
        cycles, rest = divmod(steps, size)
        needed = cycles * self._decodes
        if rest:
            start = self.steps % size
            residue = self._residue
            needed += sum(residue[start : start + rest])
            if start + rest > size:
                needed += sum(residue[: start + rest - size])
        return needed

    def _end_decodes(self) -> None:
        """Take out the decodes whose last token came in the step just done."""
        ends, state = self._ends, self._state
        while ends and ends[0][0] <= self.steps:
            index = heappop(ends)[1]
            if state[index] != _DECODE:
                continue
            self._drop_decode(index)
            self._finish(index)

    def _finish(self, index: int) -> None:
        ledger = self.ledger
        ledger.last_ps[index] = ledger.end_ps[index] = self.now_ps
        ledger.output_tokens[index] = self.asked.outputs[index]
        ledger.finish[index] = LENGTH
        self._state[index] = _GONE
        self._blocked = -1
        self.finished.append(index)

    def _drop_decode(self, index: int) -> None:
        """Free what a decode holds; it has computed all tokens but its latest."""
        size = self._size
        prompt = self.asked.inputs[index]
        base = self._base[index]
        known = prompt + self.steps - base
        self._free += -(-(known - 1) // size)
        self._residue[(base + 1 - prompt) % size] -= 1
        self._decodes -= 1
        self._context -= known
        tenant = self.asked.tenant[index]
        self._rows[tenant] -= 1
        self._contexts[tenant] -= known
        del self._running[index]

    def _prefill_step(self) -> bool:
        """One step that gives the decodes a token each and the rest of the budget to prefills, running ones first.

        Returns True when the step was taken or nobody could be admitted (`_blocked` says why), False for a case of
        the real scheduler.
        """
        inputs, size = self.asked.inputs, self._size
        rows = self._decodes
        budget = self._budget - rows
        free = self._free - self._residue[self.steps % size]
        if budget < 0 or free < 0:
            return False
        threshold = self._threshold_now()
        chunks: list[tuple[int, int, int]] = []  # (request, computed, tokens)
        for index, computed in self._partial.items():
            tokens = inputs[index] - computed
            if 0 < threshold < tokens:
                tokens = threshold
            if tokens > budget:
                if self._running[index] < self._latest_decode:
                    return False  # a decode behind it starves
                tokens = budget
            if tokens == 0:
                continue
            free -= -(-(computed + tokens) // size) - -(-computed // size)
            budget -= tokens
            chunks.append((index, computed, tokens))
        if free < 0:
            return False
        stop = -1
        if self._queued:
            stop, free = self._admit(chunks, budget, free, threshold)
            if not chunks and not self._partial:
                self._blocked = stop
                return True
        if not chunks:
            return False
        self._free = free
        self._execute(chunks, rows, stop)
        return True

    def _threshold_now(self) -> int:
        config = self.config
        threshold = config.long_prefill_token_threshold
        if threshold <= 0:
            return 0
        eligible = self._queued + len(self._running)
        if eligible <= 1:
            return 0
        if config.long_prefill_token_threshold_adaptive:
            return max(threshold, config.max_num_batched_tokens // eligible)
        return threshold

    def _head(self) -> int:
        """The waiting request that is tried next; those that left are skipped."""
        queue, state = self._queue, self._state
        if isinstance(queue, deque):
            while state[queue[0]] != _WAITING:
                queue.popleft()
            return queue[0]
        while state[queue[0][2]] != _WAITING:
            heappop(queue)
        return queue[0][2]

    def _admit(self, chunks: list[tuple[int, int, int]], budget: int, free: int, threshold: int) -> tuple[int, int]:
        """Admit from the head while it fits; why it ended (-1: nobody waits) and the free blocks left."""
        config, inputs, running = self.config, self.asked.inputs, self._running
        size, slots = self._size, self._slots
        while self._queued:
            index = self._head()
            if budget <= 0:
                return _BUDGET, free
            if len(running) >= slots:
                return _SEQS, free
            prompt = tokens = inputs[index]
            if 0 < threshold < tokens:
                tokens = threshold
            if tokens > budget:
                if not config.enable_chunked_prefill:
                    return _CHUNK, free
                tokens = budget
            held = -(-tokens // size)
            needed = -(-prompt // size) if config.scheduler_reserve_full_isl else held
            if needed + (self._watermark if running else 0) > free:
                return _KV, free
            if isinstance(self._queue, deque):
                self._queue.popleft()
            else:
                heappop(self._queue)
            self._queued -= 1
            free -= held
            budget -= tokens
            self._admissions += 1
            running[index] = self._admissions
            self._state[index] = _PREFILL
            self.ledger.admitted_ps[index] = self.now_ps
            self._leave_queue(index)
            chunks.append((index, 0, tokens))
        return -1, free

    def _execute(self, chunks: list[tuple[int, int, int]], rows: int, stop: int) -> None:
        """Let the step's time pass and move its prefills on."""
        clock, inputs, tenant_of = self.clock, self.asked.inputs, self.asked.tenant
        all_tokens, area, samples = rows, 0.0, rows
        for index, computed, tokens in chunks:
            all_tokens += tokens
            area += tokens * (computed + tokens / 2)
            if computed + tokens == inputs[index]:
                samples += 1
        duration = clock.duration_ps(all_tokens, rows, self._context, area, samples)
        per_token, per_decode, per_context, per_sample = clock.model.split_ms(all_tokens, rows, samples)
        per_area, own = clock.model.a_ms, self.ledger.own_ps
        parts = [0.0] * len(self.served)
        self.timeline.add(self.steps, self.now_ps, duration, 0)
        self.steps += 1
        self.now_ps += duration
        self.busy_ps += duration
        self._context += rows
        if stop >= 0:
            self.waited[stop] += duration
        for index, computed, tokens in chunks:
            part = per_token * tokens + per_area * tokens * (computed + tokens / 2)
            if computed + tokens == inputs[index]:
                part += per_sample
            parts[tenant_of[index]] += part
            own[index] += round(part * 1e9)
        if len(parts) > 1:
            for tenant, count in enumerate(self._rows):
                parts[tenant] += count * (per_token + per_decode + per_sample) + per_context * self._contexts[tenant]
                self._contexts[tenant] += count
            self.last_served = [round(part * 1e9) for part in parts]
            for tenant, part_ps in enumerate(self.last_served):
                self.served[tenant] += part_ps
        else:
            self.last_served = [duration]
            self.served[0] += duration
        self.last_ps = duration
        for index, computed, tokens in chunks:
            if computed + tokens < inputs[index]:
                self._partial[index] = computed + tokens
            else:
                self._partial.pop(index, None)
                self._first_token(index)
        self._end_decodes()

    def _first_token(self, index: int) -> None:
        """A prefill is done: its first token came, and it decodes from the next step on, unless that was all."""
        ledger, asked = self.ledger, self.asked
        ledger.first_ps[index] = self.now_ps
        ledger.first_step[index] = self.steps - 1
        before = self._served_at.pop(index)
        for tenant, total in enumerate(self.served):
            ledger.served_ps[tenant][index] = total - before[tenant]
        prompt = asked.inputs[index]
        if asked.outputs[index] == 1:
            self._free += -(-prompt // self._size)
            del self._running[index]
            self._finish(index)
            return
        self._join(index, self.steps - 1, prompt + 1)

    def _join(self, index: int, base: int, known: int) -> None:
        """Count a request among the decodes: it has D − base output tokens and `known` tokens in all."""
        self._state[index] = _DECODE
        self._base[index] = base
        self._decodes += 1
        self._context += known
        tenant = self.asked.tenant[index]
        self._rows[tenant] += 1
        self._contexts[tenant] += known
        self._residue[(base + 1 - self.asked.inputs[index]) % self._size] += 1
        heappush(self._ends, (base + self.asked.outputs[index], index))
        self._latest_decode = max(self._latest_decode, self._running[index])

    def _stall(self, until_ps: int) -> None:
        """Nothing can move before someone comes or goes."""
        if until_ps < FOREVER:
            self.now_ps = until_ps

    def _hand_over(self) -> None:
        """Give the state to the real scheduler: the running requests with their blocks, then the queue in its order."""
        self.leaping = False
        self.handovers += 1
        scheduler = self.scheduler = Scheduler(self.config)
        scheduler.steps = self.steps
        for index in self._running:
            request = self.request_of(index, self.asked.arrival_ps[index])
            if self._state[index] == _PREFILL:
                scheduler.restore(request, computed=self._partial[index], output_tokens=0)
                continue
            outputs = self.steps - self._base[index]
            self._next_step[index] = self.steps
            scheduler.restore(request, computed=request.prompt_tokens + outputs - 1, output_tokens=outputs)
        for index in self._waiting():
            scheduler.add(self.request_of(index, self.asked.arrival_ps[index]))

    def _can_leap(self) -> bool:
        """Whether the scheduler's state is one that leaping knows, with a margin of blocks so that it lasts."""
        scheduler = self.scheduler
        running = scheduler.running
        if 4 * len(scheduler.pool.free) < len(running) or len(running) >= self.config.token_budget:
            return False
        if any(request.output_tokens and request.computed != request.known_tokens - 1 for request in running):
            return False
        return not any(request.preemptions for request in scheduler.waiting)

    def _take_back(self) -> None:
        """Take the state from the real scheduler."""
        scheduler = self.scheduler
        self._reset()
        self.leaping = True
        for request in scheduler.running:
            index = request.tag
            self._admissions += 1
            self._running[index] = self._admissions
            self._free -= len(request.blocks)
            if request.output_tokens:
                if self._next_step[index] != self.steps:  # computed again, its next token still to come
                    self.ledger.breaks.setdefault(index, []).append((request.output_tokens, self.steps))
                self._join(index, self.steps - request.output_tokens, request.known_tokens)
            else:
                self._state[index] = _PREFILL
                self._partial[index] = request.computed
        for request in scheduler.waiting:
            self._enqueue(request.tag)
        self._next_step.clear()
