"""What kind of traffic a trace is: one JSON-able profile, the same for a whole trace and for each of its tenants.

`profile(columns)` puts together times (`traces.burstiness`), lengths (`traces.lengths`), load, kinds, sessions, prefix
sharing and tenants. Keys and definitions are in docs/stats.md; a figure that the trace cannot tell is absent or null,
never 0. Nothing is read or printed here.

Formulas that stand here:

    offered load     tokens of all requests / span
    in flight        at t: arrivals up to t − ends up to t; mean over time
    prefix sharing   a block is a hit when an earlier request had it and all blocks before it in this prompt are hits:
                     what an endless cache would save
    Jain's index     (Σx)² / (n·Σx²) of tokens by tenant: 1 = equal shares, 1/n = one has all
                     (Jain, Chiu, Hawe, DEC-TR-301, 1984)
    bursting along   correlation of two tenants' counts in the same windows
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from traces.burstiness import (
    NS,
    Counts,
    Int64s,
    Windows,
    autocorrelation,
    base_window,
    counts,
    daily,
    grid,
    timing,
    windows,
)
from traces.columns import Columns
from traces.lengths import describe, rank_correlation, spread

LENGTHS_ONLY = "lengths"  # a source without arrivals says so in its metadata
MOST_TENANTS = 20  # tenants described in full; the rest only counted
_BINS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_MOST_BINS = 240
_SAMPLES = 4096  # moments at which requests in flight are counted


def profile(columns: Columns) -> dict[str, Any]:
    """The profile of a trace with its tenants."""
    found = part(columns) | {
        "source": columns.metadata.source,
        "epoch": columns.metadata.epoch,
        "history": list(columns.metadata.history),
        "out_of_order_steps": columns.out_of_order_steps,
    }
    tenants = columns.words.get("tenant")
    if tenants is None:
        return found
    shares = tenant_tokens(columns)
    largest = sorted(tenants.counts(), key=lambda name: -shares.get(name, 0))[:MOST_TENANTS]
    codes = {name: tenants.names.index(name) for name in largest}
    found["tenants"] = {name: part(columns.take(tenants.codes == codes[name])) for name in largest}
    found["tenant_rows"] = tenants.counts()
    found["tenant_tokens"] = shares
    found["jain_tokens"] = jain(list(shares.values()))
    if has_times(columns):
        found["bursting_together"] = together(columns, largest)
    return found


def part(columns: Columns) -> dict[str, Any]:
    """The profile of some rows, tenants left out."""
    found: dict[str, Any] = {"rows": len(columns)}
    timed = has_times(columns)
    if timed:
        counted = counts(columns.arrival_ns)
        found |= timing(columns.arrival_ns, counted)
        if found["span_s"] > 0:
            found |= _rhythm(columns.arrival_ns, counted) | {"offered": offered(columns, counted.ten)}
    found |= _lengths(columns)
    if timed and found["span_s"] > 0:
        found["in_flight"] = in_flight(columns)
    found |= _latency(columns) | _kinds(columns)
    found["sessions"] = sessions(columns)
    return found | prefix(columns)


def has_times(columns: Columns) -> bool:
    """Whether rows have arrivals: a trace of lengths alone has none."""
    return columns.metadata.source != LENGTHS_ONLY


def _rhythm(arrival_ns: Int64s, counted: Counts) -> dict[str, Any]:
    resolution_ns, period_ns = grid(arrival_ns)
    return {
        "timestamps": {
            "resolution_s": resolution_ns / NS,
            "batch_period_s": None if period_ns is None else period_ns / NS,
        },
        "idc_curve": [point._asdict() for point in counted.curve],
        "autocorrelation": autocorrelation(counted.second),
        "daily_rps": daily(arrival_ns),
        "rate_curve": rate_curve(counted.second, int(arrival_ns[-1] - arrival_ns[0])),
    }


def rate_curve(second: Windows, span_ns: int) -> dict[str, Any]:
    """The rate [req/s] over time in at most 240 bins of a whole number of seconds; the last may be partial."""
    bin_s = next(
        (width for width in _BINS_S if span_ns // (width * NS) < _MOST_BINS), -(-span_ns // (NS * _MOST_BINS)) + 1
    )
    counted = second.coarser(bin_s)
    lengths = np.full(counted.total, float(bin_s))
    lengths[-1] = max(span_ns / NS - bin_s * (counted.total - 1), 1e-9) if counted.total > 1 else span_ns / NS
    lengths[-1] = max(lengths[-1], bin_s / 4)  # a sliver of a bin would show a rate that never was
    return {"bin_s": bin_s, "rps": [float(value) for value in counted.dense() / lengths]}


def _lengths(columns: Columns) -> dict[str, Any]:
    numbers = columns.numbers
    found: dict[str, Any] = {
        name: described
        for name in ("input_tokens", "output_tokens")
        if name in numbers and (described := describe(numbers[name])) is not None
    }
    if len(found) == 2:
        inputs, outputs = (found[name]["mean"] * found[name]["n"] for name in ("input_tokens", "output_tokens"))
        found["prefill_decode_ratio"] = inputs / outputs if outputs else None
        found["input_output_correlation"] = rank_correlation(numbers["input_tokens"], numbers["output_tokens"])
    return found


def offered(columns: Columns, ten: Windows) -> dict[str, Any]:
    """Tokens a second that the requests ask for: on average and in the fullest 10 s."""
    span_s = int(columns.arrival_ns[-1] - columns.arrival_ns[0]) / NS
    starts = np.cumsum(ten.arrivals) - ten.arrivals
    found = {}
    for name in ("input_tokens", "output_tokens"):
        if name in columns.numbers:
            tokens = np.maximum(columns.numbers[name], 0)
            sums = np.add.reduceat(tokens, starts, dtype=np.int64)
            found[f"{name}_per_s"] = int(sums.sum()) / span_s
            found[f"{name}_per_s_peak_10s"] = int(sums.max()) / 10
    return found


def in_flight(columns: Columns) -> dict[str, Any] | None:
    """Requests in flight over time where the trace tells when they ended; None where it does not."""
    if "end_ns" not in columns.numbers:
        return None
    known = columns.numbers["end_ns"] >= 0
    arrival = columns.arrival_ns[known]
    duration = columns.numbers["end_ns"][known]
    ends = np.sort(arrival + duration)
    moments = np.linspace(0, int(ends[-1] - arrival[0]), _SAMPLES).astype(np.int64) + arrival[0]
    level = np.searchsorted(arrival, moments, side="right") - np.searchsorted(ends, moments, side="right")
    step = _SAMPLES // _MOST_BINS
    at_arrival = np.arange(1, len(arrival) + 1) - np.searchsorted(ends, arrival, side="right")
    return {
        "n": len(arrival),
        "mean": float(duration.sum()) / max(int(ends[-1] - arrival[0]), 1),
        "p50": float(np.percentile(level, 50)),
        "p99": float(np.percentile(level, 99)),
        "max": int(at_arrival.max()),
        "curve": {"step_s": float(moments[step] - moments[0]) / NS, "levels": level[::step].tolist()},
    }


def _latency(columns: Columns) -> dict[str, Any]:
    """Times as measured, from the moment each request was sent."""
    numbers = columns.numbers
    found = {}
    if "first_token_ns" in numbers:
        found["ttft_s"] = spread(numbers["first_token_ns"], 1 / NS)
    if "end_ns" in numbers:
        found["e2e_s"] = spread(numbers["end_ns"], 1 / NS)
    if {"first_token_ns", "last_token_ns", "output_tokens"} <= numbers.keys():
        first, last, tokens = (numbers[name] for name in ("first_token_ns", "last_token_ns", "output_tokens"))
        there = (first >= 0) & (last > first) & (tokens > 1)
        if there.any():
            found["tpot_s"] = spread((last[there] - first[there]) / (tokens[there] - 1), 1 / NS)
    return found


def _kinds(columns: Columns) -> dict[str, Any]:
    found: dict[str, Any] = {
        plural: columns.words[name].counts()
        for name, plural in (
            ("model", "models"),
            ("endpoint", "endpoints"),
            ("outcome", "outcomes"),
            ("finish_reason", "finish_reasons"),
            ("tokens_source", "tokens_sources"),
        )
        if name in columns.words
    }
    if columns.stream is not None:
        known = columns.stream >= 0
        found["streaming_share"] = float(columns.stream[known].mean())
    if "tools" in columns.numbers:
        found["tools_share"] = float((columns.numbers["tools"] > 0).mean())
    return found


def sessions(columns: Columns) -> dict[str, Any] | None:
    """Turns and think times of conversations; None where the trace has no session."""
    if columns.session is None or not columns.session.any():
        return None
    known = columns.session[columns.session != 0]
    _, turns = np.unique(known, return_counts=True)
    found: dict[str, Any] = {
        "n": len(turns),
        "rows_in_sessions": len(known),
        "turns": spread(turns),
        "single_turn_share": float((turns == 1).mean()),
    }
    if "think_ns" in columns.numbers:
        think = columns.numbers["think_ns"]
        found["think_s"] = spread(think, 1 / NS)
        found["sum_think_time_s"] = int(think[think >= 0].sum()) / NS
    return found


def prefix(columns: Columns) -> dict[str, Any]:
    """What an endless prefix cache would find; empty where the trace has no prefix blocks."""
    if columns.blocks is None or columns.block_count is None or not len(columns.blocks):
        return {}
    leading = seen_before(columns)
    blocks = len(columns.blocks)
    found: dict[str, Any] = {
        "total_hash_ids": blocks,
        "unique_hash_ids": len(np.unique(columns.blocks)),
        "leading_prefix_blocks_seen_before_infinite_cache": int(leading.sum()),
        "prefix": {
            "block_size": columns.block_size,
            "block_unit": columns.metadata.block_unit,
            "ideal_hit_rate": int(leading.sum()) / blocks,
            "rows_with_a_hit_share": float((leading > 0).mean()),
            "rows_with_blocks": int(np.count_nonzero(columns.block_count)),
        },
    }
    if "cached_tokens" in columns.numbers and "input_tokens" in columns.numbers:
        cached, inputs = columns.numbers["cached_tokens"], columns.numbers["input_tokens"]
        both = (cached >= 0) & (inputs >= 0)
        if inputs[both].sum():
            found["prefix"]["measured_cached_share"] = float(cached[both].sum() / inputs[both].sum())
    return found


def seen_before(columns: Columns) -> Int64s:
    """How many blocks from the start of each prompt an earlier request had."""
    assert columns.blocks is not None
    assert columns.block_count is not None
    rows = np.repeat(np.arange(len(columns)), columns.block_count)
    _, first_place, of_block = np.unique(columns.blocks, return_index=True, return_inverse=True)
    return leading_run(rows[first_place][of_block] < rows, columns.block_count)


def leading_run(flags: np.typing.NDArray[np.bool_], count: Int64s) -> Int64s:
    """How many flags are True from the start of each row; rows of `count` flags lie one after the other."""
    ends = np.cumsum(count)
    starts = ends - count
    places = np.concatenate([np.flatnonzero(~flags), [len(flags)]])
    first_false = places[np.searchsorted(places, starts)]
    return np.asarray(np.minimum(first_false, ends) - starts)


def tenant_tokens(columns: Columns) -> dict[str, int]:
    """Input and output tokens by tenant, most first."""
    tenants = columns.words["tenant"]
    there = tenants.codes >= 0
    tokens = np.zeros(len(columns))
    for name in ("input_tokens", "output_tokens"):
        if name in columns.numbers:
            tokens += np.maximum(columns.numbers[name], 0)
    sums = np.bincount(tenants.codes[there], tokens[there], minlength=len(tenants.names))
    return {tenants.names[code]: int(sums[code]) for code in np.argsort(-sums, kind="stable").tolist()}


def jain(shares: list[int]) -> float | None:
    """Jain's fairness index of what each got; None when nobody got anything."""
    square = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * square) if square else None


def together(columns: Columns, names: list[str]) -> list[dict[str, Any]]:
    """Pairs of tenants whose counts rise and fall together, or against each other, beyond chance (3 standard errors).

    Counts in windows of a width that holds a request of the trace on average; sorted by strength.
    """
    if columns.arrival_ns[-1] == columns.arrival_ns[0]:
        return []
    tenants = columns.words["tenant"]
    width_s = max(base_window(windows(columns.arrival_ns, NS)), 10)
    total = windows(columns.arrival_ns, width_s * NS).total
    if total < 20:
        return []
    index = (columns.arrival_ns - columns.arrival_ns[0]) // (width_s * NS)
    each = {name: np.bincount(index[tenants.codes == tenants.names.index(name)], minlength=total) for name in names}
    pairs = []
    for one, two in itertools.combinations(names, 2):
        if not each[one].std() or not each[two].std():
            continue
        correlation = float(np.corrcoef(each[one], each[two])[0, 1])
        if abs(correlation) > 3 / (total - 1) ** 0.5:
            pairs.append({"tenants": [one, two], "correlation": correlation, "window_s": width_s, "windows": total})
    return sorted(pairs, key=lambda pair: -abs(pair["correlation"]))
