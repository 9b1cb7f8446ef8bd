"""What can be wrong with a trace that a user hands in.

    TraceError            anything below; its text is one clear line
    ├── BadRow            a row breaks a rule: file, row (data rows from 1) and column are named
    └── BadFile           the file as a whole: missing, not Parquet, a column that is unknown or missing

Commands print the text and exit 2. Failed requests are no errors: they are rows.
"""

from __future__ import annotations


class TraceError(Exception):
    """A trace that cannot be used as it is; the text says which and why."""


class BadFile(TraceError):
    """The file as a whole cannot be read as a trace."""


class BadRow(TraceError):
    """One row breaks a rule of the record."""

    def __init__(self, source: str, row: int | None, column: str | None, problem: str) -> None:
        self.source, self.row, self.column, self.problem = source, row, column, problem
        where = [source]
        if row is not None:
            where.append(f"row {row}")
        if column is not None:
            where.append(f"column {column}")
        super().__init__(", ".join(where) + f": {problem}")
