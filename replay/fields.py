"""A trace's columns as the arrays of a plan: numbers without nulls, words as small indexes, turns as links.

A column that a trace lacks costs no memory: it is one value, broadcast. What had to be guessed is put in `notes`, a
sentence each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.errors import BadFile
from traces.record import ENDPOINTS, metadata_of

NONE = -1  # in any array of the plan: the trace says nothing

SENDABLE = ("chat", "completions", "responses", "messages", "generate")
"""Endpoints that can be replayed; rows of others are refused, by count."""

_PIECE = 1 << 18
_ABORTED = "client_abort"
_ABORT_ROOM_TOKENS = 256


def constant(value: Any, rows: int, dtype: Any) -> Any:
    """One value for all rows, in the memory of one."""
    return np.broadcast_to(np.array(value, dtype=dtype), rows)


def is_constant(array: npt.NDArray[Any]) -> bool:
    """Whether an array is one value, broadcast."""
    return len(array) > 0 and array.strides == (0,)


def values(trace: pa.Table, name: str, dtype: Any, missing: Any = None) -> Any:
    """A column as numpy; nulls become `missing`; a column that is absent or all null is one broadcast value."""
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        return constant(missing, trace.num_rows, dtype)
    column = trace.column(name)
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(missing, type=column.type))
    return column.to_numpy().astype(dtype, copy=False)


def text(trace: pa.Table, name: str) -> pa.Array | None:
    """A column of words as it is; None where the trace has none."""
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        return None
    return trace.column(name).combine_chunks()


def lengths(trace: pa.Table, name: str, notes: list[str]) -> Any:
    """Token counts, at least 1. Unknown ones take the median of the known ones, and that is said."""
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        raise BadFile(
            f"column {name} is missing or empty: a replay needs the length of every request; "
            f"a recording: capture again with --tokenizer FILE; a CSV: import it with --map {name}=COLUMN"
        )
    column = trace.column(name)
    unknown = column.null_count
    if unknown:
        median = int(np.median(column.drop_null().to_numpy()))
        notes.append(f"{unknown:,} rows have no {name}: they take the median of the others, {median:,}")
        column = pc.fill_null(column, pa.scalar(median, type=column.type))
    values = column.to_numpy().astype(np.int32, copy=False)
    empty = int(np.count_nonzero(values < 1))
    if empty:
        notes.append(f"{empty:,} rows have 0 {name}: at least 1 is sent")
        values = np.maximum(values, 1)
    return values


def aborts(trace: pa.Table, notes: list[str]) -> Any:
    """Patience of clients that left: `end_ns` of rows whose outcome is `client_abort`."""
    if not {"outcome", "end_ns"} <= set(trace.schema.names):
        return constant(NONE, trace.num_rows, np.int64)
    left = pc.fill_null(pc.equal(trace.column("outcome").cast(pa.string()), _ABORTED), False)
    mask = left.to_numpy()
    count = int(np.count_nonzero(mask))
    if not count:
        return constant(NONE, trace.num_rows, np.int64)
    ends = values(trace, "end_ns", np.int64, NONE)
    found = np.where(mask, ends, NONE)
    unknown = int(np.count_nonzero(mask & (ends == NONE)))
    if unknown:
        notes.append(f"{unknown:,} aborted requests have no end_ns: they are not aborted again")
    return found


def room_to_abort(trace: pa.Table, output_tokens: Any, abort_ns: Any) -> Any:
    """An aborted request was cut short: it asks for its own limit, or for twice what came and some more."""
    mask = abort_ns != NONE
    if not mask.any():
        return output_tokens
    limit = values(trace, "max_tokens", np.int32, NONE)
    guess = 2 * output_tokens + _ABORT_ROOM_TOKENS
    return np.where(mask, np.where(limit > 0, np.maximum(limit, output_tokens), guess), output_tokens).astype(np.int32)


def words(trace: pa.Table, name: str, missing: str | None) -> tuple[Any, tuple[str, ...]]:
    """A word column as small indexes and its table in order of first appearance."""
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        return (constant(0 if missing else NONE, trace.num_rows, np.int16), (missing,) if missing else ())
    column = trace.column(name)
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    encoded = column.unify_dictionaries().combine_chunks()
    codes = pc.fill_null(encoded.indices, NONE).to_numpy().astype(np.int16)
    words: list[str | None] = encoded.dictionary.to_pylist()
    if missing is not None and encoded.null_count:
        known = words.index(missing) if missing in words else len(words)
        words += [missing] * (known == len(words))
        codes[codes == NONE] = known
    return _by_appearance(codes, words)


def _by_appearance(codes: npt.NDArray[np.int16], words: list[str | None]) -> tuple[Any, tuple[str, ...]]:
    """Codes and words renumbered in order of first appearance, whatever order a file's dictionary has."""
    first: dict[int, int] = {}
    for start in range(0, len(codes), _PIECE):
        present, places = np.unique(codes[start : start + _PIECE], return_index=True)
        for code, place in zip(present.tolist(), places.tolist(), strict=True):
            first.setdefault(code, start + place)
    order = sorted((code for code in first if code != NONE), key=first.__getitem__)
    if order != list(range(len(words))):
        renumbered = np.full(len(words) + 1, NONE, dtype=np.int16)  # the last one stands for NONE itself
        renumbered[order] = np.arange(len(order))
        codes = renumbered[codes]
    return codes, tuple(str(words[code]) for code in order)


def endpoints(trace: pa.Table, forced: str | None, notes: list[str]) -> Any:
    """Index into ENDPOINTS; `completions` where the trace is silent. Raises BadFile for what cannot be replayed."""
    index, names = words(trace, "endpoint", None)
    rows = trace.num_rows
    if forced is not None:
        changed = [name for name in names if name != forced]
        if changed:
            notes.append(f"endpoint {', '.join(sorted(changed))} of the trace is sent to {forced}, as asked")
        return constant(ENDPOINTS.index(forced), rows, np.int8)
    if not names:
        notes.append("the trace names no endpoint: completions, where prompt lengths are exact")
        return constant(ENDPOINTS.index("completions"), rows, np.int8)
    for name in names:
        if name not in SENDABLE:
            count = int(np.count_nonzero(index == names.index(name)))
            raise BadFile(f"{count:,} rows are of endpoint {name!r}, which cannot be replayed: --endpoint completions")
    table = np.array([ENDPOINTS.index(name) for name in names] + [ENDPOINTS.index("completions")], dtype=np.int8)
    if len(names) == 1 and not bool(np.any(index == NONE)):
        return constant(table[0], rows, np.int8)
    return table[index]  # NONE is −1, the last one


def sessions(trace: pa.Table) -> tuple[Any, Any]:
    """Session (from 0, in order of appearance) and turn of each row; NONE and 0 where there are none."""
    if "session_id" not in trace.schema.names or trace.column("session_id").null_count == trace.num_rows:
        return constant(NONE, trace.num_rows, np.int32), constant(0, trace.num_rows, np.int32)
    encoded = pc.dictionary_encode(trace.column("session_id")).unify_dictionaries().combine_chunks()
    session = pc.fill_null(encoded.indices, NONE).to_numpy().astype(np.int32)
    return session, values(trace, "turn", np.int32, NONE)


def links(trace: pa.Table, at_ns: Any, sessions: tuple[Any, Any], turns: str, notes: list[str]) -> tuple[Any, Any]:
    """For each later turn the row before it in its session, and the think time between them."""
    session, turn = sessions
    rows = trace.num_rows
    nothing = constant(NONE, rows, np.int32), constant(NONE, rows, np.int64)
    if turns == "timed" or is_constant(session):
        return nothing
    order = np.lexsort((np.arange(rows), turn, session))
    follows = (session[order][1:] == session[order][:-1]) & (session[order][1:] != NONE)
    if not follows.any():
        return nothing
    previous = np.full(rows, NONE, dtype=np.int32)
    previous[order[1:][follows]] = order[:-1][follows]
    later = previous != NONE
    think = np.where(later, values(trace, "think_ns", np.int64, NONE), NONE)
    ends = values(trace, "end_ns", np.int64, NONE)
    before = np.where(later, previous, 0)
    derived = later & (think == NONE) & (ends[before] != NONE)
    think[derived] = np.maximum(at_ns - (at_ns[before] + ends[before]), 0)[derived]
    unknown = int(np.count_nonzero(later & (think == NONE)))
    if unknown:
        notes.append(
            f"{unknown:,} later turns have no think time: due at their trace time, or when the former turn ends"
        )
    return previous, think


def block_size(trace: pa.Table, offsets: Any, input_tokens: Any, notes: list[str]) -> Any:
    """Tokens in a prefix block. A recording without a tokenizer counts characters: turned into tokens by its lengths.

    A prompt with k full blocks of s characters has (k + 1/2) s of them on average, so one block is taken as
    s · (input tokens) / (sum of (k + 1/2) s) tokens, over all rows with blocks.
    """
    size = values(trace, "block_size", np.int32, NONE)
    if metadata_of(trace).block_unit != "characters" or "block_hashes" not in trace.schema.names:
        return size
    blocks = np.diff(offsets)
    counted = (blocks > 0) & (size > 0)
    if not counted.any():
        return size
    characters = ((blocks[counted] + 0.5) * size[counted]).sum()
    tokens_a_character = float(np.asarray(input_tokens)[counted].sum() / characters)
    converted = np.where(size > 0, np.maximum(np.rint(size * tokens_a_character), 1), NONE).astype(np.int32)
    notes.append(f"prefix blocks of {int(size.max())} characters are taken as {int(converted.max())} tokens")
    return converted


def blocks(trace: pa.Table) -> tuple[Any, Any]:
    """Where each row's prefix hashes begin in the flat array of all, and that array."""
    if "block_hashes" not in trace.schema.names or trace.column("block_hashes").null_count == trace.num_rows:
        return constant(0, trace.num_rows + 1, np.int64), np.zeros(1, dtype=np.int64)
    lists = trace.column("block_hashes").combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.zeros(trace.num_rows + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    hashes = pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return offsets, hashes if len(hashes) else np.zeros(1, dtype=np.int64)
