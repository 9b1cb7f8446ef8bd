"""Failures by cause: the same failure is one line with a count and one example, however often it happened."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from traces.record import FAILURES
from traces.units import NS_PER_S


class Cause(NamedTuple):
    """One way to fail. `at_s`: when its first case was sent, from the run's start."""

    outcome: str
    error: str
    n: int
    tenants: dict[str, int]
    request_id: str
    at_s: float | None

    @property
    def text(self) -> str:
        """``9 × http_error 503, first at 132.0 s (summary, request 0412)``."""
        known = self.outcome.split("_")
        what = " ".join([self.outcome, *(word for word in self.error.split() if word not in known)])
        when = "" if self.at_s is None else f" at {self.at_s:.1f} s"
        who = ", ".join(self.tenants)
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{self.n:,} × {what}, first{when} ({who}{request})"


def causes(outcomes: pa.Table) -> list[Cause]:
    """The failures of a run by outcome and error class, most frequent first; warm-up rows are left out."""
    names = set(outcomes.schema.names)
    failed = pc.is_in(outcomes.column("outcome").cast(pa.string()), pa.array(FAILURES))
    if "warmup" in names:
        failed = pc.and_(failed, pc.invert(pc.fill_null(outcomes.column("warmup"), False)))
    rows = outcomes.filter(failed)
    wanted = ("outcome", "error", "status", "tenant", "request_id", "sent_ns")
    columns = {name: rows.column(name).to_pylist() if name in names else [None] * rows.num_rows for name in wanted}
    groups: dict[tuple[str, str], list[int]] = {}
    for row, (outcome, error, status) in enumerate(
        zip(columns["outcome"], columns["error"], columns["status"], strict=True)
    ):
        groups.setdefault((outcome, error or (str(status) if status else "")), []).append(row)
    found = []
    for (outcome, error), members in groups.items():
        first = min(members, key=lambda row: (columns["sent_ns"][row] is None, columns["sent_ns"][row] or 0))
        sent_ns = columns["sent_ns"][first]
        found.append(
            Cause(
                outcome,
                error,
                len(members),
                dict(Counter(columns["tenant"][row] or "default" for row in members).most_common()),
                columns["request_id"][first] or "",
                None if sent_ns is None else sent_ns / NS_PER_S,
            )
        )
    return sorted(found, key=lambda cause: -cause.n)
