"""`replay isolate`: does priority isolate the urgent tenant? The same plan in several arms, again and again.

The verdict is `tenants judge OUT`'s; this command only makes the runs (folders: `replay/trials.py`), then asks it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from replay import trials
from replay.command import check_files
from replay.options import OfferOptions, SendOptions, make_offer, offer_options, send_options
from replay.target import parse_target
from replay.trials import Setup, experiment_options
from traces.shell import DURATION, EXIT_INTERRUPTED, EXIT_UNJUDGED, parsed
from traces.units import NS_PER_S, show_ns

if TYPE_CHECKING:
    from replay.arms import Part
    from replay.options import Offered
    from replay.preflight import Ask, Target
    from replay.session import EngineOptions

START_S = 600.0  # a server that loads a large model takes minutes


def parse_server(text: str) -> tuple[str, str]:
    """`fcfs=vllm serve ...`. Raises ValueError."""
    return trials.parse_own(text, "an arm's server", "fcfs=vllm serve MODEL --scheduling-policy fcfs")


@experiment_options
@click.command()
@offer_options
@send_options
@click.option("--cool", "cool_ns", type=DURATION, default=2 * NS_PER_S, help="Pause between runs.  [default: 2s]")
@click.option(
    "--arm-server",
    "servers",
    multiple=True,
    type=parsed("arm=command", parse_server),
    help="Start this server for an arm, and end it afterwards: 'fcfs=vllm serve ... --port 8001'.",
)
@click.option("--pool-target", metavar="URL", help="Arm `pooled`: where the less urgent tenants go.")
@click.option("--policy", default="priority", show_default=True, help="Embedded engine: its scheduling policy.")
@click.option(
    "--max-num-seqs", type=click.IntRange(1), default=8, show_default=True, help="Embedded engine: its slots."
)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Embedded engine: tokens in a step.")
@click.option("--profile", help="Embedded engine: which model on which GPU.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="The experiment's folder.  [default: runs/isolate-DATE-TIME]"
)
@click.option("--json", "as_json", is_flag=True, help="The verdict as JSON on stdout, and nothing else there.")
@click.option("--dry-run", is_flag=True, help="Print the runs and how long they take; send nothing.")
def isolate(
    offer: OfferOptions,
    send: SendOptions,
    bounds: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **rest: Any,
) -> int:
    r"""Run TRACE in several arms and say whether its tenants are isolated from each other, and what it costs.

    \b
    replay isolate mix.parquet --tenants tenants.toml --target http://127.0.0.1:8000 --trials 5
    replay isolate mix.parquet --tenant-mix risk=4:summary=1 --cap summary=6 --bound 'risk: ttft_p95 <= 1.25x alone'

    Exit: 0 isolated, 1 a bound or an SLA missed, 2 usage, 3 inconclusive or invalid, 130 interrupted.
    """
    from replay import preflight
    from replay.run import Interrupted
    from tenants import judge

    dry_run = rest.pop("dry_run")
    if out is not None and out.exists():
        raise click.UsageError(f"--out {out} exists: name a new folder, results are never overwritten")
    offer = trials.prepared(offer, bounds)
    engine = {name: rest.pop(name) for name in ("policy", "max_num_seqs", "max_num_batched_tokens", "profile")}
    offered = make_offer(offer)
    setup = _setup(offered, send, **rest)
    trials.announce(offered, setup)
    click.echo(f"{show_ns(trials.span_ns(offered, setup))} and what the servers take to finish", err=True)
    if dry_run:
        check_files(send)
        return 0
    folder = out or Path("runs") / time.strftime("isolate-%Y%m%d-%H%M%S")
    from replay.session import EngineOptions

    try:
        interrupted = run(offer, send, setup, EngineOptions(**engine), folder)
    except preflight.Refused as error:
        if not (folder / "experiment.json").exists():
            raise click.UsageError(str(error)) from error
        click.echo(f"replay isolate: {error}; ended here, what had run stands in {folder}", err=True)
        judge.judge_experiment(folder, as_json=as_json)
        return EXIT_UNJUDGED
    except Interrupted:
        click.echo(f"interrupted twice: left at once, what there is stands in {folder}", err=True)
        return EXIT_INTERRUPTED
    code = judge.judge_experiment(folder, as_json=as_json)
    return EXIT_INTERRUPTED if interrupted else code


def _setup(offered: Offered, send: SendOptions, *, servers: tuple[tuple[str, str], ...], **rest: Any) -> Setup:
    """The arms that make sense here, or a clear refusal of what does not."""
    own, pool = dict(servers), rest["pool_target"]
    chosen, alone = trials.chosen_arms(offered, rest.pop("arms"), rest.pop("alone"), own, pool=pool is not None)
    if "pooled" in chosen and pool is None:
        raise click.UsageError("arm pooled needs --pool-target URL")
    _check_pool(pool, send)
    _check_servers(chosen, own, send)
    return Setup(arms=chosen, alone=alone, own=own, **rest)


def _check_pool(pool: str | None, send: SendOptions) -> None:
    from replay.target import Refused, allowed

    if pool is None:
        return
    try:
        allowed(parse_target(pool), send.allow_host)
    except (ValueError, Refused) as error:
        raise click.BadParameter(
            str(error).replace("--target", "--pool-target", 1), param_hint="--pool-target"
        ) from None


def _check_servers(arms: Collection[str], own: Mapping[str, str], send: SendOptions) -> None:
    """Refuse an arm's server that could not be told from another: it needs an address of its own."""
    for arm, command in own.items():
        try:
            shlex.split(command)
        except ValueError as error:
            raise click.BadParameter(f"{arm}: {error}", param_hint="--arm-server") from None
    if any(port_of(command) is None for command in own.values()) and send.target is None:
        raise click.UsageError("--arm-server needs --target, the URL where it listens, or --port in its command")
    if send.target is None:
        return
    there = parse_target(send.target).port
    bare = [arm for arm in arms if arm not in own]
    clash = [arm for arm, command in own.items() if arm in arms and port_of(command) in {None, there}]
    if bare and clash:
        raise click.UsageError(
            f"--arm-server {clash[0]} would listen where the server of {', '.join(bare)} does, port {there}: give its "
            "command another --port, or every arm a command"
        )


def port_of(command: str) -> int | None:
    """The port that a server's command names by `--port`; None where it names none."""
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        found = value if equals else following
        if option == "--port" and found.isdecimal():
            return int(found)
    return None


def target_of(command: str, send: SendOptions) -> Target:
    """Where an arm's server listens: at --target, on the port that its command names."""
    target = parse_target(send.target or "http://127.0.0.1:8000")
    return target._replace(port=port_of(command) or target.port)


class Bench(NamedTuple):
    """Where the runs of an experiment are made. `target` is None where every run has a server of its own."""

    send: SendOptions
    setup: Setup
    engine: EngineOptions
    target: Target | None


def run(offer: OfferOptions, send: SendOptions, setup: Setup, engine: EngineOptions, folder: Path) -> bool:
    """Make all runs; returns whether the user ended it.

    Raises:
        replay.preflight.Refused, replay.run.Interrupted
    """
    from replay import session

    with contextlib.ExitStack() as stack:
        target = None if setup.own else stack.enter_context(session.server(send, engine))
        bench = Bench(send, setup, engine, target)
        return trials.play(offer, setup, folder, lambda *run: _one(bench, *run))


def _one(bench: Bench, offered: Offered, asked: OfferOptions, part: Part, folder: Path) -> bool:
    """One run, on its own server where the arm has one; returns whether the user ended it."""
    from replay import arms, session
    from replay.live import LiveView
    from replay.pooled import pooled

    rules = [rule for tenant in offered.tenants for rule in tenant.slas]
    with contextlib.ExitStack() as stack:
        target = bench.target
        if target is None:
            if part.arm in bench.setup.own:
                target = stack.enter_context(_started(bench.setup.own[part.arm], bench.send))
            else:
                target = stack.enter_context(session.server(bench.send, bench.engine))
        view = stack.enter_context(LiveView(f"{part.folder} -> {target.host}:{target.port}", rules))
        if part.arm == arms.POOLED:
            here = msgspec.structs.replace(bench.send, target=target.origin + target.base_path)
            there = msgspec.structs.replace(bench.send, target=bench.setup.pool_target)
            return pooled(offered, asked, (here, there), folder, view.update)
        return session.one(
            offered, asked, bench.send, target, folder, arm=part.arm, watch=view.update
        ).result.interrupted


@contextlib.contextmanager
def _started(command: str, send: SendOptions) -> Iterator[Target]:
    """A server for one run, in a process group of its own, ended with all its children.

    Raises:
        replay.preflight.Refused: something else listens there already, or it did not come up.
    """
    import os
    import signal
    import subprocess

    from replay import preflight, session

    target = target_of(command, send)
    preflight.allowed(target, send.allow_host)
    if _listens(target):  # it would be measured in place of the arm's own
        raise preflight.Refused(f"--arm-server: something listens at {target.origin} already: end it first")
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command
            shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise preflight.Refused(f"--arm-server: cannot start {shlex.split(command)[0]} ({error.strerror})") from error
    try:
        end = time.monotonic() + START_S
        while True:
            if process.poll() is not None:
                how = f"ended with exit code {process.returncode} before it listened"
                raise preflight.Refused(f"--arm-server: {command.split(maxsplit=1)[0]} {how}")
            if _answers(preflight.Ask(target, tls=session.tls(send))):
                break
            if time.monotonic() > end:
                raise preflight.Refused(f"--arm-server: nothing listens at {target.origin} after {START_S:.0f} s")
            time.sleep(0.2)
        yield target
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _listens(target: Target) -> bool:
    import socket

    with contextlib.suppress(OSError), socket.create_connection((target.host, target.port), 1.0):
        return True
    return False


def _answers(ask: Ask) -> bool:
    """Whether a server answers at all: one that asks for a key does, one that still loads (503) does not."""
    import http.client

    with contextlib.suppress(OSError, http.client.HTTPException):
        status, _ = ask.get("/v1/models")
        return status != http.client.SERVICE_UNAVAILABLE
    return False
