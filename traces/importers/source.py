"""A file to import as a stream of plain bytes: decompressed, byte order mark removed, never read whole.

gzip and zstd are told by their first bytes, not by the file's name. What is no text at all (UTF-16, a folder, an empty
file) is refused here, once for all importers.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from traces.errors import BadFile

HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_COMPRESSIONS = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_POINTER = b"version https://git-lfs"
_BOM = b"\xef\xbb\xbf"


class Source:
    """One input file. `name` is what messages call it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = os.fspath(path)

    def open(self) -> BinaryIO:
        """The bytes, decompressed, without a byte order mark. Raises BadFile when there is nothing to read."""
        if self.path.is_dir():
            raise BadFile(f"{self.name}: is a folder; name one file in it")
        if not self.path.exists():
            raise BadFile(f"{self.name}: no such file")
        try:
            raw = self.path.open("rb")
        except OSError as error:
            raise BadFile(f"{self.name}: cannot be opened ({error.strerror})") from error
        start = raw.read(len(_POINTER))
        raw.seek(0)
        if start == _POINTER:
            raw.close()
            raise BadFile(f"{self.name}: is a Git LFS pointer, not the data: git lfs pull")
        for magic, codec in _COMPRESSIONS:
            if start.startswith(magic):
                return self._after_mark(io.BufferedReader(_Decompressed(raw, codec, self.name), _CHUNK_BYTES))
        return self._after_mark(raw)

    def _after_mark(self, stream: io.BufferedReader) -> BinaryIO:
        start = stream.peek(3)[:3]
        if not start:
            stream.close()
            raise BadFile(f"{self.name}: is empty")
        if start[:2] in {b"\xff\xfe", b"\xfe\xff"}:
            stream.close()
            raise BadFile(f"{self.name}: is UTF-16 text; save it as UTF-8")
        if start == _BOM:
            stream.read(3)
        return stream

    def head(self, size: int = HEAD_BYTES) -> bytes:
        """The first bytes, for telling formats apart."""
        with self.open() as stream:
            return stream.read(size)

    def lines(self) -> Iterator[bytes]:
        """Lines without their ends (LF or CRLF); empty ones too."""
        with self.open() as stream:
            for line in stream:
                yield line.rstrip(b"\r\n")

    def text(self) -> str:
        """All of it as text, for small files only."""
        with self.open() as stream:
            try:
                return stream.read().decode()
            except UnicodeDecodeError as error:
                raise BadFile(f"{self.name}: is not UTF-8 text") from error


class _Decompressed(io.RawIOBase):
    """Arrow's decompressing stream with errors that name the file; a cut stream is an error, not an early end."""

    def __init__(self, raw: BinaryIO, codec: str, name: str) -> None:
        super().__init__()
        self._raw, self._name = raw, name
        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise BadFile(f"{self._name}: the compressed data is damaged or cut short ({error})") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._raw.close()
        super().close()
