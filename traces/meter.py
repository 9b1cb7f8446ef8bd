"""The meter: bytes of a response with the times they came, in; the measured response, out. No I/O, no clock.

Capture and replay measure with this one class, so that a trace and its replay can be compared. What arrives is stamped
by the caller before it is given here; all events of one piece of bytes share its stamp, and no gap is invented between
them. How the bytes are cut into pieces changes nothing but the stamps.

A response runs through three layers: content decoding (`wire/content.py`), framing (server-sent events, lines of JSON,
one JSON document) and the format's own words (`wire/openai.py` and its siblings), which all write into one `Tally`.
The format is told by the shape of the events, not by the path they came from.

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

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from traces.wire import openai, sse
from traces.wire.tally import Tally
from traces.wire.template import Template

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

BODY_LIMIT = 64 << 20  # bytes of a body that is one JSON document; a longer one is counted, not read

_decode = msgspec.json.Decoder().decode
_FAILED = {"error", "abort"}
_STREAM_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")


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


class Meter:
    """Measures one response.

    Args:
        endpoint: one of `traces.record.ENDPOINTS`.
        stream: whether a stream was asked for (the response's own content type decides).
        n: answers asked for.
        start_ns: when the request was sent, on the clock of all the other stamps.
        chunks: which chunk times to keep: "all", "first" or "none".
        max_tokens: the request's limit on output tokens, if known; it helps to tell an empty delta from a token.
    """

    __slots__ = (
        "_body",
        "_last_ns",
        "_splitter",
        "_template",
        "chunks",
        "content_type",
        "endpoint",
        "framing",
        "headers_ns",
        "max_tokens",
        "n",
        "received",
        "start_ns",
        "status",
        "stream",
        "tally",
    )

    def __init__(
        self,
        *,
        endpoint: str = "chat",
        stream: bool = True,
        n: int = 1,
        start_ns: int,
        chunks: str = "all",
        max_tokens: int | None = None,
    ) -> None:
        self.endpoint, self.stream, self.n = endpoint, stream, n
        self.start_ns, self.chunks, self.max_tokens = start_ns, chunks, max_tokens
        self.status: int | None = None
        self.headers_ns: int | None = None
        self.content_type = ""
        self.tally = Tally(keep_all=chunks == "all")
        self.framing = ""
        self._splitter = sse.Splitter()
        self._template = Template()
        self._body = bytearray()
        self.received = 0
        self._last_ns = 0

    @property
    def complete(self) -> bool:
        """The format's own end marker was seen; nothing more of interest can come."""
        return self.tally.done

    @property
    def tokens(self) -> int:
        """Token chunks so far."""
        return self.tally.chunks

    def head(self, now_ns: int, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """The response head, complete at `now_ns`; interim responses (1xx) are ignored."""
        if 100 <= status < 200:
            return
        self.status = status
        self.headers_ns = now_ns - self.start_ns
        for name, value in headers:
            if name.lower() == "content-type":
                self.content_type = value.partition(";")[0].strip().lower()

    def feed(self, now_ns: int, data: bytes) -> None:
        """Body bytes as they came, framing of HTTP removed."""
        self.received += len(data)
        self._last_ns = at_ns = now_ns - self.start_ns
        if not self.framing and not self._tell_framing(data):
            return
        if self.framing == "sse":
            blocks = self._splitter.feed(bytes(self._body) + data if self._body else data)
            if self._body:
                self._body.clear()
            tally, template = self.tally, self._template
            for block in blocks:
                if template.fits(block):
                    tally.events += 1
                    tally.token(at_ns)
                elif block:
                    self._block(at_ns, block)
        elif len(self._body) <= BODY_LIMIT:
            self._body += data

    def close(self, now_ns: int, end: End) -> Measured:
        """The response is over; how, says `end`. Call once.

        Args:
            now_ns: when it ended.
            end: "eof" when the body ended as HTTP said it would; "closed" or "reset" when the connection ended before.
        """
        if self.framing == "sse":
            for block in self._splitter.close():
                self._block(self._last_ns, block)
        elif self._body and len(self._body) <= BODY_LIMIT:
            self._whole(bytes(self._body))
        self._body.clear()
        return _measured(self, now_ns - self.start_ns, end)

    def _tell_framing(self, data: bytes) -> bool:
        """Whether the framing is known now: from the content type, else from the first bytes."""
        if self.content_type == "text/event-stream":
            self.framing = "sse"
            return True
        if self.content_type in {"application/json", "application/problem+json"}:
            self.framing = "json"
            return True
        start = (bytes(self._body[:64]) + data[:64]).lstrip(b"\xef\xbb\xbf \t\r\n")
        if len(start) < 6 and start[:1] not in {b"{", b"["}:
            self._body += data
            return False
        self.framing = "sse" if start.startswith(_STREAM_STARTS) else "json"
        return True

    def _block(self, at_ns: int, block: bytes) -> None:
        name, data, comments = sse.parse(block)
        tally = self.tally
        tally.comments += comments
        if data is None:
            return
        if data.strip() == b"[DONE]":
            tally.done = True
            return
        tally.events += 1
        chunk = _json(data)
        if not isinstance(chunk, dict):
            tally.unreadable += 1
            return
        openai.event(tally, at_ns, name, chunk)
        self._template.learn(block, chunk)

    def _whole(self, body: bytes) -> None:
        answer = _json(body)
        if isinstance(answer, dict):
            self.tally.done = True
            openai.answer(self.tally, answer)
        else:
            self.tally.unreadable += 1


def _json(data: bytes) -> Any:
    """JSON, forgiving invalid UTF-8 (a character cut in half by a server is still a chunk); None when unreadable."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _decode(data.decode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return None


def _measured(meter: Meter, end_ns: int, end: End) -> Measured:
    tally = meter.tally
    streamed = meter.framing != "json"
    finished = _finished(meter)
    _count_output(tally)
    _settle_empties(tally, meter.max_tokens)
    outcome, error = _outcome(meter, end, has_tokens=tally.chunks > 0 or tally.has_output, finished=finished)
    row = Measured(
        status=meter.status,
        outcome=outcome,
        error=error,
        finish_reason=",".join(dict.fromkeys(tally.finishes[index] for index in sorted(tally.finishes))) or None,
        headers_ns=meter.headers_ns,
        end_ns=end_ns,
        queue_ns=tally.queue_ns,
        prefill_ns=tally.prefill_ns,
        input_tokens=tally.input_tokens,
        output_tokens=tally.output_tokens,
        cached_tokens=tally.cached_tokens,
        reasoning_tokens=tally.reasoning_tokens,
        tokens_source="usage" if tally.output_tokens is not None else None,
        response_bytes=meter.received,
    )
    if streamed and tally.chunks:
        row.first_token_ns = tally.first_ns
        row.first_visible_ns = tally.first_visible_ns
        row.last_token_ns = tally.last_ns
        if meter.chunks != "none":
            row.chunk_ns = tally.chunk_ns if meter.chunks == "all" else [tally.first_ns or 0]
            if tally.counted == tally.chunks:
                row.chunk_tokens = tally.chunk_tokens
        if row.output_tokens is None:
            row.output_tokens, row.tokens_source = tally.chunks, "chunks"
    return row


def _finished(meter: Meter) -> bool:
    """Every choice that was seen gave its finish reason, and at least as many as were asked for."""
    tally = meter.tally
    return len(tally.finishes) >= max(meter.n, 1) and tally.indexes <= tally.finishes.keys()


def _count_output(tally: Tally) -> None:
    """Usage on every chunk of several choices counts each choice by itself: add them up."""
    if len(tally.indexes) > 1 and tally.indexes == tally.output_by_index.keys():
        tally.output_tokens = sum(tally.output_by_index.values())


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
        proven = tally.empties
    elif spare > 0 and tally.empty_length:
        proven = tally.empties[-1:]
    else:
        return
    _merge(tally, proven)


def _merge(tally: Tally, proven: list[tuple[int, int, bool]]) -> None:
    """Put proven empty deltas among the token chunks, where they came."""
    if tally.keep_all:
        times, at = [], 0
        for before, at_ns, _ in proven:
            times += tally.chunk_ns[at:before]
            times.append(at_ns)
            at = before
        tally.chunk_ns = times + tally.chunk_ns[at:]
    first = proven[0]
    if tally.first_ns is None or first[0] == 0:
        tally.first_ns = first[1]
    visible = [at_ns for _, at_ns, is_visible in proven if is_visible]
    if visible and (tally.first_visible_ns is None or visible[0] < tally.first_visible_ns):
        tally.first_visible_ns = visible[0]
    if proven[-1][0] >= tally.chunks:
        tally.last_ns = proven[-1][1]
    tally.chunks += len(proven)
    tally.empties = []


def _outcome(meter: Meter, end: End, *, has_tokens: bool, finished: bool) -> tuple[str, str | None]:
    tally = meter.tally
    if meter.status is None:
        return _unanswered(end)
    if not 200 <= meter.status < 300:
        return "http_error", f"http {meter.status}"
    if tally.error is not None:
        return "stream_error", f"stream {tally.error}".strip()
    failed = _FAILED & set(tally.finishes.values())
    if failed:
        return "stream_error", f"stream {min(failed)}"
    # A stream whose choices all finished is an answer, marker or not, unless we gave up waiting for more.
    gave_up = end.startswith("timeout") or end == "connect_error"
    if tally.done or (finished and not gave_up):
        return ("ok", None) if has_tokens else ("no_token", None)
    if end == "eof" and meter.framing == "json":
        return "no_token", "body"  # complete, but not an answer
    return _unanswered(end)


def _unanswered(end: End) -> tuple[str, str | None]:
    """Over before the answer was complete."""
    if end in {"client_abort", "cut"}:
        return end, None
    if end.startswith("timeout"):
        return end, f"timeout {end.removeprefix('timeout_')}"
    if end == "connect_error":
        return end, "connect"
    return "truncated", "reset" if end == "reset" else "closed"
