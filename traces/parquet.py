"""Trace files: read in batches, checked row by row; written under a temporary name and renamed when complete.

A path is a file, a folder of parts (`*.parquet`, read in name order), a glob, or a URI that `pyarrow.fs` knows, so a
trace can live in object storage. Reading keeps memory to the columns asked for. Every broken rule is a `BadRow` that
names file, row (data rows count from 1) and column.
"""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from traces.errors import BadFile, BadRow
from traces.record import ENDPOINTS, NAMES, OUTCOMES, SCHEMA, TOKENS_SOURCES, Metadata, schema_for

BATCH_ROWS = 65_536

_NOT_NEGATIVE = tuple(
    name for name in NAMES if name.endswith(("_ns", "_tokens", "_bytes")) and not name.startswith(("chunk_", "arrival"))
)
_ONE_OF = {"endpoint": ENDPOINTS, "outcome": OUTCOMES, "tokens_source": TOKENS_SOURCES}


def locate(path: str | os.PathLike[str]) -> tuple[pafs.FileSystem, list[str]]:
    """The file system and the files that `path` stands for, in name order. Raises BadFile when there is none."""
    text = os.fspath(path)
    if "://" in text:
        filesystem, inner = pafs.FileSystem.from_uri(text)
        found = _listed(filesystem, inner)
    elif any(mark in text for mark in "*?[") and not Path(text).exists():
        filesystem, found = pafs.LocalFileSystem(), sorted(glob.glob(text))  # noqa: PTH207 - a pattern with folders in it
    else:
        filesystem = pafs.LocalFileSystem()
        found = _listed(filesystem, text)
    if not found and any(Path(text).glob("spool-*")):
        raise BadFile(
            f"{text}: no part yet; its recorder closes one every minute (--part-every) and when it ends, "
            f"and for one that was killed there is traces recover {text}"
        )
    if not found:
        raise BadFile(f"{text}: no such file, or a folder without *.parquet files")
    return filesystem, found


def _listed(filesystem: pafs.FileSystem, inner: str) -> list[str]:
    info = filesystem.get_file_info(inner)
    if info.type == pafs.FileType.File:
        return [inner]
    if info.type != pafs.FileType.Directory:
        return []
    below = filesystem.get_file_info(pafs.FileSelector(inner))
    return sorted(item.path for item in below if item.is_file and item.path.endswith(".parquet") and item.size)


def batches(
    path: str | os.PathLike[str], columns: Sequence[str] | None = None, *, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Batches of a trace in file order, checked, with the columns asked for that the files have.

    Args:
        path: see the module's head.
        columns: names to read; None for all. `arrival_ns` is always among them.
        batch_rows: rows in a batch at most.

    Yields:
        Record batches whose schema carries the trace's metadata. A column that one file of several lacks is null there.

    Raises:
        BadFile, BadRow.
    """
    filesystem, files = locate(path)
    opened = [_open(filesystem, name) for name in files]
    present = {name for file in opened for name in file.schema_arrow.names}
    wanted = [name for name in NAMES if name in present and (columns is None or name in {*columns, "arrival_ns"})]
    metadata = _common_metadata(files, opened)
    schema = schema_for(wanted, metadata)
    for name, file in zip(files, opened, strict=True):
        first_row = 1
        here = [column for column in wanted if column in file.schema_arrow.names]
        try:
            for batch in file.iter_batches(batch_rows, columns=here):
                shaped = _shape(batch, schema, name)
                check(shaped, name, first_row)
                first_row += shaped.num_rows
                yield shaped
        except (pa.ArrowInvalid, OSError) as error:
            raise BadFile(f"{name}: cannot be read from row {first_row} on ({_first_line(error)})") from error


def read(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """A whole trace as a table, sorted by `arrival_ns` (several recorders may write to one folder).

    Raises:
        BadFile, BadRow.
    """
    found = list(batches(path, columns))
    if not found:
        filesystem, files = locate(path)
        file = _open(filesystem, files[0])
        names = [name for name in file.schema_arrow.names if columns is None or name in {*columns, "arrival_ns"}]
        return schema_for(names, Metadata.decode(file.schema_arrow.metadata)).empty_table()
    return in_order(pa.Table.from_batches(found))


def in_order(trace: pa.Table) -> pa.Table:
    """The same rows by arrival, ties in file order."""
    arrival = trace.column("arrival_ns").to_numpy()
    if len(arrival) < 2 or bool(np.all(arrival[1:] >= arrival[:-1])):
        return trace
    return trace.take(pa.array(np.argsort(arrival, kind="stable")))


class Writer:
    """Writes one Parquet file that is either complete or absent.

    Rows go to a temporary name beside the target; leaving the `with` block without an error flushes, syncs and renames.
    The file's mode is 0600: traces describe other people's traffic.
    """

    def __init__(self, path: str | os.PathLike[str], schema: pa.Schema) -> None:
        self.path = Path(path)
        self.schema = schema
        self.rows = 0
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._file: pq.ParquetWriter | None = None
        self._sink: pa.NativeFile | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._sink = pa.PythonFile(os.fdopen(descriptor, "wb"), mode="w")
        self._file = pq.ParquetWriter(
            self._sink,
            self.schema,
            compression="zstd",
            use_dictionary=[field.name for field in self.schema if pa.types.is_dictionary(field.type)],
            column_encoding=_encodings(self.schema),
        )
        return self

    def write(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows; columns that the schema has and the rows lack are null."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        assert self._file is not None
        arrays = [
            table.column(field.name).cast(field.type)
            if field.name in table.schema.names
            else pa.nulls(table.num_rows, field.type)
            for field in self.schema
        ]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self.schema), row_group_size=BATCH_ROWS * 4)
        self.rows += table.num_rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        assert self._sink is not None
        try:
            self._file.close()
            self._sink.close()
            if kind is None:
                with self._temporary.open("rb") as file:
                    os.fsync(file.fileno())
                self._temporary.replace(self.path)
                _sync_folder(self.path.parent)
        finally:
            self._temporary.unlink(missing_ok=True)


def write(trace: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a whole trace with the metadata of its schema."""
    with Writer(path, schema_for(trace.schema.names, Metadata.decode(trace.schema.metadata))) as writer:
        writer.write(trace)


def write_batches(rows: Iterable[pa.RecordBatch], schema: pa.Schema, path: str | os.PathLike[str]) -> int:
    """Write batches as they come; returns the number of rows. Nothing is left behind when the source raises."""
    with Writer(path, schema) as writer:
        for batch in rows:
            writer.write(batch)
        return writer.rows


def check(batch: pa.RecordBatch, source: str, first_row: int = 1) -> None:
    """Hold a batch against the rules of the record.

    Raises:
        BadRow: names the first row that breaks a rule.
    """
    for name in batch.schema.names:
        column = batch.column(name)
        if name == "arrival_ns":
            if column.null_count:
                raise BadRow(source, first_row + _first(pc.is_null(column)), name, "a request without a time")
        elif name in _NOT_NEGATIVE:
            least = pc.min(column).as_py()
            if least is not None and least < 0:
                raise BadRow(source, first_row + _first(pc.less(column, 0)), name, f"{least} is below 0")
        elif name in _ONE_OF:
            allowed = _ONE_OF[name]
            for word in pc.unique(column).to_pylist():
                if word is not None and word not in allowed:
                    row = first_row + _first(pc.equal(column.cast(pa.string()), word))
                    raise BadRow(source, row, name, f"{word!r} is not one of {', '.join(allowed)}")


def _first(mask: pa.Array) -> int:
    return int(pc.index(mask, value=True).as_py())


def _open(filesystem: pafs.FileSystem, name: str) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(filesystem.open_input_file(name))
    except (pa.ArrowInvalid, OSError) as error:
        hint = _other_format(name)
        raise BadFile(f"{name}: not a Parquet trace ({hint or _first_line(error)})") from error
    names = file.schema_arrow.names
    for unknown in names:
        if unknown not in NAMES:
            raise BadFile(f"{name}: column {unknown!r} is not one of a trace (see docs/record.md)")
    if "arrival_ns" not in names:
        raise BadFile(f"{name}: column arrival_ns is missing: a trace needs a time on every row")
    try:
        Metadata.decode(file.schema_arrow.metadata)
    except ValueError as error:
        raise BadFile(f"{name}: {error}") from error
    return file


def _other_format(name: str) -> str | None:
    suffix = posixpath.splitext(name)[1].lower()
    if suffix in {".csv", ".json", ".jsonl", ".gor", ".har", ".mitm"}:
        return f"import it first: traces import csv {name} -o trace.parquet; see traces import --help"
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _common_metadata(files: list[str], opened: list[pq.ParquetFile]) -> Metadata:
    found = [Metadata.decode(file.schema_arrow.metadata) for file in opened]
    for name, metadata in zip(files[1:], found[1:], strict=True):
        for key in ("epoch", "block_unit"):
            if getattr(metadata, key) != getattr(found[0], key):
                raise BadFile(
                    f"{name}: {key} is {getattr(metadata, key)!r} but {getattr(found[0], key)!r} in {files[0]}: "
                    "they are not parts of one trace"
                )
    return found[0]


def _shape(batch: pa.RecordBatch, schema: pa.Schema, source: str) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        if field.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        try:
            arrays.append(column if column.type == field.type else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise BadRow(source, None, field.name, f"{column.type} cannot become {field.type}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """DELTA_BINARY_PACKED for times and counts: neighbours are near each other."""
    found = {}
    for field in schema:
        if field.type in {pa.int64(), pa.int32()}:
            found[field.name] = "DELTA_BINARY_PACKED"
        elif field.name in {"chunk_ns", "chunk_tokens"}:
            found[f"{field.name}.list.element"] = "DELTA_BINARY_PACKED"
    return found


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


assert set(_ONE_OF) <= set(SCHEMA.names)
