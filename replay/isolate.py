"""`replay isolate`: does priority isolate the urgent tenant? The same plan in several arms, again and again.

    OUT/experiment.json                  what was asked, tenants and bounds, and which runs there are
    OUT/trial-1/untagged/                a run's folder like any other; `alone-risk` is risk's part of the arm `alone`

The verdict is `tenants judge OUT`'s; this command only makes the runs, then asks it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from replay.options import OfferOptions, SendOptions, make_offer, offer_options, send_options, span_text
from traces.shell import DURATION, EXIT_INTERRUPTED, parsed
from traces.units import NS_PER_S

if TYPE_CHECKING:
    from replay.arms import Part
    from replay.options import Offered
    from replay.preflight import Target
    from replay.session import EngineOptions

START_S = 600.0  # a server that loads a large model takes minutes


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What `isolate` asks for beyond a replay."""

    arms: tuple[str, ...]
    alone: tuple[str, ...]
    trials: int
    cool_ns: int
    servers: dict[str, str]
    pool_target: str | None
    stop_early: bool


def parse_bound(text: str) -> str:
    """An isolation bound, checked and passed on as text. Raises ValueError."""
    from tenants import sla

    if not sla.parse(text).is_bound:
        raise ValueError(
            f"{text!r} compares with no arm: write it as 'risk: ttft_p95 <= 1.25x alone', or give it to --sla"
        )
    return text


def parse_server(text: str) -> tuple[str, str]:
    """`fcfs=vllm serve ...`. Raises ValueError."""
    name, equals, command = text.partition("=")
    if not equals or not name.strip().replace("-", "").replace("_", "").isalnum() or not command.strip():
        raise ValueError(
            f"{text!r} is not an arm's server: write it as 'fcfs=vllm serve MODEL --scheduling-policy fcfs'"
        )
    return name.strip(), command.strip()


@click.command()
@offer_options
@send_options
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME",
    help="alone, untagged, tagged, capped, pooled, or a name of --arm-server.",
)
@click.option("--alone", multiple=True, metavar="TENANT", help="Tenants that are run alone.  [default: all]")
@click.option("--trials", type=click.IntRange(1, 100), default=3, show_default=True, help="How often every arm is run.")
@click.option("--cool", "cool_ns", type=DURATION, default=2 * NS_PER_S, help="Pause between runs.  [default: 2s]")
@click.option(
    "--bound", "bounds", multiple=True, type=parsed("bound", parse_bound), help="'risk: ttft_p95 <= 1.25x alone'."
)
@click.option(
    "--arm-server",
    "servers",
    multiple=True,
    type=parsed("arm=command", parse_server),
    help="Start this server for an arm, and end it afterwards: 'fcfs=vllm serve ...'.",
)
@click.option("--pool-target", metavar="URL", help="Arm `pooled`: where the less urgent tenants go.")
@click.option("--stop-early", is_flag=True, help="No further trial once every verdict is clear at 99 %.")
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
    replay isolate mix.parquet --tenant-mix risk=4:summary=1 --cap summary=4 --bound 'risk: ttft_p95 <= 1.25x alone'

    Exit: 0 isolated, 1 a bound or an SLA missed, 2 usage, 3 inconclusive or invalid, 130 interrupted.
    """
    from replay import preflight
    from replay.run import Interrupted

    dry_run = rest.pop("dry_run")
    if out is not None and out.exists():
        raise click.UsageError(f"--out {out} exists: name a new folder, results are never overwritten")
    context = click.get_current_context()
    if context.get_parameter_source("turns") is not click.core.ParameterSource.COMMANDLINE:
        offer = msgspec.structs.replace(offer, turns="timed")
    offer = msgspec.structs.replace(offer, sla=(*offer.sla, *bounds))
    engine = {name: rest.pop(name) for name in ("policy", "max_num_seqs", "max_num_batched_tokens", "profile")}
    offered = make_offer(offer)
    setup = _setup(offered, send, **rest)
    _announce(offered, setup)
    if dry_run:
        return 0
    folder = out or Path("runs") / time.strftime("isolate-%Y%m%d-%H%M%S")
    from replay.session import EngineOptions

    try:
        interrupted = run(offer, send, setup, EngineOptions(**engine), folder)
    except preflight.Refused as error:
        raise click.UsageError(str(error)) from error
    except Interrupted:
        click.echo(f"interrupted twice: left at once, what there is stands in {folder}", err=True)
        return EXIT_INTERRUPTED
    from tenants import judge

    code = judge.judge_experiment(folder, as_json=as_json)
    return EXIT_INTERRUPTED if interrupted else code


def _setup(
    offered: Offered,
    send: SendOptions,
    *,
    arms: Sequence[str],
    alone: Sequence[str],
    servers: Sequence[tuple[str, str]],
    pool_target: str | None,
    **rest: Any,
) -> Setup:
    """The arms that make sense here, or a clear refusal of what does not."""
    from replay import arms as known

    started = dict(servers)
    names = [tenant.name for tenant in offered.tenants]
    if len(names) < 2:
        raise click.UsageError("one tenant has nobody to be isolated from: name two, --tenant-mix risk=3:summary=1")
    if all(tenant.priority is None for tenant in offered.tenants):
        raise click.UsageError("no tenant has a priority: --tenant-mix risk@0:summary@1, or priority in tenants.toml")
    for name in alone:
        if name not in names:
            raise click.BadParameter(f"no tenant {name}; there are {', '.join(names)}", param_hint="--alone")
    default = [known.ALONE, known.UNTAGGED, known.TAGGED]
    default += [known.CAPPED] if offered.caps else []
    default += [known.POOLED] if pool_target else []
    chosen = list(arms) or [*default, *(name for name in started if name not in known.KNOWN)]
    for arm in chosen:
        if arm not in known.KNOWN and arm not in started:
            raise click.BadParameter(
                f"{arm} is neither one of {', '.join(known.KNOWN)} nor named by --arm-server", param_hint="--arm"
            )
    if known.CAPPED in chosen and not offered.caps:
        raise click.UsageError("arm capped needs a cap: --cap summary=4")
    if known.POOLED in chosen and pool_target is None:
        raise click.UsageError("arm pooled needs --pool-target URL")
    if started and send.target is None:
        raise click.UsageError("--arm-server needs --target: the URL where its servers listen")
    return Setup(arms=tuple(chosen), alone=tuple(alone or names), servers=started, pool_target=pool_target, **rest)


def _announce(offered: Offered, setup: Setup) -> None:
    from replay import arms as known

    names = [part.folder for part in known.parts(setup.arms, setup.alone, 0)]
    runs = len(names)
    each_s = (offered.plan.span_ns + setup.cool_ns) / NS_PER_S
    click.echo(
        f"{setup.trials} trials of {runs} runs ({', '.join(names)}), "
        f"{offered.plan.rows:,} requests in {span_text(offered.plan.span_ns)} each: "
        f"{setup.trials * runs * each_s / 60:,.0f} min and what the servers take to finish",
        err=True,
    )


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
    from replay import arms, session

    folder.mkdir(parents=True)
    done: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        target = None if setup.servers else stack.enter_context(session.server(send, engine))
        bench = Bench(send, setup, engine, target)
        for trial in range(setup.trials):
            trial_offer = msgspec.structs.replace(offer, seed=offer.seed + trial)
            offered = make_offer(trial_offer)
            for part in arms.parts(setup.arms, setup.alone, trial):
                place = f"trial-{trial + 1}/{part.folder}"
                click.echo(f"trial {trial + 1} of {setup.trials}: {part.folder}", err=True)
                interrupted = _one(bench, arms.offered_for(offered, part), trial_offer, part, folder / place)
                done.append({"trial": trial + 1, "arm": part.arm, "tenant": part.tenant, "folder": place})
                _note(folder, offered, setup, done)
                if interrupted:
                    return True
                time.sleep(setup.cool_ns / NS_PER_S)
            if setup.stop_early and trial > 0 and _is_clear(folder):
                click.echo(f"every verdict is clear after {trial + 1} trials", err=True)
                break
    return False


def _one(bench: Bench, offered: Offered, asked: OfferOptions, part: Part, folder: Path) -> bool:
    """One run, on its own server where the arm has one; returns whether the user ended it."""
    from replay import arms, session
    from replay.live import LiveView
    from replay.pooled import pooled

    rules = [rule for tenant in offered.tenants for rule in tenant.slas]
    with contextlib.ExitStack() as stack:
        target = bench.target
        if target is None:
            if part.arm in bench.setup.servers:
                stack.enter_context(_started(bench.setup.servers[part.arm], bench.send))
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
def _started(command: str, send: SendOptions) -> Iterator[None]:
    """A server for one run, in a process group of its own, ended with all its children."""
    import os
    import signal
    import subprocess

    from replay import preflight

    target = preflight.parse_target(str(send.target))
    process = subprocess.Popen(  # noqa: S603 - the user's own command
        shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        end = time.monotonic() + START_S
        while True:
            if process.poll() is not None:
                how = f"ended with exit code {process.returncode} before it listened"
                raise preflight.Refused(f"--arm-server: {command.split(maxsplit=1)[0]} {how}")
            with contextlib.suppress(preflight.Refused):
                preflight.look(preflight.Ask(target))
                break
            if time.monotonic() > end:
                raise preflight.Refused(f"--arm-server: nothing listens at {target.origin} after {START_S:.0f} s")
            time.sleep(0.2)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _note(folder: Path, offered: Offered, setup: Setup, done: list[dict[str, Any]]) -> None:
    """Write `experiment.json`, complete or not at all, after every run: what there is can be judged at any time."""
    document = {
        "format": 1,
        "setup": msgspec.to_builtins(setup),
        "tenants": msgspec.to_builtins([msgspec.structs.replace(tenant, headers={}) for tenant in offered.tenants]),
        "plan": {"rows": offered.plan.rows, "span_s": offered.plan.span_ns / NS_PER_S},
        "runs": done,
    }
    temporary = folder / ".experiment.json.tmp"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    temporary.replace(folder / "experiment.json")


def _is_clear(folder: Path) -> bool:
    from tenants import judge

    return judge.is_clear(folder)
