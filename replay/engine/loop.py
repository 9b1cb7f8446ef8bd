"""The scheduler in real time: a step is scheduled, its model time passes, its tokens go out.

    schedule(k) ── t_k of the model ──► update(k), tokens out, schedule(k+1) ── t_{k+1} ──► ...
    due_{k+1} = due_k + t_{k+1} / speed        while there is work; a step after a pause begins now

Due times are absolute: a step that ended late does not push the next, so the engine does not drift from its model. A
step that ends more than 5 % of its time late is counted. When the engine is behind by more than SLACK_NS (a stopped
process, a machine too slow) it does not race to catch up: the clock slips to now, and the slip is counted, too.

Arrivals and aborts take effect between steps, as in vLLM. With asynchronous scheduling step k+1 is scheduled before the
outputs of k are known, so two steps are in flight. A step that gives nobody a token (all were preempted, a head that
does not fit) takes EMPTY_STEP_NS: the engine looks again, and does not spin.

Everything happens in callbacks of one event loop; there are no tasks and no locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from replay.engine.metrics import Finished, Gauges, Metrics
from replay.engine.request import EngineRequest, Step
from replay.engine.scheduler import Refusal, Scheduler
from replay.engine.timer import Clock
from replay.engine.truth import Truth

LATE_SHARE = 0.05
SLACK_NS = 50_000_000
EMPTY_STEP_NS = 1_000_000


class Answer(Protocol):
    """Who gets a request's tokens (one HTTP response, which may have several choices)."""

    def token(self, choice: Choice) -> None:
        """One more token of this choice; `choice.request.finish` is set with its last."""

    def flush(self) -> None:
        """All tokens of a step have been given: write them."""

    def refused(self, message: str) -> None:
        """The engine ended it before its time (displaced from a full queue)."""


class Choice:
    """One sequence in the engine and its times (CLOCK_MONOTONIC ns, 0 until it happens)."""

    __slots__ = ("answer", "arrival_ns", "first_ns", "index", "last_ns", "prompt", "request", "scheduled_ns", "seed")

    def __init__(  # noqa: PLR0917
        self, answer: Answer, index: int, prompt: int, seed: int, request: EngineRequest, arrival_ns: int
    ) -> None:
        self.answer = answer
        self.index = index  # among the choices of its answer
        self.prompt = prompt  # which of the answer's prompts
        self.seed = seed  # names what it says
        self.request = request
        self.arrival_ns = arrival_ns
        self.scheduled_ns = 0
        self.first_ns = 0
        self.last_ns = 0
        request.tag = self


class Engine:
    """The step loop.

    Args:
        clock: tells the time and calls back.
        scheduler: decides every step.
        step_ns: a step's model time in ns.
        metrics: counts what happens.
        speed: model seconds per second.
        truth: records what each request waited for.
    """

    def __init__(
        self,
        clock: Clock,
        scheduler: Scheduler,
        step_ns: Callable[[Step], float],
        metrics: Metrics,
        *,
        speed: float = 1.0,
        truth: Truth | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        self._clock = clock
        self._step_ns = step_ns
        self._speed = speed
        self._truth = truth
        self._depth = 2 if scheduler.config.async_scheduling else 1
        self._in_flight: deque[tuple[Step, int]] = deque()  # step, its length in ns
        self._due_ns = 0  # end of the oldest step in flight
        self._begun_ns = 0  # when it really began
        self._waking = False
        self._closed = False
        self._aborted: list[Choice] = []

    def gauges(self) -> Gauges:
        """How full the engine is now."""
        scheduler = self.scheduler
        return Gauges(len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage)

    def refusal(self, request: EngineRequest, n: int) -> Refusal | None:
        """Whom a full queue turns away if n such requests are added."""
        return self.scheduler.refusal(request, n)

    def add(self, choice: Choice) -> None:
        """Queue a sequence; it can be scheduled with the next step."""
        self.scheduler.add(choice.request)
        if self._truth is not None:
            self._truth.arrive(choice.request, choice.arrival_ns)
        self._wake()

    def abort(self, choice: Choice) -> None:
        """Free a sequence before the next step (its client is gone)."""
        self._aborted.append(choice)
        self._wake()

    def close(self) -> None:
        """Stop the clock; what is unfinished stays so."""
        self._clock.close()
        self._in_flight.clear()
        self._closed = True

    def _wake(self) -> None:
        if not self._in_flight and not self._waking and not self._closed:
            self._waking = True
            self._clock.soon(self._start)

    def _start(self) -> None:
        self._waking = False
        if not self._in_flight and not self._closed:
            self._due_ns = self._clock.now_ns()
            self._fill()

    def _fill(self) -> None:
        """Schedule steps until as many are in flight as the engine keeps; set the timer for the oldest."""
        self._apply_aborts()
        while len(self._in_flight) < self._depth and self.scheduler.unfinished:
            step = self.scheduler.schedule()
            self._note_scheduled(step)
            if step.scheduled:
                length_ns = int(self._step_ns(step) / self._speed)
            elif self._in_flight:
                break  # what is in flight will change the picture
            else:
                length_ns = EMPTY_STEP_NS
            self._in_flight.append((step, length_ns))
            if len(self._in_flight) == 1:
                self._set_timer()

    def _set_timer(self) -> None:
        self._begun_ns = self._clock.now_ns()
        self._due_ns += self._in_flight[0][1]
        self._clock.at(self._due_ns, self._step_ended)

    def _note_scheduled(self, step: Step) -> None:
        now_ns = self._clock.now_ns()
        self.metrics.preemptions += len(step.preempted)
        for row in step.scheduled:
            if row.kind == "new":
                row.request.tag.scheduled_ns = now_ns

    def _step_ended(self) -> None:
        if not self._in_flight:
            return
        now_ns = self._clock.now_ns()
        if now_ns < self._due_ns:  # the loop's own timer may be early
            self._clock.at(self._due_ns, self._step_ended)
            return
        step, length_ns = self._in_flight.popleft()
        self._keep_clock(now_ns, length_ns)
        self.scheduler.update(step)
        if self._truth is not None:
            self._truth.step(step, self._begun_ns, now_ns)
        self._hand_out(step)
        if self._in_flight:
            self._set_timer()
        self._fill()

    def _keep_clock(self, now_ns: int, length_ns: int) -> None:
        """Count the step and its lateness; give up what cannot be caught up."""
        metrics = self.metrics
        metrics.steps += 1
        late_ns = now_ns - self._due_ns
        metrics.lateness.observe(late_ns / 1e9)
        if late_ns > LATE_SHARE * length_ns > 0:
            metrics.late_steps += 1
        if late_ns > SLACK_NS:
            metrics.slips += 1
            metrics.slipped_s += late_ns / 1e9
            self._due_ns = now_ns

    def _hand_out(self, step: Step) -> None:
        metrics = self.metrics
        metrics.step_tokens.observe(step.tokens)
        metrics.generation_tokens += len(step.emitted)
        now_ns = self._clock.now_ns()
        answers: dict[Answer, None] = {}
        for request in step.emitted:
            choice: Choice = request.tag
            if choice.first_ns:
                metrics.inter_token.observe((now_ns - choice.last_ns) / 1e9)
            else:
                choice.first_ns = now_ns
                metrics.ttft.observe((now_ns - choice.arrival_ns) / 1e9)
                metrics.started(request.prompt_tokens, request.cached_tokens or 0)
            choice.last_ns = now_ns
            choice.answer.token(choice)
            answers[choice.answer] = None
            if request.finish is not None:
                metrics.ended(outcome(choice))
        for answer in answers:
            answer.flush()

    def _apply_aborts(self) -> None:
        for choice in self._aborted:
            if self.scheduler.abort(choice.request.request_id):
                self.metrics.ended(outcome(choice))
                if self._truth is not None:
                    self._truth.leave(choice.request, self._clock.now_ns())
        self._aborted.clear()


def outcome(choice: Choice) -> Finished:
    """What a finished sequence leaves behind."""
    request = choice.request
    return Finished(
        reason=request.finish or "abort",
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens or 0,
        output_tokens=request.output_tokens,
        max_tokens=request.max_tokens,
        preemptions=request.preemptions,
        arrival_ns=choice.arrival_ns,
        scheduled_ns=choice.scheduled_ns,
        first_ns=choice.first_ns,
        last_ns=choice.last_ns,
    )
