"""The `replay` command: options → offer → run → verdict. stdout is the result, stderr tells what happens."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from replay.crew import Crew
from replay.options import OfferOptions, SendOptions, make_offer, offer_options, send_options, span_text
from replay.target import Refused, allowed, parse_target
from traces.shell import EXIT_INTERRUPTED, EXIT_UNJUDGED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.options import Offered
    from replay.preflight import Target
    from replay.session import Ran, Ready


@click.command()
@offer_options
@send_options
@click.option("--policy", default="priority", show_default=True, help="Embedded engine: its scheduling policy.")
@click.option(
    "--max-num-seqs", type=click.IntRange(1), default=8, show_default=True, help="Embedded engine: its slots."
)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Embedded engine: tokens in a step.")
@click.option("--profile", help="Embedded engine: which model on which GPU.")
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder.  [default: runs/DATE-TIME]")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout, and nothing else there.")
@click.option("--dry-run", is_flag=True, help="Print the plan and send nothing.")
def replay(
    offer: OfferOptions, send: SendOptions, out: Path | None, as_json: bool, dry_run: bool, **engine: Any
) -> int:
    """Play TRACE against a serving engine, on its own clock, and judge what its tenants felt.

    TRACE is a Parquet trace (a file, a folder of parts, a glob); without it the sample trace is played, without
    --target against an embedded vLLM-like engine.

    \b
    replay conv.parquet --target http://127.0.0.1:8000 --speed 2x \\
        --tenant-mix risk=3:summary=1 --sla 'risk: ttft_p95 < 800ms'

    Exit: 0 pass, 1 an SLA failed, 2 usage, 3 invalid or inconclusive, 130 interrupted.
    """  # noqa: D301 - click's own mark: keep these lines
    check(offer, send, out)
    if dry_run:
        check_files(send)
        _print_plan(make_offer(offer), offer, as_json=as_json)
        return 0
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    with Crew(send.workers or 1) as crew:  # they import while we do
        from replay import session
        from replay.run import Interrupted

        offered = make_offer(offer)
        try:
            with session.server(send, session.EngineOptions(**engine)) as target:
                ran = run_once(offered, offer, send, target, folder, crew=crew)
        except session.ClientBound as error:
            click.echo(f"replay: {error}", err=True)
            return EXIT_UNJUDGED
        except Refused as error:
            raise click.UsageError(str(error)) from error
        except Interrupted:
            click.echo(f"interrupted twice: left at once, what had come back is in {folder}/outcomes.parquet", err=True)
            return EXIT_INTERRUPTED
    return _print_result(ran, as_json=as_json)


def check(offer: OfferOptions, send: SendOptions, out: Path | None) -> None:
    """What can be refused before anything is read or asked.

    Raises:
        click.UsageError: with one clear line.
    """
    if out is not None and out.exists():
        raise click.UsageError(f"--out {out} exists: name a new folder, results are never overwritten")
    above = next((path for path in out.absolute().parents if path.exists()), None) if out is not None else None
    if above is not None and not (above.is_dir() and os.access(above, os.W_OK)):
        raise click.UsageError(f"--out {out} cannot be made: {above} is no folder that can be written to")
    if send.concurrency is not None and offer.cap:
        raise click.UsageError("--cap and --concurrency exclude each other: users of a closed loop are capped already")
    if send.target is not None:
        try:
            allowed(parse_target(send.target), send.allow_host)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--target") from error
        except Refused as error:
            raise click.UsageError(str(error)) from error


def check_files(send: SendOptions) -> None:
    """That the files named for sending can be used; a run finds out when it asks the server, a dry run here.

    Raises:
        click.UsageError: with one clear line.
    """
    from replay import session, vocabulary

    try:
        session.tls(send)
        if send.tokenizer:
            vocabulary.from_tokenizer_file(Path(send.tokenizer))
    except Refused as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        raise click.UsageError(f"--tokenizer {error}") from error


def run_once(
    offered: Offered, offer: OfferOptions, send: SendOptions, target: Target, folder: Path, *, crew: Crew | None = None
) -> Ran:
    """From the offer to the run's folder, with the live view on stderr and the page beside the result.

    Raises:
        replay.preflight.Refused: the run cannot begin.
        replay.run.Interrupted: a second Ctrl-C.
    """
    from replay import session
    from replay.live import LiveView
    from tenants.sentence import IMPLICIT

    rules = [*(rule for tenant in offered.tenants for rule in tenant.slas), *offered.rules, IMPLICIT]
    with crew or Crew(1) as workers:
        workers.grow(session.workers_for(offered.plan, send))
        ready = session.checked(offered, send, session.prepare(offered, send, target, seed=offer.seed), workers.workers)
        _announce(offered, send, ready, workers.workers)
        warnings = _asked_by_behaviour(offered, send, target)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise click.UsageError(f"--out {folder} cannot be made: {error.strerror}") from error
        with LiveView(_title(offer, ready), rules) as view:
            ran = session.perform(
                offered, send, ready, folder, workers, asked=offer, watch=view.update, warnings=warnings
            )
    draw(folder)
    return ran


def _asked_by_behaviour(offered: Offered, send: SendOptions, target: Target) -> list[str]:
    """What a quick probe has to say against the tags of this run; nothing where priority is honoured.

    Asked only where tenants have different ranks and the run lasts long enough to be worth some seconds more.
    """
    from replay import probe
    from traces.units import NS_PER_S

    ranks = set(offered.plan.rank.tolist())
    if not send.probe or len(ranks) < 2 or offered.plan.span_ns < probe.WORTH_S * NS_PER_S:
        return []
    click.echo("probe    a few seconds: does the server honour priority? (--no-probe leaves it out)", err=True)
    answer = probe.quick(target, send)
    click.echo(f"probe    priority: {answer.priority}", err=True)
    return probe.warning(answer)


def _title(offer: OfferOptions, ready: Ready) -> str:
    """What runs, in a line: ``sample → 127.0.0.1:8000  2x  risk:summary  vllm``."""
    target, speed = ready.target, offer.shape.speed
    words = [
        f"{Path(offer.trace).name} → {target.host}:{target.port}",
        f"{speed:g}x" if speed else "",
        offer.tenant_mix or "",
    ]
    return "  ".join(word for word in [*words, ready.dialect.name] if word)


def _announce(offered: Offered, send: SendOptions, ready: Ready, workers: int) -> None:
    """What will be sent, before the first request."""
    plan = offered.plan
    asked, wanted = int(plan.input_tokens.sum(dtype="int64")), int(plan.output_tokens.sum(dtype="int64"))
    loop = f", closed loop of {send.concurrency} users" if send.concurrency else ""
    lines = [
        f"target   {ready.target.origin}{ready.target.base_path}, model {ready.models.default}",
        f"dialect  {ready.dialect.name} ({ready.dialect_why})",
        f"plan     {plan.rows:,} requests in {span_text(plan.span_ns)}{loop}, {asked:,} tokens in, {wanted:,} out",
        f"prompts  {_prompt_words(ready)}",
        f"sender   {workers} worker{'s' if workers > 1 else ''}; drain at most {span_text(send.drain_ns)}",
        *(f"note     {note}" for note in ready.notes),
    ]
    click.echo("\n".join(lines), err=True)


def _prompt_words(ready: Ready) -> str:
    ids = "token ids" if ready.vocabulary.ids and not ready.wiring.overhead else "text"
    return f"{ids}, lengths by {ready.vocabulary.source}" + (
        "" if ready.wiring.overhead or ids != "text" else ", approximate"
    )


def _print_plan(offered: Offered, offer: OfferOptions, *, as_json: bool) -> None:
    """The dry run's answer: rows, tenants, span before and after, tokens, digest."""
    from replay import plan as planning

    plan = offered.plan
    found = planning.counts(plan)
    found |= {
        "trace_rows": offered.rows_before,
        "span_before_s": offered.span_before_ns / 1e9,
        "span_s": plan.span_ns / 1e9,
        "turns": offer.turns,
        "notes": [*(report.line() for report in offered.reports), *plan.notes],
        "digest": planning.digest(plan),
    }
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    ranks = {tenant.name: tenant.priority for tenant in offered.tenants}
    click.echo(f"rows     {plan.rows:,} of {offered.rows_before:,} in the trace, {found['warmup']:,} of them warm-up")
    for name, rows in found["tenants"].items():
        rank = "no priority" if ranks[name] is None else f"priority {ranks[name]}"
        click.echo(f"tenant   {name}: {rows:,} requests, {rank}")
    click.echo(f"span     {span_text(offered.span_before_ns)} → {span_text(plan.span_ns)}")
    click.echo(f"tokens   {found['input_tokens']:,} in, {found['output_tokens']:,} out")
    for note in found["notes"]:
        click.echo(f"note     {note}")
    click.echo(f"digest   {found['digest']}")


def _print_result(ran: Ran, *, as_json: bool) -> int:
    """The result on stdout, its verdict first and last; the page beside it; the exit code."""
    from tenants import summary

    if as_json:
        click.echo(summary.to_json(ran.summary).decode())
    else:
        from tenants import failures, terminal

        again = shlex.join(["replay", *without_values(sys.argv[1:])])
        terminal.print_result(
            ran.summary,
            terminal.stdout_console(),
            folder=ran.folder,
            causes=failures.causes(ran.outcomes),
            again=again,
        )
    return summary.exit_code(ran.summary)


def without_values(words: Sequence[str]) -> list[str]:
    """The words of a command line with the values of headers left out: one may be a key."""
    found: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if found and found[-1] == "--header":
            found.append(_name_of(word))
        elif option == "--header" and equals:
            found.append(f"--header={_name_of(value)}")
        else:
            found.append(word)
    return found


def _name_of(header: str) -> str:
    return f"{header.partition(':')[0]}: ..."


def draw(folder: Path) -> None:
    """Write `report.html`; a page that cannot be drawn takes no result with it."""
    from replay.report import page
    from tenants import folder as folders

    try:
        page.write(folders.load_all([str(folder)]), folder / "report.html")
    except Exception as error:  # noqa: BLE001 - the run is on disk and judged: say it and go on
        click.echo(f"report.html could not be drawn: {type(error).__name__}: {error}", err=True)
