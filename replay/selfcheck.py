"""What this machine can send, measured before a run: the plan's own requests against a server that does nothing.

Two short plays in this process, with the worker's own code, against `replay.nullserver`:

    paced   the plan's first rows at their own times (evenly in a second where there are few), answers cut to 16 tokens:
            the TTFT that is added by the client alone, and its lateness
    flat    the same rows, 32 in flight, answers of one token: CPU time per request

From the two follows what a request (`request_us`) and each further token (`event_us`) cost a sender in CPU time, and so
what the plan's busiest stretch takes:

    busy  = Σ request_us + event_us · (output tokens − 1)  over the requests of a stretch of 10 s  /  its length
    needs = ⌈ busy / 0.8 ⌉ workers, a core each

What needs more workers than there are is refused before the first request: its lateness would be ours, not the
server's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replay import nullserver
from replay.alarm import Alarm
from replay.connection import HttpTransport
from replay.counters import Counters
from replay.plan import NONE, Plan
from replay.prompts import Bodies, Wiring
from replay.rows import RowWriter, read_part
from replay.schedule import Schedule
from replay.sender import Sender
from replay.vocabulary import Vocabulary
from tenants.quantiles import quantile
from traces.descriptors import SPARE_DESCRIPTORS, make_room
from traces.units import NS_PER_S

Array = npt.NDArray[Any]

PLAY_NS = 700_000_000  # length of the paced play
ROWS = (40, 1_500)  # of it: at least, at most
TOKENS = 16
IN_FLIGHT = 32
FLAT_ROWS = 600
STRETCH_NS = 10 * NS_PER_S
FULL = 0.8  # share of a core that a sender may use on average and still be on time
_LEAD_NS = 20_000_000


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """What the client adds and takes by itself.

    Attributes:
        requests: sent in the paced play; `failed` of them and of the flat play did not get a whole answer.
        ttft_ms_p50, ttft_ms_p99: from due to first token, server time almost nil.
        lateness_ms_p99: sent − due.
        request_us: CPU time per request, its first token included; event_us: per further token.
        worker_rps: requests per second of the plan's mean length that one worker can send.
        busy: cores that the plan's busiest stretch takes; None in a closed loop.
        needs: workers for it.
        wall_s: how long the check took.
    """

    requests: int
    failed: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    lateness_ms_p99: float
    request_us: float
    event_us: float
    worker_rps: float
    busy: float | None
    needs: int
    wall_s: float


def measure(plan: Plan, wiring: Wiring, vocabulary: Vocabulary, *, closed_loop: bool = False) -> Floor:
    """Play the plan's first rows against a null server; under two seconds."""
    began = time.monotonic()
    wiring = msgspec.structs.replace(wiring, headers={}, tenant_headers={}, base_path="")  # no keys leave for a check
    with nullserver.running() as url:
        paced = first_rows(plan, tokens=TOKENS)
        late, cpu_s = _play(paced, wiring, vocabulary, url, None)
        flat = first_rows(plan, tokens=1, repeat_to=FLAT_ROWS)
        quick, flat_cpu_s = _play(flat, wiring, vocabulary, url, IN_FLIGHT)
    request_us = 1e6 * flat_cpu_s / max(flat.rows, 1)
    further = float(np.mean(paced.output_tokens - 1)) if paced.rows else 0.0
    event_us = max(0.0, 1e6 * cpu_s / max(paced.rows, 1) - request_us) / further if further else 0.0
    cost_us = request_us + event_us * np.maximum(plan.output_tokens.astype(np.float64) - 1, 0)
    busy = None if closed_loop else busiest(plan.at_ns, cost_us)
    ttft_ms, lateness_ms = late
    return Floor(
        requests=paced.rows,
        failed=int(np.isinf(ttft_ms).sum() + np.isinf(quick[0]).sum()),
        ttft_ms_p50=quantile(ttft_ms, 0.5),
        ttft_ms_p99=quantile(ttft_ms, 0.99),
        lateness_ms_p99=quantile(lateness_ms, 0.99),
        request_us=request_us,
        event_us=event_us,
        worker_rps=FULL * 1e6 / float(np.mean(cost_us)) if plan.rows else math.inf,
        busy=busy,
        needs=1 if busy is None else max(1, math.ceil(busy / FULL)),
        wall_s=time.monotonic() - began,
    )


def refusal(floor: Floor, workers: int) -> str | None:
    """Why a plan is not sent with so many workers, with the way out; None when it can be."""
    if floor.needs <= workers:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = f"a worker here can send {floor.worker_rps:,.0f} requests/s of this plan"
    if floor.needs <= cores:
        return f"client-bound: {each}, its busiest 10 s take {floor.needs} workers: use --workers {floor.needs}"
    machines = math.ceil(floor.needs / cores)
    return (
        f"client-bound: {each}, its busiest 10 s take {floor.needs} workers and this machine has {cores} cores: "
        f"spread it over {machines} machines, or lower --speed or --rate"
    )


def busiest(at_ns: Array, cost_us: Array) -> float:
    """Cores that the busiest stretch takes; a shorter plan counts as a whole."""
    if not len(at_ns):
        return 0.0
    span_ns = max(int(at_ns[-1] - at_ns[0]), NS_PER_S)
    stretch_ns = min(STRETCH_NS, span_ns)
    total = np.concatenate([[0.0], np.cumsum(cost_us)])
    ends = np.searchsorted(at_ns, at_ns + stretch_ns, side="right")
    return float((total[ends] - total[:-1]).max() * 1e3 / stretch_ns)


def first_rows(plan: Plan, *, tokens: int, repeat_to: int | None = None) -> Plan:
    """The plan's first rows as a plan of its own: answers cut to `tokens`, no turn waits, nobody leaves.

    Args:
        plan: the whole.
        tokens: the longest answer.
        repeat_to: repeat the rows up to so many, all due at once; None keeps their times, or spreads them evenly where
            fewer than ROWS[0] fall in the time of the play.
    """
    inside = int(np.searchsorted(plan.at_ns, plan.at_ns[0] + PLAY_NS)) if plan.rows else 0
    count = min(max(inside, ROWS[0]), ROWS[1], plan.rows)
    if repeat_to is not None:
        picked = np.resize(np.arange(count), repeat_to if count else 0)
        at_ns = np.zeros(len(picked), dtype=np.int64)
    else:
        picked = np.arange(count)
        at_ns = plan.at_ns[:count] - plan.at_ns[0] if count == inside else picked * (PLAY_NS // max(count, 1))
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    counts = np.diff(plan.block_offsets)[picked]
    blocks = [
        plan.block_hashes[a:b] for a, b in zip(plan.block_offsets[picked], plan.block_offsets[picked + 1], strict=True)
    ]
    changed: dict[str, Any] = {
        name: values[picked]
        for name, values in fields.items()
        if isinstance(values, np.ndarray) and len(values) == plan.rows and not name.startswith("block_")
    }
    changed |= {
        "at_ns": at_ns.astype(np.int64),
        "previous": np.full(len(picked), NONE, dtype=np.int32),
        "abort_ns": np.full(len(picked), NONE, dtype=np.int64),
        "output_tokens": np.minimum(plan.output_tokens[picked], tokens).astype(np.int32),
        "block_size": plan.block_size[picked],
        "block_offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "block_hashes": np.concatenate([*blocks, np.zeros(0, dtype=np.int64)]).astype(np.int64),
        "request_id": None,
        "session_id": None,
    }
    return dataclasses.replace(plan, **changed)


def _play(
    plan: Plan, wiring: Wiring, vocabulary: Vocabulary, url: str, in_flight: int | None
) -> tuple[tuple[Array, Array], float]:
    """TTFT and lateness in ms of every row (+∞ for a failed one), and the CPU time it took."""
    import uvloop

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        path = Path(folder)
        cpu_s = runner.run(_send(Bodies(plan, wiring, vocabulary), url, in_flight, path))
        ttft_ms, lateness_ms = [], []
        for batch in read_part(path / "part"):
            for row in batch.select(["due_ns", "sent_ns", "first_token_ns", "outcome", "end_ns"]).to_pylist():
                late_ns = 0 if row["due_ns"] is None else row["sent_ns"] - row["due_ns"]
                first_ns = row["end_ns"] if row["first_token_ns"] is None else row["first_token_ns"]
                ttft_ms.append((late_ns + first_ns) / 1e6 if row["outcome"] == "ok" else math.inf)
                lateness_ms.append(late_ns / 1e6)
    return (np.array(ttft_ms), np.array(lateness_ms)), cpu_s


async def _send(bodies: Bodies, url: str, in_flight: int | None, folder: Path) -> float:
    plan = bodies.plan
    make_room(SPARE_DESCRIPTORS + min(plan.rows, in_flight or plan.rows))
    transport = HttpTransport(url)
    await transport.open()
    writer = RowWriter(folder / "part")
    rows = np.arange(plan.rows, dtype=np.int32)
    alarm = Alarm(lambda: None)
    sender = Sender(
        Schedule(plan, rows, concurrency=in_flight),
        bodies,
        transport,
        writer,
        Counters.create(folder / "counters", 1, plan.tenants).block(0),
        chunks="all",
        drain_ns=NS_PER_S,
        alarm=alarm.at,
        soon=asyncio.get_running_loop().call_soon,
    )
    alarm.callback = sender.wake
    sender.look_ahead()
    before_s = time.thread_time()
    sender.begin(time.monotonic_ns() + _LEAD_NS)
    waiting = asyncio.ensure_future(sender.finished.wait())
    while not waiting.done():
        sender.beat(0)
        await asyncio.wait([waiting], timeout=0.05)
    cpu_s = time.thread_time() - before_s
    alarm.close()
    await transport.close()
    writer.close()
    return cpu_s
