"""`traces recover DIR`: turn what a crashed recorder left behind into a part of the trace.

A recorder that is still running keeps its spool; that is said, and it is left alone. The next `capture` into the same
folder does this by itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from traces.errors import BadFile


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def recover(folder: Path) -> None:
    """Turn the spool of a crashed recorder in FOLDER into a part.

    \b
    traces recover traces/staging
    """  # noqa: D301 - click's own mark: keep these lines
    from traces import spool

    if not folder.is_dir():
        raise BadFile(f"{folder}: not a folder; name the folder that `capture --out` wrote to")
    running = [path for path in sorted(folder.glob(f"spool-*{spool.SUFFIX}")) if spool.in_use(path)]
    for path in running:
        click.echo(f"{path.name}: a recorder is writing it; left alone", err=True)
    rows = parts = 0
    for path in spool.left_behind(folder):
        try:
            part, found = spool.recover(path)
        except OSError as error:
            raise BadFile(f"{path}: cannot be turned into a part ({error.strerror or error}); it is kept") from error
        rows, parts = rows + found, parts + (part is not None)
        click.echo(f"{path.name}: {found} rows → {part.name if part else 'nothing to keep'}", err=True)
    if parts:
        click.echo(f"Recovered {rows} rows in {parts} part{'s' * (parts != 1)}: {folder}")
    else:
        click.echo(f"Nothing to recover in {folder}" + (": its recorder is running" if running else ""))
