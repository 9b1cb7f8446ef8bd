"""Server-sent events: bytes in any pieces → blocks, one per event.

WHATWG HTML, section "Server-sent events": an event ends at a blank line; a line ends with LF, CRLF or CR; a line that
begins with ":" is a comment; several `data` lines are joined by LF. The stream may begin with a byte order mark.

One bending of the rule: a last event without its blank line is given out when the stream ends, because servers that
break off, or forget the blank line, still sent it.

CR and CRLF become LF as the bytes come (a LF that follows a CR across two reads is swallowed), so that the search for a
blank line has one form. Bytes that do not make an event yet wait in one growing buffer that is searched once.
"""

from __future__ import annotations

_MARK = b"\xef\xbb\xbf"

LIMIT = 32 << 20  # bytes of one event; a longer one is skipped and counted


class Splitter:
    """Cuts a stream of bytes into event blocks (the bytes between blank lines).

    `idle` is true between events: the next byte begins a new one.
    """

    __slots__ = ("_cr", "_skipping", "_started", "_tail", "idle", "oversized")

    def __init__(self) -> None:
        self._tail = bytearray()
        self._cr = False
        self._started = False
        self._skipping = False
        self.idle = False
        self.oversized = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Blocks that are complete now; some may be empty."""
        if not self._started:
            data = self._begin(data)
        if self._cr or b"\r" in data:
            data = self._newlines(data)
        blocks: list[bytes] = []
        if self._tail:
            blocks = self._feed_tail(data)
        else:
            end = data.rfind(b"\n\n")
            if end >= 0:
                blocks = data[:end].split(b"\n\n")
                data = data[end + 2 :]
            self._tail += data
        self.idle = self._started and not self._tail and not self._cr
        return blocks

    def between(self, data: bytes) -> bool:
        """Whether `data`, which comes next, begins an event: nothing waits, and no byte order mark can stand there."""
        if not self._started and not self._tail and data and data[0] != _MARK[0]:
            self._started = self.idle = True
        return self.idle

    def close(self) -> list[bytes]:
        """What the end of the stream left without a blank line."""
        rest, self._tail = bytes(self._tail), bytearray()
        return [rest] if rest and not self._skipping else []

    def _feed_tail(self, data: bytes) -> list[bytes]:
        tail = self._tail
        seen = len(tail) - 1
        tail += data
        end = tail.rfind(b"\n\n", seen)
        if end < 0:
            if len(tail) > LIMIT:
                self.oversized += not self._skipping
                self._skipping = True
            if self._skipping:
                del tail[:-1]
            return []
        blocks = bytes(tail[:end]).split(b"\n\n")
        del tail[: end + 2]
        if self._skipping:
            self._skipping = False
            del blocks[0]
        return blocks

    def _newlines(self, data: bytes) -> bytes:
        if self._cr and data:
            self._cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _begin(self, data: bytes) -> bytes:
        """Leave out a byte order mark, which may come in pieces."""
        self._tail += data
        if len(self._tail) < 3 and _MARK.startswith(self._tail):
            return b""
        self._started = True
        data = bytes(self._tail).removeprefix(_MARK)
        self._tail.clear()
        return data


def parse(block: bytes) -> tuple[str | None, bytes | None, int]:
    """One block → (event name, data, comment lines). Data is None when the block has no `data` line."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return None, block[6:], 0
    name: str | None = None
    data: list[bytes] = []
    comments = 0
    for line in block.split(b"\n"):
        if line.startswith(b":"):
            comments += 1
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return name, b"\n".join(data) if data else None, comments
