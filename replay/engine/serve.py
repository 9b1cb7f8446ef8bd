"""`replay serve`: the embedded engine as a server of its own, under the option names of `vllm serve`.

stdout has one line, the URL, when it is ready; stderr tells what runs, and at the end how well it kept its clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.engine.policies import POLICIES
from traces.shell import FACTOR

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from replay.engine.config import SchedulerConfig
    from replay.engine.loop import Engine
    from replay.engine.record import Log
    from replay.engine.server import Server
    from replay.engine.steptime import Profile
    from replay.engine.truth import Truth


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8100, show_default=True, help="Port; 0 lets the system choose.")
@click.option("--ssl-certfile", type=click.Path(exists=True, dir_okay=False), help="Serve TLS with this certificate.")
@click.option("--ssl-keyfile", type=click.Path(exists=True, dir_okay=False), help="Key of the certificate.")
@click.option(
    "--served-model-name", "models", multiple=True, help="Model name to serve (repeatable).  [default: the profile's]"
)
@click.option(
    "--policy",
    "--scheduling-policy",
    "scheduling_policy",
    type=click.Choice(list(POLICIES)),
    default="fcfs",
    show_default=True,
    help="fcfs and priority are vLLM's; the others show what a scheduler you do not have yet would give.",
)
@click.option(
    "--higher-first", is_flag=True, help="A larger priority is more urgent, as in SGLang.  [default: smaller]"
)
@click.option(
    "--profile",
    "profile_name",
    default=None,
    help="Step-time profile: which model on which GPU.  [default: llama3-8b-a100-80]",
)
@click.option(
    "--profile-file", type=click.Path(dir_okay=False), help="Step-time profile as `replay calibrate` wrote it."
)
@click.option("--speed-of-time", type=FACTOR, default=1.0, help="2x halves every step's time.")
@click.option(
    "--max-num-seqs", type=click.IntRange(1), help="Slots: requests that run at once.  [default: the profile's]"
)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Tokens in a step.  [default: the profile's]")
@click.option("--max-num-active-seqs", type=click.IntRange(1), help="Admission cap below --max-num-seqs.")
@click.option(
    "--max-model-len", type=click.IntRange(2), help="Prompt and output tokens together.  [default: the profile's]"
)
@click.option(
    "--num-gpu-blocks", "--num-gpu-blocks-override", type=click.IntRange(2), help="KV blocks.  [default: the profile's]"
)
@click.option("--block-size", type=click.IntRange(1), help="Tokens in a KV block.  [default: the profile's]")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True)
@click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=True, show_default=True)
@click.option(
    "--long-prefill-token-threshold",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Most prompt tokens one request gets in a step; 0: no limit.",
)
@click.option("--long-prefill-token-threshold-adaptive", is_flag=True)
@click.option(
    "--prefill-schedule-interval",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="0.33: while others decode, prefill only every so many steps.",
)
@click.option(
    "--watermark",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of the blocks kept free at admission.",
)
@click.option("--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl", default=True, show_default=True)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=False,
    show_default=True,
    help="Schedule a step before the former's tokens are known.",
)
@click.option("--max-num-queued-reqs", type=click.IntRange(0), help="Refuse with 503 beyond so many.")
@click.option("--max-num-queued-tokens", type=click.IntRange(1), help="Refuse with 503 beyond so many prompt tokens.")
@click.option("--engine-version", type=click.Choice(("0.32", "0.33")), default="0.33", show_default=True)
@click.option(
    "--preemption-threshold",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="sglang: urgency gap that preempts.",
)
@click.option(
    "--ageing",
    "ageing_s",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="ageing: seconds of waiting that count as one rank.",
)
@click.option(
    "--tenant-weight", "weights", multiple=True, metavar="NAME=WEIGHT", help="fair: a tenant's weight (repeatable)."
)
@click.option("--tenant-header", default="x-tenant", show_default=True, help="Header that names the tenant.")
@click.option(
    "--mean-output-tokens",
    type=click.FloatRange(1),
    help="Answers without ignore_eos end by themselves at this mean length.  [default: never]",
)
@click.option("--enable-per-request-metrics/--no-enable-per-request-metrics", default=True, show_default=True)
@click.option("--enable-prompt-tokens-details/--no-enable-prompt-tokens-details", default=True, show_default=True)
@click.option(
    "--sse-keep-alive-interval",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds of silence after which a stream gets a comment; 0: never.",
)
@click.option(
    "--timeout-keep-alive",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds after which an idle connection is closed, as vLLM's server does.",
)
@click.option(
    "--log",
    "log_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The engine's own record of every request: JSON lines, or Parquet by the name's end.",
)
@click.option(
    "--truth",
    "truth_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Ground truth of every wait, written at the end (Parquet).",
)
@click.option("--die-with-parent", is_flag=True, hidden=True)
def serve(**options: Any) -> None:
    """Start the embedded engine: vLLM's scheduler on a step-time model, behind vLLM's HTTP API.

    \b
    replay serve --port 8100 --policy priority --max-num-seqs 8
    replay serve --profile llama3-8b-h100 --policy fcfs --log engine.jsonl

    Times are modelled, not measured, unless the profile says otherwise.
    """  # noqa: D301 - click wants the control character
    if options["die_with_parent"]:
        _die_with_parent()
    profile = make_profile(options)
    config = make_config(options, profile)
    context = _tls(options)
    run(options, profile, config, context)


def run(options: dict[str, Any], profile: Profile, config: SchedulerConfig, context: ssl.SSLContext | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    import asyncio
    import sys

    from traces.descriptors import SERVER_DESCRIPTORS, make_room

    make_room(SERVER_DESCRIPTORS)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(options, profile, config, context))


async def _serve(
    options: dict[str, Any], profile: Profile, config: SchedulerConfig, context: ssl.SSLContext | None
) -> None:
    import asyncio
    import gc
    import signal

    from aiohttp import web

    from replay.engine.record import open_log, write_truth
    from replay.engine.truth import Truth

    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    log = open_log(options["log_path"]) if options["log_path"] else None
    truth = Truth(profile.model) if options["truth_path"] else None
    server = build(options, profile, config, log=log.write if log else None, truth=truth)
    runner = server.runner()
    await runner.setup()
    try:
        site = web.TCPSite(runner, options["host"], options["port"], ssl_context=context, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise click.UsageError(
                f"--port {options['port']}: cannot listen on {options['host']}: {error.strerror}"
            ) from None
        gc.collect()
        gc.freeze()  # what lives from here on is small and short-lived: rare, short collections
        gc.set_threshold(50_000, 20, 50)
        url = f"{'https' if context else 'http'}://{_address(runner)}"
        click.echo(
            f"engine: {config.scheduling_policy}, {config.max_num_seqs} slots, "
            f"{config.max_num_batched_tokens} tokens a step, {profile.name} ({profile.provenance})",
            err=True,
        )
        click.echo(url)
        await stopping.wait()
    finally:
        await runner.cleanup()
        server.engine.close()
        if log is not None:
            log.close()
        if truth is not None:
            write_truth(truth, options["truth_path"])
    click.echo(_kept_time(server.engine), err=True)


def build(
    options: dict[str, Any],
    profile: Profile,
    config: SchedulerConfig,
    *,
    log: Callable[[Log], None] | None = None,
    truth: Truth | None = None,
) -> Server:
    """The server of these options; needs a running event loop."""
    import asyncio

    from replay.engine import words
    from replay.engine.answer import Style
    from replay.engine.loop import Engine
    from replay.engine.metrics import Metrics
    from replay.engine.scheduler import Scheduler
    from replay.engine.server import Server, Settings
    from replay.engine.timer import RealClock

    models = options["models"] or (profile.served_model or profile.name,)
    cache = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
        "enable_prefix_caching": config.enable_prefix_caching,
        "cache_dtype": "auto",
    }
    metrics = Metrics(models[0], config.max_model_len, cache)
    engine = Engine(
        RealClock(asyncio.get_running_loop()),
        Scheduler(config),
        profile.model.step_ns,
        metrics,
        speed=options["speed_of_time"],
        truth=truth,
    )
    settings = Settings(
        models=models,
        max_model_len=config.max_model_len,
        version=f"{config.engine_version}.0",
        style=Style(
            fingerprint=f"vllm-{config.engine_version}.0-convoy",
            request_metrics=options["enable_per_request_metrics"],
            prompt_details=options["enable_prompt_tokens_details"],
        ),
        higher_first=options["higher_first"],
        natural_tokens=options["mean_output_tokens"],
        keep_alive_s=options["sse_keep_alive_interval"],
        idle_connection_s=options["timeout_keep_alive"],
        tenant_header=options["tenant_header"],
        info=_info(profile, config, options),
    )
    words.pieces()  # made now, not during the first answer
    return Server(engine, settings, log)


def _info(profile: Profile, config: SchedulerConfig, options: dict[str, Any]) -> dict[str, Any]:
    import dataclasses

    return {
        "engine": "convoy",
        "vllm_config": dataclasses.asdict(config),
        "higher_first": options["higher_first"],
        "speed_of_time": options["speed_of_time"],
        "profile": {"name": profile.name, "provenance": profile.provenance, "source": profile.source},
    }


def make_profile(options: dict[str, Any]) -> Profile:
    """The step-time profile that the options name. Raises click.UsageError."""
    from replay.engine.steptime import DEFAULT_PROFILE, load_profile, read_profile

    if options["profile_name"] and options["profile_file"]:
        raise click.UsageError("give --profile or --profile-file, not both")
    try:
        if options["profile_file"]:
            return read_profile(Path(options["profile_file"]))
        return load_profile(options["profile_name"] or DEFAULT_PROFILE)
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None


def make_config(options: dict[str, Any], profile: Profile) -> SchedulerConfig:
    """The scheduler's settings: what was given, else the profile's. Raises click.UsageError."""
    import dataclasses

    from replay.engine.config import SchedulerConfig

    names = [field.name for field in dataclasses.fields(SchedulerConfig) if options.get(field.name) is not None]
    values = {name: options[name] for name in names}
    for name in ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "block_size"):
        values.setdefault(name, getattr(profile, name))
    pool_tokens = (values["num_gpu_blocks"] - 1) * values["block_size"]
    if values.get("max_model_len", 0) > pool_tokens:
        raise click.UsageError(
            f"--max-model-len {values['max_model_len']} does not fit the KV pool of {pool_tokens} tokens: "
            "raise --num-gpu-blocks or lower --max-model-len"
        )
    values.setdefault("max_model_len", min(profile.max_model_len, pool_tokens))
    return SchedulerConfig(tenant_weights=_weights(options["weights"]), **values)


def _weights(given: tuple[str, ...]) -> dict[str, float]:
    weights = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            weights[name] = 0.0
        if not name or not weights[name] > 0:
            raise click.UsageError(f"--tenant-weight {text!r}: write it as risk=3")
    return weights


def _tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    import ssl

    if not options["ssl_certfile"]:
        if options["ssl_keyfile"]:
            raise click.UsageError("--ssl-keyfile needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"])
    except (OSError, ssl.SSLError) as error:
        raise click.UsageError(f"--ssl-certfile {options['ssl_certfile']}: {error}") from None
    return context


def _address(runner: Any) -> str:
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _kept_time(engine: Engine) -> str:
    metrics = engine.metrics
    if not metrics.steps:
        return "engine: no step"
    share = metrics.late_steps / metrics.steps
    text = f"engine: {metrics.steps} steps, {metrics.late_steps} of them more than 5 % late ({share:.1%})"
    if metrics.slips:
        text += f"; its clock slipped {metrics.slips} times, {metrics.slipped_s:.3f} s in all: the machine is too slow"
    return text


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent ends (Linux)."""
    import ctypes
    import os
    import signal
    import sys

    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
