"""Head-of-line blocking from the outside: who kept whom waiting, for how long.

A request's wait for its first token, from when it was due, divides into

    lateness + held            the replayer's own
    service                    what it takes alone: S(its length), tenants/alone.py
    blocked                    the rest: TTFT from sent − S, not below 0
    = Σ by tenant + unexplained

While a request waits the engine serves others. Each stretch of the wait is split over the tenants served meanwhile by
their share of the work done in the engine's steps (tenants/steps.py), own tenant included, the request's own work left
out. Where that comes to more than the request was blocked (a request shares steps with others and would have paid their
fixed cost alone, too), it is scaled down to it; where to less, the difference is shown as unexplained.

    blocking matrix[victim][culprit]   seconds, summed over the victim's requests
    inversion time                     the part due to less urgent tenants (a larger priority rank)

The estimator sees outcome columns alone. Error against the embedded engine's ground truth: docs/blocking.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tenants.alone import Alone, learn
from tenants.steps import Floats, Ints, Seen, Steps, emitting_steps, seen, steps

UNSET_RANK = np.iinfo(np.int32).max  # a request without a priority is less urgent than any that has one


def matrix_s(tenant: Ints, by_tenant_ns: Floats) -> Floats:
    """Victim × culprit, shape (tenants, tenants), seconds: the rows of all requests of a victim, summed.

    Args:
        tenant: (requests,) whose each is.
        by_tenant_ns: (requests, tenants) what each lost by whom.
    """
    found = np.zeros((by_tenant_ns.shape[1], by_tenant_ns.shape[1]))
    np.add.at(found, tenant, by_tenant_ns)
    return found / 1e9


class Blocking(NamedTuple):
    """Per request, ns; rows as in the outcomes. Requests without a first token have 0 everywhere."""

    tenants: tuple[str, ...]
    tenant: Ints  # (requests,) index into tenants
    alone: Alone | None  # None: nothing could be learnt, service counts as 0
    service_ns: Floats
    blocked_ns: Floats
    by_tenant_ns: Floats  # (requests, tenants)
    unexplained_ns: Floats
    inversion_ns: Floats
    source: str  # what the division rests on, for people
    view: Seen
    steps: Steps

    @property
    def matrix_s(self) -> Floats:
        """(tenants, tenants): victim × culprit, seconds."""
        return matrix_s(self.tenant, self.by_tenant_ns)


class Blocker(NamedTuple):
    """One request that kept others waiting."""

    request: int  # row in the outcomes
    blocked_ns: float  # summed over the requests that waited
    victims: int
    by_victim: tuple[tuple[str, float], ...]  # tenant of those who waited, ns


def blocking(
    outcomes: pa.Table,
    alone: Alone | None = None,
    *,
    ranks: dict[str, int] | None = None,
    engine_times: bool = False,
) -> Blocking:
    """Estimate who blocked whom in a run.

    Args:
        outcomes: rows of one run against one engine, warm-up included (its work blocks, too).
        alone: S(L) from another run, such as the `alone` arm; learnt from this run when not given.
        ranks: tenant → priority, for runs whose requests carry none (an untagged arm).
        engine_times: where the engine reports how long a request queued (`queue_ns`), it was blocked at least so long,
            and where how long its prefill took (`prefill_ns`), its own service is no more; `source` says what was used.
    """
    view = seen(outcomes)
    names, tenant = _tenants(outcomes)
    emitting = emitting_steps(view)
    alone = alone or learn(emitting)
    service = alone.ns(view.input_tokens) if alone else np.zeros(len(tenant))
    wait = np.where(view.answered, view.first_ns - view.sent_ns, 0).astype(np.float64)
    queued = _reported(outcomes, "queue_ns", 0.0) if engine_times else None
    prefill = _reported(outcomes, "prefill_ns", np.inf) if engine_times else None
    if prefill is not None:
        service = np.minimum(service, prefill)
    blocked = np.maximum(wait - service, 0.0)
    if queued is not None:
        blocked = np.minimum(np.maximum(blocked, queued), wait)
    found = steps(emitting, service)
    served = _served(view, found, tenant, len(names))
    total = served.sum(axis=1)
    by_tenant = served * np.minimum(1.0, blocked / np.maximum(total, 1.0))[:, None]
    rank = _ranks(outcomes) if ranks is None else np.array([ranks.get(name, UNSET_RANK) for name in names])[tenant]
    return Blocking(
        tenants=names,
        tenant=tenant,
        alone=alone,
        service_ns=np.minimum(service, wait),
        blocked_ns=blocked,
        by_tenant_ns=by_tenant,
        unexplained_ns=blocked - by_tenant.sum(axis=1),
        inversion_ns=_inversion(by_tenant, tenant, rank, len(names)),
        source=_source([word for word, times in (("queue", queued), ("prefill", prefill)) if times is not None]),
        view=view,
        steps=found,
    )


def blockers(result: Blocking, most: int = 10) -> list[Blocker]:
    """The single requests that kept others waiting longest, the worst first."""
    view, found = result.view, result.steps
    waiting = _waiting(view, found)
    cost = found.row_work * np.maximum(waiting[found.row_step] - found.row_prefill, 0)
    total = np.bincount(found.row_request, weights=cost, minlength=len(view.sent_ns))
    worst = np.argsort(-total, kind="stable")[:most]
    return [
        Blocker(int(row), float(total[row]), *_victims(view, found, result, int(row)))
        for row in worst.tolist()
        if total[row] > 0
    ]


def _served(view: Seen, found: Steps, tenant: Ints, tenants: int) -> Floats:
    """(requests, tenants): work of others, by tenant, between a request's sending and its first token."""
    number = len(found.end_ns)
    served = np.zeros((len(tenant), tenants))
    if number == 0:
        return served
    work = np.zeros((number, tenants))
    np.add.at(work, (found.row_step, tenant[found.row_request]), found.row_work)
    before = np.concatenate([np.zeros((1, tenants)), np.cumsum(work, axis=0)])

    def until(times: Ints) -> Floats:
        at = np.minimum(np.searchsorted(found.end_ns, times), number - 1)
        length = np.maximum(found.end_ns[at] - found.start_ns[at], 1)
        share = np.clip((times - found.start_ns[at]) / length, 0.0, 1.0)
        total: Floats = before[at] + work[at] * share[:, None]
        return total

    answered = view.answered
    served[answered] = until(view.first_ns[answered]) - until(view.sent_ns[answered])
    own = np.bincount(
        found.row_request[found.row_prefill], weights=found.row_work[found.row_prefill], minlength=len(tenant)
    )
    served[np.arange(len(tenant)), tenant] -= own
    return np.maximum(served, 0.0)


def _waiting(view: Seen, found: Steps) -> Floats:
    """(steps,) requests that wait for their first token, averaged over each step."""
    middle = (found.start_ns + found.end_ns) // 2
    answered = view.answered
    came = np.searchsorted(np.sort(view.sent_ns[answered]), middle, side="right")
    gone = np.searchsorted(np.sort(view.first_ns[answered]), middle, side="right")
    return (came - gone).astype(np.float64)


def _victims(view: Seen, found: Steps, result: Blocking, request: int) -> tuple[int, tuple[tuple[str, float], ...]]:
    """How many requests waited while this one was served, and for how long, by their tenants."""
    at = found.row_request == request
    steps_of, work = found.row_step[at], found.row_work[at]
    if len(steps_of) == 0:
        return 0, ()
    begin, end = found.start_ns[steps_of], found.end_ns[steps_of]
    waits = np.flatnonzero(view.answered & (view.sent_ns < end.max()) & (view.first_ns > begin.min()))
    waits = waits[waits != request]
    held: dict[str, float] = {}
    for row in waits.tolist():
        overlap = np.minimum(end, view.first_ns[row]) - np.maximum(begin, view.sent_ns[row])
        share = np.clip(overlap / np.maximum(end - begin, 1), 0.0, 1.0)
        name = result.tenants[int(result.tenant[row])]
        held[name] = held.get(name, 0.0) + float((share * work).sum())
    return len(waits), tuple(sorted(held.items(), key=lambda pair: -pair[1]))


def _reported(outcomes: pa.Table, column: str, unknown: float) -> Floats | None:
    """Times as the engine reports them, ns, `unknown` in rows without; None where it reports none."""
    if column not in outcomes.schema.names or outcomes.column(column).null_count == outcomes.num_rows:
        return None
    found: Floats = outcomes.column(column).cast(pa.float64()).fill_null(unknown).to_numpy()
    return found


def _source(told: list[str]) -> str:
    if not told:
        return "times seen from outside"
    return f"{' and '.join(told)} times of the engine, its steps seen from outside"


def _tenants(outcomes: pa.Table) -> tuple[tuple[str, ...], Ints]:
    if "tenant" not in outcomes.schema.names:
        return ("default",), np.zeros(outcomes.num_rows, dtype=np.int64)
    words = np.array(outcomes.column("tenant").cast(pa.string()).fill_null("default").to_pylist(), dtype=object)
    names, index = np.unique(words.astype(str), return_inverse=True)
    return tuple(names.tolist()), index.astype(np.int64)


def _ranks(outcomes: pa.Table) -> Ints:
    if "priority" not in outcomes.schema.names:
        return np.full(outcomes.num_rows, UNSET_RANK, dtype=np.int64)
    ranks: Ints = outcomes.column("priority").cast(pa.int64()).fill_null(UNSET_RANK).to_numpy()
    return ranks


def _inversion(by_tenant: Floats, tenant: Ints, rank: Ints, tenants: int) -> Floats:
    """(requests,) blocked by tenants of a larger rank. A tenant's rank is that of most of its requests."""
    usual = np.array([_most(rank[tenant == index]) for index in range(tenants)])
    less_urgent = usual[None, :] > rank[:, None]
    found: Floats = (by_tenant * less_urgent).sum(axis=1)
    return found


def _most(values: Ints) -> int:
    if len(values) == 0:
        return int(UNSET_RANK)
    found, counts = np.unique(values, return_counts=True)
    return int(found[np.argmax(counts)])
