"""What the sender can do, beside two minimal clients on the same server in the same minutes.

    python benchmarks/sender.py [--short] [--only closed,fixed,speed,start] [--write docs/benchmarks.md]

The ground-truth server has one core, the client the other. Every figure of ours is the default command's
(`replay TRACE --target URL`), its Parquet and its report included; the self-check and the probe are left out where the
sender alone is measured. Clients alternate, and a ratio is the median over the alternations of one run: a machine's
mood meets all of them alike.

Added TTFT = (first token − sent) at the client − (first token written − request complete) at the server.
Lateness at the server = first byte of the request there − due time in the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import page
import truth as truth_server
from truth import CLIENT_CORE, Log, Truth, on_core

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from traces import parquet, record  # noqa: E402 after the path is set

Array = npt.NDArray[np.int64]
IN_FLIGHT = 32
CLOSED = (16, 256)
RATES = (50, 200, 500, 1000, 2000)
TTFT_MS, ITL_MS, TOKENS = 20, 2, 16
INPUT_TOKENS = 40


class Ran:
    """One client's run: its own stamps on the server's clock, and what it cost."""

    def __init__(self, *, cpu_s: float, rss_mb: float, wall_s: float) -> None:
        self.cpu_s, self.rss_mb, self.wall_s = cpu_s, rss_mb, wall_s
        self.due_ns: Array
        self.sent_ns: Array
        self.first_ns: Array
        self.gaps_ns: list[Array] = []  # between chunks, by request
        self.document: dict[str, Any] = {}


def environment() -> dict[str, str]:
    """Our own, but modules are compiled once, as they are where something is installed: in a folder apart."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/convoy-bytecode-{os.getuid()}", **kept}


def spend(command: list[str]) -> Ran:
    """Run a command on the client's core; CPU and memory of it and all its children."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*on_core(CLIENT_CORE), *command], cwd=ROOT, env=environment(), stdout=said, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1, 3):
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{said.read().decode()[-2000:]}")
    ran = Ran(
        cpu_s=usage.ru_utime + usage.ru_stime,
        rss_mb=usage.ru_maxrss / 1024,
        wall_s=time.monotonic() - began,
    )
    ran.document = {"exit": process.returncode}
    return ran


def minimal(kind: str, server: Truth, folder: Path, *how: object) -> Ran:
    """One of the yardsticks (`minimal.py`)."""
    out = folder / f"{kind}.npz"
    ran = spend([sys.executable, str(ROOT / "benchmarks/minimal.py"), kind, server.url, str(out), *map(str, how)])
    with np.load(out) as found:
        ran.due_ns, ran.sent_ns, ran.first_ns = found["due_ns"], found["sent_ns"], found["first_ns"]
        ran.gaps_ns = [np.diff(reads) for reads in np.split(found["reads"], np.cumsum(found["reads_count"])[:-1])]
    return ran


def ours(
    server: Truth,
    folder: Path,
    count: int,
    tokens: int,
    *,
    rate: float | None = None,
    arrival_ns: Array | None = None,
    options: tuple[str, ...] = (),
) -> Ran:
    """The default command: all at once for a closed loop, else at a fixed rate."""
    trace, out = folder / "trace.parquet", folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    write_trace(trace, count, tokens, rate or 1e6, arrival_ns)
    if rate is None and arrival_ns is None:
        options = ("--concurrency", str(IN_FLIGHT), *options)
    ran = spend(
        [
            sys.executable,
            "-m",
            "replay",
            str(trace),
            "--target",
            server.url,
            "--out",
            str(out),
            "--no-probe",
            "--no-self-check",
            "--workers",
            "1",
            *options,
        ]
    )
    ran.document |= json.loads((out / "run.json").read_text())
    rows = parquet.read(out / "outcomes.parquet")
    begin_ns = ran.document["start_unix_ns"] - (time.time_ns() - time.monotonic_ns())
    columns = {name: rows.column(name).to_numpy() for name in ("due_ns", "sent_ns", "first_token_ns")}
    order = np.argsort([int(text) for text in rows.column("request_id").to_pylist()])
    ran.sent_ns = begin_ns + columns["sent_ns"][order]
    ran.first_ns = ran.sent_ns + columns["first_token_ns"][order]
    ran.due_ns = ran.sent_ns if "--concurrency" in options else begin_ns + columns["due_ns"][order]
    chunks = rows.column("chunk_ns").to_pylist()
    ran.gaps_ns = [np.diff(np.array(chunks[index], dtype=np.int64)) for index in order]
    return ran


def write_trace(path: Path, count: int, tokens: int, rate: float, arrival_ns: Array | None = None) -> None:
    """Even arrivals unless they are given, one length."""
    even_ns = np.round(np.arange(count) * 1e9 / rate).astype(np.int64)
    columns: dict[str, object] = {
        "request_id": [f"{index:08d}" for index in range(count)],
        "arrival_ns": even_ns if arrival_ns is None else arrival_ns,
        "endpoint": ["chat"] * count,
        "stream": [True] * count,
        "input_tokens": np.full(count, INPUT_TOKENS, dtype=np.int32),
        "output_tokens": np.full(count, tokens, dtype=np.int32),
    }
    parquet.write(record.table(columns, record.Metadata(source="benchmark")), path)


def by_row(log: Log) -> Log:
    """The log in the order of our rows: ids end in the row's number."""
    keep = [index for index, name in enumerate(log.ids) if name.rsplit("-", 1)[-1].isdigit()]
    keep.sort(key=lambda index: int(log.ids[index].rsplit("-", 1)[-1]))
    return Log(*(column[keep] for column in log[:-1]), log.written_ns)


def closed_loop(
    server: Truth, folder: Path, *, rounds: int, short: bool
) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Requests and events per second with 32 in flight, the server as fast as it can."""
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    for tokens in CLOSED:
        count = (12_000 if short else 40_000) * 16 // (16 if tokens == 16 else 4 * tokens // 16 * 4)
        found[tokens] = {"minimal protocol": [], "minimal aiohttp": [], "replay": [], "replay, aiohttp": []}
        for _ in range(rounds):
            for name, rows in found[tokens].items():
                server.set()
                if name.startswith("minimal"):
                    few = count if "protocol" in name else count // 4
                    ran = minimal(name.split()[1], server, folder, "closed", few, IN_FLIGHT, tokens)
                else:
                    few = count if name == "replay" else count // 4
                    ran = ours(server, folder, few, tokens, options=("--transport", "aiohttp") * (name != "replay"))
                log = server.log()
                span_s = (log.last_ns.max() - log.first_byte_ns.min()) / 1e9
                rows.append(
                    {
                        "rps": float(len(log.ids) / span_s),
                        "events": float(log.tokens.sum() / span_s),
                        "cpu": ran.cpu_s / few * 1000,
                        "rss": ran.rss_mb,
                        "sender": max((w["peak_rss_mb"] for w in ran.document.get("workers", ())), default=ran.rss_mb),
                        "whole": few / ran.wall_s,
                    }
                )
                print(f"  closed {tokens} {name}: {rows[-1]}", file=sys.stderr)
    return found


def fixed_rates(
    server: Truth, folder: Path, rates: tuple[int, ...], *, rounds: int, short: bool
) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Lateness at the server and added TTFT on a fixed schedule."""
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    for rate in rates:
        count = int(max(rate * (3 if short else 8), 150))
        found[rate] = {"minimal protocol": [], "minimal aiohttp": [], "replay": []}
        for _ in range(rounds):
            for name, rows in found[rate].items():
                server.set(ttft_ms=TTFT_MS, itl_ms=ITL_MS)
                if name == "replay":
                    ran = ours(server, folder, count, TOKENS, rate=rate)
                else:
                    ran = minimal(name.split()[1], server, folder, "fixed", count, rate, TOKENS)
                rows.append(judge(ran, server.log(), count))
                print(f"  fixed {rate}/s {name}: {rows[-1]}", file=sys.stderr)
    return found


def judge(ran: Ran, log: Log, count: int) -> dict[str, float]:
    """Lateness, added TTFT and error of the gaps, in ms."""
    log = by_row(log)
    if len(log.ids) != count or len(ran.sent_ns) != count:
        raise SystemExit(f"{count} requests planned, {len(ran.sent_ns)} sent, {len(log.ids)} seen by the server")
    late = (log.first_byte_ns - ran.due_ns) / 1e6
    added = ((ran.first_ns - ran.sent_ns) - (log.token_ns - log.complete_ns)) / 1e6
    off = []
    for index in range(count):
        written = log.written_ns[log.offset[index] : log.offset[index] + log.tokens[index]]
        gaps = ran.gaps_ns[index]
        if len(gaps) == len(written) - 1:
            off.append(np.abs(gaps - np.diff(written)))
    gap_error = np.concatenate(off) / 1e6 if off else np.array([np.nan])
    span_s = (ran.sent_ns.max() - ran.sent_ns.min()) / 1e9
    return {
        "late_p50": float(np.quantile(late, 0.5)),
        "late_p99": float(np.quantile(late, 0.99)),
        "added_p50": float(np.quantile(added, 0.5)),
        "added_p99": float(np.quantile(added, 0.99)),
        "gap_p50": float(np.quantile(gap_error, 0.5)),
        "rate": float((count - 1) / span_s),
        "cpu": ran.cpu_s / count * 1000,
        "exit": ran.document["exit"],
    }


def at_speed(server: Truth, folder: Path, *, short: bool) -> str:
    """Ten minutes of a random trace at `--speed 7.3x`: lateness, and whether it grows with the index."""
    from scipy.stats import spearmanr

    seconds, rate = (60 if short else 600), 30
    gaps = np.random.default_rng(7).exponential(1e9 / rate, seconds * rate)
    server.set(ttft_ms=TTFT_MS, itl_ms=ITL_MS)
    arrival_ns = np.cumsum(gaps).astype(np.int64)
    ran = ours(server, folder, len(gaps), TOKENS, arrival_ns=arrival_ns, options=("--speed", "7.3x"))
    late_ms = (ran.sent_ns - ran.due_ns) / 1e6
    index = np.arange(len(late_ms))
    slope = np.polyfit(index, late_ms, 1)[0] * len(index)
    memory = max(worker["peak_rss_mb"] for worker in ran.document["workers"])
    return (
        f"{seconds // 60} min of trace at `--speed 7.3x` ({len(index):,} requests in {seconds / 7.3:.0f} s): lateness "
        f"{np.quantile(late_ms, 0.5):.2f} ms P50, {np.quantile(late_ms, 0.99):.2f} ms P99; trend over the whole run "
        f"{slope:+.3f} ms (rank correlation with the index {spearmanr(index, late_ms).statistic:+.3f}); "
        f"peak memory of the sender {memory:.0f} MB."
    )


def start_up(server: Truth, folder: Path) -> dict[str, float]:
    """From command to first request, 10,000 rows; `--help`."""
    found = {}
    for name, options in {
        "without self-check and probe": ("--no-self-check", "--no-probe"),
        "with both": (),
    }.items():
        server.set(ttft_ms=1)
        write_trace(folder / "trace.parquet", 10_000, 4, 1000)
        shutil.rmtree(folder / "run", ignore_errors=True)
        began_ns = time.monotonic_ns()
        spend(
            [
                sys.executable,
                "-m",
                "replay",
                str(folder / "trace.parquet"),
                "--target",
                server.url,
                "--out",
                str(folder / "run"),
                *options,
            ]
        )
        log = server.log()
        ours_only = [index for index, name in enumerate(log.ids) if name.startswith("convoy-")]
        # Without a request the self-check refused the plan: this machine is too busy to say.
        found[name] = float((log.first_byte_ns[ours_only].min() - began_ns) / 1e9) if ours_only else float("nan")
    times = []
    for _ in range(5):
        began = time.monotonic()
        spend([sys.executable, "-m", "replay", "--help"])
        times.append(time.monotonic() - began)
    found["replay --help"] = statistics.median(times)
    return found


def middle(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def closed_table(found: dict[int, dict[str, list[dict[str, float]]]]) -> str:
    rows = []
    few, many = CLOSED
    for name in found[few]:
        a, b = found[few][name], found[many][name]
        ratio = statistics.median(x["rps"] / y["rps"] for x, y in zip(a, found[few]["minimal protocol"], strict=True))
        rows.append(
            [
                name,
                f"{middle(a, 'rps'):,.0f}",
                f"{ratio:.2f}",
                f"{middle(b, 'events'):,.0f}",
                f"{middle(a, 'cpu'):.2f}",
                f"{middle(a, 'sender'):.0f}",
                f"{middle(a, 'rss'):.0f}",
            ]
        )
    head = ["client", "16 tokens, req/s", "of minimal protocol", "256 tokens, events/s"]
    return page.table([*head, "CPU s per 1,000 req", "sender, MB", "largest process, MB"], rows)


def fixed_table(found: dict[int, dict[str, list[dict[str, float]]]], what: str) -> str:
    names = list(next(iter(found.values())))
    rows = []
    for name in names:
        cells = [
            f"{middle(found[r][name], f'{what}_p50'):.2f} / {middle(found[r][name], f'{what}_p99'):.1f}" for r in found
        ]
        rows.append([name, *cells])
    aims = [[f"{aim(found[r], f'{what}_{q}'):.{digits}f}" for q, digits in (("p50", 2), ("p99", 1))] for r in found]
    rows.append(["1.25 × minimal protocol + 0.3", *(" / ".join(pair) for pair in aims)])
    return page.table(["client", *(f"{rate:,}/s" for rate in found)], rows)


def aim(clients: dict[str, list[dict[str, float]]], key: str) -> float:
    """What a sender may add, ms, measured by what Python can do in the same minutes."""
    return 1.25 * middle(clients["minimal protocol"], key) + 0.3


def gap_line(found: dict[int, dict[str, list[dict[str, float]]]]) -> str:
    shown = ", ".join(f"{rate:,}/s: {middle(clients['replay'], 'gap_p50'):.3f} ms" for rate, clients in found.items())
    return f"Error of a gap between two tokens, P50, `replay`: {shown}."


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--short", action="store_true", help="a third of the work, one round")
    options.add_argument("--rounds", type=int, help="alternations (default 5, short: 1)")
    options.add_argument("--only", default="closed,fixed,speed,start", help="parts, with commas")
    options.add_argument("--rates", help="requests per second of the fixed schedules, with commas")
    page.option(options)
    asked = options.parse_args()
    rounds = asked.rounds or (1 if asked.short else 5)

    def say(mark: str, *parts: str) -> None:
        page.say("\n\n".join([*parts, page.machine()]), asked.write, mark)

    with truth_server.server() as server, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        server.set()
        ours(server, folder, 50, TOKENS)  # so that no run that counts is the first to compile a module
        if "closed" in asked.only:
            found = closed_loop(server, folder, rounds=rounds, short=asked.short)
            say("closed", f"Closed loop, {IN_FLIGHT} in flight, median of {rounds}:", closed_table(found))
        if "fixed" in asked.only:
            rates = tuple(int(rate) for rate in asked.rates.split(",")) if asked.rates else RATES
            found = fixed_rates(server, folder, rates, rounds=rounds, short=asked.short)
            what = f"{TOKENS} tokens, first after {TTFT_MS} ms, then one each {ITL_MS} ms, median of {rounds}"
            late = [f"Lateness at the server, ms P50 / P99 ({what}):", fixed_table(found, "late")]
            added = [f"TTFT added to the truth, ms P50 / P99 ({what}):", fixed_table(found, "added"), gap_line(found)]
            say("fixed", *late, *added)
        if "speed" in asked.only:
            say("speed", at_speed(server, folder, short=asked.short))
        if "start" in asked.only:
            times = ", ".join(f"{name}: {value:.2f} s" for name, value in start_up(server, folder).items())
            say("start", f"From command to first request, 10,000 rows: {times}.")


if __name__ == "__main__":
    main()
