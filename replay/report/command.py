"""`replay report`: print and draw a run again from its folder, or several runs of one plan side by side."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--out", type=click.Path(), help="Where the page goes.  [default: report.html in the run folder]")
@click.option("--json", "as_json", is_flag=True, help="Print the summaries as JSON and nothing else.")
@click.option("--no-page", is_flag=True, help="Print the tables only.")
def report(runs: tuple[str, ...], out: str | None, as_json: bool, no_page: bool) -> int:
    """Print and draw a run again; with several runs of one plan, compare them.

    \b
    replay report runs/today
    replay report runs/fcfs runs/priority runs/capped -o arms.html
    """  # noqa: D301 - click's own mark: keep these lines
    from replay.report import page
    from tenants import folder, judge, terminal
    from tenants.summary import to_json_of_runs

    loaded = folder.load_all(list(runs))
    target = Path(out) if out else Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")
    if not no_page:
        if not target.parent.is_dir():
            raise click.UsageError(f"--out: {target.parent} is no folder, write it as -o report.html")
        try:
            page.write(loaded, target)
        except OSError as error:
            raise click.UsageError(f"--out: cannot write {target} ({error.strerror}), name another file") from None
    if as_json:
        text = to_json_of_runs([(run.name, run.summary) for run in loaded])
        click.echo(judge.with_blocking(text, loaded[0]) if len(loaded) == 1 else text)
        return 0
    console = terminal.stdout_console()
    if len(loaded) == 1:
        from tenants import failures

        causes = failures.causes(loaded[0].outcomes)
        more = judge.print_blocking_of(loaded[0])
        terminal.print_result(loaded[0].summary, console, folder=runs[0], causes=causes, more=more)
    else:
        terminal.print_comparison([(run.name, run.summary) for run in loaded], console)
    if not no_page:
        click.echo(f"wrote {target}", err=True)
    return 0
