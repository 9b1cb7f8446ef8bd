"""One request and its response on their way through the recorder, and the row they become.

The proxy's event loop only stamps and measures (`Exchange`); everything that takes time, reading the request's body,
hashing its prefix, closing the meter, happens on the recorder's thread (`Rows`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from capture import asked as bodies
from capture import rules
from capture.settings import Settings
from tenants.tenant import Tenant
from traces.meter import End, Measured, Meter
from traces.said import Said
from traces.wire.content import Content, codings

_decode = msgspec.json.Decoder().decode


class Answer:
    """The bytes of an answer until its row is made: all of them, or none when they are more than `limit`.

    Args:
        status, headers: of the response.
        limit: bytes.
    """

    __slots__ = ("headers", "limit", "pieces", "size", "status")

    def __init__(self, status: int, headers: list[tuple[str, str]], limit: int) -> None:
        self.status, self.headers, self.limit = status, headers, limit
        self.pieces: list[bytes] | None = []
        self.size = 0

    def add(self, data: bytes) -> int:
        """Keep a piece; by how many bytes what is kept grew (or shrank)."""
        if self.pieces is None:
            return 0
        if self.size + len(data) > self.limit:
            return self.let_go()
        self.pieces.append(data)
        self.size += len(data)
        return len(data)

    def let_go(self) -> int:
        """Keep nothing from now on; by how many bytes what is kept grew (0 or less)."""
        kept, self.size, self.pieces = self.size, 0, None
        return -kept

    def tokens(self, endpoint: str, encode: bodies.Encode, *, stream: bool) -> int | None:
        """Tokens of its words; None where they were let go or there are none."""
        if not self.pieces:
            return None
        said = Said(endpoint=endpoint, stream=stream)
        said.head(0, self.status, self.headers)
        for piece in self.pieces:
            said.feed(0, piece)
        said.close(0, "eof")
        return said.count(encode)


class Exchange(msgspec.Struct):
    """What is known of a request while it is in flight. No reference to mitmproxy's flow."""

    number: int  # of this recorder, from 0
    endpoint: str
    path: str
    headers: dict[str, str]  # lower-case names; only those that the rules look at
    arrival_ns: int  # UTC epoch
    body: bytes | None
    request_bytes: int
    meter: Meter
    answer: Answer | None = None  # its bytes, where a tokenizer may have to count them
    end: End = "cut"
    error: str | None = None  # class and code of a connection that could not be made
    end_ns: int = 0  # on the meter's clock


class Rows:
    """Makes rows of exchanges that are over.

    Args:
        settings: with its salt.
        tenants: of a `tenants.toml`.
        name: prefix of request ids, unique among recorders.
        encode: text → token ids, with a tokenizer.
    """

    def __init__(
        self, settings: Settings, tenants: tuple[Tenant, ...], name: str, encode: bodies.Encode | None = None
    ) -> None:
        digest = rules.salted(settings.salt)
        self.tenant_rules = rules.TenantRules(settings.tenant, tenants, digest)
        self._dialect = rules.dialect_named(settings.dialect)
        self._tenants = tenants
        self._prefixes = bodies.Prefixes(settings.salt, settings.block_size, encode)
        self._sessions = bodies.Sessions(digest, sole=settings.sole)
        self._encode = encode
        self._settings, self._name = settings, name
        self.headers = self.tenant_rules.headers | rules.PRIORITY_HEADERS | {"content-encoding"}
        if settings.session_header:
            self.headers |= {settings.session_header.lower()}

    def row(self, exchange: Exchange) -> dict[str, Any]:
        """The row of an exchange that is over."""
        body, asked, hashes, counted = self._asked(exchange)
        meter = exchange.meter
        meter.asked(stream=asked.stream, n=asked.answers, max_tokens=asked.max_tokens)
        measured = meter.close(exchange.end_ns, exchange.end)
        raw = rules.priority_raw(exchange.headers, body)
        session, turn, think_ns = self._sessions.of(
            exchange.headers.get(self._settings.session_header.lower()),
            asked.messages,
            f"{self._name}-{exchange.number}",
            exchange.arrival_ns,
            exchange.arrival_ns + (measured.end_ns or 0),
        )
        row = {
            "request_id": f"{self._name}-{exchange.number}",
            "session_id": session,
            "turn": turn,
            "think_ns": think_ns,
            "tenant": self.tenant_rules.of(exchange.headers, exchange.path, asked.model),
            "priority": rules.rank(raw, self._dialect, self._tenants),
            "priority_raw": raw,
            "arrival_ns": exchange.arrival_ns,
            "model": asked.model,
            "endpoint": exchange.endpoint,
            "stream": asked.stream,
            "max_tokens": asked.max_tokens,
            "n": asked.n,
            "tools": asked.tools,
            "request_bytes": exchange.request_bytes,
            **msgspec.structs.asdict(measured),
        }
        if exchange.error and measured.outcome == "connect_error":
            row["error"] = exchange.error
        if hashes:
            row["block_size"], row["block_hashes"] = self._settings.block_size, hashes
        if row["input_tokens"] is None and counted is not None:
            row["input_tokens"] = counted
            row["tokens_source"] = row["tokens_source"] or "tokenizer"
        if exchange.answer is not None and self._encode is not None and _uncounted(measured):
            made = exchange.answer.tokens(exchange.endpoint, self._encode, stream=asked.stream)
            if made is not None:
                row["output_tokens"], row["tokens_source"] = made, "tokenizer"
        return row

    def _asked(self, exchange: Exchange) -> tuple[dict[str, Any], bodies.Asked, list[int], int | None]:
        """(body, what it asks for, hashes of its prefix blocks, its tokens where a tokenizer counted them)."""
        streams = rules.streams_by_path(exchange.path)
        body: dict[str, Any] = {}
        try:
            body = _json(exchange)
            asked = bodies.read(body, exchange.endpoint, exchange.path, streams=streams)
            return body, asked, *self._prefixes.of(asked)
        except Exception:  # noqa: BLE001 - a body that cannot be read (nested too deep, say) costs its own columns only
            return {}, bodies.read({}, exchange.endpoint, exchange.path, streams=streams), [], None


def _uncounted(measured: Measured) -> bool:
    """Whether an answer told neither how many tokens it has nor how many each chunk has."""
    answered = measured.status is not None and 200 <= measured.status < 300
    return answered and (
        measured.output_tokens is None or (measured.tokens_source == "chunks" and measured.chunk_tokens is None)
    )


def _json(exchange: Exchange) -> dict[str, Any]:
    """The request's body as an object; empty when it is none."""
    data = exchange.body
    if data is None:
        return {}
    names = codings(exchange.headers.get("content-encoding", ""))
    if names:
        data = b"".join(Content(names).feed(data))
    try:
        body = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
