"""A long run at a steady rate: does lateness or memory drift?

    python benchmarks/soak.py [--minutes 30] [--rate 200] [--write docs/benchmarks.md]

The default command plays an even trace against the ground-truth server. Lateness at the server (first byte there − due
time) and added TTFT are shown minute by minute, and every ten seconds the memory of each of the command's processes is
read from /proc, files mapped into it left out. A trend is the least-squares slope over the whole run, beside what its
minutes scatter by themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import page
import sender
import truth as truth_server
from truth import CLIENT_CORE, Truth, on_core

from traces import parquet

LOOK_S = 10
PAGE_MB = 4096 / 1e6
Floats = npt.NDArray[np.float64]


class Soaked(NamedTuple):
    """A run that is over, on the server's clock."""

    due_s: Floats  # from the first request's due time
    late_ms: Floats
    added_ms: Floats
    memory_mb: dict[str, list[float]]  # process → every `look_s`, from its start
    look_s: float
    wall_s: float
    cpu_s: float
    document: dict[str, object]


def family(pid: int) -> Iterator[int]:
    """A process and all its children."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def memory_mb(pid: int) -> tuple[str, float]:
    """Name and memory of its own (the plan, mapped from files, is not in it). Raises OSError for one that has ended."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    name = "worker" if b"replay.worker" in words else "command"
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return name, (resident - shared) * PAGE_MB


def soak(server: Truth, folder: Path, minutes: float, rate: int, look_s: float = LOOK_S) -> Soaked:
    """Run it."""
    count = int(minutes * 60 * rate)
    trace, out = folder / "trace.parquet", folder / "run"
    sender.write_trace(trace, count, sender.TOKENS, rate)
    server.set(ttft_ms=sender.TTFT_MS, itl_ms=sender.ITL_MS)
    words = ["-m", "replay", str(trace), "--target", server.url, "--out", str(out), "--no-probe", "--workers", "1"]
    seen: dict[str, list[float]] = {}
    began = time.monotonic()
    with (folder / "said").open("wb") as said:
        command = [*on_core(CLIENT_CORE), sys.executable, *words]
        process = subprocess.Popen(command, cwd=sender.ROOT, env=sender.environment(), stdout=said, stderr=said)
        while process.poll() is None:
            look(process.pid, seen)
            try:
                process.wait(look_s)
            except subprocess.TimeoutExpired:
                continue
    if process.returncode not in (0, 1, 3):
        raise SystemExit((folder / "said").read_text()[-2000:])
    document = json.loads((out / "run.json").read_text())
    rows = parquet.read(out / "outcomes.parquet", ["request_id", "due_ns", "first_token_ns"])
    order = np.argsort([int(text) for text in rows.column("request_id").to_pylist()])
    due, first = (rows.column(name).to_numpy()[order] for name in ("due_ns", "first_token_ns"))
    log = sender.by_row(server.log())
    if len(log.ids) != count or np.isnan(first.astype(float)).any():
        raise SystemExit(f"{count:,} requests planned, {len(log.ids):,} seen by the server")
    begin_ns = document["start_unix_ns"] - (time.time_ns() - time.monotonic_ns())
    return Soaked(
        due_s=due / 1e9,
        late_ms=(log.first_byte_ns - begin_ns - due) / 1e6,
        added_ms=(first - (log.token_ns - log.complete_ns)) / 1e6,
        memory_mb=seen,
        look_s=look_s,
        wall_s=time.monotonic() - began,
        cpu_s=sum(worker["cpu_s"] for worker in document["workers"]),
        document=document,
    )


def look(pid: int, seen: dict[str, list[float]]) -> None:
    """Note the memory of a command and its children."""
    for one in family(pid):
        try:
            name, size_mb = memory_mb(one)
        except (OSError, IndexError):
            continue
        if size_mb > 0:
            seen.setdefault(name, []).append(size_mb)


def by_minute(due_s: Floats, values: Floats, q: float) -> Floats:
    """The quantile of each whole minute."""
    minute = (due_s // 60).astype(int)
    return np.array([np.quantile(values[minute == at], q) for at in range(int(minute.max()) + 1)])


def trend(values: Floats) -> str:
    """Slope over all of it, and what its points scatter around that line."""
    at = np.arange(len(values))
    slope, base = np.polyfit(at, values, 1) if len(values) > 1 else (0.0, values[0])
    scatter = float(np.std(values - base - slope * at))
    return f"{slope * len(values):+.3f} (scatter of a minute {scatter:.3f})"


def report(ran: Soaked, minutes: float, rate: int) -> str:
    """What is printed."""
    rows = []
    for name, values in (("lateness at the server, ms", ran.late_ms), ("TTFT added to the truth, ms", ran.added_ms)):
        for label, q in (("P50", 0.5), ("P99", 0.99)):
            each = by_minute(ran.due_s, values, q)
            shown = [f"{each[0]:.2f}", f"{np.median(each):.2f}", f"{each[-1]:.2f}", f"{each.max():.2f}", trend(each)]
            rows.append([f"{name}, {label}", *shown])
    for name, sizes in ran.memory_mb.items():
        sending = np.array(sizes[2 : max(3, int(minutes * 60 / ran.look_s) - 2)])  # without what comes after
        each = np.array([part.mean() for part in np.array_split(sending, max(1, int(len(sending) * ran.look_s / 60)))])
        shown = [f"{each[0]:.1f}", f"{np.median(each):.1f}", f"{each[-1]:.1f}", f"{max(sizes):.1f}", trend(each)]
        rows.append([f"memory of the {name} of its own, MB", *shown])
    head = ["by minute", "first", "median", "last", "largest", "trend over the run"]
    summary = ran.document["summary"]
    assert isinstance(summary, dict)
    lead = (
        f"{minutes:g} minutes at {rate}/s: {len(ran.due_s):,} requests sent, {summary['ok']:,} ok, "
        f"{'valid' if summary['valid'] else 'INVALID'}; {ran.cpu_s / len(ran.due_s) * 1000:.2f} s of the worker's CPU "
        f"per 1,000 requests; from the command to its end {ran.wall_s:,.0f} s. The largest memory of the command is "
        "that of the end, when results are merged and drawn."
    )
    return f"{lead}\n\n{page.table(head, rows)}\n\n{page.machine()}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--rate", type=int, default=200, help="requests per second")
    page.option(options)
    asked = options.parse_args()
    with truth_server.server() as server, tempfile.TemporaryDirectory() as place:
        text = report(soak(server, Path(place), asked.minutes, asked.rate), asked.minutes, asked.rate)
    page.say(text, asked.write, "soak")


if __name__ == "__main__":
    main()
