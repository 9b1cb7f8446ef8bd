"""Reshape a trace and say what was achieved.

A reshaping works on a `Draft`: for every row of the result, which row of the source it is, which copy, and when it
arrives. Each step is a pure function `draft → (draft, Report)`; nothing here reads a file or a clock. `build` makes the
trace of a draft: only there are columns copied, ids made unique and prefix blocks made private.

What is kept: rows of a session stay together and in order, think times follow the map of time, prefix sharing inside
the original and inside every copy stays as it was. Whatever is drawn is drawn per session from the seed
(`traces.seeded`) and held against figures of the whole trace (cuts, the arrival curve, a map of time): with the same
figures a part of a trace, split by session, comes out as that part of the whole.

What cannot be met is refused with the nearest that can: `ShapeError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces import warp
from traces.burstiness import NS, Int64s
from traces.errors import TraceError
from traces.record import COLUMNS, Metadata
from traces.seeded import UInt64s, mix, mix_one, session_keys, uniform
from traces.units import show_ns

JITTER_S = 5  # copies move by as many ranks of the arrival curve as come in this time on average
Int32s = npt.NDArray[np.int32]


class ShapeError(TraceError):
    """A reshaping that this trace cannot take; the text says the nearest that it can."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what was asked and what came out."""

    step: str  # "speed", "burst", ...
    asked: str  # as the user would write it: "2x@1s"
    what: str  # the quantity, with its unit: "span [s]"
    before: float
    planned: float
    achieved: float
    note: str = ""

    def line(self) -> str:
        """For people: `burst 2x@1s: index of dispersion at 1 s 1.35 → 2.71 (planned 2.71)`."""
        text = f"{self.step} {self.asked}".strip()
        text += f": {self.what} {self.before:,.6g} → {self.achieved:,.6g} (planned {self.planned:,.6g})"
        return f"{text}; {self.note}" if self.note else text


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Rows of a reshaped trace, by arrival. All arrays have one length."""

    row: Int64s  # row of the source
    copy: Int32s  # 0: the original; k: its k-th copy, with ids and prefix blocks of its own
    arrival_ns: Int64s  # ascending
    think_ns: Int64s | None  # −1 where null; None when the trace has none
    session: UInt64s  # key of the session (traces.seeded)
    tenant: Int32s | None  # code of the tenant, −1 where null

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Draft:
        """Some of the rows, or all in another order."""
        return Draft(
            row=self.row[index],
            copy=self.copy[index],
            arrival_ns=self.arrival_ns[index],
            think_ns=None if self.think_ns is None else self.think_ns[index],
            session=self.session[index],
            tenant=None if self.tenant is None else self.tenant[index],
        )

    def offset_ns(self) -> Int64s:
        """Trace time: from the first arrival."""
        return np.asarray(self.arrival_ns - self.arrival_ns[0])

    def span_ns(self) -> int:
        """From the first arrival to the last."""
        return int(self.arrival_ns[-1] - self.arrival_ns[0])


Step = tuple[Draft, Report]


def draft_of(trace: pa.Table, *, keys: bool = True) -> Draft:
    """The draft that leaves a trace (sorted by arrival) as it is.

    Args:
        trace: at least `arrival_ns`; `think_ns`, `tenant`, `session_id` and `request_id` are used when there.
        keys: False leaves the session keys at 0, for steps that draw nothing.

    Raises:
        ShapeError: there is no row.
    """
    rows = trace.num_rows
    if not rows:
        raise ShapeError("the trace is empty: there is nothing to reshape")
    names = trace.schema.names
    think = trace.column("think_ns") if "think_ns" in names else None
    return Draft(
        row=np.arange(rows, dtype=np.int64),
        copy=np.zeros(rows, dtype=np.int32),
        arrival_ns=trace.column("arrival_ns").to_numpy(),
        think_ns=None if think is None or think.null_count == rows else pc.fill_null(think, -1).to_numpy(),
        session=session_keys(trace) if keys else np.zeros(rows, dtype=np.uint64),
        tenant=_codes(trace.column("tenant")) if "tenant" in names else None,
    )


def _codes(column: pa.ChunkedArray) -> Int32s:
    words = column.cast(pa.string()).combine_chunks().dictionary_encode()
    if isinstance(words, pa.ChunkedArray):
        words = words.combine_chunks()
    codes: Int32s = pc.fill_null(words.indices, -1).to_numpy(zero_copy_only=False).astype(np.int32)
    return codes


def spelt(duration_ns: int) -> str:
    """A duration as a user would write it: `90s`, `250ms`."""
    for unit_ns, unit in ((60 * NS, "m"), (NS, "s"), (NS // 1000, "ms")):
        if duration_ns % unit_ns == 0 and (duration_ns or unit == "s"):
            return f"{duration_ns // unit_ns}{unit}"
    return f"{duration_ns}ns"


# ---- choosing rows ----------------------------------------------------------------------------------------------


def window(draft: Draft, start_ns: int, end_ns: int | None) -> Step:
    """Rows with start <= trace time < end.

    Raises:
        ShapeError: none is.
    """
    offset = draft.offset_ns()
    first = int(np.searchsorted(offset, start_ns, side="left"))
    last = len(offset) if end_ns is None else int(np.searchsorted(offset, end_ns, side="left"))
    asked = f"{spelt(start_ns)}:{'' if end_ns is None else spelt(end_ns)}"
    if first >= last:
        raise ShapeError(
            f"--window {asked}: no request arrives then; the trace lasts {show_ns(draft.span_ns())} "
            f"and is {_fullest(offset, start_ns, end_ns)}"
        )
    kept = draft.take(np.arange(first, last))
    return kept, _rows_report("window", asked, draft, planned=last - first, achieved=last - first)


def _fullest(offset: Int64s, start_ns: int, end_ns: int | None) -> str:
    if start_ns > offset[-1]:
        return f"over before {show_ns(start_ns)}"
    after = offset[np.searchsorted(offset, start_ns)] if end_ns is not None else offset[-1]
    return f"idle from {show_ns(start_ns)} to {show_ns(int(after))}"


def only_tenants(draft: Draft, names: Sequence[str], known: Sequence[str]) -> Step:
    """Rows of some tenants.

    Args:
        draft: with tenant codes.
        names: tenants to keep.
        known: names by code.

    Raises:
        ShapeError: the trace has no such tenant.
    """
    for name in names:
        if name not in known:
            there = ", ".join(known) if known else "none: tag it first, see tenants tag --help"
            raise ShapeError(f"--tenant {name}: no such tenant in the trace (it has {there})")
    assert draft.tenant is not None
    keep = np.isin(draft.tenant, [known.index(name) for name in names])
    kept = draft.take(keep)
    return kept, _rows_report("tenant", ",".join(names), draft, int(keep.sum()), int(keep.sum()))


def thin(draft: Draft, share: float, seed: int, *, step: str = "sample") -> Step:
    """A share of every tenant's requests, whole sessions drawn at random.

    Per tenant the sessions with the smallest draws are kept until the share of the requests is met as nearly as whole
    sessions can: tenants' shares stay, and what was Poisson stays Poisson.

    Raises:
        ShapeError: nothing would be left.
    """
    keep = below(draft, cuts(draft, share, seed, step), seed, step)
    planned = share * len(draft.row)
    if not keep.any():
        raise ShapeError(f"--{step} {share:.6g}x: of {len(draft.row)} requests none is left")
    kept = draft.take(keep)
    return kept, _rows_report(step, f"{share:.6g}x", draft, planned, len(kept.row))


def cuts(draft: Draft, share: float, seed: int, purpose: str) -> dict[int, float]:
    """Per tenant code, the draw up to which sessions are taken so that they hold `share` of its requests.

    As nearly as whole sessions can: −1 takes none.
    """
    draw, tenant = uniform(draft.session, seed, purpose), _tenant_of(draft)
    found = {}
    for code in np.unique(tenant):
        ordered = np.sort(draw[tenant == code])
        ends = np.flatnonzero(np.concatenate([ordered[1:] != ordered[:-1], [True]])) + 1
        sizes = np.concatenate([[0], ends])
        nearest = sizes[np.argmin(np.abs(sizes - share * len(ordered)))]
        found[int(code)] = float(ordered[nearest - 1]) if nearest else -1.0
    return found


def below(draft: Draft, limits: dict[int, float], seed: int, purpose: str) -> npt.NDArray[np.bool_]:
    """Which rows belong to sessions that the cuts take."""
    draw, tenant = uniform(draft.session, seed, purpose), _tenant_of(draft)
    taken = np.zeros(len(draw), dtype=bool)
    for code, limit in limits.items():
        taken |= (tenant == code) & (draw <= limit)
    return taken


def _tenant_of(draft: Draft) -> Int32s:
    return draft.tenant if draft.tenant is not None else np.zeros(len(draft.row), dtype=np.int32)


# ---- more or other rows -----------------------------------------------------------------------------------------


def rate(draft: Draft, factor: float, seed: int) -> Step:
    """More or fewer arrivals with the same shape of the rate over time.

    Below 1 sessions are thinned. Above 1 sessions are copied: each whole multiple copies all, the fraction a drawn
    share. A copy's first turn moves along the arrival curve by up to ±(arrivals that come in 5 s on average) ranks, so
    it lands among its neighbours: near in a burst, far in a lull. Its later turns move with it.

    Raises:
        ShapeError: nothing would be left.
    """
    if factor < 1:
        return thin(draft, factor, seed, step="rate")
    parts = [draft]
    whole = int(factor)
    for number in range(1, whole + 1):
        part = (
            draft
            if number < whole
            else draft.take(below(draft, cuts(draft, factor - whole, seed, "more"), seed, "more"))
        )
        if len(part.row):
            parts.append(jittered_copy(part, draft.arrival_ns, number, seed))
    grown = _by_arrival(_joined(parts))
    report = _rows_report("rate", f"{factor:.6g}x", draft, factor * len(draft.row), len(grown.row))
    return grown, report


def jittered_copy(part: Draft, curve_ns: Int64s, number: int, seed: int) -> Draft:
    """The `number`-th copy of some sessions, each moved along the arrival curve of the whole trace.

    Args:
        part: rows of whole sessions.
        curve_ns: all arrivals of the trace.
        number: of the copy, from 1.
        seed: the user's.
    """
    sessions, first, of_row = np.unique(part.session, return_index=True, return_inverse=True)
    start, origin, last = part.arrival_ns[first], curve_ns[0], len(curve_ns) - 1
    end = np.full(len(sessions), origin)
    np.maximum.at(end, of_row, part.arrival_ns)
    in_jitter = len(curve_ns) * JITTER_S * NS / max(int(curve_ns[-1] - origin), 1)
    reach = max(1.0, min(in_jitter, len(curve_ns) / 50))
    rank = np.searchsorted(curve_ns, start) + reach * (2 * uniform(sessions, seed, f"jitter{number}") - 1)
    rank = last - np.abs(last - np.abs(rank))  # reflected at both ends
    moved = np.interp(rank, np.arange(len(curve_ns)), (curve_ns - origin).astype(np.float64))
    shift = np.rint(moved).astype(np.int64) + origin - start
    shift = np.clip(shift, origin - start, curve_ns[-1] - end)
    fresh = mix(part.session ^ np.uint64(mix_one(number)))
    copy = np.full(len(part.row), number, dtype=np.int32)
    return dataclasses.replace(part, arrival_ns=part.arrival_ns + shift[of_row], copy=copy, session=fresh)


def loop(draft: Draft, passes: int) -> Step:
    """The trace `passes` times in a row, a mean gap apart; each pass has ids and prefix blocks of its own."""
    span = draft.span_ns()
    period = span + round(span / max(len(draft.row) - 1, 1))
    copies = int(draft.copy.max()) + 1
    parts = [
        dataclasses.replace(
            draft,
            arrival_ns=draft.arrival_ns + number * period,
            copy=draft.copy + np.int32(number * copies),
            session=draft.session if number == 0 else mix(draft.session ^ np.uint64(mix_one(-number))),
        )
        for number in range(passes)
    ]
    grown = _joined(parts)
    report = _rows_report("loop", str(passes), draft, passes * len(draft.row), len(grown.row))
    return grown, report


def _joined(parts: Sequence[Draft]) -> Draft:
    thinks = [part.think_ns for part in parts if part.think_ns is not None]
    tenants = [part.tenant for part in parts if part.tenant is not None]
    return Draft(
        row=np.concatenate([part.row for part in parts]),
        copy=np.concatenate([part.copy for part in parts]),
        arrival_ns=np.concatenate([part.arrival_ns for part in parts]),
        think_ns=np.concatenate(thinks) if thinks else None,
        session=np.concatenate([part.session for part in parts]),
        tenant=np.concatenate(tenants) if tenants else None,
    )


def _by_arrival(draft: Draft) -> Draft:
    return draft.take(np.argsort(draft.arrival_ns, kind="stable"))


# ---- moving rows in time ----------------------------------------------------------------------------------------


def speed(draft: Draft, factor: float) -> Step:
    """Every gap and every think time divided by `factor`, exact to the nanosecond (half to even)."""
    think = draft.think_ns
    if think is not None:
        think = np.where(think < 0, -1, warp.scaled(think, factor))
    faster = dataclasses.replace(
        draft,
        arrival_ns=draft.arrival_ns[0] + warp.scaled(draft.offset_ns(), factor),
        think_ns=think,
    )
    report = Report(
        step="speed",
        asked=f"{factor:.6g}x",
        what="span [s]",
        before=draft.span_ns() / NS,
        planned=draft.span_ns() / NS / factor,
        achieved=faster.span_ns() / NS,
    )
    return faster, report


def burst(draft: Draft, factor: float, width_ns: int) -> Step:
    """The index of dispersion at `width_ns` times `factor`; count, order, first and last arrival stay.

    Raises:
        ShapeError: the dispersion cannot be reached, or the trace has too few windows to speak of one.
    """
    asked = f"{factor:.6g}x@{spelt(width_ns)}"
    what = f"index of dispersion at {show_ns(width_ns)}"
    span = draft.span_ns()
    if span < 10 * width_ns:
        raise ShapeError(
            f"--burst {asked}: the trace lasts {show_ns(span)}, and a dispersion needs 10 windows: "
            f"the widest window here is {show_ns(span // 10)}"
        )
    solved = warp.solve_burst(draft.offset_ns(), width_ns, factor)
    planned = solved.before * factor
    if planned <= 0 or abs(solved.achieved / planned - 1) > warp.TOLERANCE:
        nearest = solved.achieved / solved.before if planned > 0 else 1.0
        raise ShapeError(
            f"--burst {asked}: {what} is {solved.before:.4g} and moving arrivals in time cannot make it {planned:.4g}; "
            f"the nearest is {nearest:.3g}x ({solved.achieved:.4g})"
        )
    kept = f"the rate over {warp.BLOCK_WINDOWS} windows is kept" if solved.block_windows else "slow changes grew too"
    report = Report(
        step="burst",
        asked=asked,
        what=what,
        before=solved.before,
        planned=planned,
        achieved=solved.achieved,
        note=f"exponent {solved.exponent:.3g}, {kept}",
    )
    return _warped(draft, solved.warp), report


def retime(draft: Draft, cv: float, seed: int, *, poisson: bool = False) -> Step:
    """New times at the same rate: Poisson, or gamma gaps with coefficient of variation `cv` (0: constant).

    Count, order, first and last arrival stay.
    """
    generator = np.random.default_rng([seed & 0xFFFFFFFF, 0x7E71])
    count, span = len(draft.row), draft.span_ns()
    if count < 3 or span == 0:
        raise ShapeError(f"re-timing needs at least 3 requests and a span; the trace has {count} in {show_ns(span)}")
    times = warp.poisson_times(count, span, generator) if poisson else warp.gamma_times(count, span, cv, generator)
    moved = dataclasses.replace(
        _warped(draft, warp.through(draft.offset_ns(), times)), arrival_ns=draft.arrival_ns[0] + times
    )
    report = Report(
        step="poisson" if poisson else "gamma",
        asked="" if poisson else f"{cv:.6g}",
        what="inter-arrival CV",
        before=_cv(draft.arrival_ns),
        planned=1.0 if poisson else cv,
        achieved=_cv(moved.arrival_ns),
        note=f"same {count:,} requests in the same {show_ns(span)}",
    )
    return moved, report


def _warped(draft: Draft, curve: warp.Warp) -> Draft:
    offset = draft.offset_ns()
    moved = curve.at(offset)
    think = draft.think_ns
    if think is not None:
        think = np.where(think < 0, -1, np.maximum(moved - curve.at(offset - think), 0))
    return dataclasses.replace(draft, arrival_ns=draft.arrival_ns[0] + moved, think_ns=think)


def _cv(arrival_ns: Int64s) -> float:
    gaps = np.diff(arrival_ns)
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.any() else 0.0


def _rows_report(step: str, asked: str, before: Draft, planned: float, achieved: int) -> Report:
    return Report(
        step=step, asked=asked, what="requests", before=len(before.row), planned=planned, achieved=float(achieved)
    )


# ---- lengths ----------------------------------------------------------------------------------------------------


def scale_lengths(
    trace: pa.Table, input_factor: float = 1.0, output_factor: float = 1.0, most: int | None = None
) -> tuple[pa.Table, list[Report]]:
    """Input and output lengths times a factor, at least 1 where there was one.

    A request above `most` tokens (input + output) is cut to it, both parts in proportion.

    Cached and reasoning tokens and `max_tokens` scale along. A prefix block grows with the input (its size is rounded
    down), so the share of a prompt that is shared stays. Times of single chunks no longer fit and are dropped.
    """
    names = trace.schema.names
    new_in, new_out = _lengths(trace, "input_tokens", input_factor), _lengths(trace, "output_tokens", output_factor)
    if most is not None:
        total = np.maximum(new_in, 0) + np.maximum(new_out, 0)
        shrink = np.minimum(1.0, most / np.maximum(total, 1))
        new_out = np.where(new_out > 0, np.maximum(np.floor(new_out * shrink), 1), new_out)
        room = most - np.maximum(new_out, 0)
        new_in = np.where(shrink < 1, np.minimum(new_in, np.maximum(room, 1)), new_in)
    reports = []
    for name, values, factor in (
        ("input_tokens", new_in, input_factor),
        ("output_tokens", new_out, output_factor),
    ):
        if name in names and (factor != 1 or most is not None):
            reports.append(_length_report(trace, name, values, factor, most))
            trace = _with(trace, name, values)
    for name, factor in (("cached_tokens", input_factor), ("reasoning_tokens", output_factor)):
        if name in names:
            cap = new_in if name == "cached_tokens" else new_out
            scaled = _lengths(trace, name, factor)
            trace = _with(trace, name, np.where(cap >= 0, np.minimum(scaled, np.maximum(cap, 0)), scaled))
    if "max_tokens" in names:
        limit = _lengths(trace, "max_tokens", output_factor)
        trace = _with(trace, "max_tokens", np.where(limit >= 0, np.maximum(limit, new_out), limit))
    if "block_size" in names and input_factor != 1:
        size = _lengths(trace, "block_size", 1.0)
        trace = _with(trace, "block_size", np.where(size > 0, np.maximum(np.floor(size * input_factor), 1), size))
    return trace.drop_columns([name for name in ("chunk_ns", "chunk_tokens") if name in names]), reports


def _lengths(trace: pa.Table, name: str, factor: float) -> npt.NDArray[np.float64]:
    """A column of counts times a factor, −1 where null or absent."""
    if name not in trace.schema.names:
        return np.full(trace.num_rows, -1.0)
    values = pc.fill_null(trace.column(name), -1).to_numpy().astype(np.float64)
    return np.asarray(np.where(values > 0, np.maximum(np.rint(values * factor), 1), values))


def _with(trace: pa.Table, name: str, values: npt.NDArray[np.float64]) -> pa.Table:
    field = trace.schema.field(name)
    array = pa.array(values.astype(np.int64), mask=values < 0).cast(field.type)
    return trace.set_column(trace.schema.get_field_index(name), field, array)


def _length_report(
    trace: pa.Table, name: str, values: npt.NDArray[np.float64], factor: float, most: int | None
) -> Report:
    before = float(pc.sum(trace.column(name)).as_py() or 0)
    asked = f"{factor:.6g}x" + (f",max={most}" if most is not None else "")
    note = ""
    if most is not None:
        cut = int((values < _lengths(trace, name, factor)).sum())
        note = f"{cut:,} requests cut to {most:,} tokens"
    return Report(
        step="lengths",
        asked=asked,
        what=name.replace("_", " "),
        before=before,
        planned=before * factor,
        achieved=float(np.maximum(values, 0).sum()),
        note=note,
    )


# ---- two traces -------------------------------------------------------------------------------------------------


def merge(trace: pa.Table, other: pa.Table, metadata: Metadata, other_metadata: Metadata) -> tuple[pa.Table, Report]:
    """Both traces as one.

    Two recordings of the same days keep their clock time; anything else starts together. Rows of `other` whose ids are
    taken become private copies.

    Raises:
        ShapeError: the prefix blocks of the two are counted in different units.
    """
    if metadata.block_unit != other_metadata.block_unit and {"block_hashes"} <= {*trace.schema.names} & {
        *other.schema.names
    }:
        raise ShapeError(
            f"--merge: prefix blocks are counted in {metadata.block_unit} here and in {other_metadata.block_unit} there"
        )
    if not other.num_rows or not trace.num_rows:
        raise ShapeError("--merge: one of the two traces is empty")
    start, end = _ends(trace)
    other_start, other_end = _ends(other)
    clock = metadata.epoch == other_metadata.epoch == "unix" and other_start <= end and start <= other_end
    if not clock:
        shifted = pc.add(other.column("arrival_ns"), start - other_start)
        other = other.set_column(other.schema.get_field_index("arrival_ns"), "arrival_ns", shifted)
    if _share_ids(trace, other):
        other = build(
            other, dataclasses.replace(draft_of(other, keys=False), copy=np.ones(other.num_rows, dtype=np.int32))
        )
    schema = pa.schema(
        [pa.field(c.name, c.type) for c in COLUMNS if c.name in {*trace.schema.names, *other.schema.names}],
        metadata=trace.schema.metadata,
    )
    both = pa.concat_tables([_widened(trace, schema), _widened(other, schema)])
    both = both.take(pa.array(np.argsort(both.column("arrival_ns").to_numpy(), kind="stable")))
    report = Report(
        step="merge",
        asked="",
        what="requests",
        before=trace.num_rows,
        planned=trace.num_rows + other.num_rows,
        achieved=both.num_rows,
        note="by clock time" if clock else "both start together",
    )
    return both, report


def _ends(trace: pa.Table) -> tuple[int, int]:
    arrival = trace.column("arrival_ns")
    return arrival[0].as_py(), arrival[-1].as_py()


def _share_ids(trace: pa.Table, other: pa.Table) -> bool:
    for name in ("request_id", "session_id"):
        if name in trace.schema.names and name in other.schema.names:
            known = trace.column(name).drop_null()
            if pc.any(pc.is_in(other.column(name).drop_null(), value_set=known)).as_py():
                return True
    return False


def _widened(trace: pa.Table, schema: pa.Schema) -> pa.Table:
    names = trace.schema.names
    return pa.Table.from_arrays(
        [
            trace.column(field.name).cast(field.type) if field.name in names else pa.nulls(trace.num_rows, field.type)
            for field in schema
        ],
        schema=schema,
    )


# ---- the trace of a draft ---------------------------------------------------------------------------------------


def build(trace: pa.Table, draft: Draft, mark: str | None = None) -> pa.Table:
    """The rows of a draft as a trace.

    Args:
        trace: the source whose rows the draft points to.
        draft: what to make of it.
        mark: stands between an id and the number of its copy; None finds one that no id of the source has.

    Returns:
        A table with the source's columns, those of an outcome left out: they tell of another run.
    """
    outcome = {column.name for column in COLUMNS if column.outcome}
    trace = trace.select([name for name in trace.schema.names if name not in outcome])
    if not (len(draft.row) == trace.num_rows and bool((draft.row == np.arange(trace.num_rows)).all())):
        trace = trace.take(pa.array(draft.row))
    trace = _put(trace, "arrival_ns", pa.array(draft.arrival_ns))
    if draft.think_ns is not None:
        trace = _put(trace, "think_ns", pa.array(draft.think_ns, mask=draft.think_ns < 0))
    if not draft.copy.any():
        return trace
    mark = mark or free_mark(trace)
    for name in ("request_id", "session_id"):
        if name in trace.schema.names:
            trace = _put(trace, name, _renamed(trace.column(name), draft.copy, mark))
    if "block_hashes" in trace.schema.names:
        trace = _put(trace, "block_hashes", _resalted(trace.column("block_hashes"), draft.copy, len(mark)))
    return trace


def free_mark(trace: pa.Table) -> str:
    """As many `~` as no id of the trace holds in a row, so copies of copies get ids and prefix blocks of their own."""
    mark = "~"
    names = [name for name in ("request_id", "session_id") if name in trace.schema.names]
    while any(pc.any(pc.match_substring(trace.column(name), mark)).as_py() for name in names):
        mark += "~"
    return mark


def _put(trace: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return trace.set_column(trace.schema.get_field_index(name), trace.schema.field(name), values)


def _renamed(column: pa.ChunkedArray, copy: Int32s, mark: str) -> pa.ChunkedArray:
    endings = pa.array([mark + str(number) if number else "" for number in range(int(copy.max()) + 1)])
    return pc.binary_join_element_wise(column, endings.take(pa.array(copy)), "")


def _resalted(column: pa.ChunkedArray, copy: Int32s, generation: int) -> pa.Array:
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], type=column.type)
    length = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    of_value = np.repeat(copy, length)
    values = lists.flatten().to_numpy(zero_copy_only=False).copy()
    private = of_value > 0
    salts = mix(np.arange(int(copy.max()) + 1, dtype=np.uint64) + np.uint64(generation << 32))
    values[private] = mix(values[private].view(np.uint64) ^ salts[of_value[private]]).view(np.int64)
    offsets = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pc.is_null(lists))
