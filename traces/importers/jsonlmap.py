"""Any JSON lines (or array of objects), its fields named by `--map`.

A field may be a path such as `usage.prompt_tokens`. Values are taken as the text they were written as, so a time keeps
all its digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from traces.importers import jsonrows, mapping, tables
from traces.importers.clock import Clock
from traces.importers.intake import Intake
from traces.importers.source import Source

_BATCH_ROWS = 8192


class _Batch:
    """Rows read so far: their numbers, and a list of texts (None where a field is absent) for every column."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.rows: list[int] = []
        self.texts: dict[str, list[str | None]] = {source: [] for source in sources}


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of the mapped fields."""
    found = jsonrows.read(source, intake, dict[str, msgspec.Raw])
    first = next(found, None)
    if first is None:
        return
    columns, clock = mapping.resolve(intake.options.mapping, list(first[1]), source.name, nested=True)
    names = list(dict.fromkeys(column.source for column in columns))
    batch = _Batch(names)
    _add(batch, *first)
    for row, fields in found:
        _add(batch, row, fields)
        if len(batch.rows) >= _BATCH_ROWS:
            yield _records(intake, columns, clock, batch)
            batch = _Batch(names)
    if batch.rows:
        yield _records(intake, columns, clock, batch)


def _add(batch: _Batch, row: int, fields: dict[str, msgspec.Raw]) -> None:
    batch.rows.append(row)
    for source, texts in batch.texts.items():
        texts.append(_text(fields, source))


def _text(fields: dict[str, msgspec.Raw], path: str) -> str | None:
    """A field as text: a string's content, anything else as it is written; None where absent or null."""
    raw = fields.get(path)
    if raw is None:
        head, dot, rest = path.partition(".")
        if not dot or head not in fields:
            return None
        try:
            return _text(msgspec.json.decode(fields[head], type=dict[str, msgspec.Raw]), rest)
        except msgspec.ValidationError:
            return None
    text = bytes(raw)
    if text == b"null":
        return None
    return str(msgspec.json.decode(text)) if text.startswith(b'"') else text.decode()


def _records(intake: Intake, columns: list[mapping.Column], clock: Clock, batch: _Batch) -> pa.RecordBatch:
    texts = {source: pa.array(values, pa.string()) for source, values in batch.texts.items()}
    rows = tables.Rows(texts, lambda index: batch.rows[index])
    return mapping.records(intake, "jsonl", columns, clock, rows)
