"""A run folder read back: `run.json` with the summary in it, and `outcomes.parquet`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from tenants import summary as summaries
from tenants.measures import Rows, rows_of
from traces import parquet
from traces.errors import BadFile

COLUMNS = (
    "request_id",
    "tenant",
    "priority",
    "endpoint",
    "stream",
    "n",
    "input_tokens",
    "output_tokens",
    "reasoning_tokens",
    "first_token_ns",
    "first_visible_ns",
    "last_token_ns",
    "end_ns",
    "status",
    "outcome",
    "error",
    "due_ns",
    "released_ns",
    "sent_ns",
    "connect_ns",
    "attempts",
    "warmup",
)
"""What tables and charts need; chunk times stay on disk."""


class Run(NamedTuple):
    """One run, or one arm of an experiment."""

    name: str
    summary: summaries.Summary
    outcomes: pa.Table
    rows: Rows
    document: dict[str, Any]  # run.json without the summary
    path: Path = Path()

    def everything(self) -> pa.Table:
        """The outcomes with all their columns, chunk times included."""
        return parquet.read(self.path / "outcomes.parquet")


def load(folder: str | os.PathLike[str], name: str | None = None) -> Run:
    """A run from its folder.

    Args:
        folder: as `replay` wrote it.
        name: how it is called beside others; None = the folder's name.

    Raises:
        BadFile: a file is missing or is not what it should be.
    """
    path = Path(folder)
    document = _document(path)
    found = document.pop("summary", None)
    if found is None:
        raise BadFile(f"{path / 'run.json'}: has no summary: the run did not end (its rows are in outcomes.parquet)")
    try:
        summary = summaries.from_json(found)
    except msgspec.ValidationError as error:
        raise BadFile(f"{path / 'run.json'}: the summary is not one of this version ({error})") from None
    outcomes = parquet.read(path / "outcomes.parquet", COLUMNS)
    rows = rows_of(outcomes, interrupted=summary.interrupted)
    return Run(name or path.resolve().name, summary, outcomes, rows, document, path)


def load_all(folders: list[str]) -> list[Run]:
    """Several runs under names that tell them apart: the shortest tails of their paths that differ."""
    paths = [Path(folder).resolve() for folder in folders]
    depth = 1
    deepest = max(len(path.parts) for path in paths)
    while depth < deepest and len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return [load(path, "/".join(path.parts[-depth:])) for path in paths]


def _document(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise BadFile(f"{path}: no such run folder")
    try:
        document = msgspec.json.decode((path / "run.json").read_bytes())
    except FileNotFoundError:
        raise BadFile(f"{path}: not a run folder: run.json is missing") from None
    except msgspec.DecodeError as error:
        raise BadFile(f"{path / 'run.json'}: not JSON ({error})") from None
    if not isinstance(document, dict):
        raise BadFile(f"{path / 'run.json'}: not a JSON object")
    return document
