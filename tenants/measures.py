"""The measured rows of a run as arrays of times. Pure; no clock, no file.

Every time counts from the moment a request was *due* (what the user felt), the same from the moment it was *sent*
beside it; in a closed loop nothing is due and both are the same. In ms, with S = sent, D = due (S in a closed loop):

    TTFT = S + first token − D        TPOT = (last token − first token) / (streamed tokens − tokens of the first chunk)
    E2E  = S + end − D                held = released − D            lateness = S − released

A failed request is +∞ in each, so that no percentile improves by failing; the same for one that was never sent, unless
the run was interrupted. What did not happen is left out: the first token of an answer that was not streamed, a client
abort or a cut before it (censored), the TPOT of a single token. Streamed tokens are the output tokens without
reasoning that was hidden (`reasoning_tokens` although no reasoning was streamed).

The gap between two content chunks is an inter-token latency (ITL) only where each chunk is one token; else it is
inter-chunk latency and called so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tenants.tenant import DEFAULT
from traces.errors import TraceError
from traces.record import FAILURES, OUTCOMES
from traces.units import NS_PER_MS

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

OK, ABORT, CUT, UNSENT = (OUTCOMES.index(name) for name in ("ok", "client_abort", "cut", "unsent"))
FAILED = [OUTCOMES.index(name) for name in FAILURES]


class Rows(NamedTuple):
    """The measured rows (no warm-up) of a run as arrays; times in ms, +∞ = failed, NaN = did not happen."""

    names: list[str]
    tenant: NDArray[np.int64]  # index into names
    priority: Floats  # NaN = unset
    outcome: NDArray[np.int64]  # index into OUTCOMES
    due_ms: Floats  # from the run's start; when sent, in a closed loop
    sent_ms: Floats
    end_ms: Floats  # from the run's start
    ttft_ms: Floats
    ttft_sent_ms: Floats
    ttft_visible_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    held_ms: Floats
    late_ms: Floats
    connect_ms: Floats
    output_tokens: Floats
    closed_loop: bool
    at: NDArray[np.int64]  # row in the outcome table


def rows_of(outcomes: pa.Table, *, interrupted: bool = False) -> Rows:
    """Take the measured rows apart.

    Args:
        outcomes: a run's outcome table; null columns may be absent.
        interrupted: unsent rows are left out of every time instead of being +∞.

    Raises:
        TraceError: the table has no `outcome` on some row, so it is no result of a run.
    """
    get = Columns(outcomes)
    warm = get.flags("warmup", default=False)
    index = np.flatnonzero(~warm)
    outcome = get.codes("outcome", list(OUTCOMES))
    if len(outcome) and int(outcome.min()) < 0:
        raise TraceError("these are not the outcomes of a run: a row has no outcome (replay a trace to get some)")
    names, tenant = get.words("tenant", DEFAULT)
    due, sent = get.numbers("due_ns"), get.numbers("sent_ns")
    closed_loop = bool(len(index)) and bool(np.isnan(due[index]).all()) and not bool(np.isnan(sent[index]).all())
    start = np.where(np.isnan(due), sent, due)
    released = np.where(np.isnan(get.numbers("released_ns")), due, get.numbers("released_ns"))
    was_sent = ~np.isnan(sent)

    failed = np.isin(outcome, FAILED) | ((outcome == UNSENT) & (not interrupted))
    streamed = get.flags("stream", default=True) & ~np.isin(get.codes("endpoint", ["embeddings", "rerank"]), [0, 1])
    first, end = get.numbers("first_token_ns"), get.numbers("end_ns")

    def felt(offset: Floats, origin: Floats, where: Mask) -> Floats:
        # whole ns are exact up to 104 days: equal waits stay equal, whenever in the run they were
        return np.where(where & failed, np.inf, np.where(where, (sent + offset - origin) / NS_PER_MS, np.nan))

    complete = (outcome == OK) | failed
    values = {
        "priority": get.numbers("priority"),
        "outcome": outcome,
        "tenant": tenant,
        "due_ms": start / NS_PER_MS,
        "sent_ms": sent / NS_PER_MS,
        "end_ms": (sent + end) / NS_PER_MS,
        "ttft_ms": felt(first, start, streamed),
        "ttft_sent_ms": felt(first, sent, streamed),
        "ttft_visible_ms": felt(get.numbers("first_visible_ns"), start, streamed),
        "tpot_ms": np.where(streamed & failed, np.inf, np.where(streamed, _tpot_ms(get), np.nan)),
        "e2e_ms": felt(end, start, complete),
        "held_ms": np.where(was_sent, (released - due) / NS_PER_MS, np.nan),
        "late_ms": np.where(was_sent & ~np.isnan(due), (sent - released) / NS_PER_MS, np.nan),
        "connect_ms": get.ms("connect_ns"),
        "output_tokens": get.numbers("output_tokens"),
    }
    taken = {name: array[index] for name, array in values.items()}
    return Rows(names=names, closed_loop=closed_loop, at=index, **taken)


def _tpot_ms(get: Columns) -> Floats:
    """Time per output token of each answer; NaN where first and last token coincide or nothing is left to divide by."""
    first, last = get.numbers("first_token_ns"), get.numbers("last_token_ns")
    left = streamed_tokens(get) - get.first_chunk_tokens()
    several = get.numbers("n") > 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = (last - first) / NS_PER_MS / left
    usable = (left > 0) & (last > first) & ~several
    return np.where(usable, tpot, np.nan)


def streamed_tokens(get: Columns) -> Floats:
    """Output tokens without those of reasoning that the server kept to itself."""
    reasoning = np.nan_to_num(get.numbers("reasoning_tokens"))
    none_streamed = get.ms("first_visible_ns") == get.ms("first_token_ns")
    return get.numbers("output_tokens") - np.where(none_streamed, reasoning, 0.0)


class Columns:
    """Columns of an outcome table as numpy arrays; an absent column is all null."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.present = set(table.schema.names)

    def numbers(self, name: str) -> Floats:
        """Numbers, NaN for null."""
        if name not in self.present:
            return np.full(self.table.num_rows, np.nan)
        column = self.table.column(name).cast(pa.float64(), safe=False)
        values: Floats = pc.fill_null(column, math.nan).to_numpy()
        return values

    def ms(self, name: str) -> Floats:
        """A column of nanoseconds in ms, NaN for null."""
        return self.numbers(name) / NS_PER_MS

    def flags(self, name: str, *, default: bool) -> Mask:
        """Flags, `default` for null."""
        if name not in self.present:
            return np.full(self.table.num_rows, default)
        values: Mask = pc.fill_null(self.table.column(name), default).to_numpy()
        return values

    def words(self, name: str, default: str) -> tuple[list[str], NDArray[np.int64]]:
        """Distinct values and each row's index into them."""
        rows = self.table.num_rows
        if name not in self.present:
            return ([default] if rows else []), np.zeros(rows, np.int64)
        column = pc.fill_null(self.table.column(name).cast(pa.string()), default)
        encoded = column.combine_chunks().dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)

    def codes(self, name: str, allowed: list[str]) -> NDArray[np.int64]:
        """Each row's index into `allowed`, −1 for null or another word."""
        if name not in self.present:
            return np.full(self.table.num_rows, -1, np.int64)
        found, index = self.words(name, "")
        place = np.array([allowed.index(word) if word in allowed else -1 for word in found], np.int64)
        return place[index] if len(place) else index

    def first_chunk_tokens(self) -> Floats:
        """Tokens of the first chunk, 1 where the stream did not tell."""
        if "chunk_tokens" not in self.present or self.table.column("chunk_tokens").null_count == self.table.num_rows:
            return np.ones(self.table.num_rows)
        column = self.table.column("chunk_tokens").combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        found = np.ones(self.table.num_rows)
        filled = pc.list_element(column.filter(pa.array(lengths > 0)), 0)
        found[lengths > 0] = pc.fill_null(filled, 1).to_numpy(zero_copy_only=False)
        return np.maximum(found, 1)


class Gaps:
    """Gaps between the content chunks of an answer, per tenant, and whether each chunk was one token."""

    def __init__(self, outcomes: pa.Table, rows: Rows) -> None:
        self.by_tenant: dict[int, Floats] = {}
        self.one_token: dict[int, bool] = {}
        if "chunk_ns" not in outcomes.schema.names or outcomes.column("chunk_ns").null_count == outcomes.num_rows:
            return
        wanted = outcomes if len(rows.at) == outcomes.num_rows else outcomes.take(pa.array(rows.at))
        column = wanted.column("chunk_ns").combine_chunks()
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        times: NDArray[np.int64] = column.flatten().to_numpy(zero_copy_only=False)
        if len(times) < 2:
            return
        row = np.repeat(np.arange(len(counts)), counts)
        inside = row[1:] == row[:-1]
        gap_ms = np.diff(times)[inside] / NS_PER_MS
        tenant = rows.tenant[row[1:][inside]]
        get = Columns(wanted)
        matched = (streamed_tokens(get) == counts) | (self._all_single(wanted, counts))
        for code in range(len(rows.names)):
            self.by_tenant[code] = gap_ms[tenant == code]
            having = (rows.tenant == code) & (counts > 1)
            self.one_token[code] = bool(matched[having].all()) if having.any() else False

    @staticmethod
    def _all_single(wanted: pa.Table, counts: NDArray[np.int64]) -> Mask:
        """Rows whose stream says that each chunk held one token."""
        if "chunk_tokens" not in wanted.schema.names:
            return np.zeros(len(counts), bool)
        column = wanted.column("chunk_tokens").combine_chunks()
        told = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        single = pc.fill_null(pc.equal(column.flatten(), 1), False).to_numpy(zero_copy_only=False)
        ones = np.bincount(np.repeat(np.arange(len(told)), told), single, len(told))
        single_rows: Mask = (told == counts) & (ones == told) & (told > 0)
        return single_rows

    def of(self, codes: Sequence[int]) -> tuple[Floats, bool]:
        """Gaps in ms and whether they are inter-token latencies."""
        found = [self.by_tenant[code] for code in codes if code in self.by_tenant]
        having = [code for code in codes if len(self.by_tenant.get(code, ()))]
        return (
            np.concatenate(found) if found else np.empty(0),
            bool(having) and all(self.one_token[code] for code in having),
        )
