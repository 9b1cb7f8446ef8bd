"""One sender process: its share of the plan in, a part of outcome rows out. Started by `replay.run`, never by hand.

    stdin     one line of JSON (`Job`), then `go T0_NS`, later perhaps `stop`; the pipe's end is an order to stop, too
    stdout    `ready`, then one line of JSON (`Report`) when all is written

T0 is one moment of the monotonic clock for all workers. Interrupts are the parent's business and ignored here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay import machine
from replay.alarm import Alarm
from replay.counters import Counters
from replay.flight import Transport
from replay.plan import load
from replay.prompts import Bodies, Wiring
from replay.rows import RowWriter
from replay.schedule import Schedule
from replay.sender import Sender
from replay.vocabulary import Vocabulary
from traces.descriptors import SPARE_DESCRIPTORS, make_room
from traces.shell import without_pandas
from traces.units import NS_PER_S

BEAT_NS = 50_000_000


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told: everything that is not in the plan's files. Keys travel here, through a pipe."""

    folder: str
    worker: int
    workers: int
    target: str
    transport: str
    wiring: Wiring
    vocabulary: Vocabulary
    caps: dict[int, int] = {}
    concurrency: int | None = None
    drop_after_ns: int | None = None
    retry: int = 0
    drain_ns: int = 120 * NS_PER_S
    chunks: str = "all"
    ca_file: str | None = None
    insecure: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says at its end."""

    worker: int
    rows: int
    dropped: int = 0
    stopped: bool = False
    drain_ended: bool = False
    retries: int = 0
    connections: int = 0
    transport: str = ""
    lag_ms_max: float = 0.0
    lag_ms_p99: float = 0.0
    lags: int = 0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_rss_mb: float = 0.0


async def work(job: Job, say: Callable[[str], None], orders: asyncio.StreamReader) -> Report:
    """Do a job: get ready, wait for the common start, send, and write every row."""
    folder = Path(job.folder)
    plan = load(folder / "plan")
    owner = np.load(folder / "owner.npy", mmap_mode="r")
    rows = np.flatnonzero(owner == job.worker).astype(np.int32)
    make_room(SPARE_DESCRIPTORS + min(len(rows), job.concurrency or len(rows)))
    counters = Counters(folder / "counters", job.workers, plan.tenants)
    transport = await open_transport(job)
    writer = RowWriter(folder / f"part-{job.worker}.arrow")
    schedule = Schedule(plan, rows, caps=job.caps, concurrency=job.concurrency, drop_after_ns=job.drop_after_ns)
    loop = asyncio.get_running_loop()
    alarm = Alarm(lambda: None)
    sender = Sender(
        schedule,
        Bodies(plan, job.wiring, job.vocabulary),
        transport,
        writer,
        counters.block(job.worker),
        retry=job.retry,
        chunks=job.chunks,
        drain_ns=job.drain_ns,
        alarm=alarm.at,
        soon=loop.call_soon,
    )
    alarm.callback = sender.wake
    sender.look_ahead()
    gc.collect()
    gc.freeze()
    gc.disable()
    say("ready")
    word, _, moment = (await orders.readline()).decode().partition(" ")
    lags: list[int] = []
    began_ns, began_cpu_s, waited_ns = time.monotonic_ns(), time.process_time(), machine.waited_ns() or 0
    if word == "go":
        sender.begin(int(moment))
        helpers = [asyncio.ensure_future(_beat(sender, lags)), asyncio.ensure_future(_obey(sender, orders))]
        await sender.finished.wait()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
    alarm.close()
    await transport.close()
    writer.close()
    lag_ms = np.array(lags or [0]) / 1e6
    return Report(
        worker=job.worker,
        rows=writer.written,
        dropped=len(schedule.dropped),
        stopped=sender.stopped,
        drain_ended=sender.drain_ended,
        retries=sender.retries,
        connections=transport.made,
        transport=transport.name,
        lag_ms_max=float(lag_ms.max()),
        lag_ms_p99=float(np.quantile(lag_ms, 0.99, method="inverted_cdf")),
        lags=len(lags),
        waited_s=((machine.waited_ns() or 0) - waited_ns) / 1e9,
        cpu_s=time.process_time() - began_cpu_s,
        wall_s=(time.monotonic_ns() - began_ns) / 1e9,
        peak_rss_mb=_peak_rss_mb(),
    )


async def open_transport(job: Job) -> Transport:
    """The transport that the job names, ready to send."""
    tls = _tls(job) if job.target.startswith("https:") else None
    transport: Transport
    if job.transport == "aiohttp":
        from replay.aiohttp_transport import AiohttpTransport

        transport = AiohttpTransport(job.target, tls)
    else:
        from replay.connection import HttpTransport

        transport = HttpTransport(job.target, tls)
    await transport.open()
    return transport


def _tls(job: Job) -> Any:
    import ssl

    context = ssl.create_default_context(cafile=job.ca_file)
    if job.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def _beat(sender: Sender, lags: list[int]) -> None:
    """Every 50 ms: how late the loop itself was, a sign of life, and a nudge for what waits."""
    due_ns = time.monotonic_ns()
    beats = 0
    while True:
        due_ns += BEAT_NS
        await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / NS_PER_S))
        now_ns = time.monotonic_ns()
        lag_ns = max(0, now_ns - due_ns)
        if len(lags) < 100_000:
            lags.append(lag_ns)
        due_ns = max(due_ns, now_ns - BEAT_NS)
        sender.beat(lag_ns)
        beats += 1
        if beats % 200 == 0:
            gc.collect(0)


async def _obey(sender: Sender, orders: asyncio.StreamReader) -> None:
    """`stop`, or the end of the pipe (the parent is gone): end the run."""
    await orders.readline()
    sender.stop()


def _peak_rss_mb() -> float:
    """This process's own peak; `getrusage` would count the parent's memory before the exec."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=64 << 20)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    line = await orders.readline()
    if line:
        report = await work(msgspec.json.decode(line, type=Job), _say, orders)
        _say(msgspec.json.encode(report).decode())
    pipe.close()


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def main() -> None:
    """Run as the child of `replay.run`."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal tells all its processes; the parent decides
        signal.signal(number, signal.SIG_IGN)
    without_pandas()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())


if __name__ == "__main__":
    main()
