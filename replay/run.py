"""A run: workers started early, one common start, signals obeyed, and every row of the plan on disk at the end.

    crew = Crew(workers)             the processes start at once and import while the plan is still being made
    result = run(plan, job, crew, folder, watch)

    folder/.work/                    the plan's arrays, the counters and the workers' parts, removed when all is merged
    folder/outcomes.parquet          one row per request of the plan, in order of sending, the unsent ones too

Nothing here can hang: a worker that dies or falls silent is given up (its rows up to its last second are kept, the
rest are `unsent`), and the first interrupt ends the run in seconds, the second at once, with the rows that the workers
had written.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import pyarrow as pa

from replay import plan as planning
from replay import rows as rows_of
from replay.counters import Counters
from replay.crew import Crew
from replay.plan import NONE, Plan
from replay.snapshot import LiveSnapshot, snapshot
from replay.worker import Job, Report
from traces import parquet
from traces.record import Metadata
from traces.units import NS_PER_S

READY_S = 60.0
LEAD_NS = 30_000_000  # from the last `ready` to T0: time for the word `go` to arrive everywhere
LOOK_S = 0.1
SHOW_S = 0.25  # seldom: where a worker has the same core, it waits meanwhile
SILENCE_S = 30.0  # a worker beats twenty times a second
STOP_S = 15.0  # from the order to stop to the last row written

__all__ = ["Crew", "Interrupted", "Result", "Watch", "merge", "run"]

Watch = Callable[[LiveSnapshot], None]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a run went, apart from its rows.

    Attributes:
        reports: what the workers said at their end.
        lost: one sentence per worker that did not reach its end.
        interrupted: ended by Ctrl-C, SIGTERM or SIGHUP.
        start_unix_ns: wall clock at the run's zero.
        wall_s: from zero to the last worker's end.
        rows: rows in the outcome file.
    """

    reports: list[Report]
    lost: list[str]
    interrupted: bool
    start_unix_ns: int
    wall_s: float
    rows: int


class Interrupted(Exception):
    """A second interrupt: leave now."""


def run(
    plan: Plan,
    job: Job,
    crew: Crew,
    folder: Path,
    *,
    capped: dict[str, int],
    models: tuple[str, ...],
    metadata: Metadata,
    arm: str | None = None,
    watch: Watch = lambda *_: None,
) -> Result:
    """Send a plan and leave its outcomes in `folder`.

    Args:
        plan: what to send.
        job: what every worker is told; `folder`, `worker`, `workers`, `caps` and `concurrency` are filled in here.
        crew: the workers, started.
        folder: the run's folder; it exists.
        capped: tenant → requests in flight at most.
        models: model names asked for, `plan.models` in the server's words and then the default.
        metadata: of the outcome file.
        arm: name of the experiment's arm.
        watch: called four times a second with the state of the run.

    Raises:
        Interrupted: a second Ctrl-C; what the workers had written is in the outcome file all the same.
    """
    work = folder / ".work"
    work.mkdir()
    planning.save(plan, work / "plan")
    np.save(work / "owner.npy", planning.shard(plan, crew.workers, tuple(capped)))
    counters = Counters.create(work / "counters", crew.workers, plan.tenants)
    caps = {plan.tenants.index(name): cap for name, cap in capped.items() if name in plan.tenants}
    parts = [work / f"part-{worker}.arrow" for worker in range(crew.workers)]
    with _interrupts() as interrupts:
        watcher = _Watcher(crew, counters, _View(plan, watch), interrupts)
        try:
            for worker in range(crew.workers):
                mine = msgspec.structs.replace(
                    job,
                    folder=str(work),
                    worker=worker,
                    workers=crew.workers,
                    caps=caps,
                    concurrency=_users(job.concurrency, worker, crew.workers),
                )
                crew.order(worker, msgspec.json.encode(mine))
            watcher.until_ready()
            start_ns = time.monotonic_ns() + LEAD_NS
            start_unix_ns = time.time_ns() + LEAD_NS
            for worker in range(crew.workers):
                crew.order(worker, b"go %d" % start_ns)
            watcher.until_done(start_ns)
        except Interrupted:
            crew.kill()
            merge(plan, parts, folder / "outcomes.parquet", models=models, metadata=metadata, arm=arm)
            raise
        wall_s = (time.monotonic_ns() - start_ns) / NS_PER_S
    counters.close()
    written = merge(plan, parts, folder / "outcomes.parquet", models=models, metadata=metadata, arm=arm)
    shutil.rmtree(work)
    return Result(
        reports=sorted(watcher.reports.values(), key=lambda report: report.worker),
        lost=watcher.lost,
        interrupted=bool(interrupts),
        start_unix_ns=start_unix_ns,
        wall_s=wall_s,
        rows=written,
    )


def merge(
    plan: Plan, parts: list[Path], path: Path, *, models: tuple[str, ...], metadata: Metadata, arm: str | None = None
) -> int:
    """Join the workers' parts with the plan into one outcome file; returns its rows, which are the plan's.

    Up to a million rows are put in order of sending; more stay in the order they ended, so that memory stays bounded.
    """
    schema = rows_of.outcome_schema(plan, metadata, arm=arm)
    found = rows_of.outcomes(plan, parts, schema, models=models, arm=arm)
    if plan.rows > 1_000_000:
        return parquet.write_batches(found, schema, path)
    whole = pa.Table.from_batches(found, schema=schema).unify_dictionaries()
    parquet.write(parquet.in_order(whole), path)
    return int(whole.num_rows)


def _users(concurrency: int | None, worker: int, workers: int) -> int | None:
    """A worker's share of the users of a closed loop."""
    if concurrency is None:
        return None
    return concurrency // workers + (worker < concurrency % workers)


class _View:
    """The plan's part of a live snapshot, and who wants to see it."""

    def __init__(self, plan: Plan, watch: Watch) -> None:
        self._watch = watch
        self._span_ns = plan.span_ns
        self._planned = np.bincount(plan.tenant, minlength=len(plan.tenants)).tolist()
        self._ranks: list[int | None] = []
        for index in range(len(plan.tenants)):
            ranks = plan.rank[plan.tenant == index]
            self._ranks.append(int(ranks.min()) if len(ranks) and ranks.min() != NONE else None)

    def show(self, elapsed_ns: int, counters: Counters, *, stopping: bool) -> None:
        """The counters as they are now."""
        stage = "stopping" if stopping else "draining" if elapsed_ns > self._span_ns else "sending"
        names = list(counters.tenants)
        self._watch(
            snapshot(elapsed_ns, self._span_ns, names, self._ranks, self._planned, rows=counters.rows(), stage=stage)
        )


class _Watcher:
    """Looks at the workers until they are done, dead, or told to stop."""

    def __init__(self, crew: Crew, counters: Counters, view: _View, interrupts: list[int]) -> None:
        self.reports: dict[int, Report] = {}
        self.lost: list[str] = []
        self._crew, self._counters, self._view, self._interrupts = crew, counters, view, interrupts
        self._pending = set(range(crew.workers))
        self._ready: set[int] = set()
        self._stopped_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._text = dict.fromkeys(range(crew.workers), b"")
        for worker in range(crew.workers):
            os.set_blocking(crew.output(worker).fileno(), False)
            self._selector.register(crew.output(worker), selectors.EVENT_READ, worker)

    def until_ready(self) -> None:
        """Wait for every worker's `ready`; one that dies before is lost. Then draw the first view.

        Drawing it the first time takes a core for some 15 ms, which the first requests should not feel.
        """
        deadline = time.monotonic() + READY_S
        while self._pending - self._ready and time.monotonic() < deadline:
            self._listen()
            self._check_interrupts()
            if self._interrupts:
                return
        for worker in self._pending - self._ready:
            self._give_up(worker, f"worker {worker} was not ready within {READY_S:.0f} s")
        self._view.show(0, self._counters, stopping=False)

    def until_done(self, start_ns: int) -> None:
        """Wait for every worker's report."""
        shown_ns = time.monotonic_ns()
        while self._pending:
            self._listen()
            self._check_interrupts()
            now_ns = time.monotonic_ns()
            if now_ns - shown_ns >= SHOW_S * NS_PER_S or not self._pending:
                shown_ns = now_ns
                self._view.show(now_ns - start_ns, self._counters, stopping=self._stopped_at is not None)
            self._check_silence(now_ns, start_ns)
        self._selector.close()

    def _listen(self) -> None:
        for key, _ in self._selector.select(LOOK_S):
            worker: int = key.data
            data = self._crew.output(worker).read()
            if data:
                *lines, self._text[worker] = (self._text[worker] + data).split(b"\n")
                for line in lines:
                    self._hear(worker, line)
            elif data == b"":
                self._selector.unregister(key.fileobj)
                if worker in self._pending:
                    self._pending.discard(worker)
                    self.lost.append(self._crew.epitaph(worker))

    def _hear(self, worker: int, line: bytes) -> None:
        if line == b"ready":
            self._ready.add(worker)
        else:
            self.reports[worker] = msgspec.json.decode(line, type=Report)
            self._pending.discard(worker)

    def _check_interrupts(self) -> None:
        if self._interrupts and self._stopped_at is None:
            self._stopped_at = time.monotonic()
            for worker in self._pending:
                self._crew.order(worker, b"stop")
        if len(self._interrupts) > 1:
            raise Interrupted
        if self._stopped_at is not None and time.monotonic() > self._stopped_at + STOP_S:
            for worker in list(self._pending):
                self._give_up(worker, f"worker {worker} did not stop within {STOP_S:.0f} s")

    def _check_silence(self, now_ns: int, start_ns: int) -> None:
        for worker in list(self._pending):
            silent_s = (now_ns - max(start_ns, self._counters.state(worker).beat_ns)) / NS_PER_S
            if silent_s > SILENCE_S:
                self._give_up(worker, f"worker {worker} was silent for {silent_s:.0f} s and was given up")

    def _give_up(self, worker: int, why: str) -> None:
        self._crew.kill(worker)
        self._pending.discard(worker)
        self.lost.append(why)


def _silence(descriptors: Sequence[int]) -> None:
    """Send what is written there nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP gather in a list instead of ending the process.

    A terminal that is closed hangs up, often twice (the kernel and the shell both say so): that is one interrupt. What
    is written to it from then on would fail, so it goes nowhere. `nohup` is honoured.
    """
    found: list[int] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def note(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            found.append(number)
            return
        if number not in found:
            found.append(number)
            _silence(terminals)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            hung_up = number == signal.SIGHUP and number in found  # the second may come while results are written
            signal.signal(number, signal.SIG_IGN if hung_up else handler)
