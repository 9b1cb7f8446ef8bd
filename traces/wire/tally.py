"""What a response has told so far: the one thing every wire format writes into, and `Meter.close` reads.

Times are offsets in nanoseconds from the start of the request. A *token chunk* is a piece of the stream that carries
output: text, reasoning, a tool-call fragment. A chunk is not a token: `chunk_tokens` is known only where the stream
itself counts.

An *empty delta* (content present, but "") may be a token whose text the engine holds back (half a UTF-8 character, a
possible stop string), or nothing at all. It is kept aside as a candidate and becomes a token only where usage, or a
finish by length, proves it.
"""

from __future__ import annotations

import re
from typing import Any

_WORD = re.compile(r"[A-Za-z][A-Za-z_.-]{0,31}")

# Error words that servers are known to send. Any other text of a server could echo what it was sent, so it is dropped.
ERROR_CODES = frozenset(
    """
    api_error authentication_error billing_error invalid_request_error not_found_error overloaded_error
    permission_error rate_limit_error request_too_large timeout_error server_error internal_server_error
    insufficient_quota invalid_api_key model_not_found context_length_exceeded rate_limit_exceeded content_filter
    tool_use_failed json_validate_failed invalid_prompt vector_store_timeout server_is_overloaded
    service_unavailable_error generation overloaded validation incomplete_generation template_error
    BadRequestError NotFoundError InternalServerError ServiceUnavailableError RateLimitError TimeoutError
    AuthenticationError PermissionDeniedError UnprocessableEntityError APIError
    INVALID_ARGUMENT FAILED_PRECONDITION PERMISSION_DENIED NOT_FOUND RESOURCE_EXHAUSTED INTERNAL UNAVAILABLE
    DEADLINE_EXCEEDED provider_error upstream_error
    """.split()  # noqa: SIM905 - a table of words reads better than a list
)


class Tally:
    """Counts and times of one response; formats call the methods, in the order the bytes came."""

    __slots__ = (
        "cached_tokens",
        "chunk_ns",
        "chunk_tokens",
        "chunks",
        "comments",
        "counted",
        "done",
        "empties",
        "empty_length",
        "error",
        "events",
        "finishes",
        "first_ns",
        "first_visible_ns",
        "has_output",
        "indexes",
        "input_tokens",
        "keep_all",
        "last_ns",
        "lengths",
        "output_by_index",
        "output_tokens",
        "prefill_ns",
        "queue_ns",
        "reasoning_tokens",
        "uncounted",
        "unreadable",
    )

    def __init__(self, *, keep_all: bool) -> None:
        self.keep_all = keep_all
        self.events = 0  # data events, the end marker left out
        self.comments = 0
        self.unreadable = 0  # events that are not JSON
        self.done = False  # the format's own end marker
        self.error: str | None = None  # code of an error event; "" when it gave none that may be kept
        self.indexes: set[int] = set()
        self.finishes: dict[int, str] = {}
        self.chunks = 0
        self.first_ns: int | None = None
        self.first_visible_ns: int | None = None
        self.last_ns: int | None = None
        self.chunk_ns: list[int] = []
        self.chunk_tokens: list[int] = []
        self.counted = 0  # chunks whose number of tokens the stream told
        self.uncounted: set[int] = set()  # choices with a chunk whose tokens the stream did not tell
        self.empties: list[tuple[int, int, bool]] = []  # (chunks before it, time, visible)
        self.empty_length = False  # the last empty delta came with finish_reason "length"
        self.has_output = False  # a whole answer (not streamed) holds output
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.output_by_index: dict[int, int] = {}
        self.lengths: dict[int, int] = {}  # text so far, where text is cumulative
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.queue_ns: int | None = None
        self.prefill_ns: int | None = None

    def token(self, at_ns: int, *, visible: bool = True, tokens: int | None = None) -> None:
        """A chunk with output; `tokens` where the stream tells how many."""
        if self.first_ns is None:
            self.first_ns = at_ns
        if visible and self.first_visible_ns is None:
            self.first_visible_ns = at_ns
        self.last_ns = at_ns
        self.chunks += 1
        if self.keep_all:
            self.chunk_ns.append(at_ns)
        if tokens is not None:
            self.counted += 1
            if self.keep_all or self.chunks == 1:
                self.chunk_tokens.append(tokens)

    def plain(self, at_ns: int, count: int) -> None:
        """`count` visible chunks at once, whose number of tokens the stream did not tell."""
        if self.first_ns is None:
            self.first_ns = at_ns
        if self.first_visible_ns is None:
            self.first_visible_ns = at_ns
        self.last_ns = at_ns
        self.events += count
        self.chunks += count
        if self.keep_all:
            if count == 1:
                self.chunk_ns.append(at_ns)
            else:
                self.chunk_ns += [at_ns] * count

    def plain_run(self, times_ns: list[int]) -> None:
        """One visible chunk at each of these times, whose number of tokens the stream did not tell."""
        if self.first_ns is None:
            self.first_ns = times_ns[0]
        if self.first_visible_ns is None:
            self.first_visible_ns = times_ns[0]
        self.last_ns = times_ns[-1]
        self.events += len(times_ns)
        self.chunks += len(times_ns)
        if self.keep_all:
            self.chunk_ns += times_ns

    def empty(self, at_ns: int, *, visible: bool = True, length: bool = False) -> None:
        """A delta that is present but empty: a token only if something proves it."""
        self.empties.append((self.chunks, at_ns, visible))
        self.empty_length = length

    def finish(self, index: int, reason: Any) -> None:
        """A choice ended. What is not a plain word is not kept: it is the server's text."""
        word = reason if isinstance(reason, str) and _WORD.fullmatch(reason) else "other"
        self.finishes[index] = word

    def fail(self, *codes: Any) -> None:
        """An error event; the first of `codes` that is a number or a known word is kept, never other text."""
        if self.error:
            return
        self.error = ""
        for code in codes:
            if isinstance(code, int) and not isinstance(code, bool) and 0 <= code < 100_000:
                self.error = str(code)
                return
            if isinstance(code, str) and (code in ERROR_CODES or (code.isascii() and code.isdigit() and len(code) < 6)):
                self.error = code
                return


def word(*values: Any) -> str:
    """The first of some JSON values that is a text and not empty, else ""."""
    return next((value for value in values if isinstance(value, str) and value), "")


def whole(value: Any) -> int | None:
    """A count from JSON: a whole number from 0 on that fits the record, else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 2**31 else None
    if isinstance(value, float) and value.is_integer() and 0 <= value < 2**31:
        return int(value)
    return None


def span_ns(value: Any, unit_ns: float) -> int | None:
    """A duration from JSON in nanoseconds; None for anything but a number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    span = value * unit_ns
    return round(span) if 0 <= span < 2**62 else None
