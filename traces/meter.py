"""The meter: bytes of a response with the times they came, in; the measured response, out. No I/O, no clock.

Capture and replay measure with this one class, so that a trace and its replay can be compared. What arrives is stamped
by the caller before it is given here; all events of one piece of bytes share its stamp, and no gap is invented between
them. How the bytes are cut into pieces changes nothing but the stamps.

A response runs through three layers, each with its own file in `wire/`: content decoding, framing (server-sent
events, lines of JSON, one document), and the format's own words. They write into one `Tally`, of which `measured.py`
makes the row.

Most events of a stream differ in one string from the one before; `wire/template.py` knows those without decoding them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from traces.measured import End, Ending, Measured, measured
from traces.wire import everyday, formats, openai, sse
from traces.wire.content import Content, codings
from traces.wire.documents import Body, Lines
from traces.wire.tally import Tally, span_ns, whole
from traces.wire.template import Template

__all__ = ["End", "Measured", "Meter"]

_decode = msgspec.json.Decoder().decode
_TRIES = 8  # chunks of another form after which a stream is read in the general way
_EVERYDAY = (formats.OPENAI, None)
_EVERYDAY_ENDPOINTS = {"chat", "completions"}
_EVENTS = {"text/event-stream"}
_LINES = {
    f"application/{name}"
    for name in ("x-ndjson", "ndjson", "jsonl", "x-jsonlines", "jsonlines", "json-lines", "stream+json", "json-seq")
}
_DOCUMENTS = {"application/json", "application/problem+json"}
_EVENT_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")
_BLANKS = b"\xef\xbb\xbf \t\r\n"


class Meter:
    """Measures one response.

    Args:
        endpoint: one of `traces.record.ENDPOINTS`.
        stream: whether a stream was asked for (what comes decides).
        n: answers asked for.
        start_ns: when the request was sent, on the clock of all the other stamps.
        chunks: which chunk times to keep: "all", "first" or "none".
        max_tokens: the request's limit on output tokens, if known; it helps to tell an empty delta from a token.
    """

    __slots__ = (
        "_body",
        "_chunks",
        "_content",
        "_content_type",
        "_endpoint",
        "_everyday",
        "_format",
        "_framing",
        "_headers_ns",
        "_last_ns",
        "_lines",
        "_max_tokens",
        "_n",
        "_splitter",
        "_start_ns",
        "_stream",
        "_template",
        "_waiting",
        "received",
        "status",
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
        self._endpoint, self._stream, self._n = endpoint, stream, n
        self._start_ns, self._chunks, self._max_tokens = start_ns, chunks, max_tokens
        self.tally = Tally(keep_all=chunks == "all")
        self.status: int | None = None
        self.received = 0  # body bytes, as they came
        self._headers_ns: int | None = None
        self._content_type = ""
        self._content: Content | None = None
        self._framing = ""  # "events", "lines", "document" once it is known
        self._waiting = b""  # first bytes, while the framing is unknown
        self._splitter = sse.Splitter()
        self._lines: Lines | None = None
        self._body: Body | None = None
        self._format: formats.Format | None = None
        self._template = Template()
        self._everyday = _TRIES if endpoint in _EVERYDAY_ENDPOINTS else 0
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
        self._headers_ns = now_ns - self._start_ns
        coded: list[str] = []
        for name, value in headers:
            lower = name.lower()
            if lower == "content-type":
                self._content_type = value.partition(";")[0].strip().lower()
            elif lower == "content-encoding":
                coded += codings(value)
            elif lower.startswith("x-"):
                _timing_header(self.tally, lower, value)
        self._content = Content(coded) if coded else None

    def asked(self, *, stream: bool, n: int, max_tokens: int | None) -> None:
        """What the request asked for, when that becomes known later; before `close`."""
        self._stream, self._n, self._max_tokens = stream, n, max_tokens

    def feed(self, now_ns: int, data: bytes) -> None:
        """Body bytes as they came, framing of HTTP removed."""
        self.received += len(data)
        self._last_ns = at_ns = now_ns - self._start_ns
        if self._content is not None:
            for piece in self._content.feed(data):
                self._read(at_ns, piece)
        else:
            self._read(at_ns, data)

    def feed_all(self, reads: Sequence[tuple[int, bytes]]) -> None:
        """Many reads at once, as (time, body bytes): the same as `feed` for each, faster."""
        place = 0
        while place < len(reads):
            if self._content is None and self._splitter.idle:
                times_ns: list[int] = []
                self.received += self._template.run(reads, place, self._start_ns, times_ns)
                if times_ns:
                    self.tally.plain_run(times_ns)
                    self._last_ns = times_ns[-1]
                    place += len(times_ns)
                    continue
            self.feed(*reads[place])
            place += 1

    def close(self, now_ns: int, end: End) -> Measured:
        """The response is over; how, says `end`. Call once.

        Args:
            now_ns: when it ended.
            end: "eof" when the body ended as HTTP said it would; "closed" or "reset" when the connection ended before.
        """
        if self._waiting:
            self._framing, waiting, self._waiting = "document", self._waiting, b""
            self._read(self._last_ns, waiting)
        for block in self._splitter.close():
            self._block(self._last_ns, block)
        for line in self._lines.close() if self._lines else ():
            self._event(self._last_ns, None, line)
        if self._body:
            self._read_document(self._body)
            self._body = None
        ending = Ending(
            end=end,
            end_ns=now_ns - self._start_ns,
            status=self.status,
            headers_ns=self._headers_ns,
            document=self._framing == "document",
            n=self._n,
            chunks=self._chunks,
            max_tokens=self._max_tokens,
            received=self.received,
            content_error=self._content.error if self._content else None,
        )
        return measured(self.tally, ending)

    def _read(self, at_ns: int, data: bytes) -> None:
        """Decoded body bytes."""
        if not self._framing:
            data = self._waiting + data
            self._framing = self._tell_framing(data)
            self._waiting = b"" if self._framing else data
        if self._framing == "events":
            self._read_events(at_ns, data)
        elif self._framing == "lines":
            self._lines = self._lines or Lines()
            for line in self._lines.feed(data):
                self._event(at_ns, None, line)
        elif self._framing == "document":
            self._body = self._body or Body()
            self._body.feed(at_ns, data)

    def _read_events(self, at_ns: int, data: bytes) -> None:
        """Bytes of a stream of events: whole ones where they stand, the rest through the splitter."""
        if b"\r" not in data and self._splitter.between(data):
            place = 0
            while (end := data.find(b"\n\n", place)) >= 0:
                known, size = self._template.lead(data, place)
                if known:
                    self.tally.plain(at_ns, known)
                    place += size
                else:
                    self._block(at_ns, data[place:end])
                    place = end + 2
            data = data[place:]
            if not data:
                return
        for block in self._splitter.feed(data):
            if self._template.fits(block):
                self.tally.plain(at_ns, 1)
            else:
                self._block(at_ns, block)

    def _tell_framing(self, data: bytes) -> str:
        """The framing, from the content type, else from the first bytes; "" while it cannot be told."""
        if self._content_type in _EVENTS:
            return "events"
        if self._content_type in _LINES:
            return "lines"
        if self._content_type in _DOCUMENTS:
            return "document"
        start = data.lstrip(_BLANKS)
        if start.startswith(_EVENT_STARTS):
            return "events"
        unknown = any(possible.startswith(start) for possible in _EVENT_STARTS)
        return "" if unknown else "document"

    def _block(self, at_ns: int, block: bytes) -> None:
        """One server-sent event; empty where there were more blank lines than one."""
        name, data, comments = sse.parse(block)
        self.tally.comments += comments
        if data is None:
            return
        if data.strip() == b"[DONE]":
            self.tally.done = True
            return
        if self._everyday and name is None and self._format in _EVERYDAY:
            found = everyday.read(self.tally, at_ns, data)
            if found:
                self.tally.events += 1
                self._format = formats.OPENAI
                if found == everyday.PLAIN:
                    self._template.learn(block, None)
                return
            self._everyday -= 1
        chunk = self._event(at_ns, name, data)
        if chunk is not None and self._format is formats.OPENAI:
            self._template.learn(block, chunk)

    def _event(self, at_ns: int, name: str | None, data: bytes) -> dict[str, Any] | None:
        """One event of a stream, its data as JSON."""
        self.tally.events += 1
        chunk = _json(data)
        if not isinstance(chunk, dict):
            self.tally.unreadable += 1
            if name == "error":
                self.tally.fail()
            return None
        if self._format is None:
            self._format = formats.of(chunk, self._endpoint)
        read = self._format.event if self._format else openai.event  # which knows errors of all kinds
        read(self.tally, at_ns, name, chunk)
        return chunk

    def _read_document(self, body: Body) -> None:
        """A body that is one JSON document; or, though a stream was asked for, several."""
        answer = _json(bytes(body.data))
        if isinstance(answer, dict) or (isinstance(answer, list) and not self._stream):
            for one in answer if isinstance(answer, list) else [answer]:
                if isinstance(one, dict):
                    found = formats.of(one, self._endpoint)
                    (found.answer if found else openai.answer)(self.tally, one)
            self.tally.done = True
            return
        documents = [(at_ns, chunk) for at_ns, chunk in body.documents() if isinstance(chunk, dict)]
        for at_ns, chunk in documents:
            self.tally.events += 1
            self._format = self._format or formats.of(chunk, self._endpoint)
            (self._format.event if self._format else openai.event)(self.tally, at_ns, None, chunk)
        if documents:
            self._framing = "lines"
        else:
            self.tally.unreadable += 1


def _json(data: bytes) -> Any:
    """JSON, forgiving a character cut in half by a server, as bytes or as an escape, and NaN; None when unreadable."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _timing_header(tally: Tally, name: str, value: str) -> None:
    """What TGI tells in the head of an answer that is not streamed (milliseconds; tokens)."""
    if name in {"x-queue-time", "x-prompt-tokens", "x-generated-tokens"}:
        try:
            number = float(value)
        except ValueError:
            return
        if name == "x-queue-time":
            tally.queue_ns = span_ns(number, 1e6)
        elif name == "x-prompt-tokens":
            tally.input_tokens = whole(number)
        else:
            tally.output_tokens = whole(number)
