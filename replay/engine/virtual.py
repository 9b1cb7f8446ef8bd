"""A serving engine on a virtual clock: arrivals and lengths in, the time of every token out.

    workload = Workload(arrival_ns=..., input_tokens=..., output_tokens=..., tenant=codes, tenants=("risk", "summary"))
    result = simulate(workload, SchedulerConfig(scheduling_policy="priority"), load_profile().model)
    result.first_token_ns, result.last_token_ns, result.wait_slot_ns, result.served_ns, result.chunk_ns(i), ...

Decisions are those of `scheduler.py`, step times those of `steptime.py` in whole picoseconds, so that stepping and
leaping agree to the bit. Where a request's arrival depends on the run itself (a turn after its predecessor's end, a
tenant's cap on
what is in flight), the simulation follows; everything else is an open loop.

With several replicas each has its own scheduler and clock, and a routing rule sends every request to one as it arrives:
`round-robin`, `least-loaded` (fewest unfinished requests, ties to the lower number), `session` (all turns of a session
to one).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from replay.engine.config import SchedulerConfig
from replay.engine.leap import LeapReplica, is_closed_form
from replay.engine.ledger import ABORT, CAUSES, PS_PER_NS, REFUSED, UNFINISHED, Ints, Ledger, column, rounded_ns
from replay.engine.replica import FOREVER, Asked, StepReplica
from replay.engine.steptime import PicoClock, StepModel

ROUTINGS = ("round-robin", "least-loaded", "session")
FINISHES = ("unfinished", "length", "stop", "abort", "refused")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of the engine, as arrays of one length n.

    Attributes:
        arrival_ns: when each request is due; any order. A later turn's own time counts only without `after`.
        input_tokens, output_tokens: lengths, both at least 1; outputs end at max_model_len.
        tenant, tenants: code of each request's tenant, and the names.
        priority: rank, smaller is more urgent.
        session: any code; routing by session keeps equal codes together.
        after, think_ns: index of the former turn (-1: none): due at its end plus the think time; where that is -1, at
            its own arrival time, but not before that end.
        abort_ns: the client gives up this long after sending (-1: never).
        prefixes, prefix_block_size: chained hashes of the prompt's blocks, as traces keep them.
        caps: tenant name → most requests it may have in flight; more are held back.
    """

    arrival_ns: Ints
    input_tokens: Ints
    output_tokens: Ints
    tenant: npt.NDArray[np.integer] | None = None
    tenants: tuple[str, ...] = ("default",)
    priority: npt.NDArray[np.integer] | None = None
    session: npt.NDArray[np.integer] | None = None
    after: Ints | None = None
    think_ns: Ints | None = None
    abort_ns: Ints | None = None
    prefixes: Sequence[Sequence[int] | None] | None = None
    prefix_block_size: int = 16
    caps: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_ns)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times of every request, in ns on the workload's clock; -1 where it did not come.

    Attributes:
        due_ns, sent_ns: when it should have been and was offered (later under a cap).
        admitted_ns, first_token_ns, last_token_ns, end_ns: what became of it.
        output_tokens: tokens it got; finish: code into `FINISHES`.
        wait_*_ns, own_ns, resume_wait_ns, served_ns: ground truth, see truth.py; served_ns has a row for each tenant.
        steps, busy_ns: of each replica.
        livelocks: how often an engine was given up because its requests only took each other's blocks in turn.
        handovers: how often a closed-form replica gave way to stepping.
    """

    due_ns: Ints
    sent_ns: Ints
    admitted_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    end_ns: Ints
    output_tokens: Ints
    cached_tokens: Ints
    preemptions: Ints
    finish: Ints
    replica: Ints
    wait_step_ns: Ints
    wait_slot_ns: Ints
    wait_budget_ns: Ints
    wait_kv_ns: Ints
    wait_preempted_ns: Ints
    resume_wait_ns: Ints
    own_ns: Ints
    served_ns: Ints
    tenants: tuple[str, ...]
    steps: tuple[int, ...]
    busy_ns: tuple[int, ...]
    livelocks: int
    handovers: int
    ledger: Ledger
    replicas: tuple[StepReplica, ...]

    @property
    def prefill_ns(self) -> Ints:
        """From admission to the first token, other waits left out; 0 without a first token."""
        waits = self.wait_step_ns + self.wait_slot_ns + self.wait_budget_ns + self.wait_kv_ns + self.wait_preempted_ns
        return np.where(self.first_token_ns < 0, 0, np.maximum(0, self.first_token_ns - self.sent_ns - waits))

    def chunk_ns(self, request: int) -> Ints:
        """The time of each token of one request."""
        replica = self.replica[request]
        if replica < 0:
            return np.empty(0, dtype=np.int64)
        return self.ledger.chunk_ns(self.replicas[replica].timeline, request)


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    model: StepModel,
    *,
    replicas: int = 1,
    routing: str = "round-robin",
    stepwise: bool = False,
) -> Result:
    """Play a workload on simulated engines.

    Args:
        workload: what is asked.
        config: the engine's settings, the same for each replica.
        model: the step times.
        replicas: how many engines.
        routing: one of `ROUTINGS`.
        stepwise: take every step one by one, for comparison.

    Raises:
        ValueError: lengths below 1, a prompt that does not fit max_model_len, an unknown routing rule or tenant.
    """
    _check(workload, config, replicas, routing)
    simulation = _Simulation(workload, config, model, replicas=replicas, routing=routing, stepwise=stepwise)
    simulation.run()
    return simulation.result()


def _check(workload: Workload, config: SchedulerConfig, replicas: int, routing: str) -> None:
    size = len(workload)
    if routing not in ROUTINGS:
        raise ValueError(f"unknown routing {routing!r}: one of {', '.join(ROUTINGS)}")
    if replicas < 1:
        raise ValueError("at least one replica is needed")
    for name in ("input_tokens", "output_tokens"):
        values = getattr(workload, name)
        if len(values) != size or (size and values.min() < 1):
            raise ValueError(f"{name}: every request needs at least one token")
    if size and workload.input_tokens.max() >= config.max_model_len:
        row = int(np.argmax(workload.input_tokens))
        longest = int(workload.input_tokens[row])
        raise ValueError(f"request {row}: prompt of {longest} tokens does not fit max_model_len {config.max_model_len}")
    unknown = set(workload.caps) - set(workload.tenants)
    if unknown:
        raise ValueError(f"cap for unknown tenant {', '.join(sorted(unknown))}")


class _Simulation:
    """The world around the replicas: who is due when, who is held back, who gives up, who goes where."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        model: StepModel,
        *,
        replicas: int,
        routing: str,
        stepwise: bool,
    ) -> None:
        size = len(workload)
        self.workload = workload
        self.config = config
        self.routing = routing
        zeros = np.zeros(size, dtype=np.int64)
        outputs = np.minimum(workload.output_tokens, config.max_model_len - workload.input_tokens)
        self.asked = Asked(
            inputs=workload.input_tokens.tolist(),
            outputs=outputs.tolist(),
            priority=(zeros if workload.priority is None else workload.priority).tolist(),
            tenant=(zeros if workload.tenant is None else workload.tenant).tolist(),
            tenants=workload.tenants,
            prefixes=None if workload.prefixes is None else [None if p is None else list(p) for p in workload.prefixes],
            prefix_block_size=workload.prefix_block_size,
            arrival_ps=[-1] * size,
        )
        self.ledger = Ledger(size, len(workload.tenants))
        clock = PicoClock(model)
        if is_closed_form(config, self.asked) and not stepwise:
            made: list[StepReplica] = [
                LeapReplica(config, clock, self.asked, self.ledger, number=number) for number in range(replicas)
            ]
        else:
            made = [
                StepReplica(config, clock, self.asked, self.ledger, number=number, skip=not stepwise)
                for number in range(replicas)
            ]
        self.replicas = made
        self.due_ps: list[int] = [-1] * size
        self._followers: dict[int, int] = {}
        self._aborts: list[tuple[int, int]] = []
        self._events: list[tuple[int, int]] = []  # arrivals to come: (time, request)
        self._ends: list[tuple[int, int]] = []  # finished requests that something may depend on
        self._in_flight: dict[int, int] = {}
        self._held: dict[int, deque[int]] = {}
        self._caps = {workload.tenants.index(name): cap for name, cap in workload.caps.items()}
        self._next_replica = 0
        self._is_linked = workload.after is not None or bool(self._caps)
        self._is_open = not self._is_linked and workload.abort_ns is None

    def run(self) -> None:
        """Offer every request at its time and let the replicas run to the end."""
        workload = self.workload
        order = np.argsort(workload.arrival_ns, kind="stable")
        if workload.after is not None:
            order = order[workload.after[order] < 0]
            followers = np.flatnonzero(workload.after >= 0)
            self._followers = dict(zip(workload.after[followers].tolist(), followers.tolist(), strict=True))
        times = (workload.arrival_ns[order] * PS_PER_NS).tolist()
        if self._is_open and (len(self.replicas) == 1 or self.routing == "round-robin"):
            self._run_open(order.tolist(), times)
            return
        self._events = list(zip(times, order.tolist(), strict=True))
        heapify(self._events)
        self._run_events()

    def _run_open(self, order: list[int], times: list[int]) -> None:
        """Arrivals that depend on nothing: each replica plays its own part alone."""
        count = len(self.replicas)
        for number, replica in enumerate(self.replicas):
            add, run = replica.add, replica.run
            due = self.due_ps
            limits = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
            for index, at in zip(order[number::count], times[number::count], strict=True):
                if replica.now_ps < at:
                    run(at)
                due[index] = at
                if limits == (None, None):
                    add(index, at)
                else:
                    self._offer(replica, index, at)
            run(FOREVER)

    def _run_events(self) -> None:
        """Take arrivals, give-ups and ends in the order of time, the replicas in between."""
        events, aborts, ends = self._events, self._aborts, self._ends
        while True:
            at = min(queue[0][0] if queue else FOREVER for queue in (events, aborts, ends))
            if self._advance(at):
                continue
            if at == FOREVER:
                return
            while ends and ends[0][0] <= at:
                end_ps, index = heappop(ends)
                self._ended(index, end_ps)
            while aborts and aborts[0][0] <= at:
                self._give_up(heappop(aborts)[1])
            while events and events[0][0] <= at:
                due, index = heappop(events)
                self.due_ps[index] = due
                self._release(index, due)

    def _advance(self, until_ps: int) -> bool:
        """Run the replicas up to `until_ps`; True when some may still have decisions before it.

        Where arrivals depend on ends, a replica must not run past an end that another has yet to find: then the one
        that is furthest behind takes one step at a time.
        """
        if not self._is_linked:
            for replica in self.replicas:
                replica.run(until_ps)
                replica.finished.clear()
            return False
        behind = [replica for replica in self.replicas if replica.unfinished and replica.now_ps < until_ps]
        if not behind:
            return False
        for replica in sorted(behind, key=lambda candidate: candidate.now_ps):
            before = replica.moves
            replica.run(until_ps if len(self.replicas) == 1 else replica.now_ps + 1, stop_at_finish=True)
            for index in replica.finished:
                heappush(self._ends, (self.ledger.end_ps[index], index))
            replica.finished.clear()
            if replica.moves > before:
                return True
        return False  # all of them stand still until someone comes or goes

    def _ended(self, index: int, end_ps: int) -> None:
        follower = self._followers.pop(index, None)
        if follower is not None:
            think_ns = 0 if self.workload.think_ns is None else int(self.workload.think_ns[follower])
            own_ps = int(self.workload.arrival_ns[follower]) * PS_PER_NS
            due_ps = end_ps + think_ns * PS_PER_NS if think_ns >= 0 else max(own_ps, end_ps)
            heappush(self._events, (due_ps, follower))
        tenant = self.asked.tenant[index]
        if tenant not in self._caps:
            return
        self._in_flight[tenant] -= 1
        held = self._held.get(tenant)
        if held:
            self._send(held.popleft(), end_ps)

    def _release(self, index: int, at_ps: int) -> None:
        """A request is due: send it, or hold it while its tenant has as many in flight as it may."""
        tenant = self.asked.tenant[index]
        if tenant in self._caps and self._in_flight.get(tenant, 0) >= self._caps[tenant]:
            self._held.setdefault(tenant, deque()).append(index)
            return
        self._send(index, at_ps)

    def _send(self, index: int, at_ps: int) -> None:
        tenant = self.asked.tenant[index]
        if tenant in self._caps:
            self._in_flight[tenant] = self._in_flight.get(tenant, 0) + 1
        if self.workload.abort_ns is not None and self.workload.abort_ns[index] >= 0:
            heappush(self._aborts, (at_ps + int(self.workload.abort_ns[index]) * PS_PER_NS, index))
        self._offer(self._route(index), index, at_ps)

    def _route(self, index: int) -> StepReplica:
        if len(self.replicas) == 1:
            return self.replicas[0]
        if self.routing == "least-loaded":
            return min(self.replicas, key=lambda replica: (replica.unfinished, replica.number))
        if self.routing == "session" and self.workload.session is not None:
            return self.replicas[int(self.workload.session[index]) % len(self.replicas)]
        self._next_replica += 1
        return self.replicas[(self._next_replica - 1) % len(self.replicas)]

    def _offer(self, replica: StepReplica, index: int, at_ps: int) -> None:
        """Hand a request to a replica, whose full queue may turn it (or one that waits) away."""
        refused = replica.refuse(index, at_ps)
        if refused is not None:
            self.asked.arrival_ps[refused] = at_ps if refused == index else self.asked.arrival_ps[refused]
            self.ledger.finish[refused] = REFUSED
            self.ledger.end_ps[refused] = at_ps
            self.ledger.replica[refused] = replica.number
            if self._is_linked:
                heappush(self._ends, (at_ps, refused))
        if refused != index:
            replica.add(index, at_ps)

    def _give_up(self, index: int) -> None:
        number = self.ledger.replica[index]
        if number >= 0 and self.replicas[number].abort(index) and self._is_linked:
            heappush(self._ends, (self.ledger.end_ps[index], index))

    def result(self) -> Result:
        """The ledger's columns as arrays, in ns."""
        ledger = self.ledger

        def ns(values: npt.ArrayLike) -> Ints:
            return rounded_ns(np.asarray(values, dtype=np.int64))

        waits = dict(zip(CAUSES, (ns(column(cause)) for cause in ledger.wait_ps), strict=True))
        return Result(
            due_ns=ns(self.due_ps),
            sent_ns=ns(self.asked.arrival_ps),
            admitted_ns=ns(column(ledger.admitted_ps)),
            first_token_ns=ns(column(ledger.first_ps)),
            last_token_ns=ns(column(ledger.last_ps)),
            end_ns=ns(column(ledger.end_ps)),
            output_tokens=column(ledger.output_tokens),
            cached_tokens=column(ledger.cached_tokens),
            preemptions=column(ledger.preemptions),
            finish=column(ledger.finish),
            replica=column(ledger.replica),
            wait_step_ns=ns(column(ledger.wait_step_ps)),
            wait_slot_ns=waits["seqs"],
            wait_budget_ns=waits["budget"] + waits["chunk"],
            wait_kv_ns=waits["kv"],
            wait_preempted_ns=waits["preempted"],
            resume_wait_ns=ns(column(ledger.resume_wait_ps)),
            own_ns=ns(column(ledger.own_ps)),
            served_ns=np.stack([ns(column(served)) for served in ledger.served_ps]),
            tenants=self.workload.tenants,
            steps=tuple(replica.steps for replica in self.replicas),
            busy_ns=tuple(replica.busy_ps // PS_PER_NS for replica in self.replicas),
            livelocks=sum(replica.livelocks for replica in self.replicas),
            handovers=sum(getattr(replica, "handovers", 0) for replica in self.replicas),
            ledger=ledger,
            replicas=tuple(self.replicas),
        )


__all__ = ["ABORT", "FINISHES", "REFUSED", "ROUTINGS", "UNFINISHED", "Result", "Workload", "simulate"]
