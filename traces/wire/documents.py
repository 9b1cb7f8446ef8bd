"""JSON that is not server-sent events: lines of JSON, and a body that is one document or a list of them.

Lines (`application/x-ndjson`) are read as they come. Any other body is kept until its end and read once; if a stream
was asked for and the body is a row of documents (Gemini without `alt=sse` sends one array, mislabelled lines occur),
each document gets the time of the bytes that completed it, so nothing is lost by waiting.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

LINE_LIMIT = 32 << 20  # bytes of one line; a longer one is skipped and counted
BODY_LIMIT = 64 << 20  # bytes of a body; a longer one is counted, not read

_raw_decode = json.JSONDecoder().raw_decode
_BETWEEN = " \t\r\n,[]\x1e\xef\xbb\xbf"


class Lines:
    """Cuts a stream of bytes into lines that are not blank."""

    __slots__ = ("_skipping", "_tail", "oversized")

    def __init__(self) -> None:
        self._tail = bytearray()
        self._skipping = False
        self.oversized = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that are complete now."""
        end = data.rfind(b"\n")
        if end < 0:
            self._tail += data
            if len(self._tail) > LINE_LIMIT:
                self.oversized += not self._skipping
                self._skipping = True
                self._tail.clear()
            return []
        lines = (bytes(self._tail) + data[:end]).split(b"\n")
        self._tail[:] = data[end + 1 :]
        if self._skipping:
            self._skipping = False
            del lines[0]
        return [line for line in lines if not line.isspace() and line]

    def close(self) -> list[bytes]:
        """What the end of the stream left without a line end."""
        rest, self._tail = bytes(self._tail), bytearray()
        return [rest] if rest.strip() and not self._skipping else []


class Body:
    """Keeps a body, and when each part of it came."""

    __slots__ = ("_at_ns", "_ends", "data", "oversized")

    def __init__(self) -> None:
        self.data = bytearray()
        self._ends: list[int] = []
        self._at_ns: list[int] = []
        self.oversized = 0

    def feed(self, at_ns: int, data: bytes) -> None:
        """Keep a piece."""
        if len(self.data) + len(data) > BODY_LIMIT:
            self.oversized = 1
            self.data.clear()
        if not self.oversized:
            self.data += data
            self._ends.append(len(self.data))
            self._at_ns.append(at_ns)

    def documents(self) -> Iterator[tuple[int, Any]]:
        """The JSON documents in a row, each with the time when its last byte came; stops at what is not JSON.

        Read as Latin-1, so that positions are bytes; the strings in it are not looked at, only whether they are empty.
        """
        text = self.data.decode("latin-1")
        at = 0
        while True:
            while at < len(text) and text[at] in _BETWEEN:
                at += 1
            if at == len(text):
                return
            try:
                document, at = _raw_decode(text, at)
            except (ValueError, RecursionError):
                return
            yield self._at_ns[bisect_left(self._ends, at)], document
