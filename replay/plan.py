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

from replay import fields
from replay.fields import NONE
from traces.errors import BadFile

Ints = npt.NDArray[np.signedinteger[Any]]

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

_PIECE = 1 << 18

__all__ = ["NONE", "READ_COLUMNS", "Plan", "build", "counts", "digest", "load", "save", "shard"]


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
    arrival = fields.values(trace, "arrival_ns", np.int64)
    at_ns = arrival - arrival[0]
    if rows > 1 and bool(np.any(at_ns[1:] < at_ns[:-1])):
        raise BadFile("the trace is not in order of arrival: sort it first (traces shape)")
    input_tokens = fields.lengths(trace, "input_tokens", notes)
    output_tokens = fields.lengths(trace, "output_tokens", notes)
    abort_ns = fields.aborts(trace, notes)
    output_tokens = fields.room_to_abort(trace, output_tokens, abort_ns)
    tenant, tenants = fields.words(trace, "tenant", "default")
    models_of, models = fields.words(trace, "model", None)
    if model is not None:
        models_of, models = fields.constant(0, rows, np.int16), (model,)
    session, turn = fields.sessions(trace)
    previous, think_ns = fields.links(trace, at_ns, (session, turn), turns, notes)
    offsets, hashes = fields.blocks(trace)
    return Plan(
        at_ns=at_ns,
        previous=previous,
        think_ns=think_ns,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        abort_ns=abort_ns,
        tenant=tenant,
        rank=fields.values(trace, "priority", np.int16, NONE),
        endpoint=fields.endpoints(trace, endpoint, notes),
        stream=fields.values(trace, "stream", np.bool_, True),
        model=models_of,
        n=fields.values(trace, "n", np.int16, 1),
        session=session,
        turn=turn,
        block_size=fields.block_size(trace, offsets, input_tokens, notes),
        block_offsets=offsets,
        block_hashes=hashes,
        tenants=tenants,
        models=models,
        warmup_ns=warmup_ns,
        request_id=fields.text(trace, "request_id"),
        session_id=fields.text(trace, "session_id"),
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
        np.save(folder / f"{name}.npy", array[:1] if fields.is_constant(array) else array)
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
