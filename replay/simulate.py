"""`replay simulate`: the same replay on a virtual clock, against as many engines as asked.

The plan is the one `replay` would send, the scheduler the one `replay serve` runs; only time is computed instead of
waited for. The run folder is a replay's (`run.json`, `outcomes.parquet`, `report.html`), and beside it
`truth.parquet`: for each
request what it waited for (a slot, tokens, blocks, the running step) and whom the engine served meanwhile.

There is no network and no sender: a first token is the end of the step that made it, lateness is 0, and options about
how to send (timeouts, retries, workers ...) change nothing.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from replay import trials
from replay.engine.policies import POLICIES
from replay.engine.serve import make_config, make_profile, serve
from replay.options import OfferOptions, SendOptions, make_offer, offer_options, send_options
from replay.trials import Setup, experiment_options
from traces.shell import EXIT_PASS, parsed

if TYPE_CHECKING:
    from replay.arms import Part
    from replay.options import Offered
    from replay.simulated import Engine, Simulated
    from tenants.summary import Summary

MOST_DRAWN = 20_000  # the page asks who blocked whom, which takes longer than the simulation

_OF_SERVE = (
    "profile_file",
    "max_num_batched_tokens",
    "max_num_active_seqs",
    "max_model_len",
    "num_gpu_blocks",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "watermark",
    "scheduler_reserve_full_isl",
    "async_scheduling",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "engine_version",
    "preemption_threshold",
    "ageing_s",
    "weights",
)


ENGINE = (*_OF_SERVE, "scheduling_policy", "max_num_seqs", "profile_name", "replicas", "routing", "step_by_step")


def parse_arm_engine(text: str) -> tuple[str, str]:
    """`fair=--policy fair`, split at the first `=`. Raises ValueError."""
    return trials.parse_own(text, "an arm's engine", "fair=--policy fair --max-num-seqs 16")


def engine_options(command: click.Command) -> click.Command:
    """Give a command the engine's options, as `replay serve` has them."""
    command.params += [option for option in serve.params if option.name in _OF_SERVE]
    return command


@experiment_options
@engine_options
@click.command()
@offer_options
@send_options
@click.option(
    "--policy",
    "scheduling_policy",
    type=click.Choice(list(POLICIES)),
    default="priority",
    show_default=True,
    help="fcfs and priority are vLLM's; the others show what a scheduler you do not have yet would give.",
)
@click.option("--max-num-seqs", type=click.IntRange(1), default=8, show_default=True, help="Slots of each engine.")
@click.option("--profile", "profile_name", help="Which model on which GPU.  [default: llama3-8b-a100-80]")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Engines behind one address.")
@click.option(
    "--routing",
    type=click.Choice(("round-robin", "least-loaded", "session")),
    default="round-robin",
    show_default=True,
    help="Which of them a request goes to.",
)
@click.option("--step-by-step", is_flag=True, help="Take every step alone: slow, and the same to the nanosecond.")
@click.option(
    "--arm-engine",
    "own",
    multiple=True,
    type=parsed("arm=options", parse_arm_engine),
    help="An arm with another engine: 'fair=--policy fair --max-num-seqs 16'.",
)
@click.option("--out", type=click.Path(path_type=Path), help="The folder.  [default: runs/DATE-TIME]")
@click.option(
    "--page/--no-page", default=None, help=f"Draw report.html as well.  [default: up to {MOST_DRAWN:,} requests]"
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout, and nothing else there.")
def simulate(
    offer: OfferOptions, send: SendOptions, out: Path | None, page: bool | None, as_json: bool, **rest: Any
) -> int:
    """Play TRACE on a virtual clock: what if another policy, more slots, one more engine.

    Takes the options of `replay`; those about sending change nothing here.

    \b
    replay simulate conv.parquet --tenant-mix risk=3:summary=1 --policy fcfs --max-num-seqs 64
    replay simulate day.parquet --replicas 4 --routing least-loaded --sla 'risk: ttft_p95 < 800ms'
    replay simulate mix.parquet --tenants tenants.toml --poisson --trials 5 --arm-engine 'fair=--policy fair'

    With --trials or any other option of an experiment, its arms are played as `replay isolate` runs them, and judged.

    Exit: 0 pass, 1 an SLA or a bound missed, 2 usage, 3 invalid or inconclusive.
    """  # noqa: D301 - click's own mark: keep these lines
    if out is not None and out.exists():
        raise click.UsageError(f"--out {out} exists: name a new folder, results are never overwritten")
    if send.concurrency is not None:
        raise click.UsageError("--concurrency is not simulated: the plan is an open loop; use --cap TENANT=N")
    if send.target is not None:
        raise click.UsageError("--target: a simulation sends nothing; name the engine by --profile and its options")
    engine = engine_of(rest)
    context = click.get_current_context()
    asked = [name for name in ("arms", "alone", "trials", "bounds", "own", "stop_early") if _given(context, name)]
    if asked:
        folder = out or Path("runs") / time.strftime("isolate-%Y%m%d-%H%M%S")
        return _experiment(trials.prepared(offer, rest["bounds"]), send, engine, folder, as_json=as_json)
    from replay import simulated

    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    offered = make_offer(offer)
    click.echo(engine.line, err=True)
    ran = simulated.Simulated(offered, engine, send)
    click.echo(ran.line, err=True)
    summary = simulated.keep(ran, offer, folder)
    if len(ran.work) <= MOST_DRAWN if page is None else page:
        from replay.command import draw

        draw(folder)
    return _print(ran, summary, folder, as_json=as_json)


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def engine_of(options: dict[str, Any]) -> Engine:
    """The simulated engine of these options. Raises click.UsageError."""
    from replay.simulated import Engine

    profile = make_profile(options)
    return Engine(make_config(options, profile), profile, {name: options[name] for name in ENGINE})


def _print(ran: Simulated, summary: Summary, folder: Path, *, as_json: bool) -> int:
    from tenants import summary as summaries

    if as_json:
        click.echo(summaries.to_json(summary).decode())
    else:
        from tenants import failures, terminal

        causes = failures.causes(ran.outcomes)
        terminal.print_result(summary, terminal.stdout_console(), folder=folder, causes=causes, again=None)
    return summaries.exit_code(summary) or EXIT_PASS


def _experiment(offer: OfferOptions, send: SendOptions, engine: Engine, folder: Path, *, as_json: bool) -> int:
    """All arms and trials, each on the engine asked for or on its own, then the verdict."""
    from replay import plan as planning
    from replay import simulated
    from tenants import judge

    asked = click.get_current_context().params
    own = dict(asked["own"])
    engines = {arm: engine_of(engine.options | arm_options(words)) for arm, words in own.items()}
    offered = make_offer(offer)
    arms, alone = trials.chosen_arms(offered, asked["arms"], asked["alone"], own, pool=False)
    setup = Setup(arms=arms, alone=alone, own=own, trials=asked["trials"], stop_early=asked["stop_early"])
    if setup.trials > 1 and planning.digest(offered.plan) == planning.digest(_again(offer).plan):
        raise click.UsageError(
            f"--trials {setup.trials}: nothing is drawn, every trial would be the same: add --poisson, or --trials 1"
        )
    click.echo(engine.line, err=True)
    trials.announce(offered, setup)

    def one(offered: Offered, asked: OfferOptions, part: Part, place: Path) -> bool:
        simulated.play_arm((offered, part.arm), asked, engines.get(part.arm, engine), send, place)
        return False

    trials.play(offer, setup, folder, one)
    return judge.judge_experiment(folder, as_json=as_json)


def _again(offer: OfferOptions) -> Offered:
    return make_offer(msgspec.structs.replace(offer, seed=offer.seed + 1))


def arm_options(words: str) -> dict[str, Any]:
    """Options of an arm's own engine, by name, those given alone. Raises click.UsageError."""
    command = click.Command("--arm-engine", params=[option for option in simulate.params if option.name in ENGINE])
    with command.make_context("--arm-engine", shlex.split(words)) as context:
        return {name: value for name, value in context.params.items() if _given(context, name)}
