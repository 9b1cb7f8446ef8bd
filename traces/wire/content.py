"""Content codings, undone piece by piece, with a bound on what a body may grow to.

gzip, deflate (with or without its zlib head), br and zstd, also several in a row. Output comes in small pieces, so a
bomb costs no memory; when a body has grown beyond `SLACK + RATIO` times what came in, decoding stops.

A body that lies about its coding is read as it is when nothing could be decoded from its beginning; either way the
coding is named in `error`. What the client receives is never touched by any of this.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

SLACK = 8 << 20
RATIO = 100
_PIECE = 1 << 16
_HELD = 1 << 16  # raw bytes kept until something was decoded, to read them plain if nothing can be
_WINDOW = 8 << 20  # RFC 8878: what a zstd decoder on the web has to support, and no more

KNOWN = ("gzip", "x-gzip", "deflate", "br", "zstd")

Step = Callable[[bytes], Iterator[bytes]]


class Content:
    """Undoes the codings of one body.

    Args:
        codings: the values of Content-Encoding in the order they were applied; "identity" is left out before.
    """

    def __init__(self, codings: list[str]) -> None:
        self.error: str | None = None
        self.name = codings[-1] if codings[-1] in KNOWN else "other"
        self._steps = [_STEPS[coding]() for coding in reversed(codings) if coding in _STEPS]
        if len(self._steps) < len(codings):
            self.error, self._steps = f"encoding {self.name}", []
        self._came = self._grown = 0
        self._held = bytearray()
        self._stopped = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decoded pieces of what came."""
        if self._stopped:
            return
        if not self._steps:
            yield data
            return
        self._came += len(data)
        if not self._grown and len(self._held) < _HELD:
            self._held += data
        try:
            for piece in _chain(self._steps, data):
                self._grown += len(piece)
                if self._grown > SLACK + RATIO * self._came:
                    self.error, self._stopped = "encoding bomb", True
                    return
                yield piece
        except _BROKEN:
            self.error = f"encoding {self.name}"
            if self._grown or len(self._held) < self._came:
                self._stopped = True
            else:
                self._steps = []
                yield bytes(self._held)
        if self._grown:
            self._held.clear()


def codings(values: str) -> list[str]:
    """The codings named by a Content-Encoding header, "identity" left out."""
    names = (part.strip().lower() for part in values.split(","))
    return [name for name in names if name and name != "identity"]


def _chain(steps: list[Step], data: bytes) -> Iterator[bytes]:
    if not steps:
        yield data
        return
    for piece in steps[0](data):
        yield from _chain(steps[1:], piece)


class _Broken(Exception):
    """A body that is not what its coding says."""


def _inflate(wbits: int) -> Step:
    state = zlib.decompressobj(wbits)

    def step(data: bytes) -> Iterator[bytes]:
        nonlocal state
        while data:
            piece = state.decompress(data, _PIECE)
            if piece:
                yield piece
            data = state.unconsumed_tail
            if state.eof:
                data = state.unused_data
                if not data.strip(b"\0"):
                    return
                state = zlib.decompressobj(wbits)  # gzip allows several members in a row

    return step


def _deflate() -> Step:
    """With the zlib head that RFC 9110 asks for, or without it, as some servers send."""
    step: Step | None = None
    begun = b""

    def first(data: bytes) -> Iterator[bytes]:
        nonlocal step, begun
        if step is None:
            begun += data
            if len(begun) < 2:
                return
            headed = begun[0] & 0x0F == 8 and int.from_bytes(begun[:2], "big") % 31 == 0
            step, data, begun = _inflate(zlib.MAX_WBITS if headed else -zlib.MAX_WBITS), begun, b""
        yield from step(data)

    return first


def _brotli() -> Step:
    import brotli

    state = brotli.Decompressor()

    limited = hasattr(state, "can_accept_more_data")  # from brotli 1.2 on; before, small inputs keep the output small

    def step(data: bytes) -> Iterator[bytes]:
        inputs = [data] if limited else [data[start : start + 16] for start in range(0, len(data), 16)]
        try:
            for each in inputs:
                if state.is_finished():
                    return
                piece = state.process(each, output_buffer_limit=_PIECE) if limited else state.process(each)
                while piece:
                    yield piece
                    more = limited and not state.is_finished() and not state.can_accept_more_data()
                    piece = state.process(b"", output_buffer_limit=_PIECE) if more else b""
        except brotli.error as error:
            raise _Broken from error

    return step


def _zstd() -> Step:
    import zstandard

    state = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(read_across_frames=True)

    def step(data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), 256):
            try:
                piece = state.decompress(data[start : start + 256])
            except zstandard.ZstdError as error:
                raise _Broken from error
            if piece:
                yield piece

    return step


_STEPS: dict[str, Callable[[], Step]] = {
    "gzip": lambda: _inflate(16 + zlib.MAX_WBITS),
    "x-gzip": lambda: _inflate(16 + zlib.MAX_WBITS),
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
_BROKEN = (_Broken, zlib.error)
