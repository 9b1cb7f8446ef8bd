"""A trace on its way to another shape: for every row of the result, which row of the source, which copy, and when.

A `Draft` holds those columns alone; the others are copied once, when the trace is made (`traces.assemble`). A step of a
reshaping gives back the next draft and a `Report` of what was asked and achieved.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.burstiness import NS, Int32s, Int64s
from traces.errors import TraceError
from traces.seeded import UInt64s, session_keys

Int16s = npt.NDArray[np.int16]


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
        text += f": {self.what} {_figure(self.before)} → {_figure(self.achieved)} (planned {_figure(self.planned)})"
        return f"{text}; {self.note}" if self.note else text


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e6 else f"{value:,.6g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Rows of a reshaped trace, by arrival. All arrays have one length."""

    row: Int32s  # row of the source
    copy: Int16s  # 0: the original; k: its k-th copy, with ids and prefix blocks of its own
    arrival_ns: Int64s  # ascending
    think_ns: Int64s | None = None  # −1 where null; None when the trace has none
    session: UInt64s | None = None  # key of the session (traces.seeded), for steps that draw; None once copies are made
    tenant: Int32s | None = None  # code of the tenant, −1 where null
    alone: bool = False  # no two rows are of one session

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> Draft:
        """Some of the rows, or all in another order."""
        return dataclasses.replace(
            self,
            row=self.row[index],
            copy=self.copy[index],
            arrival_ns=self.arrival_ns[index],
            think_ns=None if self.think_ns is None else self.think_ns[index],
            session=None if self.session is None else self.session[index],
            tenant=None if self.tenant is None else self.tenant[index],
        )

    def offset_ns(self) -> Int64s:
        """Trace time: from the first arrival."""
        return np.asarray(self.arrival_ns - self.arrival_ns[0])

    def span_ns(self) -> int:
        """From the first arrival to the last."""
        return int(self.arrival_ns[-1] - self.arrival_ns[0])


Step = tuple[Draft, Report]


def draft_of(trace: pa.Table) -> Draft:
    """The draft that leaves a trace (sorted by arrival) as it is.

    Args:
        trace: at least `arrival_ns`; `think_ns`, `tenant`, `session_id` and `request_id` are used when there.

    Raises:
        ShapeError: there is no row.
    """
    rows = trace.num_rows
    if not rows:
        raise ShapeError("the trace is empty: there is nothing to reshape")
    names = trace.schema.names
    think = trace.column("think_ns") if "think_ns" in names else None
    return Draft(
        row=np.arange(rows, dtype=np.int32),
        copy=np.zeros(rows, dtype=np.int16),
        arrival_ns=trace.column("arrival_ns").to_numpy(),
        think_ns=None if think is None or think.null_count == rows else pc.fill_null(think, -1).to_numpy(),
        session=session_keys(trace),
        tenant=_codes(trace.column("tenant")) if "tenant" in names else None,
        alone="session_id" not in names or trace.column("session_id").null_count == rows,
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


def plain(draft: Draft) -> Draft:
    """Without what only drawing needs."""
    return dataclasses.replace(draft, session=None, tenant=None)


def joined(parts: list[Draft]) -> Draft:
    """One after the other. `parts` is emptied."""
    thinks = [part.think_ns for part in parts if part.think_ns is not None]
    whole = dataclasses.replace(
        parts[0],
        row=np.concatenate([part.row for part in parts]),
        copy=np.concatenate([part.copy for part in parts]),
        arrival_ns=np.concatenate([part.arrival_ns for part in parts]),
        think_ns=np.concatenate(thinks) if thinks else None,
    )
    parts.clear()
    return whole


def by_arrival(draft: Draft) -> Draft:
    """Its own arrays put in order, one after the other."""
    order = np.argsort(draft.arrival_ns, kind="stable").astype(np.int32)
    for values in (draft.row, draft.copy, draft.arrival_ns, draft.think_ns):
        if values is not None:
            values[:] = values[order]
    return draft


def of_rows(step: str, asked: str, before: Draft, planned: float, achieved: int) -> Report:
    """The report of a step that changes how many requests there are."""
    return Report(
        step=step, asked=asked, what="requests", before=len(before), planned=planned, achieved=float(achieved)
    )
