"""Longer or shorter requests, with everything that hangs on a length.

Input and output lengths are multiplied; cached and reasoning tokens and `max_tokens` scale along. A prefix block grows
with the input (its size is rounded down), so the share of a prompt that is shared stays. A limit on the tokens of a
request cuts both parts in proportion. Every row is scaled by itself, so a trace may be scaled in parts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from traces.burstiness import Floats
from traces.draft import Report

CHUNKS = ("chunk_ns", "chunk_tokens")


class Tally(NamedTuple):
    """Tokens before and after, and requests that the limit cut."""

    input_before: int = 0
    input_after: int = 0
    output_before: int = 0
    output_after: int = 0
    cut: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(*(one + two for one, two in zip(self, other, strict=True)))


def scale_lengths(
    trace: pa.Table, input_factor: float = 1.0, output_factor: float = 1.0, most: int | None = None
) -> tuple[pa.Table, Tally]:
    """Lengths times a factor, at least 1 where there was one, and cut to `most` tokens of input and output together.

    Args:
        trace: any columns.
        input_factor: for input and cached tokens and the size of prefix blocks.
        output_factor: for output and reasoning tokens and `max_tokens`; rounded alike, it stays at least the output.
        most: a request above it is cut, both parts in proportion.

    Returns:
        The trace without times of single chunks, which no longer fit, and what changed.
    """
    names = trace.schema.names
    new_in, new_out = _scaled(trace, "input_tokens", input_factor), _scaled(trace, "output_tokens", output_factor)
    cut = 0
    if most is not None:
        new_in, new_out, cut = _limited(new_in, new_out, most)
    tally = Tally(*_sums(trace, "input_tokens", new_in), *_sums(trace, "output_tokens", new_out), cut)
    columns = {"input_tokens": new_in, "output_tokens": new_out}
    for name, factor, whole in (
        ("cached_tokens", input_factor, new_in),
        ("reasoning_tokens", output_factor, new_out),
    ):
        part = _scaled(trace, name, factor)
        columns[name] = np.where(whole >= 0, np.minimum(part, np.maximum(whole, 0)), part)
    columns["max_tokens"] = _scaled(trace, "max_tokens", output_factor)
    size = _scaled(trace, "block_size", 1.0)
    columns["block_size"] = np.where(size > 0, np.maximum(np.floor(size * input_factor), 1), size)
    for name in columns.keys() & set(names):
        trace = _with(trace, name, columns[name])
    return trace.drop_columns([name for name in CHUNKS if name in names]), tally


def _limited(inputs: Floats, outputs: Floats, most: int) -> tuple[Floats, Floats, int]:
    total = np.maximum(inputs, 0) + np.maximum(outputs, 0)
    over = total > most
    share = most / np.maximum(total, 1)
    fewer_out = np.where(over & (outputs > 0), np.maximum(np.floor(outputs * share), 1), outputs)
    fewer_in = np.where(over, np.minimum(inputs, most - np.maximum(fewer_out, 0)), inputs)
    return fewer_in, fewer_out, int(np.count_nonzero(over))


def length_reports(
    tally: Tally, input_factor: float = 1.0, output_factor: float = 1.0, most: int | None = None
) -> list[Report]:
    """What was planned and achieved: a report each for input and output where it was asked."""
    limit = "" if most is None else f"{tally.cut:,} requests cut to {most:,} tokens"
    found = []
    for kind, factor, before, after in (
        ("input", input_factor, tally.input_before, tally.input_after),
        ("output", output_factor, tally.output_before, tally.output_after),
    ):
        if factor != 1 or most is not None:
            found.append(
                Report(
                    step="lengths",
                    asked=f"{kind}={factor:.6g}x" + ("" if most is None else f",max={most}"),
                    what=f"{kind} tokens",
                    before=before,
                    planned=before * factor,
                    achieved=after,
                    note=limit,
                )
            )
    return found


def _sums(trace: pa.Table, name: str, after: Floats) -> tuple[int, int]:
    before = int(pc.sum(trace.column(name)).as_py() or 0) if name in trace.schema.names else 0
    return before, int(np.maximum(after, 0).sum())


def _scaled(trace: pa.Table, name: str, factor: float) -> Floats:
    """A column of counts times a factor, −1 where null or absent."""
    if name not in trace.schema.names:
        return np.full(trace.num_rows, -1.0)
    values = pc.fill_null(trace.column(name), -1).to_numpy().astype(np.float64)
    return np.asarray(np.where(values > 0, np.maximum(np.rint(values * factor), 1), values))


def _with(trace: pa.Table, name: str, values: Floats) -> pa.Table:
    field = trace.schema.field(name)
    array = pa.array(values.astype(np.int64), mask=values < 0).cast(field.type)
    return trace.set_column(trace.schema.get_field_index(name), field, array)
