"""Draw a trace from a model: arrivals, then conversations, lengths and prefixes, tenant by tenant, then merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from traces import mixture
from traces.burstiness import NS, Floats
from traces.errors import TraceError
from traces.parquet import in_order
from traces.record import Metadata, table
from traces.synthesis import UNTAGGED, Arrivals, Lengths, Model, Prefix, Sessions, Tenant, draw_arrivals

_POOL = 2048  # earlier prompts that a prefix may come from


def draw(model: Model, duration_s: float, *, seed: int, rps: float | None = None) -> pa.Table:
    """A new trace of `duration_s` seconds.

    Args:
        model: a fitted model.
        duration_s: its length; arrivals are in [0, duration).
        seed: every draw follows from it.
        rps: mean rate of all first turns together, for a model of lengths alone: Poisson, tenants in equal parts.

    Raises:
        TraceError: the model has no arrivals and no rate is given, or nothing was drawn.
    """
    generators = np.random.default_rng(seed).spawn(len(model.tenants))
    parts = []
    for (name, tenant), generator in zip(model.tenants.items(), generators, strict=True):
        arrivals = tenant.arrivals
        if arrivals.kind == "none":
            if rps is None:
                raise TraceError("the model is of lengths alone: say how fast requests arrive with --rps 5")
            arrivals = Arrivals(kind="poisson", rate_rps=rps / len(model.tenants))
        columns = _draw_tenant(tenant, arrivals, duration_s, generator)
        rows = len(columns["arrival_ns"])
        if not rows:
            continue
        prefix = "" if name == UNTAGGED else f"{name}-"
        columns["request_id"] = [f"{prefix}{number}" for number in range(rows)]
        if "session_id" in columns:
            columns["session_id"] = [f"{prefix}s{number}" for number in columns["session_id"]]
        if name != UNTAGGED:
            columns["tenant"] = [name] * rows
        parts.append(columns)
    if not parts:
        raise TraceError(f"nothing arrived in {duration_s:g} s: draw a longer trace with --duration")
    return _merged(parts, _metadata(model, seed))


def _metadata(model: Model, seed: int) -> Metadata:
    unit = next((tenant.prefix.unit for tenant in model.tenants.values() if tenant.prefix is not None), "tokens")
    return Metadata(source="synth", block_unit=unit, history=(f"synth draw (seed {seed})",))


def _merged(parts: list[dict[str, Any]], metadata: Metadata) -> pa.Table:
    names = {name for part in parts for name in part}
    tables = [
        table(part | {name: [None] * len(part["arrival_ns"]) for name in names - part.keys()}, metadata)
        for part in parts
    ]
    return in_order(pa.concat_tables(tables).unify_dictionaries())


def _draw_tenant(
    tenant: Tenant, arrivals: Arrivals, duration_s: float, generator: np.random.Generator
) -> dict[str, Any]:
    columns: dict[str, Any]
    if tenant.sessions is None:
        times = draw_arrivals(arrivals, duration_s, generator)
        columns = _lengths(tenant.lengths, len(times), generator)
    else:
        times, columns = _conversations(tenant, tenant.sessions, arrivals, duration_s, generator)
    rows = len(times)
    columns["arrival_ns"] = np.floor(times * NS).astype(np.int64)
    if tenant.prefix is not None and "input_tokens" in columns:
        columns["block_size"] = np.full(rows, tenant.prefix.block_size)
        columns["block_hashes"] = _blocks(tenant.prefix, columns, generator)
    if tenant.models:
        names, shares = list(tenant.models), np.array(list(tenant.models.values()))
        columns["model"] = [names[i] for i in generator.choice(len(names), size=rows, p=shares / shares.sum())]
    if tenant.stream_share is not None:
        columns["stream"] = generator.random(rows) < tenant.stream_share
    if tenant.endpoint is not None:
        columns["endpoint"] = [tenant.endpoint] * rows
    if tenant.priority is not None:
        columns["priority"] = np.full(rows, tenant.priority)
    return columns


def _lengths(lengths: Lengths | None, rows: int, generator: np.random.Generator) -> dict[str, Any]:
    if lengths is None:
        return {}
    tokens = mixture.draw(_mixture(lengths), rows, generator)
    return {
        f"{name}_tokens": np.clip(np.rint(tokens[:, column]), 1, lengths.most[column]).astype(np.int64)
        for column, name in enumerate(lengths.of)
    }


def _mixture(lengths: Lengths) -> mixture.Mixture:
    components = lengths.components
    sd = np.array([component.sd for component in components])
    covariances = sd[:, :, None] * sd[:, None, :]
    together = np.clip([component.correlation for component in components], -0.9999, 0.9999)
    covariances *= np.where(np.eye(sd.shape[1]), 1.0, together[:, None, None])
    weights = np.array([component.weight for component in components])
    return mixture.Mixture(weights, np.array([component.mean for component in components]), covariances)


def _conversations(
    tenant: Tenant, sessions: Sessions, arrivals: Arrivals, duration_s: float, generator: np.random.Generator
) -> tuple[Floats, dict[str, Any]]:
    """Turns in the window of all conversations, those that began before it too."""
    mean_gap_s = float(np.exp(sessions.gap_ln_s[0] + sessions.gap_ln_s[1] ** 2 / 2))
    mean_turns = sessions.single_share + (1 - sessions.single_share) * (
        2 + sessions.go_on / max(1 - sessions.go_on, 1e-3)
    )
    earlier_s = min(2 * mean_gap_s * mean_turns, 2 * duration_s)
    starts = draw_arrivals(arrivals, earlier_s + duration_s, generator) - earlier_s
    more = generator.random(len(starts)) >= sessions.single_share
    turns = np.where(more, 1 + generator.geometric(max(1 - sessions.go_on, 1e-3), size=len(starts)), 1)
    session = np.repeat(np.arange(len(starts)), turns)
    first = np.cumsum(turns) - turns
    turn = np.arange(len(session)) - np.repeat(first, turns)
    gap = np.where(turn > 0, generator.lognormal(*sessions.gap_ln_s, size=len(session)), 0.0)
    running = np.cumsum(gap)
    times = np.repeat(starts - running[first], turns) + running
    columns = _lengths(tenant.lengths, len(session), generator)
    if sessions.grows and {"input_tokens", "output_tokens"} <= columns.keys():
        assert tenant.lengths is not None
        new = np.rint(generator.lognormal(*sessions.new_ln_tokens, size=len(session))).astype(np.int64)
        added = np.where(turn > 0, new, 0)
        added[1:] += np.where(turn[1:] > 0, columns["output_tokens"][:-1], 0)
        running = np.cumsum(added)
        prompts = np.repeat(columns["input_tokens"][first] - running[first], turns) + running
        columns["input_tokens"] = np.minimum(prompts, tenant.lengths.most[0])  # first prompt + answers + what was new
    columns |= {
        "session_id": session,
        "turn": turn,
        "think_ns": np.floor(gap * sessions.think_share * NS).astype(np.int64),
    }
    seen = (times >= 0) & (times < duration_s)
    chosen = np.flatnonzero(seen)[np.argsort(times[seen], kind="stable")]
    columns = {name: values[chosen] for name, values in columns.items()}
    columns["think_ns"] = pa.array(columns["think_ns"], mask=columns["turn"] == 0)
    return times[chosen], columns


def _blocks(prefix: Prefix, columns: dict[str, Any], generator: np.random.Generator) -> list[list[int]]:
    """Prefix blocks: a later turn goes on from the former one, a first prompt from an earlier one as was fitted."""
    counts = (columns["input_tokens"] // prefix.block_size).tolist()
    sessions = columns.get("session_id")
    shares = np.array(prefix.hit_shares)
    tenths = generator.choice(len(shares), size=len(counts), p=shares / shares.sum())
    hits = np.where(tenths > 0, (tenths - generator.random(len(counts))) / (len(shares) - 1), 0.0)
    fresh = int(generator.integers(1 << 61))
    last: dict[int, list[int]] = {}
    pool: list[list[int]] = []
    rows = []
    for row, count in enumerate(counts):
        session = None if sessions is None else int(sessions[row])
        former = None if session is None else last.get(session)
        kept = former[:count] if former is not None else _from_pool(pool, round(hits[row] * count), generator)
        blocks = [*kept, *range(fresh, fresh + count - len(kept))]
        fresh += count - len(kept)
        rows.append(blocks)
        if session is not None:
            last[session] = blocks
        if len(pool) < _POOL:
            pool.append(blocks)
        else:
            pool[int(generator.integers(_POOL))] = blocks
    return rows


def _from_pool(pool: list[list[int]], wanted: int, generator: np.random.Generator) -> list[int]:
    """The first `wanted` blocks of an earlier prompt that is long enough; of the longest of eight tries if none is."""
    best: list[int] = []
    if not pool or not wanted:
        return best
    for place in generator.integers(len(pool), size=8).tolist():
        if len(pool[place]) > len(best):
            best = pool[place]
        if len(best) >= wanted:
            break
    return best[:wanted]
