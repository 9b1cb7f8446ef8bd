"""The plan: what will be sent, when, and in whose name; fixed before the first request.

A plan is a set of numpy arrays, one value per request, in the order of the trace, and a few string tables. It is a pure
function of the trace (already tagged and reshaped) and the options, bit for bit: the same input gives the same digest.

    at_ns      = arrival − first arrival                       (the trace's own clock, from the run's start)
    due_ns     = at_ns                                         first turns, and every turn under `--turns timed`
               = end of the former turn + think_ns             later turns under `--turns linked`, known only as it runs
               = max(at_ns, end of the former turn)            the same where the trace has no think time

Columns that a trace lacks cost no memory: they are one value, broadcast. Five million rows fit in 500 MB. Workers map
the arrays from files (`save`, `load`); no message per request passes between processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.errors import BadFile
from traces.record import ENDPOINTS, metadata_of

Ints = npt.NDArray[np.signedinteger[Any]]

NONE = -1  # in any array of the plan: the trace says nothing

READ_COLUMNS = (
    "request_id",
    "session_id",
    "turn",
    "think_ns",
    "tenant",
    "priority",
    "arrival_ns",
    "model",
    "endpoint",
    "stream",
    "max_tokens",
    "n",
    "input_tokens",
    "output_tokens",
    "block_size",
    "block_hashes",
    "end_ns",
    "outcome",
)
"""The columns of a trace that a plan is made of: reading no more keeps memory to what is sent."""

SENDABLE = ("chat", "completions", "responses", "messages", "generate")
"""Endpoints that can be replayed; rows of others are refused, by count."""

_PIECE = 1 << 18
_ABORTED = "client_abort"
_ABORT_ROOM_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything to send. Arrays have one value per request; NONE (−1) stands for "the trace says nothing".

    Attributes:
        at_ns: int64, due time by the trace's own clock, from the run's start.
        previous: int32, the row whose end this turn waits for; NONE for first turns and under `--turns timed`.
        think_ns: int64, from that end to this turn; NONE where the trace does not know.
        input_tokens, output_tokens: int32, the lengths to produce.
        abort_ns: int64, patience of a client that left: give up so long after sending.
        tenant: int16, index into `tenants`.
        rank: int16, priority, 0 = most urgent.
        endpoint: int8, index into `traces.record.ENDPOINTS`.
        stream: bool.
        model: int16, index into `models`.
        n: int16, answers asked for.
        session: int32, index of the session; turn: int32.
        block_size: int32; block_offsets: int64 (n + 1), row i has `block_hashes[offsets[i]:offsets[i + 1]]`.
        warmup_ns: rows with at_ns below it are the warm-up.
        request_id, session_id: Arrow strings of the trace, None where it has none (they stay with the parent process).
        notes: what had to be filled in or changed, one sentence each.
    """

    at_ns: npt.NDArray[np.int64]
    previous: npt.NDArray[np.int32]
    think_ns: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    abort_ns: npt.NDArray[np.int64]
    tenant: npt.NDArray[np.int16]
    rank: npt.NDArray[np.int16]
    endpoint: npt.NDArray[np.int8]
    stream: npt.NDArray[np.bool_]
    model: npt.NDArray[np.int16]
    n: npt.NDArray[np.int16]
    session: npt.NDArray[np.int32]
    turn: npt.NDArray[np.int32]
    block_size: npt.NDArray[np.int32]
    block_offsets: npt.NDArray[np.int64]
    block_hashes: npt.NDArray[np.int64]
    tenants: tuple[str, ...]
    models: tuple[str, ...]
    warmup_ns: int = 0
    request_id: pa.Array | None = None
    session_id: pa.Array | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """How many requests."""
        return len(self.at_ns)

    @property
    def span_ns(self) -> int:
        """From the first due time to the last, by the trace's own clock."""
        return int(self.at_ns[-1] - self.at_ns[0]) if self.rows else 0

    @property
    def warmup(self) -> npt.NDArray[np.bool_]:
        """Which rows are the warm-up."""
        return self.at_ns < self.warmup_ns

    @property
    def linked(self) -> bool:
        """Whether some turn waits for another's end."""
        return bool(np.any(self.previous != NONE))


_SHARED = tuple(
    field.name
    for field in dataclasses.fields(Plan)
    if field.name not in {"tenants", "models", "warmup_ns", "request_id", "session_id", "notes"}
)
_DIGESTED = tuple(name for name in _SHARED if name not in {"at_ns", "session"})


def build(
    trace: pa.Table, *, turns: str = "linked", endpoint: str | None = None, model: str | None = None, warmup_ns: int = 0
) -> Plan:
    """Make the plan of a tagged and reshaped trace.

    Args:
        trace: request records by arrival (`traces.parquet.read`, `tenants.mix`, `traces.reshape`).
        turns: "linked": a later turn waits for its predecessor's end; "timed": every turn at its own trace time.
        endpoint: send everything there instead of where the trace says; null endpoints are `completions`.
        model: ask for this model instead of the trace's.
        warmup_ns: the first stretch of the plan that is sent but not measured.

    Raises:
        BadFile: no rows, no lengths, or endpoints that cannot be replayed.
    """
    if not trace.num_rows:
        raise BadFile("the trace has no rows (left): nothing to replay")
    notes: list[str] = []
    rows = trace.num_rows
    arrival = _values(trace, "arrival_ns", np.int64)
    at_ns = arrival - arrival[0]
    if rows > 1 and bool(np.any(at_ns[1:] < at_ns[:-1])):
        raise BadFile("the trace is not in order of arrival: sort it first (traces shape)")
    input_tokens = _lengths(trace, "input_tokens", notes)
    output_tokens = _lengths(trace, "output_tokens", notes)
    abort_ns = _aborts(trace, notes)
    output_tokens = _room_to_abort(trace, output_tokens, abort_ns)
    tenant, tenants = _words(trace, "tenant", "default")
    models_of, models = _words(trace, "model", None)
    if model is not None:
        models_of, models = _constant(0, rows, np.int16), (model,)
    session, turn = _sessions(trace)
    previous, think_ns = _links(trace, at_ns, (session, turn), turns, notes)
    offsets, hashes = _blocks(trace)
    return Plan(
        at_ns=at_ns,
        previous=previous,
        think_ns=think_ns,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        abort_ns=abort_ns,
        tenant=tenant,
        rank=_values(trace, "priority", np.int16, NONE),
        endpoint=_endpoints(trace, endpoint, notes),
        stream=_values(trace, "stream", np.bool_, True),
        model=models_of,
        n=_values(trace, "n", np.int16, 1),
        session=session,
        turn=turn,
        block_size=_block_size(trace, offsets, input_tokens, notes),
        block_offsets=offsets,
        block_hashes=hashes,
        tenants=tenants,
        models=models,
        warmup_ns=warmup_ns,
        request_id=_text(trace, "request_id"),
        session_id=_text(trace, "session_id"),
        notes=tuple(notes),
    )


def digest(plan: Plan) -> str:
    """A fingerprint of what is offered: first turns' times, all lengths, tags, links and think times.

    Later turns' own times are left out where they wait for a predecessor: they are not used.
    """
    found = hashlib.blake2b(digest_size=16)
    found.update(json.dumps([plan.rows, plan.tenants, plan.models, plan.warmup_ns]).encode())
    for start in range(0, plan.rows, _PIECE):
        piece = slice(start, start + _PIECE)
        found.update(np.where(plan.previous[piece] == NONE, plan.at_ns[piece], NONE).data)
    for name in _DIGESTED:
        found.update(name.encode())
        array = getattr(plan, name)
        for start in range(0, len(array), _PIECE):  # a broadcast constant is never written out whole
            found.update(np.ascontiguousarray(array[start : start + _PIECE]).data)
    return found.hexdigest()


def shard(plan: Plan, workers: int, capped: Sequence[str] = ()) -> npt.NDArray[np.int16]:
    """Which worker sends which row: sessions and single requests are dealt round by due time.

    A tenant with a concurrency cap is dealt whole to one worker, so that its cap needs no message between processes.
    Turns of one session stay together. Returns int16 per row.
    """
    if workers <= 1:
        return np.zeros(plan.rows, dtype=np.int16)
    if not plan.linked and not set(capped) & set(plan.tenants):
        single = np.empty(plan.rows, dtype=np.int16)
        for worker in range(workers):
            single[worker::workers] = worker
        return single
    unit = _units(plan)
    first, inverse = np.unique(unit, return_index=True, return_inverse=True)[1:]
    order = np.argsort(first, kind="stable")
    dealt = np.empty(len(first), dtype=np.int16)
    dealt[order] = np.arange(len(first)) % workers
    owner: npt.NDArray[np.int16] = dealt[inverse]
    names = [plan.tenants.index(name) for name in capped if name in plan.tenants]
    if names:
        is_capped = np.isin(plan.tenant, names)
        mixed = _mixes_tenants(plan, unit)
        for place, name in enumerate(names):
            touched = np.unique(inverse[plan.tenant == name])
            owner[np.isin(inverse, touched)] = 0 if mixed else place % workers
        owner[is_capped & mixed] = 0
    return owner


def save(plan: Plan, folder: Path) -> None:
    """Write the arrays that workers need, one file each, to be mapped by `load`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _SHARED:
        array = getattr(plan, name)
        np.save(folder / f"{name}.npy", array[:1] if _is_constant(array) else array)
    tables = {"rows": plan.rows, "tenants": plan.tenants, "models": plan.models, "warmup_ns": plan.warmup_ns}
    (folder / "plan.json").write_text(json.dumps(tables))


def load(folder: Path) -> Plan:
    """Map a saved plan: pages are shared between processes and read when touched."""
    tables = json.loads((folder / "plan.json").read_text())
    rows = tables["rows"]
    arrays: dict[str, Any] = {}
    for name in _SHARED:
        array = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))  # a memmap's own indexing is slow
        single = len(array) == 1 and name not in {"block_offsets", "block_hashes"}
        arrays[name] = np.broadcast_to(array[0], rows) if single else array
    if len(arrays["block_offsets"]) == 1:
        arrays["block_offsets"] = np.broadcast_to(arrays["block_offsets"][0], rows + 1)
    return Plan(
        **arrays,
        tenants=tuple(tables["tenants"]),
        models=tuple(tables["models"]),
        warmup_ns=tables["warmup_ns"],
    )


def _units(plan: Plan) -> Ints:
    """What must stay on one worker: the session of linked rows, else the row itself (numbered after the sessions)."""
    own = np.arange(plan.rows, dtype=np.int64)
    if not plan.linked:
        return own
    return np.where(plan.session == NONE, own + plan.rows, plan.session.astype(np.int64))


def _mixes_tenants(plan: Plan, unit: Ints) -> bool:
    pairs = np.unique(np.stack([unit, plan.tenant.astype(np.int64)]), axis=1)
    return bool(pairs.shape[1] > len(np.unique(unit)))


def _constant(value: Any, rows: int, dtype: Any) -> Any:
    return np.broadcast_to(np.array(value, dtype=dtype), rows)


def _is_constant(array: npt.NDArray[Any]) -> bool:
    return len(array) > 0 and array.strides == (0,)


def _values(trace: pa.Table, name: str, dtype: Any, missing: Any = None) -> Any:
    """A column as numpy; nulls become `missing`; a column that is absent or all null is one broadcast value."""
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        return _constant(missing, trace.num_rows, dtype)
    column = trace.column(name)
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(missing, type=column.type))
    return column.to_numpy().astype(dtype, copy=False)


def _text(trace: pa.Table, name: str) -> pa.Array | None:
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        return None
    return trace.column(name).combine_chunks()


def _lengths(trace: pa.Table, name: str, notes: list[str]) -> Any:
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


def _aborts(trace: pa.Table, notes: list[str]) -> Any:
    """Patience of clients that left: `end_ns` of rows whose outcome is `client_abort`."""
    if not {"outcome", "end_ns"} <= set(trace.schema.names):
        return _constant(NONE, trace.num_rows, np.int64)
    left = pc.fill_null(pc.equal(trace.column("outcome").cast(pa.string()), _ABORTED), False)
    mask = left.to_numpy()
    count = int(np.count_nonzero(mask))
    if not count:
        return _constant(NONE, trace.num_rows, np.int64)
    ends = _values(trace, "end_ns", np.int64, NONE)
    found = np.where(mask, ends, NONE)
    unknown = int(np.count_nonzero(mask & (ends == NONE)))
    if unknown:
        notes.append(f"{unknown:,} aborted requests have no end_ns: they are not aborted again")
    return found


def _room_to_abort(trace: pa.Table, output_tokens: Any, abort_ns: Any) -> Any:
    """An aborted request was cut short: it asks for its own limit, or for twice what came and some more."""
    mask = abort_ns != NONE
    if not mask.any():
        return output_tokens
    limit = _values(trace, "max_tokens", np.int32, NONE)
    guess = 2 * output_tokens + _ABORT_ROOM_TOKENS
    return np.where(mask, np.where(limit > 0, np.maximum(limit, output_tokens), guess), output_tokens).astype(np.int32)


def _words(trace: pa.Table, name: str, missing: str | None) -> tuple[Any, tuple[str, ...]]:
    """A word column as small indexes and its table in order of first appearance."""
    if name not in trace.schema.names or trace.column(name).null_count == trace.num_rows:
        return (_constant(0 if missing else NONE, trace.num_rows, np.int16), (missing,) if missing else ())
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


def _endpoints(trace: pa.Table, forced: str | None, notes: list[str]) -> Any:
    index, names = _words(trace, "endpoint", None)
    rows = trace.num_rows
    if forced is not None:
        changed = [name for name in names if name != forced]
        if changed:
            notes.append(f"endpoint {', '.join(sorted(changed))} of the trace is sent to {forced}, as asked")
        return _constant(ENDPOINTS.index(forced), rows, np.int8)
    if not names:
        notes.append("the trace names no endpoint: completions, where prompt lengths are exact")
        return _constant(ENDPOINTS.index("completions"), rows, np.int8)
    for name in names:
        if name not in SENDABLE:
            count = int(np.count_nonzero(index == names.index(name)))
            raise BadFile(f"{count:,} rows are of endpoint {name!r}, which cannot be replayed: --endpoint completions")
    table = np.array([ENDPOINTS.index(name) for name in names] + [ENDPOINTS.index("completions")], dtype=np.int8)
    if len(names) == 1 and not bool(np.any(index == NONE)):
        return _constant(table[0], rows, np.int8)
    return table[index]  # NONE is −1, the last one


def _sessions(trace: pa.Table) -> tuple[Any, Any]:
    if "session_id" not in trace.schema.names or trace.column("session_id").null_count == trace.num_rows:
        return _constant(NONE, trace.num_rows, np.int32), _constant(0, trace.num_rows, np.int32)
    encoded = pc.dictionary_encode(trace.column("session_id")).unify_dictionaries().combine_chunks()
    session = pc.fill_null(encoded.indices, NONE).to_numpy().astype(np.int32)
    return session, _values(trace, "turn", np.int32, NONE)


def _links(trace: pa.Table, at_ns: Any, sessions: tuple[Any, Any], turns: str, notes: list[str]) -> tuple[Any, Any]:
    """For each later turn the row before it in its session, and the think time between them."""
    session, turn = sessions
    rows = trace.num_rows
    nothing = _constant(NONE, rows, np.int32), _constant(NONE, rows, np.int64)
    if turns == "timed" or _is_constant(session):
        return nothing
    order = np.lexsort((np.arange(rows), turn, session))
    follows = (session[order][1:] == session[order][:-1]) & (session[order][1:] != NONE)
    if not follows.any():
        return nothing
    previous = np.full(rows, NONE, dtype=np.int32)
    previous[order[1:][follows]] = order[:-1][follows]
    later = previous != NONE
    think = np.where(later, _values(trace, "think_ns", np.int64, NONE), NONE)
    ends = _values(trace, "end_ns", np.int64, NONE)
    before = np.where(later, previous, 0)
    derived = later & (think == NONE) & (ends[before] != NONE)
    think[derived] = np.maximum(at_ns - (at_ns[before] + ends[before]), 0)[derived]
    unknown = int(np.count_nonzero(later & (think == NONE)))
    if unknown:
        notes.append(
            f"{unknown:,} later turns have no think time: due at their trace time, or when the former turn ends"
        )
    return previous, think


def _block_size(trace: pa.Table, offsets: Any, input_tokens: Any, notes: list[str]) -> Any:
    """Tokens in a prefix block. A recording without a tokenizer counts characters: turned into tokens by its lengths.

    A prompt with k full blocks of s characters has (k + 1/2) s of them on average, so one block is taken as
    s · (input tokens) / (sum of (k + 1/2) s) tokens, over all rows with blocks.
    """
    size = _values(trace, "block_size", np.int32, NONE)
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


def _blocks(trace: pa.Table) -> tuple[Any, Any]:
    if "block_hashes" not in trace.schema.names or trace.column("block_hashes").null_count == trace.num_rows:
        return _constant(0, trace.num_rows + 1, np.int64), np.zeros(1, dtype=np.int64)
    lists = trace.column("block_hashes").combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.zeros(trace.num_rows + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    hashes = pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return offsets, hashes if len(hashes) else np.zeros(1, dtype=np.int64)


def counts(plan: Plan) -> dict[str, Any]:
    """What a dry run prints: `rows`, `tenants` (name → rows), `warmup`, `input_tokens`, `output_tokens`, `span_ns`."""
    per_tenant = np.bincount(plan.tenant, minlength=len(plan.tenants))
    return {
        "rows": plan.rows,
        "tenants": {name: int(per_tenant[index]) for index, name in enumerate(plan.tenants)},
        "warmup": int(np.count_nonzero(plan.warmup)),
        "input_tokens": int(plan.input_tokens.sum(dtype=np.int64)),
        "output_tokens": int(plan.output_tokens.sum(dtype=np.int64)),
        "span_ns": plan.span_ns,
    }
