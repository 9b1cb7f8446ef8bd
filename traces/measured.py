"""From what a response told (`wire.tally.Tally`) and how it ended to the row's response columns.

Outcomes (first match):

    no head                                     connect_error, timeout_*, client_abort, cut, else truncated
    status not 2xx                              http_error
    error event; finish reason error or abort   stream_error
    complete, no token in any known delta       no_token
    finish reason or end marker, with tokens    ok
    else by how it ended                        truncated (closed, reset), client_abort, cut, timeout_*

An answer that is not streamed has no first token. `output_tokens` is what usage says, else the number of token chunks
(`tokens_source` tells which).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from traces.wire.tally import Tally

End = Literal[
    "eof",
    "closed",
    "reset",
    "client_abort",
    "cut",
    "timeout_connect",
    "timeout_idle",
    "timeout_total",
    "connect_error",
]

_FAILED = {"error", "abort"}


class Measured(msgspec.Struct):
    """The response columns of the record (`traces/record.py`); times are offsets from the start of the request."""

    status: int | None = None
    outcome: str = "ok"
    finish_reason: str | None = None
    error: str | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    first_visible_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None
    chunk_ns: list[int] | None = None
    chunk_tokens: list[int] | None = None
    queue_ns: int | None = None
    prefill_ns: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    tokens_source: str | None = None
    response_bytes: int = 0


class Ending(msgspec.Struct):
    """How a response ended, as the meter saw it."""

    end: End
    end_ns: int
    status: int | None
    headers_ns: int | None
    document: bool  # the body was one JSON document (or no answer at all), not a stream
    n: int  # answers asked for
    chunks: str  # "all", "first" or "none"
    max_tokens: int | None
    received: int  # body bytes
    content_error: str | None  # what was wrong with the content coding


def measured(tally: Tally, ending: Ending) -> Measured:
    """The row of a response that is over."""
    if len(tally.indexes) > 1 and tally.indexes == tally.output_by_index.keys():
        # Usage on every chunk of several choices counts each choice by itself.
        tally.output_tokens = sum(tally.output_by_index.values())
    _settle_empties(tally, ending.max_tokens)
    outcome, error = _outcome(tally, ending)
    if ending.content_error and outcome != "http_error":
        error = ending.content_error
    row = Measured(
        status=ending.status,
        outcome=outcome,
        error=error,
        finish_reason=_finish_reason(tally),
        headers_ns=ending.headers_ns,
        end_ns=ending.end_ns,
        queue_ns=tally.queue_ns,
        prefill_ns=tally.prefill_ns,
        input_tokens=tally.input_tokens,
        output_tokens=tally.output_tokens,
        cached_tokens=tally.cached_tokens,
        reasoning_tokens=tally.reasoning_tokens,
        tokens_source=None if tally.output_tokens is None and tally.input_tokens is None else "usage",
        response_bytes=ending.received,
    )
    if tally.chunks:
        _times(row, tally, ending.chunks)
    return row


def _times(row: Measured, tally: Tally, chunks: str) -> None:
    row.first_token_ns = tally.first_ns
    row.first_visible_ns = tally.first_visible_ns
    row.last_token_ns = tally.last_ns
    if chunks != "none":
        row.chunk_ns = tally.chunk_ns if chunks == "all" else [tally.first_ns or 0]
        if tally.counted == tally.chunks:
            row.chunk_tokens = tally.chunk_tokens
    if row.output_tokens is None:
        row.output_tokens, row.tokens_source = tally.chunks, "chunks"


def _finish_reason(tally: Tally) -> str | None:
    """The reasons of all choices in the order of their numbers, each once."""
    finishes = tally.finishes
    if len(finishes) < 2:
        return next(iter(finishes.values()), None)
    return ",".join(dict.fromkeys(finishes[index] for index in sorted(finishes)))


def _settle_empties(tally: Tally, max_tokens: int | None) -> None:
    """Empty deltas become tokens where the number of output tokens, or a finish by length, proves it.

    With a known number of tokens (usage, else the limit that was reached): all of them where text chunks and empty ones
    add up to it exactly; else the last one where it came with finish reason "length" and a token is left to be
    accounted for. Without a known number a finish by length proves them all: such an engine sends a chunk per token.
    """
    if not tally.empties:
        return
    by_length = "length" in tally.finishes.values()
    known = tally.output_tokens
    if known is None and by_length:
        known = max_tokens if max_tokens is not None else tally.chunks + len(tally.empties)
    spare = 0 if known is None else known - tally.chunks
    if spare == len(tally.empties):
        _merge(tally, tally.empties)
    elif spare > 0 and tally.empty_length:
        _merge(tally, tally.empties[-1:])


def _merge(tally: Tally, proven: list[tuple[int, int, bool]]) -> None:
    """Put proven empty deltas among the token chunks, where they came."""
    if tally.keep_all:
        times: list[int] = []
        at = 0
        for before, at_ns, _ in proven:
            times += tally.chunk_ns[at:before]
            times.append(at_ns)
            at = before
        tally.chunk_ns = times + tally.chunk_ns[at:]
    if proven[0][0] == 0:
        tally.first_ns = proven[0][1]
    visible = [at_ns for _, at_ns, is_visible in proven if is_visible]
    if visible and (tally.first_visible_ns is None or visible[0] < tally.first_visible_ns):
        tally.first_visible_ns = visible[0]
    if proven[-1][0] >= tally.chunks:
        tally.last_ns = proven[-1][1]
    tally.chunks += len(proven)


def _outcome(tally: Tally, ending: Ending) -> tuple[str, str | None]:
    if ending.status is None:
        return _unanswered(ending.end)
    if not 200 <= ending.status < 300:
        return "http_error", f"http {ending.status}"
    if tally.error is not None:
        return "stream_error", f"stream {tally.error}".strip()
    failed = [word for word in map(str.lower, tally.finishes.values()) if word in _FAILED]
    if failed:
        return "stream_error", f"stream {min(failed)}"
    if tally.done or (_finished(tally, ending.n) and not _gave_up(ending.end)):
        return ("ok", None) if tally.chunks or tally.has_output else ("no_token", None)
    if ending.end == "eof" and ending.document and ending.received:
        return "no_token", "body"  # complete, but not an answer
    return _unanswered(ending.end)


def _finished(tally: Tally, n: int) -> bool:
    """Every choice that was seen gave its finish reason, and at least as many as were asked for."""
    return len(tally.finishes) >= max(n, 1) and tally.indexes <= tally.finishes.keys()


def _gave_up(end: End) -> bool:
    """Whether we stopped waiting, so that what is missing may still have come."""
    return end.startswith("timeout") or end == "connect_error"


def _unanswered(end: End) -> tuple[str, str | None]:
    """Over before the answer was complete."""
    if end in {"client_abort", "cut"}:
        return end, None
    if end.startswith("timeout"):
        return end, f"timeout {end.removeprefix('timeout_')}"
    if end == "connect_error":
        return end, "connect"
    return "truncated", "reset" if end == "reset" else "closed"
