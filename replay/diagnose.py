"""`replay diagnose`: what this machine can send, and what limits it, measured in a few seconds on loopback alone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from traces.descriptors import SPARE_DESCRIPTORS

if TYPE_CHECKING:
    from replay.machine import Machine
    from replay.selfcheck import Floor

RINGS = 200
STEP_NS = 2_300_000
SHAPES = ((16, 1000), (256, 50))  # output tokens, requests/s of the plan that is tried


@click.command(short_help="What this machine can send, and what limits it.")
@click.option("--json", "as_json", is_flag=True, help="As JSON on stdout, and nothing else there.")
def diagnose(*, as_json: bool) -> None:
    """Measure what this machine can send, and name what limits it.

    \b
    Example:
      replay diagnose

    Nothing leaves this machine: a server that does nothing runs beside for two seconds. Timer, requests and tokens are
    what a sender's own part in a latency is made of; files and ports are what a burst may run out of.
    """  # noqa: D301 - click's own mark: keep these lines
    from replay import machine

    found = machine.look()
    timer_ms = timer()
    floors = {tokens: _floor(tokens, rate) for tokens, rate in SHAPES}
    if as_json:
        import msgspec

        text = {"machine": found, "timer_ms": timer_ms, "floors": {str(tokens): f for tokens, f in floors.items()}}
        click.echo(msgspec.json.encode(text).decode())
        return
    for line in lines(found, timer_ms, floors):
        click.echo(line)


def lines(machine: Machine, timer_ms: dict[str, float], floors: dict[int, Floor]) -> list[str]:
    """The page: the answer first, then its parts, then what to do."""
    few = floors[min(floors)]
    rate, cores = few.worker_rps, machine.cores
    load = "unknown" if machine.load is None else f"{machine.load:.1f}"
    stolen = "" if machine.stolen is None else f", {machine.stolen:.1%} stolen by the hypervisor since boot"
    said = [
        f"One worker here can send {rate:,.0f} requests/s of {min(floors)} tokens; {cores} cores, {rate * cores:,.0f}.",
        "",
        _timer_line(timer_ms),
        *(_floor_line(tokens, floor) for tokens, floor in floors.items()),
        f"cores     {cores}, load {load}{stolen}",
        f"files     {machine.files:,}: {machine.files - SPARE_DESCRIPTORS:,} connections a worker",
        f"ports     {_count(machine.ports)} to one address; backlog of a server here {_count(machine.backlog)}",
    ]
    return said + [f"advice    {advice}" for advice in advices(machine, timer_ms)]


def _timer_line(timer_ms: dict[str, Any]) -> str:
    late = f"{timer_ms['p50']:.2f} ms P50, {timer_ms['p99']:.2f} P99, {timer_ms['max']:.2f} at most"
    return f"timer     late by {late} ({RINGS} rings, {timer_ms['kind']})"


def _floor_line(tokens: int, floor: Floor) -> str:
    return (
        f"floor     {tokens} tokens: TTFT {floor.ttft_ms_p50:.2f} ms P50, {floor.ttft_ms_p99:.2f} P99, lateness "
        f"{floor.lateness_ms_p99:.2f} P99; CPU {floor.request_us:.0f} µs a request, {floor.event_us:.1f} a token"
    )


def advices(machine: Machine, timer_ms: dict[str, Any]) -> list[str]:
    """What stands in the way, with the way out."""
    found = []
    if machine.load is not None and machine.load > 0.7 * machine.cores:
        found.append(
            f"{machine.load:.1f} of {machine.cores} cores are busy: other work and its pauses show in every latency"
        )
    if timer_ms["p99"] > 1:
        found.append("timers ring over 1 ms late: a busy or virtual machine; judge nothing finer than that")
    if timer_ms["kind"] != "timerfd":
        found.append("no timerfd here: sends are rounded to milliseconds")
    if machine.files < 4096:
        found.append(f"only {machine.files:,} open files allowed, and no process may raise that: see ulimit -Hn")
    if machine.stolen is not None and machine.stolen > 0.01:
        found.append("the hypervisor takes time away: use dedicated cores")
    return found


def timer() -> dict[str, Any]:
    """How late the pacer's alarm rings, in ms."""
    import numpy as np
    import uvloop

    from replay.alarm import Alarm

    async def ring() -> tuple[list[int], str]:
        late: list[int] = []
        done = asyncio.Event()
        moment_ns = time.monotonic_ns()

        def rang() -> None:
            nonlocal moment_ns
            now_ns = time.monotonic_ns()
            if late or now_ns >= moment_ns:
                late.append(now_ns - moment_ns)
            if len(late) == RINGS:
                done.set()
                return
            moment_ns = now_ns + STEP_NS
            alarm.at(moment_ns)

        alarm = Alarm(rang)
        alarm.at(moment_ns)
        await done.wait()
        alarm.close()
        return late, alarm.kind

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        late, kind = runner.run(ring())
    late_ms = np.array(late) / 1e6
    p50, p99 = np.quantile(late_ms, [0.5, 0.99], method="inverted_cdf").tolist()
    return {"p50": p50, "p99": p99, "max": float(late_ms.max()), "kind": kind}


def _floor(tokens: int, rate: int) -> Floor:
    import numpy as np

    from replay import plan, selfcheck
    from replay.prompts import Wiring
    from replay.vocabulary import ASSUMED
    from traces.record import Metadata, table

    count = rate * 2
    columns: dict[str, object] = {
        "arrival_ns": np.round(np.arange(count) * 1e9 / rate).astype(np.int64),
        "endpoint": ["chat"] * count,
        "stream": [True] * count,
        "input_tokens": np.full(count, 200, dtype=np.int32),
        "output_tokens": np.full(count, tokens, dtype=np.int32),
    }
    made = plan.build(table(columns, Metadata()))
    return selfcheck.measure(made, Wiring(model="null", models=("null",)), ASSUMED)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
