"""What a probe sends, and what the answers say by their times alone. Pure: traces out, outcomes in, words out.

Four little traces, each a replay of its own, with ranks 0 (urgent), 1 (block) and 2 (low):

    idle     short prompts one after the other, then two longer ones: what an idle server takes; is it idle?
    backlog  prompts of rank 1 that take a second or more to read, then short ones of ranks 0 and 2 in turn. Honoured:
             every urgent one answers before every low one, though half were sent later. Inverted: the other way
             round. Ignored: neither. Needs no more than a queue for prefill: it works with hundreds of slots
    slots    more streams of rank 1 than the server may have slots, then an urgent one. Streams that answer before the
             first one ends hold the slots. If the urgent one answers before any stream ends, one was displaced for it
    long     a stream, then one long prompt of rank 2, then an urgent one. Blocks where the urgent one's first token
             waits for the long one's. Gaps of the stream that are longer than usual count the steps that read the
             prompt, so the budget is about length / steps
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.record import Metadata, table
from traces.units import NS_PER_MS, NS_PER_S

Floats = npt.NDArray[np.float64]

URGENT, BLOCK, LOW = "urgent", "block", "low"
RANKS = {URGENT: 0, BLOCK: 1, LOW: 2}

SHORT_TOKENS = 24
IDLE_OUT = 12
LEARN = (800, 1600)  # lengths from which the time per prompt token is learnt
BACKLOG_S = 1.5  # of prefill in front of the short ones
BLOCKER_S = 0.15
FEWEST_BLOCKERS, MOST_BLOCKERS = 8, 48
TURNS = (LOW, URGENT, URGENT, LOW, LOW, URGENT, URGENT, LOW)  # as many first as last for both: no order favours one
MOST_SLOTS = 40
STREAMS_S = 1.6
SLOTS_DRAIN_S = 3.0  # after the urgent one; who has no slot by then is cut
LONG_S = 1.0
SLOWER = 2.0  # a step that reads a prompt beside a stream takes so many times what a step of the stream takes, or more
HONOURED, INVERTED = 0.9, 0.1  # share of pairs in which the urgent one is first
IGNORED = (0.25, 0.75)


class Idle(NamedTuple):
    """What the idle server takes."""

    short_ms: float  # median time to first token of short prompts
    gap_ms: float  # between tokens of a lone stream
    token_ms: float  # per prompt token
    busy: str  # why it does not look idle; empty when it does


class Findings(NamedTuple):
    """What one burst says: a word and its evidence."""

    word: str
    evidence: str


def trace(rows: list[tuple[float, str, int, int]], endpoint: str) -> pa.Table:
    """A trace of (second, kind, tokens in, tokens out)."""
    rows = sorted(rows)
    return table(
        {
            "arrival_ns": [int(at * NS_PER_S) for at, *_ in rows],
            "tenant": [kind for _, kind, *_ in rows],
            "priority": [RANKS[kind] for _, kind, *_ in rows],
            "input_tokens": [tokens for *_, tokens, _ in rows],
            "output_tokens": [tokens for *_, tokens in rows],
            "endpoint": [endpoint] * len(rows),
            "stream": [True] * len(rows),
        },
        Metadata(source="probe", epoch="relative"),
    )


def idle_rows() -> list[tuple[float, str, int, int]]:
    """Short prompts with time between them, then longer ones; ranks all alike."""
    shorts = [(0.35 * index, BLOCK, SHORT_TOKENS, IDLE_OUT) for index in range(6)]
    return shorts + [(2.4 + 0.8 * index, BLOCK, tokens, 1) for index, tokens in enumerate(LEARN)]


def read_idle(outcomes: pa.Table) -> Idle | None:
    """What the idle burst says; None where it was not answered."""
    seen = _seen(outcomes)
    short = seen.tokens <= LEARN[0] // 2
    first = seen.first_ms - seen.sent_ms
    known = np.isfinite(first)
    if known[short].sum() < 3 or not known[~short].all():
        return None
    short_ms = float(np.median(first[short & known][1:]))  # the first one opens connections and warms up
    gaps = np.concatenate([np.diff(chunks) for chunks, is_short in zip(seen.chunks_ms, short, strict=True) if is_short])
    gap_ms = float(np.median(gaps)) if len(gaps) else 1.0
    token_ms = max(float(np.median((first[~short] - short_ms) / seen.tokens[~short])), 1e-4)
    return Idle(short_ms, gap_ms, token_ms, _busy(first[short & known][1:], gap_ms))


def _busy(first_ms: Floats, gap_ms: float) -> str:
    """An idle server answers a short prompt within a few of its own steps, and about alike each time."""
    quick, usual = float(first_ms.min()), float(np.median(first_ms))
    if quick > 20 * gap_ms + 200:
        return f"a short prompt waits {quick:,.0f} ms for its first token, {quick / gap_ms:,.0f} gaps between tokens"
    if usual > 5 * quick + 150:
        return f"short prompts wait {quick:,.0f} to {first_ms.max():,.0f} ms for their first token"
    return ""


def backlog_rows(idle: Idle, longest: int | None) -> list[tuple[float, str, int, int]]:
    """Blockers at once, then short ones in turn while most of them still wait."""
    most = (longest or 1 << 20) - 64
    tokens = int(np.clip(BLOCKER_S * 1e3 / idle.token_ms, 256, min(most, 16_000)))
    each_s = tokens * idle.token_ms / 1e3
    count = int(np.clip(np.ceil(BACKLOG_S / each_s), FEWEST_BLOCKERS, MOST_BLOCKERS))
    after = min(0.3 * count * each_s, 0.4)
    step = min(0.02, 0.2 * count * each_s / len(TURNS))
    blockers = [(0.0005 * index, BLOCK, tokens, 1) for index in range(count)]
    return blockers + [(after + step * index, kind, SHORT_TOKENS, 1) for index, kind in enumerate(TURNS)]


def read_backlog(outcomes: pa.Table, idle: Idle) -> Findings:
    """Whether priority is honoured: the share of pairs (urgent, low) in which the urgent one answered first."""
    refused = _refused(outcomes)
    if refused:
        return Findings("rejected", refused)
    seen = _seen(outcomes)
    urgent, low = (seen.first_ms[seen.kind == kind] for kind in (URGENT, LOW))
    blockers = seen.first_ms[seen.kind == BLOCK]
    if not (np.isfinite(urgent).all() and np.isfinite(low).all() and len(urgent) and len(low)):
        return Findings("inconclusive", "not every short request of the burst was answered")
    short_sent = float(seen.sent_ms[(seen.kind != BLOCK)].max())
    waiting = int((blockers > short_sent).sum())
    if waiting < 3:
        return Findings("inconclusive", f"only {waiting} blockers still waited when the short requests came: no queue")
    apart = max(2.0, 0.5 * idle.gap_ms)  # nearer than this is the same step
    before = (low[None, :] - urgent[:, None] > apart).mean()
    after = (urgent[:, None] - low[None, :] > apart).mean()
    passed = (blockers[None, :] > urgent[:, None] + apart).mean() * len(blockers)
    share = float(before + (1 - before - after) / 2)
    told = (
        f"{len(blockers)} blockers, {waiting} still waiting: urgent before low in {before:.0%} of pairs, after it in "
        f"{after:.0%}; median first token urgent {np.median(urgent) - short_sent:,.0f} ms, low "
        f"{np.median(low) - short_sent:,.0f} ms after the last was sent; urgent passed {passed:.0f} blockers"
    )
    if before >= HONOURED and passed >= 1:
        return Findings("honoured", told)
    if after >= 1 - INVERTED:
        return Findings("inverted", told)
    if IGNORED[0] <= share <= IGNORED[1]:
        return Findings("ignored", told)
    return Findings("inconclusive", told)


def slot_rows(idle: Idle) -> list[tuple[float, str, int, int]]:
    """Streams that last a while, and an urgent request once those without a slot wait."""
    gap_s = idle.gap_ms / 1e3
    tokens = int(np.clip(STREAMS_S / gap_s, 24, 600))
    streams = [(0.0005 * index, BLOCK, SHORT_TOKENS, tokens + 3 * index) for index in range(MOST_SLOTS)]
    return [*streams, (0.4 * tokens * gap_s, URGENT, SHORT_TOKENS, 1)]


def read_slots(outcomes: pa.Table) -> tuple[int | None, bool | None, str]:
    """(slots, whether an urgent request takes the slot of a running one, evidence)."""
    seen = _seen(outcomes)
    streams, urgent = seen.kind == BLOCK, seen.kind == URGENT
    ends = seen.end_ms[streams & seen.ok]
    if not len(ends) or not urgent.any():
        return None, None, "slots: no stream ended in time"
    first_end = float(ends.min())
    sent, answered = float(seen.sent_ms[urgent][0]), float(seen.first_ms[urgent][0])
    holding = int((seen.first_ms[streams] < min(first_end, sent)).sum())
    number = int(streams.sum())
    if holding == number:
        return None, None, f"slots: all {holding} streams ran at once, so there are {holding} or more"
    told = f"slots: {holding} of {number} streams answered before the first one ended"
    if sent >= first_end:
        return holding, None, f"{told}; the urgent request came too late to tell more"
    displaced = answered < first_end - 0.1 * (first_end - sent)
    waited = f"answered after {answered - sent:,.0f} ms" if np.isfinite(answered) else "had no answer"
    how = "before" if displaced else "not before"
    said = f"an urgent request sent {first_end - sent:,.0f} ms before that {waited}, {how} a slot came free"
    return holding, displaced, f"{told}; {said}"


def long_rows(idle: Idle, longest: int | None) -> list[tuple[float, str, int, int]]:
    """A stream, a long prompt, and an urgent request while it is read."""
    most = (longest or 1 << 20) - 64
    tokens = int(np.clip(LONG_S * 1e3 / idle.token_ms, 2048, min(most, 120_000)))
    tokens = min(tokens, most)
    long_s = tokens * idle.token_ms / 1e3
    stream = int(np.clip((long_s * 3 + 1.5) * 1e3 / idle.gap_ms, 40, 2000))
    begin = 0.3
    return [
        (0.0, BLOCK, SHORT_TOKENS, stream),
        (begin, LOW, tokens, 1),
        (begin + 0.2 * long_s, URGENT, SHORT_TOKENS, 1),
    ]


def read_long(outcomes: pa.Table) -> tuple[bool | None, int | None, str]:
    """(whether a long prompt blocks an urgent one, tokens in a step, evidence)."""
    seen = _seen(outcomes)
    at = {kind: int(np.flatnonzero(seen.kind == kind)[0]) for kind in (URGENT, BLOCK, LOW)}
    first, sent = seen.first_ms, seen.sent_ms
    if not np.isfinite(first).all():
        return None, None, "long prompt: not every request was answered"
    long_first, urgent_first, urgent_sent = first[at[LOW]], first[at[URGENT]], sent[at[URGENT]]
    stream = seen.chunks_ms[at[BLOCK]]
    usual = float(np.median(np.diff(stream[stream < sent[at[LOW]]]))) if (stream < sent[at[LOW]]).sum() > 2 else np.inf
    during = (stream[1:] > sent[at[LOW]]) & (stream[1:] <= long_first + usual)
    steps = int((np.diff(stream)[during] > SLOWER * usual).sum())
    left = long_first - urgent_sent
    whole = long_first - sent[at[LOW]]
    if left < 0.2 * whole:
        return None, None, "long prompt: it was read before the urgent request came"
    budget = None
    if steps >= 2:
        budget = round(float(seen.tokens[at[LOW]]) / steps)
    waited = (urgent_first - urgent_sent) / left
    blocks = True if waited >= 0.8 else False if waited <= 0.6 else None
    told = (
        f"a prompt of {seen.tokens[at[LOW]]:,.0f} tokens took {whole:,.0f} ms in {steps} steps; an urgent request sent "
        f"{left:,.0f} ms before its first token waited {urgent_first - urgent_sent:,.0f} ms"
    )
    return blocks, budget, told


class _Seen(NamedTuple):
    """Times in ms from the run's start; +∞ where there was no token."""

    kind: npt.NDArray[np.str_]
    tokens: Floats
    sent_ms: Floats
    first_ms: Floats
    end_ms: Floats
    ok: npt.NDArray[np.bool_]
    chunks_ms: list[Floats]


def _seen(outcomes: pa.Table) -> _Seen:
    rows: list[dict[str, Any]] = outcomes.to_pylist()

    def ms(row: dict[str, Any], name: str) -> float:
        return float("inf") if row.get(name) is None else float(row["sent_ns"] or 0) / NS_PER_MS + row[name] / NS_PER_MS

    return _Seen(
        kind=np.array([row["tenant"] for row in rows]),
        tokens=np.array([row.get("planned_input_tokens") or row["input_tokens"] for row in rows], dtype=np.float64),
        sent_ms=np.array([float(row["sent_ns"] or 0) / NS_PER_MS for row in rows]),
        first_ms=np.array([ms(row, "first_token_ns") if row["outcome"] in {"ok", "cut"} else np.inf for row in rows]),
        end_ms=np.array([ms(row, "end_ns") for row in rows]),
        ok=np.array([row["outcome"] == "ok" for row in rows]),
        chunks_ms=[
            (np.array(row.get("chunk_ns") or [], dtype=float) + (row["sent_ns"] or 0)) / NS_PER_MS for row in rows
        ],
    )


def _refused(outcomes: pa.Table) -> str:
    """Where every request with a priority was turned down by its status."""
    status = [row["status"] for row in outcomes.select(["status"]).to_pylist()]
    bad = [code for code in status if code is not None and 400 <= code < 500]
    return (
        f"HTTP {bad[0]} for {len(bad)} of {len(status)} requests with a priority" if len(bad) > len(status) / 2 else ""
    )
