"""One import from file to Parquet: read in batches, settle outcomes, spool, sort when needed, rename.

Rows are spooled to a hidden file beside the target as they come. When time never decreased and there are no turns to
number, that file is the result. Otherwise it is written anew by time, ties in file order, in windows: the order of all
rows is 16 bytes a row, and of the rows themselves only one window is in memory. Files that are nearly in order touch
each row group once or twice.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from traces.errors import BadFile
from traces.importers.formats import FORMATS
from traces.importers.intake import Intake, Options
from traces.importers.source import Source
from traces.importers.turns import Turns, wanted
from traces.parquet import Writer, in_order
from traces.record import Metadata, schema_for

_GROUP_ROWS = 131_072
_GROUP_BYTES = 32 << 20
_WINDOW_ROWS = 262_144
_WINDOW_BYTES = 64 << 20


def batches(name: str, path: str | os.PathLike[str], intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of the records of a file in format `name`, in file order, outcomes settled and counted.

    Raises:
        BadFile, BadRow: the file or a row of it cannot be read.
    """
    module = importlib.import_module(FORMATS[name].module)
    try:
        for batch in module.read(Source(path), intake):
            settled = intake.settle(batch)
            if settled.num_rows:
                yield settled
    except (pa.ArrowInvalid, OverflowError) as error:
        reason = (str(error).splitlines() or ["too large"])[0]
        raise BadFile(f"{intake.source}: a value near row {intake.rows + 1} fits no column ({reason})") from error


def table(name: str, path: str | os.PathLike[str], options: Options = Options()) -> pa.Table:  # noqa: B008 - frozen
    """A small file as a table in memory, by arrival."""
    found = list(batches(name, path, Intake(os.fspath(path), options)))
    if not found:
        raise BadFile(f"{os.fspath(path)}: no rows to import")
    trace = in_order(pa.Table.from_batches(found))
    return pa.Table.from_batches([Turns().number(_one_batch(trace))]) if wanted(trace) else trace


def import_file(name: str, path: str | os.PathLike[str], out: str | os.PathLike[str], options: Options) -> Intake:
    """Import a file into a Parquet trace that is complete or absent.

    Returns:
        The intake with its counts.

    Raises:
        BadFile, BadRow: nothing is written then.
    """
    intake, target = Intake(os.fspath(path), options), Path(out)
    if target.is_dir():
        raise BadFile(f"{target}: is a folder; name the file to write: -o {target}/trace.parquet")
    spool = target.with_name(f".{target.name}.{os.getpid()}.spool")
    groups = _grouped(batches(name, path, intake))
    try:
        first = next(groups, None)
        if first is None:
            raise BadFile(f"{intake.source}: no rows to import{_why_none(intake)}")
        number = False
        with Writer(spool, first.schema) as writer:
            for group in itertools.chain([first], groups):
                number = number or wanted(group)
                writer.write(group)
        if intake.out_of_order or number:
            rewrite(spool, target, Turns() if number else None)
        else:
            spool.replace(target)
    finally:
        spool.unlink(missing_ok=True)
    return intake


def _why_none(intake: Intake) -> str:
    if intake.bad:
        return f" ({intake.bad} unreadable rows skipped)"
    return f" ({intake.failed} failed rows dropped)" if intake.failed and intake.options.failed == "drop" else ""


def _grouped(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches joined to the size of a row group."""
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in rows:
        waiting.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        if count >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def rewrite(spool: Path, target: Path, turns: Turns | None) -> None:
    """Write the rows of `spool` to `target` by arrival, ties in file order, and with their turns where asked for."""
    with pq.ParquetFile(spool) as file:
        schema = file.schema_arrow
        if turns is not None:
            schema = schema_for((*schema.names, "turn", "think_ns"), Metadata.decode(schema.metadata))
        arrival = file.read(["arrival_ns"]).column(0).to_numpy()
        order = np.argsort(arrival, kind="stable")
        del arrival
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        total = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
        rows = max(1, min(_WINDOW_ROWS, _WINDOW_BYTES * len(order) // max(1, total)))
        with Writer(target, schema) as writer:
            for low in range(0, len(order), rows):
                window = _window(file, starts, order[low : low + rows])
                writer.write(window if turns is None else turns.number(_one_batch(window)))


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    return rows.combine_chunks().to_batches()[0]


def _window(file: pq.ParquetFile, starts: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> pa.Table:
    """The rows `wanted` (positions in the file) in that order, read from the row groups that hold one."""
    positions = np.sort(wanted)
    pieces = []
    for group, (low, high) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        a, b = np.searchsorted(positions, [low, high])
        if a < b:
            pieces.append(file.read_row_group(group).take(pa.array(positions[a:b] - low)))
    return pa.concat_tables(pieces).unify_dictionaries().take(pa.array(np.searchsorted(positions, wanted)))
