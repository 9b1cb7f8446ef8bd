"""What a reader must know before trusting the numbers of a run: warnings, found in its rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tenants import figures, quantiles
from tenants.measures import ABORT, OK, Columns, Rows
from tenants.sla import Rule

LOUD = "PRIORITY "  # how a warning begins that tags have no effect: shown in red
DRIFT_ROWS = 20  # least number on either side
DRIFT_RATIO = 1.5  # of the medians


def cautions(outcomes: pa.Table, rows: Rows, rules: Sequence[Rule]) -> list[str]:
    """What a reader must know to trust the numbers."""
    found = []
    get = Columns(outcomes.take(pa.array(rows.at)) if len(rows.at) < outcomes.num_rows else outcomes)
    ok = rows.outcome == OK
    several = get.numbers("n") > 1
    planned = get.numbers("planned_output_tokens")
    known = ok & ~np.isnan(planned) & ~np.isnan(rows.output_tokens) & ~several
    off = known & (planned != rows.output_tokens)
    if off.any():
        ratio = float(np.nansum(rows.output_tokens[known]) / max(1.0, np.nansum(planned[known])))
        found.append(
            f"output lengths not met: {int(off.sum()):,} of {int(known.sum()):,} answers differ from the plan "
            f"({ratio:.0%} of its tokens)"
        )
    if (several & ~np.isnan(rows.priority)).any():
        found.append("n > 1 with priority: the answers of one request are scheduled one by one; its TPOT is left out")
    unstreamed = ok & np.isnan(rows.ttft_ms) & get.flags("stream", default=False)
    if unstreamed.any():
        found.append(f"{int(unstreamed.sum()):,} answers came whole although a stream was asked for: no TTFT")
    for rule in rules:
        if rule.metric == "ttft" and rule.tenant in rows.names:
            mine = (rows.tenant == rows.names.index(rule.tenant)) & (rows.outcome == ABORT) & np.isnan(rows.ttft_ms)
            waited = int((mine & (rows.end_ms - rows.due_ms > rule.limit)).sum())
            if waited:
                found.append(
                    f"{rule.text}: {waited:,} clients gave up after the limit without a token; "
                    "they are censored, not counted as violations"
                )
    found += _drifts(rows)
    if rows.closed_loop:
        found.append(
            "closed loop: users wait for their answers, so a slow server is asked less; lateness means nothing"
        )
    return found


def _drifts(rows: Rows) -> list[str]:
    """Tenants whose median TTFT in the first fifth is not that of the rest: a cold start, or a load that grows.

    Said where the 95 % intervals of the two medians lie apart and the medians differ by half or more.
    """
    found = []
    seen = np.isfinite(rows.ttft_ms) & np.isfinite(rows.due_ms)
    if not seen.any():
        return []
    begin, end = float(rows.due_ms[seen].min()), float(rows.due_ms[seen].max())
    early = rows.due_ms < begin + (end - begin) / 5
    for code, name in enumerate(rows.names):
        mine = seen & (rows.tenant == code)
        first, rest = (quantiles.ordered(rows.ttft_ms[mine & part]) for part in (early, ~early))
        if min(len(first), len(rest)) < DRIFT_ROWS:
            continue
        halves = [(quantiles.quantile(part, 0.5), quantiles.interval(part, 0.5)) for part in (first, rest)]
        (median, one), (later, other) = halves
        assert one is not None
        assert other is not None
        apart = one.low > other.high or other.low > one.high
        if apart and max(median, later) >= DRIFT_RATIO * min(median, later):
            found.append(
                f"not stationary: {name} TTFT P50 is {figures.digits(median)} ms in the first fifth of the run and "
                f"{figures.digits(later)} ms after it (cold caches, or a load that changes)"
            )
    return found
