"""Ground truth of a run: what each request waited for, and whom the engine served meanwhile.

Only the engine knows why a request stands still. An estimator of blocking that works from the outside can be compared
with what is recorded here; it must never read it.

For each request, up to its first token:

    wait_step_ns      arrived while a step was running, until the next decision
    wait_slot_ns      in the queue while the head lacked a slot (max_num_seqs)
    wait_budget_ns    ... while the step's tokens were used up by others
    wait_kv_ns        ... while the head's blocks were missing
    wait_preempted_ns ... during steps that preempted (such a step admits nobody)
    prefill_ns        admitted and not yet answered, its own work included
    own_ns            of all steps up to its first token, its own share of the work
    served_ns         the same for each tenant (order: `Truth.tenants`), from arrival to first token
    resume_wait_ns    after the first token: in the queue again, preempted

Waiting stands in the queue's order: whatever stops the head stops all behind it, so the head's reason counts for all.

A step's time is split over its rows by the step model: the linear layers by tokens, decode attention by context,
prefill attention by area, lm_head by rows; the fixed cost of a step by tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from replay.engine.request import EngineRequest, Scheduled, Step, Stop
from replay.engine.steptime import StepModel

CAUSES: tuple[Stop, ...] = ("seqs", "budget", "kv", "preempted", "chunk")
COLUMNS = (
    "wait_step_ns",
    "wait_slot_ns",
    "wait_budget_ns",
    "wait_kv_ns",
    "wait_preempted_ns",
    "prefill_ns",
    "own_ns",
    "resume_wait_ns",
)


class RequestTruth(NamedTuple):
    """One finished or aborted request; columns as the module says."""

    request: EngineRequest
    arrival_ns: float
    admitted_ns: float | None
    first_token_ns: float | None
    end_ns: float
    wait_step_ns: float
    wait_slot_ns: float
    wait_budget_ns: float
    wait_kv_ns: float
    wait_preempted_ns: float
    prefill_ns: float
    own_ns: float
    resume_wait_ns: float
    served_ns: tuple[float, ...]


class _Open:
    """What is known so far of an unfinished request."""

    __slots__ = (
        "admitted_ns",
        "arrival_ns",
        "first_ns",
        "own_ns",
        "queued_at",
        "resume_ns",
        "served_at",
        "served_ns",
        "step_ns",
        "waits",
    )

    def __init__(self, arrival_ns: float) -> None:
        self.arrival_ns = arrival_ns
        self.admitted_ns: float | None = None
        self.first_ns: float | None = None
        self.step_ns = 0.0
        self.own_ns = 0.0
        self.resume_ns = 0.0
        self.waits = [0.0] * len(CAUSES)
        self.queued_at: list[float] | None = None  # cumulative waits when it joined the queue
        self.served_at: list[float] | None = None  # cumulative service of each tenant when it arrived
        self.served_ns: tuple[float, ...] | None = None


class Truth:
    """Records one engine.

    Call `arrive` when a request is added, `step` after each `Scheduler.update`, `leave` for an abort. Times are ns on
    any one clock. Finished requests collect in `rows`.

    Args:
        model: splits a step's time over its rows.
        tenants: their order in `served_ns`; others are appended as they appear.
    """

    def __init__(self, model: StepModel, tenants: Iterable[str] = ()) -> None:
        self.model = model
        self.tenants: list[str] = list(tenants)
        self.rows: list[RequestTruth] = []
        self._open: dict[EngineRequest, _Open] = {}
        self._arrived: list[EngineRequest] = []  # not yet seen by a decision
        self._waited = [0.0] * len(CAUSES)
        self._served = [0.0] * len(self.tenants)
        self._latest: tuple[float, float, list[float], list[float]] = (0.0, 0.0, [], [])

    def arrive(self, request: EngineRequest, now_ns: float) -> None:
        """A request was added to the scheduler."""
        state = self._open[request] = _Open(now_ns)
        self._arrived.append(request)
        self._column(request.tenant)
        start_ns, end_ns, served, shares = self._latest
        if start_ns <= now_ns < end_ns:  # reported after that step
            self._catch(state, served, shares, start_ns, end_ns)

    def leave(self, request: EngineRequest, now_ns: float) -> None:
        """A request was aborted."""
        state = self._open.get(request)
        if state is not None:
            self._close(request, state, now_ns)

    def step(self, step: Step, start_ns: float, end_ns: float) -> None:
        """A step ran from `start_ns` to `end_ns` and was applied with `Scheduler.update`."""
        self._join_queue(start_ns)
        for request in step.preempted:
            if request in self._open:
                self._open[request].queued_at = list(self._waited)
        for row in step.scheduled:
            if row.kind != "running":
                self._admit(row, start_ns)
        elapsed = end_ns - start_ns
        shares = self._shares(step, elapsed)
        late = [request for request in self._arrived if self._open[request].arrival_ns < end_ns]
        for request in late:
            self._catch(self._open[request], self._served, shares, start_ns, end_ns)
        self._latest = (start_ns, end_ns, self._served, shares)
        self._served = [before + share for before, share in zip(self._served, shares, strict=True)]
        if step.stop in CAUSES:
            self._waited[CAUSES.index(step.stop)] += elapsed
        for request in step.emitted:
            state = self._open.get(request)
            if state is not None and state.first_ns is None:
                self._first_token(state, end_ns)
        for request in step.finished:
            state = self._open.get(request)
            if state is not None:
                self._close(request, state, end_ns)

    def _join_queue(self, start_ns: float) -> None:
        """Those that arrived by the time of this decision take part in it."""
        later = []
        for request in self._arrived:
            state = self._open.get(request)
            if state is None:
                continue
            if state.arrival_ns > start_ns:
                later.append(request)
                continue
            state.queued_at = list(self._waited)
            if state.served_at is None:
                state.served_at = list(self._served)
        self._arrived = later

    def _catch(self, state: _Open, served: list[float], shares: list[float], start_ns: float, end_ns: float) -> None:
        """A request that came in the middle of a step waits for its end and sees the rest of its service."""
        rest = (end_ns - max(state.arrival_ns, start_ns)) / (end_ns - start_ns)
        state.step_ns += end_ns - max(state.arrival_ns, start_ns)
        if state.served_at is None:
            state.served_at = [before + share * (1 - rest) for before, share in zip(served, shares, strict=False)]

    def _admit(self, row: Scheduled, start_ns: float) -> None:
        state = self._open.get(row.request)
        if state is None:
            return
        self._leave_queue(state)
        if state.admitted_ns is None:
            state.admitted_ns = start_ns

    def _leave_queue(self, state: _Open) -> None:
        if state.queued_at is None:
            return
        waits = [now - before for now, before in zip(self._waited, state.queued_at, strict=True)]
        state.queued_at = None
        if state.first_ns is None:
            state.waits = [before + more for before, more in zip(state.waits, waits, strict=True)]
        else:
            state.resume_ns += sum(waits)

    def _first_token(self, state: _Open, now_ns: float) -> None:
        self._leave_queue(state)
        state.first_ns = now_ns
        start = state.served_at or []
        start = [*start, *[0.0] * (len(self._served) - len(start))]
        state.served_ns = tuple(now - before for now, before in zip(self._served, start, strict=True))

    def _close(self, request: EngineRequest, state: _Open, now_ns: float) -> None:
        self._leave_queue(state)
        del self._open[request]
        seqs, budget, kv, preempted, chunk = state.waits
        first = state.first_ns
        waited = state.step_ns + sum(state.waits)
        prefill = max(0.0, first - state.arrival_ns - waited) if first is not None else 0.0
        self.rows.append(
            RequestTruth(
                request,
                arrival_ns=state.arrival_ns,
                admitted_ns=state.admitted_ns,
                first_token_ns=first,
                end_ns=now_ns,
                wait_step_ns=state.step_ns,
                wait_slot_ns=seqs,
                wait_budget_ns=budget + chunk,
                wait_kv_ns=kv,
                wait_preempted_ns=preempted,
                prefill_ns=prefill,
                own_ns=state.own_ns,
                resume_wait_ns=state.resume_ns,
                served_ns=state.served_ns or (),
            )
        )

    def _shares(self, step: Step, elapsed: float) -> list[float]:
        """The step's time split over the tenants; prefill rows also get their own part."""
        shares = [0.0] * len(self.tenants)
        if not step.tokens:
            self._grow(shares)
            return shares
        weigh = row_weights(self.model, step)
        total = sum(weigh) or 1.0
        for row, weight in zip(step.scheduled, weigh, strict=True):
            part = elapsed * weight / total
            column = self._column(row.request.tenant)
            self._grow(shares)
            shares[column] += part
            state = self._open.get(row.request)
            if state is not None and state.first_ns is None:
                state.own_ns += part
        return shares

    def _column(self, tenant: str) -> int:
        if tenant not in self.tenants:
            self.tenants.append(tenant)
            self._served.append(0.0)
        return self.tenants.index(tenant)

    def _grow(self, shares: list[float]) -> None:
        shares.extend([0.0] * (len(self.tenants) - len(shares)))


def row_weights(model: StepModel, step: Step) -> list[float]:
    """What each row of a step takes of its time, in ms, in the order of `step.scheduled`; together, all of it."""
    per_token, per_decode, per_context, per_sample = model.split_ms(step.tokens, step.decodes, step.samples)
    weights = []
    for row in step.scheduled:
        weight = per_token * row.tokens + per_sample * row.samples
        if row.tokens == 1 and row.computed >= row.request.prompt_tokens:
            weight += per_decode + per_context * (row.computed + 1)
        else:
            weight += model.a_ms * row.tokens * (row.computed + row.tokens / 2)
        weights.append(weight)
    return weights
