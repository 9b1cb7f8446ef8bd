"""What the reader of a run must know beside its numbers, one sentence each: of lengths, of workers, of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replay import preflight
from replay.options import SendOptions, span_text
from replay.plan import Plan
from replay.prompts import takes_ids
from replay.run import Result
from replay.vocabulary import Vocabulary
from tenants.dialects import Dialect
from traces.units import NS_PER_MS

MAX_LAG_MS = 10.0  # P99 of a worker's event loop lag beyond which its stamps are not believed,
MIN_LAGS = 100  # from so many samples on
WAITED = 0.1  # share of time without a core that is worth a word


def lengths(plan: Plan, dialect: Dialect, learnt: Vocabulary) -> list[str]:
    """How exact the prompts and the outputs can be here."""
    notes = []
    text = [kind for kind in preflight.kinds_of(plan) if not (learnt.ids and takes_ids(dialect.name, kind))]
    if text and not learnt.exact:
        how = (
            "words taken as one token each, for nothing could be asked"
            if learnt.source == "assumed"
            else f"words of {learnt.tokens_per_word:.2f} tokens on average"
        )
        notes.append(f"{', '.join(text)}: prompt lengths are approximate ({how})")
    if not dialect.forces_length:
        notes.append(f"{dialect.name}: output lengths cannot be forced, the trace's are a limit")
    return notes


def deviation(outcomes: Any) -> list[str]:
    """How far the prompt lengths that the server counted are from the plan's."""
    if not outcomes.num_rows or "input_tokens" not in outcomes.schema.names:
        return []
    off = pc.subtract(outcomes.column("input_tokens"), outcomes.column("planned_input_tokens")).drop_null()
    if isinstance(off, pa.ChunkedArray):
        off = off.combine_chunks()
    values = off.to_numpy()
    wrong = values[values != 0]
    if not len(wrong):
        return []
    mean, most = np.abs(wrong).mean(), np.abs(wrong).max()
    share = f"{len(wrong):,} of {len(values):,}"
    return [f"prompt lengths: {share} differ from the plan, by {mean:.1f} tokens on average, {most:,} at most"]


def of_workers(result: Result, send: SendOptions) -> list[str]:
    """What the workers have to say that a reader must know."""
    notes = []
    dropped = sum(report.dropped for report in result.reports)
    if dropped:
        notes.append(f"{dropped:,} requests were too late to be sent and dropped (--catch-up drop)")
    retries = sum(report.retries for report in result.reports)
    if retries:
        notes.append(f"{retries:,} further attempts were made (--retry {send.retry}): they add to the load")
    waited = max((report.waited_s / report.wall_s for report in result.reports if report.wall_s), default=0.0)
    if waited > WAITED:
        notes.append(f"a sender was ready and had no core {waited:.0%} of the time: other work on this machine took it")
    if any(report.drain_ended for report in result.reports):
        notes.append(f"the drain ended after {span_text(send.drain_ns)} with requests in flight: they are cut")
    return notes


def starved(result: Result, send: SendOptions) -> list[str]:
    """Workers whose event loop itself was late all the time: their stamps say nothing about the server."""
    limit_ms = max(MAX_LAG_MS, (send.max_lateness_ns or 0) / NS_PER_MS)
    return [
        f"client-bound: worker {report.worker} was late to look at its sockets, by {report.lag_ms_p99:,.0f} ms (P99), "
        f"and waited for a core {report.waited_s / report.wall_s:.0%} of the time"
        for report in result.reports
        if report.lags >= MIN_LAGS and report.lag_ms_p99 > limit_ms
    ]
