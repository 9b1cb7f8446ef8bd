"""Decode stalls from the outside: whose prefill held up streams that were already answering.

A prompt that is admitted shares its steps with every stream that decodes: their next token comes when the whole step is
done. So a gap between two chunks that is much longer than the stream's own, in a step that holds another request's
prefill, is that request's doing:

    own gap    a + b·n + κ·C, what the step's decoding rows explain (tenants/steps.py)
    excess     the step's duration − own gap, counted where the step takes over `LONG` times the own gap
    culprits   the requests whose prefill was placed in the step, by its work there

    stall matrix[victim][culprit]   seconds, summed over the victim's streams

A stall costs every stream of the step its excess, so a prefill of 0.2 s beside eight streams is 1.6 s of stall. The
estimator sees outcome columns alone. Not seen: answers whose chunks hold
several tokens or were not kept, and pauses of a preempted stream (it is absent from the steps, not slow in them).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tenants.blocking import Blocking, matrix_s
from tenants.steps import Floats, Ints, Steps

LONG = 1.5  # a step this many times as long as its decoding rows explain is a stall


class Stalls(NamedTuple):
    """Excess of gaps between chunks, by who waited and whose prefill it was."""

    tenants: tuple[str, ...]
    tenant: Ints  # (requests,) index into tenants
    by_tenant_ns: Floats  # (requests, tenants) of each stream
    unexplained_ns: Floats  # (requests,) long steps that hold nobody's prefill
    worst: tuple[Staller, ...]

    @property
    def matrix_s(self) -> Floats:
        """(tenants, tenants): victim × culprit, seconds."""
        return matrix_s(self.tenant, self.by_tenant_ns)


class Staller(NamedTuple):
    """One request whose prefill held up streams."""

    request: int  # row in the outcomes
    stalled_ns: float  # summed over the streams
    victims: int
    by_victim: tuple[tuple[str, float], ...]  # tenant of the streams, ns


def stalls(outcomes: pa.Table, blocked: Blocking, most: int = 10) -> Stalls | None:
    """Estimate whose prefill held up whose streams; None where no chunk times were kept.

    Args:
        outcomes: rows of one run against one engine, warm-up included.
        blocked: what `blocking` found in them: the engine's steps, and the tenants.
        most: single stallers to name.
    """
    if "chunk_ns" not in outcomes.schema.names or outcomes.column("chunk_ns").null_count == outcomes.num_rows:
        return None
    found = blocked.steps
    requests, tenants = len(blocked.tenant), len(blocked.tenants)
    number = len(found.end_ns)
    excess = np.where(found.end_ns - found.start_ns > LONG * found.decode_ns, found.spare_ns, 0.0)
    prefill, decode = np.flatnonzero(found.row_prefill), np.flatnonzero(~found.row_prefill)
    placed = np.bincount(found.row_step[prefill], weights=found.row_work[prefill], minlength=number)
    share = found.row_work[prefill] / np.maximum(placed[found.row_step[prefill]], 1e-9)
    cost = share * excess[found.row_step[prefill]]  # ns that one stream lost by this row
    step_tenant = np.zeros((number, tenants))
    np.add.at(step_tenant, (found.row_step[prefill], blocked.tenant[found.row_request[prefill]]), cost)
    by_tenant = np.zeros((requests, tenants))
    np.add.at(by_tenant, found.row_request[decode], step_tenant[found.row_step[decode]])
    lost = excess - step_tenant.sum(axis=1)
    unexplained: Floats = np.bincount(
        found.row_request[decode], weights=lost[found.row_step[decode]], minlength=requests
    ).astype(np.float64)
    streams = np.bincount(found.row_step[decode], minlength=number)
    total = np.bincount(found.row_request[prefill], weights=cost * streams[found.row_step[prefill]], minlength=requests)
    order = np.argsort(-total, kind="stable")[:most]
    worst = [_staller(int(row), found, prefill, cost, blocked) for row in order.tolist() if total[row] > 0]
    return Stalls(blocked.tenants, blocked.tenant, by_tenant, unexplained, tuple(worst))


def _staller(request: int, found: Steps, prefill: Ints, cost: Floats, blocked: Blocking) -> Staller:
    """The streams that decoded in the steps of this request's prefill, and what each tenant's lost."""
    lost = np.zeros(len(found.end_ns))
    mine = found.row_request[prefill] == request
    np.add.at(lost, found.row_step[prefill][mine], cost[mine])
    rows = np.flatnonzero(~found.row_prefill & (lost[found.row_step] > 0))
    streams = found.row_request[rows]
    by_tenant = np.bincount(blocked.tenant[streams], weights=lost[found.row_step[rows]], minlength=len(blocked.tenants))
    held = [(blocked.tenants[index], float(by_tenant[index])) for index in np.argsort(-by_tenant).tolist()]
    return Staller(
        request,
        float(by_tenant.sum()),
        len(np.unique(streams)),
        tuple((name, ns) for name, ns in held if ns > 0),
    )
