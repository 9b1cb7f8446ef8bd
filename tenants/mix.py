"""A tenant mix in one word: who takes part, how much of the trace each gets, and who is urgent.

    NAME[=SHARE][@PRIORITY] joined by `:`          risk:summary        risk=3:summary=1        risk@0:batch@5

Most urgent first when priorities are left out; all or none are given.

On an *untagged* trace the mix assigns: requests of one session stay together, the number of sessions a tenant gets
is its share of them to within one, and which ones is a seeded draw (`share`) or by length of the answer (`length`:
the most urgent tenant gets the shortest). On a *tagged* trace it selects and ranks: shares are refused there, and a
tenant that the mix does not name is an error unless told to `drop` it or to keep it at the `lowest` rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tenants.tenant import DEFAULT, NAME, Tenant
from traces.errors import TraceError
from traces.record import SCHEMA, metadata_of, schema_for

EXAMPLE = "risk=3:summary=1"
ASSIGN = ("share", "length")
OTHERS = ("drop", "lowest")

_ENTRY = re.compile(r"(?P<name>[^=@:]+)(?:=(?P<share>[^=@:]*))?(?:@(?P<priority>[^=@:]*))?")


def parse(text: str) -> tuple[Tenant, ...]:
    """The tenants of a mix, in the order they were named. Raises ValueError with a right example."""
    found: list[Tenant] = []
    for part in text.strip().split(":"):
        match = _ENTRY.fullmatch(part.strip())
        if match is None or not NAME.fullmatch(match["name"].strip()) or match["name"].strip() == "all":
            raise ValueError(f"{part!r} in {text!r} is not a tenant: write NAME[=SHARE][@PRIORITY], as in {EXAMPLE}")
        name = match["name"].strip()
        if any(tenant.name == name for tenant in found):
            raise ValueError(f"{name!r} is in {text!r} twice")
        found.append(Tenant(name=name, share=_share(match["share"], text), priority=_rank(match["priority"], text)))
    given = [tenant.priority is not None for tenant in found]
    if any(given) and not all(given):
        raise ValueError(
            f"{text!r} gives some priorities and leaves out others: give all or none, as in risk@0:batch@5"
        )
    if all(given):
        return tuple(found)
    return tuple(Tenant(name=t.name, share=t.share, priority=rank) for rank, t in enumerate(found))


def is_tagged(trace: pa.Table) -> bool:
    """Whether any row says whose it is."""
    return "tenant" in trace.schema.names and trace.column("tenant").null_count < trace.num_rows


def assign(
    trace: pa.Table,
    mix: Sequence[Tenant] | None,
    *,
    seed: int = 0,
    by: str = "share",
    others: str | None = None,
) -> pa.Table:
    """The trace with a tenant and a rank on every row, as the mix says.

    Args:
        trace: rows in order of arrival. Rows may be dropped from a tagged one (`others="drop"`), never from another.
        mix: tenants, from `parse` or `tenants.tenant.load`; None keeps a tagged trace as it is and names the tenant of
            an untagged one `default`, rank 0.
        seed: of the draw.
        by: one of ASSIGN.
        others: one of OTHERS, or None to refuse tenants that the mix does not name.

    Raises:
        TraceError: the mix and the trace do not fit.
    """
    if not mix:
        if is_tagged(trace):
            return trace
        return _tagged(trace, np.zeros(trace.num_rows, np.int64), [DEFAULT], [0], "tenant: default")
    names, ranks = [t.name for t in mix], [t.priority if t.priority is not None else i for i, t in enumerate(mix)]
    said = ":".join(
        f"{n}{'' if t.share is None else f'={t.share:g}'}@{r}" for t, n, r in zip(mix, names, ranks, strict=True)
    )
    if is_tagged(trace):
        return _select(trace, mix, ranks, others, said)
    shares = np.array([1.0 if t.share is None else t.share for t in mix])
    unit = _units(trace)
    units = int(unit.max()) + 1 if len(unit) else 0
    order = np.random.default_rng(seed).permutation(units) if by == "share" else _by_length(trace, unit, units)
    of_unit = np.empty(units, np.int64)
    precedence = np.argsort(np.array(ranks), kind="stable") if by == "length" else np.arange(len(mix))
    of_unit[order] = np.repeat(precedence, quotas(shares[precedence], units))
    return _tagged(trace, of_unit[unit], names, ranks, f"mix {said} by {by}, seed {seed}")


def quotas(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Whole numbers that add up to `total`, each within one of its share of it (largest remainders)."""
    exact = shares / shares.sum() * total
    whole: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    rest = total - int(whole.sum())
    whole[np.argsort(-(exact - whole), kind="stable")[:rest]] += 1
    return whole


def _select(trace: pa.Table, mix: Sequence[Tenant], ranks: list[int], others: str | None, said: str) -> pa.Table:
    shared = next((tenant for tenant in mix if tenant.share is not None), None)
    if shared is not None:
        raise TraceError(
            f"tenant mix: {shared.name}={shared.share:g} asks for a share, but the trace already says whose each "
            f"request is; write {':'.join(tenant.name for tenant in mix)}"
        )
    column = trace.column("tenant").cast(pa.string()).combine_chunks()
    column = pc.fill_null(column, DEFAULT).dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    present: list[str] = column.dictionary.to_pylist()
    names = [tenant.name for tenant in mix]
    for name in names:
        if name not in present:
            close = difflib.get_close_matches(name, present, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise TraceError(f"tenant mix: no tenant {name!r} in the trace; it has {', '.join(sorted(present))}{hint}")
    unnamed = [name for name in present if name not in names]
    if unnamed and others is None:
        raise TraceError(
            f"tenant mix: the trace also has {', '.join(sorted(unnamed))}; "
            "name them, or say --others drop or --others lowest"
        )
    lowest = max(ranks) + 1
    rank_of = np.array([ranks[names.index(name)] if name in names else lowest for name in present], np.int64)
    codes = column.indices.to_numpy()
    tagged = _tagged(trace, codes, present, rank_of.tolist(), f"mix {said}" + (f", others {others}" if unnamed else ""))
    if unnamed and others == "drop":
        kept = np.isin(codes, [i for i, name in enumerate(present) if name in names])
        return tagged.filter(pa.array(kept))
    return tagged


def _tagged(trace: pa.Table, code: NDArray[np.int64], names: list[str], ranks: list[int], step: str) -> pa.Table:
    """The trace with its tenant and priority columns replaced; the step goes into its history."""
    tenant = pa.DictionaryArray.from_arrays(pa.array(code.astype(np.int32)), pa.array(names, pa.string()))
    priority = pa.array(np.array(ranks, np.int32)[code] if len(code) else np.zeros(0, np.int32))
    columns = {name: trace.column(name) for name in trace.schema.names}
    columns |= {"tenant": tenant, "priority": priority}
    schema = schema_for(list(columns), metadata_of(trace).done(step))
    return pa.Table.from_arrays([_typed(columns[field.name], field.name) for field in schema], schema=schema)


def _typed(column: pa.ChunkedArray | pa.Array, name: str) -> pa.ChunkedArray | pa.Array:
    wanted = SCHEMA.field(name).type
    return column if column.type == wanted else column.cast(wanted)


def _units(trace: pa.Table) -> NDArray[np.int64]:
    """Row → number of the session it belongs to, in order of first arrival; a row without one stands alone."""
    if "session_id" not in trace.schema.names or trace.column("session_id").null_count == trace.num_rows:
        return np.arange(trace.num_rows, dtype=np.int64)
    column = trace.column("session_id").combine_chunks().dictionary_encode()
    codes = pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    alone = codes < 0
    codes[alone] = len(column.dictionary) + np.arange(int(alone.sum()))
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(len(first))
    of_row: NDArray[np.int64] = place[inverse]
    return of_row


def _by_length(trace: pa.Table, unit: NDArray[np.int64], units: int) -> NDArray[np.int64]:
    """Sessions from the shortest mean answer to the longest, ties in order of arrival."""
    if "output_tokens" not in trace.schema.names or trace.column("output_tokens").null_count:
        raise TraceError("--assign length: the trace does not know every output length; use --assign share")
    tokens = trace.column("output_tokens").to_numpy().astype(np.float64)
    mean = np.bincount(unit, tokens, units) / np.maximum(1, np.bincount(unit, minlength=units))
    by_length: NDArray[np.int64] = np.argsort(mean, kind="stable")
    return by_length


def _share(text: str | None, whole: str) -> float | None:
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ValueError(f"share {text!r} in {whole!r} is not a number above 0: write it as {EXAMPLE}")
    return share


def _rank(text: str | None, whole: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"priority {text!r} in {whole!r} is not a rank (0 = most urgent): write it as risk@0:batch@5")
    return int(text)
