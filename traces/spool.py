"""The recorder's spool: rows on their way to a part, so written that a crash loses at most the last flush.

A spool is an Arrow IPC stream (schema, then one record batch per flush) that grows at its end. Killed at any moment it
holds every batch flushed before; what stands after the last whole batch is cut off. A write that fails (a full disk)
is taken back to the last whole batch.

Whoever writes a spool holds a lock on it (`flock`), which the kernel lets go when that process dies; so a spool
without a lock is a dead recorder's, and anybody may turn it into a part. `spool-NAME.arrows` becomes
`part-NAME.parquet`; that both exist means that the part is complete and the spool was about to be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from traces.parquet import Writer
from traces.record import COLUMNS, Metadata, schema_for

SUFFIX = ".arrows"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # end of an Arrow IPC stream

REQUEST_COLUMNS = tuple(column.name for column in COLUMNS if not column.outcome)


def spool_schema(metadata: Metadata) -> pa.Schema:
    """The record's request columns, words as plain strings: a stream that grows cannot share dictionaries."""
    plain = [
        pa.field(column.name, pa.string() if pa.types.is_dictionary(column.type) else column.type)
        for column in COLUMNS
        if not column.outcome
    ]
    return pa.schema(plain, metadata=metadata.encode())


def warm_up() -> None:
    """Do once what Arrow does late: its first array of objects imports pandas where that is installed (a second)."""
    pa.array([None, 1], type=pa.int64())


def name_of(path: Path) -> str:
    """NAME of `spool-NAME.arrows`."""
    return path.name.removeprefix("spool-").removesuffix(SUFFIX)


def part_for(path: Path) -> Path:
    """The part that a spool becomes."""
    return path.with_name(f"part-{name_of(path)}.parquet")


class Spool:
    """One growing spool file, held under a lock. Raises OSError when it cannot be made."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self.rows = 0
        self._schema = spool_schema(metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.size = 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(self._schema.serialize())
        except OSError:
            self.discard()
            raise

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows (column name → value, missing = null) as one batch; all of them or none. Raises OSError."""
        columns = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._write(batch.serialize())
        self.rows += len(rows)

    def is_there(self) -> bool:
        """Whether the file still has its name (its folder may have been removed)."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file))
        except OSError:
            return False

    def put_back(self) -> None:
        """Give a removed file its name again, with all that was in it. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        again = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            at = 0
            while piece := os.pread(self._file, 1 << 20, at):
                _write_all(again, piece)
                at += len(piece)
        except OSError:
            os.close(again)
            self.path.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = again

    def finish(self) -> Path | None:
        """Make the part and remove the spool; None when it held no row. Raises OSError; the spool is kept then."""
        with contextlib.suppress(OSError):
            self._write(_END)
        part = to_part(self.path) if self.rows else None
        self.discard()
        return part

    def let_go(self) -> None:
        """Leave the file where it is, for `recover`."""
        os.close(self._file)

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _write(self, data: Any) -> None:
        try:
            _write_all(self._file, memoryview(data))
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(memoryview(data).cast("B"))


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The whole batches of a spool; ends at the first that is not whole."""
    with contextlib.suppress(pa.ArrowInvalid, EOFError, OSError), path.open("rb") as file:
        yield from pa.ipc.open_stream(file)


def to_part(path: Path) -> Path | None:
    """Write the part of a spool; None when no row could be read."""
    part = part_for(path)
    writer: Writer | None = None
    with contextlib.ExitStack() as stack:
        for batch in batches(path):
            if writer is None:
                metadata = Metadata.decode(batch.schema.metadata)
                writer = stack.enter_context(Writer(part, schema_for(REQUEST_COLUMNS, metadata)))
            writer.write(batch)
    return part if writer is not None else None


def in_use(path: Path) -> bool:
    """Whether a living recorder holds the spool."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def left_behind(folder: Path) -> list[Path]:
    """The spools of dead recorders, oldest name first."""
    return [path for path in sorted(folder.glob(f"spool-*{SUFFIX}")) if not in_use(path)]


def recover(path: Path) -> tuple[Path | None, int]:
    """Turn a dead recorder's spool into a part: (part or None, its rows). The spool is removed. Raises OSError."""
    part = part_for(path)
    if not part.exists() and to_part(path) is None:
        path.unlink(missing_ok=True)
        return None, 0
    import pyarrow.parquet as pq

    rows: int = pq.read_metadata(part).num_rows
    path.unlink(missing_ok=True)
    return part, rows


def _write_all(file: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]
