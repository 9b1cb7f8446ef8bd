"""`traces export TRACE -o OUT`: a trace for other tools, as Mooncake JSON lines or as CSV.

Mooncake (`.jsonl`): `timestamp` in ms from the first row (a whole number where it is one, else with the digits it
needs), `input_length`, `output_length`, `hash_ids`; `session_id` where the trace has sessions. Readers of the format
take blocks of 512 tokens. Block hashes of a size that divides 512 are joined: a block of 512 is the same when all the
blocks up to its end are, and blocks are numbered in the order they appear. Where the trace has no blocks, or of
another size, every row gets blocks of its own: no sharing, which is said.

CSV (`.csv`): the record's columns as they are (times in ns), lists left out; `traces import csv` reads it back.

Rows without lengths (failed before any was known) cannot be replayed from Mooncake; they are left out and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import click

BLOCK_TOKENS = 512
_SUFFIXES = {".jsonl": "mooncake", ".csv": "csv"}


@click.command("export", short_help="write a trace as Mooncake JSONL or CSV, for other tools", no_args_is_help=True)
@click.argument("trace")
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["mooncake", "csv"]),
    help="Format; the ending of OUT tells it too (.jsonl is mooncake, .csv is csv).",
)
def export(trace: str, out: Path, form: str | None) -> None:
    """Write TRACE for other tools.

    \b
    Examples:
      traces export conv.parquet -o conv.jsonl
      traces export runs/today/outcomes.parquet -o today.csv
    """  # noqa: D301 - click's paragraph mark
    form = form or _SUFFIXES.get(out.suffix.lower())
    if form is None:
        raise click.UsageError(f"what format is {out.name}? Name it .jsonl or .csv, or say --format mooncake")
    for line in write(trace, out, form):
        click.echo(line, err=True)
    click.echo(str(out))


def write(trace: str | os.PathLike[str], out: Path, form: str) -> list[str]:
    """Write a trace in format `form`; complete or absent, mode 0600.

    Returns:
        What the user should know, a line each.

    Raises:
        TraceError: the trace cannot be read.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as sink:
            notes = _csv(trace, sink) if form == "csv" else _mooncake(trace, sink)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return notes


def _csv(trace: str | os.PathLike[str], sink: BinaryIO) -> list[str]:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    from traces import parquet

    writer: pacsv.CSVWriter | None = None
    rows = 0
    for batch in parquet.batches(trace):
        names = [field.name for field in batch.schema if not pa.types.is_list(field.type)]
        flat = [
            batch.column(name).cast(pa.string())
            if pa.types.is_dictionary(batch.schema.field(name).type)
            else batch.column(name)
            for name in names
        ]
        plain = pa.RecordBatch.from_arrays(flat, names=names)
        if writer is None:
            writer = pacsv.CSVWriter(sink, plain.schema, write_options=pacsv.WriteOptions(quoting_style="needed"))
        writer.write(plain)
        rows += batch.num_rows
    if writer is not None:
        writer.close()
    return [f"{rows:,} rows"]


def _mooncake(trace: str | os.PathLike[str], sink: BinaryIO) -> list[str]:
    import msgspec

    encode = msgspec.json.Encoder(decimal_format="number").encode
    blocks = Blocks()
    rows = left_out = 0
    first_ns: int | None = None
    for row in _rows(trace):
        if row["input_tokens"] is None or row["output_tokens"] is None:
            left_out += 1
            continue
        first_ns = row["arrival_ns"] if first_ns is None else first_ns
        line: dict[str, object] = {
            "timestamp": _ms(row["arrival_ns"] - first_ns),
            "input_length": row["input_tokens"],
            "output_length": row["output_tokens"],
            "hash_ids": blocks.of(row["input_tokens"], row.get("block_size"), row.get("block_hashes")),
        }
        if row.get("session_id") is not None:
            line["session_id"] = row["session_id"]
        sink.write(encode(line) + b"\n")
        rows += 1
    notes = [f"{rows:,} rows"]
    if left_out:
        notes.append(f"{left_out:,} rows without lengths left out")
    if blocks.private:
        notes.append(f"{blocks.private:,} rows without blocks that make up 512 tokens: they share no prefix")
    return notes


def _rows(trace: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    from traces import parquet

    table = parquet.read(
        trace, ["arrival_ns", "input_tokens", "output_tokens", "session_id", "block_size", "block_hashes"]
    )
    for name in ("input_tokens", "output_tokens"):
        if name not in table.schema.names:
            raise click.UsageError(f"{os.fspath(trace)}: has no {name}, which Mooncake needs: use --format csv")
    for batch in table.to_batches(8192):
        yield from batch.to_pylist()


def _ms(offset_ns: int) -> int | Decimal:
    whole, rest = divmod(offset_ns, 1_000_000)
    return whole if rest == 0 else Decimal(offset_ns).scaleb(-6).normalize()


class Blocks:
    """Numbers blocks of 512 tokens in the order they appear; equal prefixes get equal numbers."""

    def __init__(self) -> None:
        self.private = 0
        self._next = 0
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, input_tokens: int, size: int | None, hashes: list[int] | None) -> list[int]:
        """Ids of the ceil(input / 512) blocks of a prompt that has `hashes` of blocks of `size` tokens."""
        count = -(-input_tokens // BLOCK_TOKENS)
        if hashes is None or size is None or BLOCK_TOKENS % size:
            self.private += bool(count)
            return [self._new() for _ in range(count)]
        each = BLOCK_TOKENS // size
        found: list[int] = []
        before = -1
        for start in range(0, len(hashes), each):
            part = tuple(hashes[start : start + each])
            if len(found) == count:
                break
            key = (before, part)
            if key not in self._known:
                self._known[key] = self._new()
            before = self._known[key]
            found.append(before)
        return found + [self._new() for _ in range(count - len(found))]

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
