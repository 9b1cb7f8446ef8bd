"""One simulated engine, step by step on a virtual clock: the scheduler decides, the step model says how long it takes.

`StepReplica` is the plain way and the reference. It can skip along stretches in which nothing is decided: while all
that runs decodes, and nobody waits who could get in, every step gives each running request one token, until the first
of them ends, someone arrives, or blocks run out. The blocks of such a stretch are taken at once.

Use: `add` a request when it arrives, `run(until_ps)` all steps that begin before that time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from replay.engine.config import SchedulerConfig
from replay.engine.ledger import ABORT, CAUSES, LENGTH, REFUSED, STOP, Ledger, Timeline
from replay.engine.request import EngineRequest, Step
from replay.engine.scheduler import Scheduler
from replay.engine.steptime import PicoClock

_LOOK, _ROUNDS = 1024, 16  # steps without a token between two looks; so often may all that runs be computed without one
_PLAIN_ORDER = {"fcfs", "priority", "ageing"}  # who is next changes only when someone comes or goes


@dataclass(slots=True)
class Asked:
    """The requests of a simulation as plain lists (fast to index): lengths, ranks, tenants; times in ps."""

    inputs: list[int]
    outputs: list[int]
    priority: list[int]
    tenant: list[int]
    tenants: tuple[str, ...]
    prefixes: list[list[int] | None] | None = None
    prefix_block_size: int = 16
    arrival_ps: list[int] = field(default_factory=list)  # when each was really offered


class StepReplica:
    """An engine on a virtual clock, stepping through the real scheduler class.

    Args:
        config: the engine's settings.
        clock: step times.
        asked: all requests; `add` names them by index.
        ledger: where it writes.
        skip: take stretches of pure decoding at once.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: PicoClock,
        asked: Asked,
        ledger: Ledger,
        *,
        number: int = 0,
        skip: bool = True,
    ) -> None:
        self.config = config
        self.clock = clock
        self.asked = asked
        self.ledger = ledger
        self.number = number
        self.skip = skip and not config.async_scheduling and config.prefill_interval == 1
        self.now_ps = 0
        self.steps = 0  # executed
        self.busy_ps = 0
        self.livelocks = 0
        self._barren = 0  # steps since the last token
        self.moves = 0  # decisions that changed something
        self.timeline = Timeline()
        self.scheduler = Scheduler(config)
        self.finished: list[int] = []  # since the caller last looked
        self.waited = [0] * len(CAUSES)
        self.served = [0] * len(asked.tenants)
        self.last_ps = 0  # duration of the latest step, and each tenant's part of it
        self.last_served = [0] * len(asked.tenants)
        self._queued_at: dict[int, list[int]] = {}
        self._served_at: dict[int, list[int]] = {}
        self._flight: deque[tuple[Step, int, int]] = deque()  # asynchronous: (step, start, end)
        self._next_step: dict[int, int] = {}  # the step a request's next token comes in, if nothing holds it up

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return self.scheduler.unfinished

    def add(self, index: int, at_ps: int) -> None:
        """Request `index` arrives at `at_ps`; decisions before that time have been taken."""
        if not self.unfinished and not self._flight:
            self.now_ps = max(self.now_ps, at_ps)
        self.asked.arrival_ps[index] = at_ps
        self.meet(index, at_ps)
        self.scheduler.add(self.request_of(index, at_ps))

    def refuse(self, index: int, at_ps: int) -> int | None:
        """Whom a full queue turns away if `index` comes now: that one, a waiting one (taken out here), or nobody.

        The step that runs at that moment counts as over, so what ends with it does not fill the queue any more.
        """
        refusal = self.scheduler.refusal(self.request_of(index, at_ps))
        if refusal is None:
            return None
        refused: int = refusal.request.tag
        if refused != index:
            self.scheduler.abort(refusal.request.request_id)
            self._note_end(refusal.request, at_ps, REFUSED)
        return refused

    def meet(self, index: int, at_ps: int) -> None:
        """Write down the arrival: what is left of the running step it waits, and sees served."""
        ledger = self.ledger
        ledger.replica[index] = self.number
        late = self.now_ps - at_ps
        ledger.wait_step_ps[index] = late
        self._queued_at[index] = list(self.waited)
        if late and self.last_ps:
            self._served_at[index] = [
                total - part * late // self.last_ps for total, part in zip(self.served, self.last_served, strict=True)
            ]
        else:
            self._served_at[index] = list(self.served)

    def request_of(self, index: int, at_ps: int) -> EngineRequest:
        """The scheduler's view of a request."""
        asked = self.asked
        return EngineRequest(
            f"{index:09d}",
            prompt_tokens=asked.inputs[index],
            max_tokens=asked.outputs[index],
            priority=asked.priority[index],
            arrival_time=at_ps / 1e12,
            tenant=asked.tenants[asked.tenant[index]],
            prefix_hashes=asked.prefixes[index] if asked.prefixes is not None else None,
            prefix_block_size=asked.prefix_block_size,
            tag=index,
        )

    def abort(self, index: int) -> bool:
        """The client of `index` gives up; False when it is no longer here."""
        request = self.scheduler.requests.get(f"{index:09d}")
        if request is None:
            return False
        self.scheduler.abort(request.request_id)
        self._note_end(request, self.now_ps, ABORT)
        return True

    def run(self, until_ps: int, *, stop_at_finish: bool = False) -> None:
        """Take every decision before `until_ps`; with `stop_at_finish` up to the first step that ends a request."""
        while self.now_ps < until_ps and (self.scheduler.unfinished or self._flight):
            moved = self._asynchronous() if self.config.async_scheduling else self._synchronous(until_ps)
            if not moved:
                self.now_ps = max(self.now_ps, until_ps) if until_ps < FOREVER else self.now_ps
                return
            if stop_at_finish and self.finished:
                return

    def _synchronous(self, until_ps: int) -> bool:
        """One step, then the stretch behind it. False when nothing can move any more."""
        step = self.scheduler.schedule()
        if not step.tokens and not step.preempted:
            return False
        self.moves += 1
        start = self.now_ps
        self.now_ps += self._duration(step)
        self.scheduler.update(step)
        self._write(step, start, self.now_ps)
        if self._is_livelock(step):
            return False
        if self.skip and not step.finished and self.now_ps < until_ps:
            self._skip_along(step, until_ps)
        return True

    def _asynchronous(self) -> bool:
        """Build the next step; wait for the oldest in flight when there are two, or nothing to build."""
        step = self.scheduler.schedule() if self.scheduler.unfinished else None
        if step is not None and (step.tokens or step.preempted or self._flight):
            start = max(self.now_ps, self._flight[-1][2] if self._flight else 0)
            self._flight.append((step, start, start + self._duration(step)))
            if len(self._flight) < 2:
                return True
        if not self._flight:
            return False
        self.moves += 1
        done, start, end = self._flight.popleft()
        self.now_ps = max(self.now_ps, end)
        self.scheduler.update(done)
        self._write(done, start, end)
        return not self._is_livelock(done)

    def _is_livelock(self, step: Step) -> bool:
        """Whether steps only undo each other's work and will for ever; looked at every thousand steps without a token.

        Two requests that are alike in priority and arrival can take each other's blocks in turn, each losing all it had
        computed, where prompts are admitted by their first chunk (`scheduler_reserve_full_isl` off): vLLM does, too.
        """
        self._barren = 0 if step.emitted else self._barren + 1
        if self._barren == 0 or self._barren % _LOOK:
            return False
        if self._barren < _ROUNDS * sum(request.known_tokens for request in self.scheduler.running):
            return False
        self._barren = 0
        self.livelocks += 1
        return True

    def _duration(self, step: Step) -> int:
        return (
            self.clock.duration_ps(step.tokens, step.decodes, step.context, step.area, step.samples)
            if step.tokens
            else 0
        )

    def _write(self, step: Step, start_ps: int, end_ps: int) -> None:
        """Put one executed step into the ledger."""
        number = self.steps
        duration = end_ps - start_ps
        if step.tokens:
            self.steps += 1
            self.busy_ps += duration
            self.timeline.add(number, start_ps, duration, 0)
        for request in step.preempted:
            self._queued_at[request.tag] = list(self.waited)
            self.ledger.preemptions[request.tag] += 1
        for row in step.scheduled:
            if row.kind != "running":
                self._note_admission(row.request, start_ps)
        self._serve(step, duration)
        if step.stop in CAUSES:
            self.waited[CAUSES.index(step.stop)] += duration
        for request in step.emitted:
            self._note_token(request, number, end_ps)
        for request in step.finished:
            self._note_end(request, end_ps, STOP if request.finish == "stop" else LENGTH)
            self.finished.append(request.tag)

    def _serve(self, step: Step, duration: int) -> None:
        """Split a step's time over the tenants, and write down what requests without a token yet had of it."""
        parts = [0.0] * len(self.served)
        if step.tokens:
            model = self.clock.model
            per_token, per_decode, per_context, per_sample = model.split_ms(step.tokens, step.decodes, step.samples)
            for row in step.scheduled:
                part = per_token * row.tokens + per_sample * row.samples
                if row.tokens == 1 and row.computed >= row.request.prompt_tokens:
                    part += per_decode + per_context * (row.computed + 1)
                else:
                    part += model.a_ms * row.tokens * (row.computed + row.tokens / 2)
                    if self.ledger.first_ps[row.request.tag] < 0:
                        self.ledger.own_ps[row.request.tag] += round(part * 1e9)
                parts[self.asked.tenant[row.request.tag]] += part
        self.last_ps = duration
        self.last_served = [round(part * 1e9) for part in parts]
        self.served = [total + part for total, part in zip(self.served, self.last_served, strict=True)]

    def _note_admission(self, request: EngineRequest, start_ps: int) -> None:
        index = request.tag
        ledger = self.ledger
        if ledger.admitted_ps[index] < 0:
            ledger.admitted_ps[index] = start_ps
            ledger.cached_tokens[index] = request.cached_tokens or 0
        self._leave_queue(index)

    def _leave_queue(self, index: int) -> None:
        before = self._queued_at.pop(index, None)
        if before is None or before == self.waited:
            return
        if self.ledger.first_ps[index] < 0:
            for cause, total in enumerate(self.waited):
                self.ledger.wait_ps[cause][index] += total - before[cause]
        else:
            self.ledger.resume_wait_ps[index] += sum(self.waited) - sum(before)

    def _note_token(self, request: EngineRequest, number: int, end_ps: int) -> None:
        index = request.tag
        ledger = self.ledger
        ledger.last_ps[index] = end_ps
        if ledger.first_ps[index] < 0:
            self._leave_queue(index)
            ledger.first_ps[index] = end_ps
            ledger.first_step[index] = number
            before = self._served_at.pop(index)
            for tenant, total in enumerate(self.served):
                ledger.served_ps[tenant][index] = total - before[tenant]
        elif self._next_step[index] != number:
            ledger.breaks.setdefault(index, []).append((request.output_tokens - 1, number))
        self._next_step[index] = number + 1

    def _note_end(self, request: EngineRequest, end_ps: int, finish: int) -> None:
        index = request.tag
        self._leave_queue(index)
        self._served_at.pop(index, None)
        self._next_step.pop(index, None)
        self.ledger.end_ps[index] = end_ps
        self.ledger.output_tokens[index] = request.output_tokens
        self.ledger.finish[index] = finish

    def _skip_along(self, step: Step, until_ps: int) -> None:
        """Take as many steps at once as repeat the last decision."""
        scheduler = self.scheduler
        running = scheduler.running
        if not self._repeats(step):
            return
        rows = len(running)
        limit = self.config.max_model_len
        steps = (
            min(min(request.max_tokens - request.output_tokens, limit - request.known_tokens) for request in running)
            - 1
        )
        context = sum(request.known_tokens for request in running)
        steps = min(steps, self.steps_until(rows, context, until_ps - self.now_ps))
        steps = self._affordable(steps)
        if steps > 0:
            scheduler.decode_all(steps)
            self._write_stretch(rows, context, steps, step.stop if len(scheduler.waiting) else "empty")

    def _repeats(self, step: Step) -> bool:
        """Whether the next step can only give one token to each running request again."""
        scheduler = self.scheduler
        if len(scheduler.waiting):
            if self.config.scheduling_policy not in _PLAIN_ORDER and step.stop != "seqs":
                return False
            if self.config.scheduling_policy in {"priority-preemptive", "sglang"}:
                return False
            if step.stop == "kv" and self.asked.prefixes is not None:
                return False
            if step.stop not in {"seqs", "kv"}:
                return False
        running = scheduler.running
        if not running or len(running) > self.config.token_budget:
            return False
        return all(request.output_tokens and request.computed == request.known_tokens - 1 for request in running)

    def _affordable(self, steps: int) -> int:
        """The most steps up to `steps` whose blocks are free."""
        size = self.config.block_size
        free = len(self.scheduler.pool.free)

        def needed(count: int) -> int:
            return sum(-(-(r.computed + count) // size) - len(r.blocks) for r in self.scheduler.running)

        if steps <= 0 or needed(steps) <= free:
            return steps
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle) <= free else (low, middle)
        return low

    def steps_until(self, rows: int, context: int, wait_ps: int) -> int:
        """The fewest decode steps that take at least `wait_ps`."""
        return steps_to_cover(self.clock, rows, context, wait_ps)

    def _write_stretch(self, rows: int, context: int, steps: int, stop: str) -> None:
        clock = self.clock
        total = clock.decoding_ps(rows, context, steps)
        first = clock.decoding_ps(rows, context, 1)
        self.timeline.add(self.steps, self.now_ps, first, clock.context_ps * rows)
        running = self.scheduler.running
        counts = [0] * len(self.served)
        contexts = [0] * len(self.served)
        self.steps += steps
        self.now_ps += total
        self.busy_ps += total
        for request in running:
            tenant = self.asked.tenant[request.tag]
            counts[tenant] += 1
            contexts[tenant] += request.known_tokens - steps
            self.ledger.last_ps[request.tag] = self.now_ps
            if self._next_step[request.tag] != self.steps - steps:
                token = request.output_tokens - steps
                self.ledger.breaks.setdefault(request.tag, []).append((token, self.steps - steps))
            self._next_step[request.tag] = self.steps
        if stop in CAUSES:
            self.waited[CAUSES.index(stop)] += total
        self.serve_stretch(counts, contexts, steps)

    def serve_stretch(self, counts: list[int], contexts: list[int], steps: int) -> None:
        """Split `steps` decode steps over the tenants: `counts` rows each, with `contexts` tokens of context."""
        rows = sum(counts)
        clock = self.clock
        each = clock.decode_ps(rows) / rows
        served, last = self.served, []
        for tenant, count in enumerate(counts):
            grown = contexts[tenant] * steps + count * (steps * (steps - 1) // 2)
            served[tenant] += round(each * count * steps) + clock.context_ps * grown
            last.append(round(each * count) + clock.context_ps * (contexts[tenant] + count * (steps - 1)))
        self.last_served = last
        self.last_ps = clock.decode_ps(rows) + clock.context_ps * (sum(contexts) + rows * (steps - 1))


FOREVER = 1 << 62


def steps_to_cover(clock: PicoClock, rows: int, context: int, wait_ps: int) -> int:
    """The fewest decode steps of `rows` requests that take at least `wait_ps` together.

    Solves k·first + growth·k(k − 1)/2 ≥ wait; the estimate in floating point is then set right in whole numbers.
    """
    first = clock.decode_ps(rows) + clock.context_ps * context
    growth = clock.context_ps * rows
    if growth == 0:
        return -(-wait_ps // first) if first else FOREVER
    linear = first - growth / 2
    steps = max(1, int((-linear + (linear * linear + 2.0 * growth * wait_ps) ** 0.5) / growth))
    while clock.decoding_ps(rows, context, steps) < wait_ps:
        steps += 1
    while steps > 1 and clock.decoding_ps(rows, context, steps - 1) >= wait_ps:
        steps -= 1
    return steps
