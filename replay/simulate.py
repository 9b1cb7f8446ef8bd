"""`replay simulate`: the same replay on a virtual clock, against as many engines as asked.

The plan is the one `replay` would send, the scheduler the one `replay serve` runs; only time is computed instead of
waited for. The run folder is a replay's (`run.json`, `outcomes.parquet`, `report.html`), and beside it
`truth.parquet`: for each
request what it waited for (a slot, tokens, blocks, the running step) and whom the engine served meanwhile.

There is no network and no sender: a first token is the end of the step that made it, lateness is 0, and options about
how to send (timeouts, retries, workers ...) change nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.engine.policies import POLICIES
from replay.engine.serve import make_config, make_profile, serve
from replay.options import OfferOptions, SendOptions, make_offer, offer_options, send_options
from traces.shell import EXIT_PASS

if TYPE_CHECKING:
    from replay.simulated import Simulated

MOST_DRAWN = 20_000  # the page asks who blocked whom, which takes longer than the simulation

_ENGINE = (
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


def engine_options(command: click.Command) -> click.Command:
    """Give a command the engine's options, as `replay serve` has them."""
    command.params += [option for option in serve.params if option.name in _ENGINE]
    return command


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
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder.  [default: runs/DATE-TIME]")
@click.option(
    "--page/--no-page", default=None, help=f"Draw report.html as well.  [default: up to {MOST_DRAWN:,} requests]"
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout, and nothing else there.")
def simulate(
    offer: OfferOptions, send: SendOptions, out: Path | None, page: bool | None, as_json: bool, **engine: Any
) -> int:
    """Play TRACE on a virtual clock: what if another policy, more slots, one more engine.

    Takes the options of `replay`; those about sending change nothing here.

    \b
    replay simulate conv.parquet --tenant-mix risk=3:summary=1 --policy fcfs --max-num-seqs 64
    replay simulate day.parquet --replicas 4 --routing least-loaded --sla 'risk: ttft_p95 < 800ms'

    Exit: 0 pass, 1 an SLA failed, 2 usage, 3 invalid or inconclusive.
    """  # noqa: D301 - click's own mark: keep these lines
    if out is not None and out.exists():
        raise click.UsageError(f"--out {out} exists: name a new folder, results are never overwritten")
    if send.concurrency is not None:
        raise click.UsageError("--concurrency is not simulated: the plan is an open loop; use --cap TENANT=N")
    if send.target is not None:
        raise click.UsageError("--target: a simulation sends nothing; name the engine by --profile and its options")
    profile = make_profile(engine)
    config = make_config(engine, profile)
    offered = make_offer(offer)
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    from replay.simulated import Simulated

    click.echo(
        f"engine   {engine['replicas']} × {profile.name} ({profile.provenance}), {config.scheduling_policy}, "
        f"{config.slots} slots, {config.token_budget} tokens a step",
        err=True,
    )
    ran = Simulated(offered, config, profile, send, engine)
    tokens, steps = int(ran.result.output_tokens.sum()), sum(ran.result.steps)
    click.echo(
        f"played   {len(ran.work):,} requests, {tokens:,} tokens, {steps:,} steps in {ran.wall_s:.2f} s", err=True
    )
    drawn = len(ran.work) <= MOST_DRAWN if page is None else page
    return _finish(ran, offer, folder, page=drawn, as_json=as_json)


def _finish(ran: Simulated, offer: OfferOptions, folder: Path, *, page: bool, as_json: bool) -> int:
    """Judge, write the folder, print."""
    import pyarrow.parquet as pq

    from replay import plan as planning
    from replay.command import draw
    from replay.session import write_document
    from replay.simulated import document_of, outcomes_of, truth_of
    from tenants import summary as summaries
    from traces import parquet

    outcomes = outcomes_of(ran)
    digest = planning.digest(ran.offered.plan)
    stuck = ["the engine stalled: some requests can never be served"] if bool((ran.result.finish == 0).any()) else []
    summary = summaries.summarise(
        outcomes,
        tenants=ran.offered.tenants,
        rules=ran.offered.rules,
        digest=digest,
        warnings=ran.notes(),
        invalid=stuck,
    )
    folder.mkdir(parents=True)
    parquet.write(outcomes, folder / "outcomes.parquet")
    pq.write_table(truth_of(ran, outcomes.column("request_id").combine_chunks()), folder / "truth.parquet")
    write_document(folder, document_of(ran, offer, summary))
    if page:
        draw(folder)
    if as_json:
        click.echo(summaries.to_json(summary).decode())
    else:
        from tenants import failures, terminal

        terminal.print_result(
            summary, terminal.stdout_console(), folder=folder, causes=failures.causes(outcomes), again=None
        )
    return summaries.exit_code(summary) or EXIT_PASS
