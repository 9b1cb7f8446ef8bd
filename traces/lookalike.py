"""Measures an answer that is like one measured before, at a quarter of the meter's cost.

Answers of one server to one kind of request differ in an id, in the texts and in the usage, hardly ever in anything
else. `learn` takes an answer apart that the meter has measured:

    data: {"id":"…" + lead                       a role, perhaps
    data: {"id":"…" + before + TEXT + after      token chunks
    data: {"id":"…" + finish                     whole, or around a last text
    data: {"id":"…" ... "usage":{…}}             perhaps
    data: [DONE]

and `measure` knows an answer made of the same bytes around another id, other texts and another usage. That makes the
same JSON documents but for those strings and numbers, so what the meter found in them is true of this answer, too. An
answer that differs in one byte more is the meter's. A test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.measured import Measured
from traces.wire import everyday
from traces.wire.template import are_texts, text_end, text_start

_BEGIN = b'data: {"id":"'
_DONE = b"data: [DONE]"
_BLANK = b"\n\n"
_PATIENCE, _SELDOM = 16, 64  # after so many answers in a row that were not alike, one in so many is learnt
_AFFECTS = (b"content-encoding", b"x-queue-time", b"x-prompt-tokens", b"x-generated-tokens")

Reads = Sequence[tuple[int, bytes]]
Headers = Sequence[tuple[bytes, bytes]]


class Lookalike:
    """What the latest answer of its kind was made of.

    It serves complete streams (200, `eof`) of one choice in the everyday form, with all chunk times kept.
    """

    __slots__ = ("_after", "_before", "_ending", "_finish", "_lead", "_misses", "_names", "_reason", "_type", "_usage")

    def __init__(self) -> None:
        self._names: list[bytes] = []  # of the response headers; none: nothing has been learnt
        self._type = b""
        self._lead: list[bytes] = []
        self._before, self._after = b"", b""
        self._finish, self._ending = b"", b""  # around the last text; the whole event and b"" where it has none
        self._reason: str | None = None
        self._usage = False
        self._misses = 0

    def measure(self, headers: Headers, reads: Reads, start_ns: int) -> Measured | None:
        """The row of an answer, its status, headers_ns and end_ns left open; None when it is not like the one learnt.

        Args:
            headers: of the response, as they came.
            reads: all of the body as (time of the read, bytes).
            start_ns: when the request was sent.
        """
        if not self._names or [name for name, _ in headers] != self._names or _type(headers) != self._type:
            return None
        body = b"".join([data for _, data in reads])
        events = body.split(_BLANK)
        if events.pop() or len(events) < len(self._lead) + 3 + self._usage or events[-1] != _DONE:
            return None
        own = _own(events[0])
        first, last = len(self._lead), len(events) - 2 - self._usage
        if not own or [own + tail for tail in self._lead] != events[:first]:
            return None
        tokens = events[first:last]
        before, after = own + self._before, self._after
        texts = [event[len(before) : -len(after)] for event in tokens]
        told = before + (after + _BLANK + before).join(texts) + after + _BLANK + own + self._finish
        if self._ending:
            texts.append(events[last][len(own) + len(self._finish) : -len(self._ending)])
            told += texts[-1] + self._ending
        if told != _BLANK.join(events[first : last + 1]) or not are_texts(texts):
            return None
        times_ns = _times(reads, len(events), start_ns)
        usage = everyday.usage(events[-2]) if self._usage else None
        if times_ns is None or (self._usage and usage is None):
            return None
        chunk_ns = times_ns[first : first + len(texts)]
        self._misses = 0
        return Measured(
            finish_reason=self._reason,
            first_token_ns=chunk_ns[0],
            first_visible_ns=chunk_ns[0],
            last_token_ns=chunk_ns[-1],
            chunk_ns=chunk_ns,
            input_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else len(chunk_ns),
            cached_tokens=usage.cached_tokens if usage else None,
            tokens_source="usage" if usage else "chunks",
            response_bytes=len(body),
        )

    def learn(self, headers: Headers, reads: Reads, measured: Measured) -> None:
        """Remember what an answer was made of, if it is of this form.

        Args:
            headers: of the response, as they came.
            reads: all of the body as (time of the read, bytes).
            measured: what the meter made of them.
        """
        self._names = []
        self._misses += 1
        if self._misses > _PATIENCE and self._misses % _SELDOM:
            return
        events = b"".join([data for _, data in reads]).split(_BLANK)
        if measured.outcome != "ok" or events.pop() or len(events) < 3 or events[-1] != _DONE:
            return
        names = [name for name, _ in headers]
        own = _own(events[0])
        tokens = len(measured.chunk_ns or ())
        self._usage = everyday.usage(events[-2]) is not None
        last = len(events) - 2 - self._usage
        start = text_start(events[last])
        end = text_end(events[last], start) if start > len(own) else -1
        first = last - tokens + (end > 0)
        if not own or first == last or first not in {0, 1} or any(name.lower() in _AFFECTS for name in names):
            return
        if not all(event.startswith(own) for event in events[: last + 1]):
            return
        self._finish, self._ending = events[last][len(own) :], b""
        if end > 0:
            self._finish, self._ending = events[last][len(own) : start], events[last][end:]
        start = text_start(events[first])
        end = text_end(events[first], start)
        if start <= len(own) or end < 0:
            return
        self._lead = [event[len(own) :] for event in events[:first]]
        self._before, self._after = events[first][len(own) : start], events[first][end:]
        self._reason = measured.finish_reason
        self._type = _type(headers)
        self._names = names
        misses = self._misses
        again = self.measure(headers, reads, 0)
        if again is None or _told(again) != _told(measured):
            self._names = []  # more was told than this form can hold
        self._misses = misses


def _type(headers: Headers) -> bytes:
    return next((value for name, value in headers if name.lower() == b"content-type"), b"")


def _own(event: bytes) -> bytes:
    """The start of an event up to the end of its id; empty when it does not begin so."""
    end = event.find(b'"', len(_BEGIN))
    own = event[: end + 1]
    return own if own.startswith(_BEGIN) and b"\\" not in own and are_texts([own[len(_BEGIN) : -1]]) else b""


def _times(reads: Reads, events: int, start_ns: int) -> list[int] | None:
    """When each event was there; None when a read ends within one."""
    ends = [data[-2:] for _, data in reads].count(_BLANK)
    if ends < len(reads):
        return None
    if len(reads) == events:
        return [at_ns - start_ns for at_ns, _ in reads]
    return [at_ns - start_ns for at_ns, data in reads for _ in range(data.count(_BLANK))]


def _told(measured: Measured) -> tuple[object, ...]:
    """What the stream itself told, times apart."""
    return (
        measured.outcome,
        measured.finish_reason,
        measured.error,
        len(measured.chunk_ns or ()),
        measured.chunk_tokens,
        measured.queue_ns,
        measured.prefill_ns,
        measured.input_tokens,
        measured.output_tokens,
        measured.cached_tokens,
        measured.reasoning_tokens,
        measured.tokens_source,
        measured.response_bytes,
    )
