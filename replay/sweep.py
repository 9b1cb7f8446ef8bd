"""`replay sweep`: one replay per speed or rate, one after the other on one server: where does the SLA break.

The runs differ in one number alone; each has a folder of its own below `--out`, which `replay report` compares again.
Lowest first: with `--stop-at-fail` the sweep ends at the first run that fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from replay.options import OfferOptions, SendOptions, make_offer, offer_options, send_options
from traces import units
from traces.shell import EXIT_FAIL, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNJUDGED, parsed

if TYPE_CHECKING:
    from replay.session import Ran
    from tenants.summary import Summary


def parse_factors(text: str) -> tuple[float, ...]:
    """`1x,2x,4x`, each once, lowest first. Raises ValueError."""
    found = sorted({units.factor(part) for part in text.split(",")})
    if len(found) < 2:
        raise ValueError(f"{text!r} is one value: write at least two, such as 1x,2x,4x")
    return tuple(found)


FACTORS = parsed("factors", parse_factors)


@click.command()
@offer_options
@send_options
@click.option("--speeds", type=FACTORS, help="One run per speed: 1x,2x,4x.")
@click.option("--rates", type=FACTORS, help="One run per rate: 1x,1.5x,2x.")
@click.option("--stop-at-fail", is_flag=True, help="End at the first run that fails.")
@click.option("--policy", default="priority", show_default=True, help="Embedded engine: its scheduling policy.")
@click.option("--max-num-seqs", type=click.IntRange(1), default=8, show_default=True, help="Embedded engine: slots.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Embedded engine: tokens in a step.")
@click.option("--profile", help="Embedded engine: which model on which GPU.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the runs.  [default: runs/sweep-DATE-TIME]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: value → summary.")
def sweep(offer: OfferOptions, send: SendOptions, out: Path | None, as_json: bool, **options: Any) -> int:
    """Replay TRACE at several speeds or rates and say where its SLAs break.

    \b
    replay sweep --speeds 0.5x,1x,2x --tenant-mix risk:summary --sla 'risk: ttft_p95 < 800ms'

    Exit: 0 all passed, 1 one failed, 3 one was invalid or inconclusive, 130 interrupted.
    """  # noqa: D301 - click's own mark: keep these lines
    speeds, rates, stop_at_fail = options.pop("speeds"), options.pop("rates"), options.pop("stop_at_fail")
    if (speeds is None) == (rates is None):
        raise click.UsageError("say what to vary: --speeds 1x,2x,4x or --rates 1x,2x")
    word, values = ("speed", speeds) if speeds is not None else ("rate", rates)
    from replay.command import check, run_once
    from replay.preflight import Refused
    from replay.run import Interrupted
    from replay.session import EngineOptions, server

    check(offer, send, out)
    folder = out or Path("runs") / time.strftime("sweep-%Y%m%d-%H%M%S")
    found: list[tuple[str, Ran]] = []
    try:
        with server(send, EngineOptions(**options)) as target:
            for value in values:
                shape = msgspec.structs.replace(offer.shape, **{word: value})
                asked = msgspec.structs.replace(offer, shape=shape)
                name = f"{word}-{value:g}x"
                click.echo(f"{name}", err=True)
                ran = run_once(make_offer(asked), asked, send, target, folder / name)
                found.append((name, ran))
                if ran.result.interrupted or (stop_at_fail and ran.summary.verdict == "fail"):
                    break
    except Refused as error:
        raise click.UsageError(str(error)) from error
    except Interrupted:
        return EXIT_INTERRUPTED
    return _print([(name, ran.summary) for name, ran in found], as_json=as_json)


def _print(runs: Sequence[tuple[str, Summary]], *, as_json: bool) -> int:
    from tenants import terminal
    from tenants.summary import to_json_of_runs

    if as_json:
        click.echo(to_json_of_runs(runs))
    else:
        line = breaking_point(runs)
        console = terminal.stdout_console()
        click.echo(line)
        terminal.print_comparison(runs, console)
        click.echo(line)
    verdicts = {summary.verdict for _, summary in runs}
    if any(summary.interrupted for _, summary in runs):
        return EXIT_INTERRUPTED
    if "fail" in verdicts:
        return EXIT_FAIL
    return EXIT_PASS if verdicts == {"pass"} else EXIT_UNJUDGED


def breaking_point(runs: Sequence[tuple[str, Summary]]) -> str:
    """Where it breaks, in a sentence: the last value that passed before the first one that failed."""
    failed = next((index for index, (_, summary) in enumerate(runs) if summary.verdict == "fail"), None)
    held = [name for name, summary in runs[:failed] if summary.verdict == "pass"]
    if failed is None:
        unjudged = [name for name, summary in runs if summary.verdict != "pass"]
        return f"cannot judge {', '.join(unjudged)}" if unjudged else f"everything holds up to {runs[-1][0]}"
    name, summary = runs[failed]
    return f"{f'holds at {held[-1]}, ' if held else ''}fails at {name}: {summary.sentence}"
