"""`traces stats`: what kind of traffic a trace is, in words, tables, JSON or one HTML page.

A path is a trace, a folder of parts, a run folder (its outcomes are a trace), or any file that `traces import` knows.
The first line and the last say it in a sentence; figures are defined in docs/stats.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

    from traces.columns import Columns


@click.command(short_help="what kind of traffic this is: bursts, tails, kinds, tenants")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on stdout, and nothing else.")
@click.option("--html", "as_html", is_flag=True, help="Also write one self-contained page (see -o).")
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Name of the page [default: NAME.stats.html]."
)
def stats(paths: tuple[str, ...], as_json: bool, as_html: bool, out: Path | None) -> None:
    """Say what kind of traffic PATH is, and what that means for a test.

    Several paths are also compared with the first.

    \b
    traces stats conv.parquet
    traces stats conv.parquet code.parquet
    traces stats runs/today --json
    """  # noqa: D301 - click's own mark: keep these lines
    from traces import findings

    if out is not None and not as_html:
        raise click.UsageError("-o names the page of --html: write traces stats PATH --html -o page.html")
    if out is not None and out.exists() and out.suffix != ".html":
        raise click.UsageError(f"{out} exists and is no page: name a new file with -o page.html")
    profiles = {name: profile_of(path) for name, path in named(paths).items()}
    compared = _compared(profiles)
    if as_html:
        from traces.stats_page import page

        target = out or Path(f"{next(iter(profiles))}.stats.html")
        target.write_text(page(profiles, compared), encoding="utf-8")
        click.echo(f"page written to {target}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(_as_json(profiles, compared)).decode())
    else:
        from traces.stats_text import show

        for name, profile in profiles.items():
            show(name, profile, titled=len(profiles) > 1)
        for line in compared or [findings.headline(next(iter(profiles.values())))]:
            click.echo(line)


def _as_json(profiles: dict[str, dict[str, Any]], compared: list[str]) -> dict[str, Any]:
    if len(profiles) == 1:
        return next(iter(profiles.values()))
    return {"traces": profiles, "comparison": compared}


def _compared(profiles: dict[str, dict[str, Any]]) -> list[str]:
    from traces.findings import comparison

    (first, one), *others = profiles.items()
    return [line for name, other in others for line in comparison(first, one, name, other)]


def named(paths: tuple[str, ...]) -> dict[str, str]:
    """Name → path; a path is its own name where two files are called the same."""
    names = [name_of(path) for path in paths]
    return {name if names.count(name) == 1 else path: path for name, path in zip(names, paths, strict=True)}


def name_of(path: str) -> str:
    """What to call a trace: its file's name without endings."""
    name = Path(path.rstrip("/")).name
    return name.split(".")[0] or name


def profile_of(path: str) -> dict[str, Any]:
    """The profile of whatever `path` is, findings included.

    Raises:
        TraceError: it cannot be read, or holds no row.
    """
    from traces.errors import BadFile
    from traces.findings import findings, headline
    from traces.profile import profile

    columns = read(path)
    if columns is None:
        raise BadFile(f"{path}: holds no request")
    columns, unsent = _sent(columns)
    if not len(columns):
        raise BadFile(f"{path}: all {unsent:,} rows are unsent: there is nothing to describe")
    found = profile(columns)
    if unsent:
        found["unsent_rows_left_out"] = unsent
    return {"headline": headline(found)} | found | {"findings": msgspec.to_builtins(findings(found))}


def _sent(columns: Columns) -> tuple[Columns, int]:
    """Rows that were sent: the others of a run have no arrival at the server."""
    outcome = columns.words.get("outcome")
    if outcome is None or "unsent" not in outcome.names:
        return columns, 0
    sent = outcome.codes != outcome.names.index("unsent")
    return columns.take(sent), int((~sent).sum())


def read(path: str) -> Columns | None:
    """The columns that statistics need, from a trace, a run folder or a file that an importer knows."""
    from traces.columns import gather

    return gather(batches(path))


def batches(path: str) -> Iterator[pa.RecordBatch]:
    """Record batches of a path, the needed columns only where the file allows it."""
    from traces import parquet
    from traces.columns import NEEDED

    outcomes = Path(path) / "outcomes.parquet"
    if outcomes.is_file():
        return parquet.batches(outcomes, NEEDED)
    if Path(path).is_file() and not _is_parquet(Path(path)):
        return _imported(path)
    return parquet.batches(path, NEEDED)


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _imported(path: str) -> Iterator[pa.RecordBatch]:
    from traces.errors import BadFile
    from traces.importers.intake import Intake, Options
    from traces.importers.load import batches as imported
    from traces.importers.sniff import format_of
    from traces.importers.source import Source

    name = format_of(Source(path))
    if name is None:
        raise BadFile(f"{path}: no known format; traces import --help lists them")
    click.echo(f"{path}: read as {name}", err=True)
    return imported(name, path, Intake(path, Options()))
