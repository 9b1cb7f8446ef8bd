"""The step loop: model time by an absolute clock, arrivals and aborts between steps, lateness counted."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest

from replay.engine.config import SchedulerConfig
from replay.engine.loop import EMPTY_STEP_NS, SLACK_NS, Choice, Engine
from replay.engine.metrics import Metrics
from replay.engine.request import EngineRequest
from replay.engine.scheduler import Scheduler
from replay.engine.steptime import StepModel
from replay.engine.truth import Truth

STEP_NS = 10_000_000
FLAT = StepModel(t0_ms=10.0)  # every step takes 10 ms


class FakeClock:
    """Time that moves when the test says so; `late_ns` delays every alarm."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.late_ns = 0
        self.alarm: tuple[int, Callable[[], None]] | None = None
        self.ready: list[Callable[[], None]] = []
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.closed = False

    def now_ns(self) -> int:
        return self.now

    def soon(self, callback: Callable[[], None]) -> None:
        self.ready.append(callback)

    def at(self, when_ns: int, callback: Callable[[], None]) -> None:
        self.alarm = (when_ns, callback)

    def close(self) -> None:
        self.alarm = None
        self.closed = True

    def schedule(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Something the test wants to happen then."""
        heapq.heappush(self.events, (when_ns, len(self.events), callback))

    def run(self, until_ns: int = 10**12) -> None:
        """Move on until nothing is left to happen."""
        while True:
            while self.ready:
                self.ready.pop(0)()
            alarm_ns = max(self.now, self.alarm[0] + self.late_ns) if self.alarm else until_ns + 1
            event_ns = self.events[0][0] if self.events else until_ns + 1
            if min(alarm_ns, event_ns) > until_ns:
                return
            self.now = max(self.now, min(alarm_ns, event_ns))
            if event_ns <= alarm_ns:
                heapq.heappop(self.events)[2]()
            else:
                callback = self.alarm[1]
                self.alarm = None
                callback()


class Reader:
    """Notes when each choice got its tokens."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.got: list[tuple[str, int]] = []
        self.flushes = 0

    def token(self, choice: Choice) -> None:
        self.got.append((choice.request.request_id, self.clock.now))

    def flush(self) -> None:
        self.flushes += 1

    def refused(self, message: str) -> None:
        raise AssertionError(message)

    def times(self, name: str) -> list[int]:
        return [when for who, when in self.got if who == name]


class Bench:
    """An engine on a fake clock."""

    def __init__(self, model: StepModel = FLAT, *, speed: float = 1.0, truth: bool = False, **config: object) -> None:
        self.clock = FakeClock()
        self.start = self.clock.now
        self.scheduler = Scheduler(SchedulerConfig(**config))  # type: ignore[arg-type]
        self.metrics = Metrics("m", 8192, {})
        self.truth = Truth(model) if truth else None
        self.engine = Engine(self.clock, self.scheduler, model.step_ns, self.metrics, speed=speed, truth=self.truth)
        self.reader = Reader(self.clock)

    def ask(self, name: str, *, prompt: int = 5, tokens: int = 3, priority: int = 0, tenant: str = "t") -> Choice:
        request = EngineRequest(
            name,
            prompt_tokens=prompt,
            max_tokens=tokens,
            priority=priority,
            arrival_time=self.clock.now / 1e9,
            tenant=tenant,
        )
        choice = Choice(self.reader, 0, 0, 0, request, self.clock.now)
        self.engine.add(choice)
        return choice

    def steps_after(self, name: str) -> list[float]:
        """Times of its tokens, in steps from the start."""
        return [(when - self.start) / STEP_NS for when in self.reader.times(name)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_token_comes_at_the_end_of_a_step_of_the_models_length(bench: Bench):
    choice = bench.ask("a")
    bench.clock.run()
    assert bench.steps_after("a") == [1, 2, 3]
    assert choice.scheduled_ns == bench.start
    assert (choice.first_ns, choice.last_ns) == (bench.start + STEP_NS, bench.start + 3 * STEP_NS)
    assert bench.metrics.steps == 3
    assert bench.clock.alarm is None


def test_speed_of_time_shortens_every_step():
    bench = Bench(speed=4.0)
    bench.ask("a")
    bench.clock.run()
    assert bench.steps_after("a") == [0.25, 0.5, 0.75]


def test_an_arrival_waits_for_the_end_of_the_step_that_runs(bench: Bench):
    bench.ask("a")
    bench.clock.schedule(bench.start + STEP_NS // 2, lambda: bench.ask("b"))
    bench.clock.run()
    assert bench.steps_after("b") == [2, 3, 4]


def test_requests_of_one_moment_share_their_first_step(bench: Bench):
    bench.ask("a")
    bench.ask("b")
    bench.clock.run()
    assert bench.steps_after("a") == bench.steps_after("b") == [1, 2, 3]
    assert bench.metrics.steps == 3


def test_a_pause_does_not_count_as_time_to_catch_up(bench: Bench):
    bench.ask("a", tokens=1)
    bench.clock.schedule(bench.start + 100 * STEP_NS, lambda: bench.ask("b", tokens=1))
    bench.clock.run()
    assert bench.steps_after("b") == [101]
    assert bench.metrics.late_steps == 0


def test_late_wake_ups_do_not_add_up_and_are_counted(bench: Bench):
    bench.clock.late_ns = STEP_NS // 10
    bench.ask("a", tokens=50)
    bench.clock.run()
    assert bench.steps_after("a") == pytest.approx([k + 0.1 for k in range(1, 51)])
    assert bench.metrics.late_steps == 50


def test_a_step_late_by_less_than_five_percent_is_not_counted(bench: Bench):
    bench.clock.late_ns = STEP_NS // 21
    bench.ask("a", tokens=20)
    bench.clock.run()
    assert bench.metrics.late_steps == 0
    assert bench.metrics.lateness.total == pytest.approx(20 * (STEP_NS // 21) / 1e9)


def test_a_stop_of_the_whole_process_slips_the_clock_instead_of_a_race(bench: Bench):
    bench.ask("a", tokens=4)
    bench.clock.run(bench.start + STEP_NS)
    bench.clock.late_ns = 100 * STEP_NS
    bench.clock.run(bench.start + 2 * STEP_NS)
    bench.clock.now = bench.start + 102 * STEP_NS
    bench.clock.late_ns = 0
    bench.clock.run()
    assert bench.steps_after("a") == [1, 102, 103, 104]
    assert bench.metrics.slips == 1
    assert bench.metrics.slipped_s == pytest.approx(100 * STEP_NS / 1e9)
    assert 100 * STEP_NS > SLACK_NS


def test_an_abort_frees_the_slot_at_the_end_of_the_step_and_not_in_it():
    bench = Bench(max_num_seqs=1)
    first = bench.ask("a", tokens=100)
    bench.ask("b")
    bench.clock.schedule(bench.start + 2 * STEP_NS + 1, lambda: bench.engine.abort(first))
    bench.clock.run()
    assert bench.steps_after("a") == [1, 2, 3]
    assert bench.steps_after("b") == [4, 5, 6]
    assert bench.metrics.finished["abort"] == 1
    assert bench.metrics.finished["length"] == 1


def test_an_abort_of_what_has_just_ended_changes_nothing(bench: Bench):
    choice = bench.ask("a", tokens=1)
    bench.clock.schedule(bench.start + STEP_NS // 2, lambda: bench.engine.abort(choice))
    bench.clock.run()
    assert choice.request.finish == "length"
    assert bench.metrics.finished["abort"] == 0


def test_a_long_prompt_gives_no_token_before_its_last_chunk():
    bench = Bench(max_num_batched_tokens=100)
    bench.ask("a", prompt=350, tokens=1)
    bench.clock.run()
    assert bench.steps_after("a") == [4]


def test_the_urgent_one_is_admitted_first_when_a_slot_comes_free():
    bench = Bench(max_num_seqs=1, scheduling_policy="priority")
    bench.ask("busy", tokens=2, priority=9)
    bench.clock.schedule(bench.start + 1, lambda: bench.ask("late", tokens=1, priority=5))
    bench.clock.schedule(bench.start + STEP_NS // 2, lambda: bench.ask("urgent", tokens=1, priority=0))
    bench.clock.run()
    assert bench.steps_after("urgent") == [3]
    assert bench.steps_after("late") == [4]


def test_asynchronous_scheduling_keeps_two_steps_in_flight_and_loses_one_slot_step_at_an_end():
    bench = Bench(max_num_seqs=1, async_scheduling=True)
    bench.ask("a", tokens=3)
    bench.ask("b", tokens=2)
    bench.clock.run()
    assert bench.steps_after("a") == [1, 2, 3]
    assert bench.steps_after("b")[0] in {4, 5}
    assert len(bench.steps_after("b")) == 2
    assert bench.scheduler.unfinished == 0


@pytest.mark.parametrize(("asynchronous", "step"), [(False, 2), (True, 3)])
def test_an_arrival_enters_the_next_step_that_is_not_yet_scheduled(asynchronous: bool, step: int):
    bench = Bench(async_scheduling=asynchronous)
    bench.ask("a", tokens=10)
    bench.clock.schedule(bench.start + STEP_NS // 2, lambda: bench.ask("b", tokens=1))
    bench.clock.run()
    assert bench.steps_after("b") == [step]


def test_a_request_that_outgrew_the_pool_is_tried_again_each_millisecond_without_spinning():
    bench = Bench(num_gpu_blocks=3, block_size=16, enable_prefix_caching=False)
    stuck = bench.ask("a", prompt=20, tokens=40)
    bench.clock.run(bench.start + 13 * STEP_NS)
    steps = bench.metrics.steps
    assert len(bench.reader.times("a")) == 13
    bench.clock.run(bench.start + 13 * STEP_NS + 20 * EMPTY_STEP_NS)
    assert bench.metrics.steps - steps == 20
    assert bench.metrics.preemptions == 1
    assert bench.metrics.late_steps == 0
    bench.engine.abort(stuck)
    bench.clock.run()
    assert bench.scheduler.unfinished == 0
    assert bench.clock.alarm is None


def test_tokens_of_a_step_are_flushed_once_for_an_answer(bench: Bench):
    bench.ask("a", tokens=2)
    bench.ask("b", tokens=2)
    bench.clock.run()
    assert bench.reader.flushes == 2


def test_metrics_split_a_request_into_queue_prefill_and_decode():
    bench = Bench(max_num_seqs=1)
    bench.ask("a", tokens=3)
    bench.ask("b", tokens=5)
    bench.clock.run()
    metrics = bench.metrics
    assert metrics.queue.total == pytest.approx(0.03)
    assert metrics.prefill.total == pytest.approx(0.02)
    assert metrics.decode.total == pytest.approx(0.02 + 0.04)
    assert metrics.e2e.total == pytest.approx(0.03 + 0.08)
    assert metrics.ttft.total == pytest.approx(0.01 + 0.04)
    assert metrics.inter_token.total == pytest.approx(0.06)
    assert metrics.generation_tokens == 8
    assert metrics.prompt_tokens == 10


def test_the_truth_knows_the_wait_for_a_slot_and_whom_the_engine_served():
    bench = Bench(max_num_seqs=1, truth=True)
    bench.ask("a", tokens=3, tenant="summary")
    bench.ask("b", tokens=1, tenant="risk")
    gone = bench.ask("c", tokens=1, tenant="risk")
    bench.clock.schedule(bench.start + 1, lambda: bench.engine.abort(gone))
    bench.clock.run()
    assert bench.truth is not None
    rows = {row.request.request_id: row for row in bench.truth.rows}
    assert set(rows) == {"a", "b", "c"}
    assert rows["b"].wait_slot_ns == 3 * STEP_NS
    assert rows["b"].served_ns[bench.truth.tenants.index("summary")] == pytest.approx(3 * STEP_NS)
    assert rows["c"].first_token_ns is None


def test_after_close_nothing_happens_any_more(bench: Bench):
    bench.ask("a")
    bench.engine.close()
    bench.clock.run()
    bench.ask("b")
    bench.clock.run()
    assert bench.reader.got == []
    assert bench.clock.closed
