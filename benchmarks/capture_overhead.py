"""What recording costs: the same load through bare mitmdump, mitmdump with the addon, and `capture`, side by side.

    python benchmarks/capture_overhead.py                     # 9 alternations of 150 streams each
    python benchmarks/capture_overhead.py --memory 20000      # the recorder's memory over 20,000 requests
    python benchmarks/capture_overhead.py --workers 2         # requests/s of 1 and of 2 workers

Each with `--write docs/capture.md` puts its table there.

Bare mitmdump runs with streaming turned on (a body would otherwise be held back whole) and nothing else. The arms take
turns, so that a machine that is busy with other things slows all of them alike; each alternation gives one ratio of CPU
time, and the interval is that of the mean of their logarithms (Student's t). Every event of a stream carries the time
at which the server wrote it, so a client knows how long each was on its way: added latency is the difference to the
same load without a proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import page

ROOT = Path(__file__).resolve().parent.parent
STREAMING = "def responseheaders(flow):\n    flow.response.stream = True\n"
BODY = json.dumps(
    {"model": "tiny", "stream": True, "max_tokens": 32,
     "messages": [{"role": "system", "content": "You are careful. " * 40}, {"role": "user", "content": "Why? " * 40}]}
).encode()  # fmt: skip
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-tenant: risk\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
) + BODY
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = ('data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1796058507,"model":"tiny",'
         '"choices":[{"index":0,"delta":{"content":" %d"},"logprobs":null,"finish_reason":null}]}\n\n')  # fmt: skip
LAST = (b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":32}}\n\ndata: [DONE]\n\n')  # fmt: skip
STAMP = re.compile(rb'"content":" (\d+)"')


# --- the server: a stream of stamped events ---------------------------------------------------------------------------


async def serve(chunks: int, gap_s: float) -> None:
    """Answer every POST with `chunks` events, one each `gap_s`; prints its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(HEAD)
                for _ in range(chunks):
                    await asyncio.sleep(gap_s)
                    data = (EVENT % time.monotonic_ns()).encode()
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# --- the client -------------------------------------------------------------------------------------------------------


async def load(port: int, requests: int, connections: int) -> tuple[float, list[float]]:
    """Send `requests` over kept-alive connections; (seconds taken, ms that each event was on its way)."""
    left = requests
    delays: list[float] = []

    async def client() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left > 0:
            left -= 1
            writer.write(REQUEST)
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await reader.read(1 << 16)
                now_ns = time.monotonic_ns()
                assert data, "the connection closed"
                delays.extend((now_ns - int(stamp)) / 1e6 for stamp in STAMP.findall(data))
                tail = (tail + data)[-5:]
        writer.close()

    began_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(connections)))
    return time.monotonic() - began_s, delays


# --- the proxies ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def child(command: list[str], ready: str) -> Iterator[tuple[subprocess.Popen[bytes], re.Match[str]]]:
    """A process that has said something that matches `ready`."""
    with tempfile.TemporaryFile() as told:  # a pipe that nobody reads would stop mitmproxy at 64 KiB
        process = subprocess.Popen(
            command, stdout=told, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            end = time.monotonic() + 90
            while not (match := re.search(ready, said := os.pread(told.fileno(), 1 << 16, 0).decode(errors="replace"))):
                assert process.poll() is None, f"{command[:4]} ended: {said}"
                assert time.monotonic() < end, f"{command[:4]} did not start: {said}"
                time.sleep(0.02)
            yield process, match
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def mitmdump(upstream: int, *more: str) -> list[str]:
    """Bare mitmdump as a reverse proxy on a port of the system's choice."""
    return [sys.executable, "-c", "from mitmproxy.tools.main import mitmdump; mitmdump()", "--mode",
            f"reverse:http://127.0.0.1:{upstream}", "--listen-host", "127.0.0.1", "--listen-port", "0",
            "--set", "connection_strategy=lazy", "--set", "flow_detail=0", *more]  # fmt: skip


def recorder(upstream: int, out: str, *more: str) -> list[str]:
    """The `capture` command."""
    return [sys.executable, "-m", "capture", "--upstream", f"http://127.0.0.1:{upstream}", "--listen", "127.0.0.1:0",
            "--out", out, *more]  # fmt: skip


LISTENS = r"listening at \S*?:(\d+)"
RECORDS = r"recording http://\S*?:(\d+) "


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children so far."""
    total = 0
    for each in (pid, *children(pid)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def rss_mb(pid: int) -> float:
    """Resident memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


# --- the comparison ---------------------------------------------------------------------------------------------------


def percentile(values: list[float], q: float) -> float:
    """Order statistic."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def ratio(values: list[float], base: list[float]) -> str:
    """Geometric mean of paired ratios with its 95 % interval, which takes two pairs."""
    from scipy import stats

    logs = [math.log(a / b) for a, b in zip(values, base, strict=True)]
    middle, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return f"× {math.exp(middle):.2f} (n = {n})"
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(logs) / math.sqrt(n)
    return f"× {math.exp(middle):.2f} [{math.exp(middle - half):.2f}, {math.exp(middle + half):.2f}] (n = {n})"


def compare(args: argparse.Namespace, upstream: int, folder: Path) -> str:
    """All arms in turn, `rounds` times."""
    script = folder / "streaming.py"
    script.write_text(STREAMING)
    addon = ("-s", "capture/addon.py", "--set", f"capture_out={folder / 'addon'}")
    with contextlib.ExitStack() as stack:
        bare, m1 = stack.enter_context(child(mitmdump(upstream, "-s", str(script)), LISTENS))
        with_addon, m2 = stack.enter_context(child(mitmdump(upstream, *addon), LISTENS))
        captured, m3 = stack.enter_context(child(recorder(upstream, str(folder / "capture")), RECORDS))
        arms = {
            "no proxy": (None, upstream),
            "bare mitmdump": (bare.pid, int(m1[1])),
            "mitmdump + addon": (with_addon.pid, int(m2[1])),
            "capture": (captured.pid, int(m3[1])),
        }
        cpu: dict[str, list[float]] = {name: [] for name in arms}
        p50: dict[str, list[float]] = {name: [] for name in arms}
        delays: dict[str, list[float]] = {name: [] for name in arms}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _, port in arms.values():
            asyncio.run(load(port, 30, args.connections))
        for turn in range(args.rounds):
            for name in list(arms) if turn % 2 else list(arms)[::-1]:
                pid, port = arms[name]
                before_s = cpu_s(pid) if pid else 0.0
                took_s, seen = asyncio.run(load(port, args.requests, args.connections))
                if pid:
                    time.sleep(1.0)  # what the recorder still writes is its cost too
                    cpu[name].append(cpu_s(pid) - before_s)
                p50[name].append(percentile(seen, 0.5))
                delays[name] += seen
                rates[name].append(args.requests / took_s)
    bare_cpu, bare_p50 = cpu["bare mitmdump"], p50["bare mitmdump"]
    lines = []
    for name in arms:
        per = statistics.fmean(cpu[name]) / args.requests if cpu[name] else math.nan
        paired = ["", ""]
        if name in {"mitmdump + addon", "capture"}:
            more_ms = statistics.median(a - b for a, b in zip(p50[name], bare_p50, strict=True))
            paired = [ratio(cpu[name], bare_cpu), f"{more_ms:+.2f}"]
        spent = [f"{per * 1e3:.2f}", f"{per / args.chunks * 1e5:.2f}"] if cpu[name] else ["", ""]
        way = f"{percentile(delays[name], 0.5):.2f} / {percentile(delays[name], 0.99):.2f}"
        lines.append([name, f"{statistics.median(rates[name]):.0f}", *spent, paired[0], way, paired[1]])
    head = ["", "requests/s", "CPU s per 1,000 requests", "per 100,000 events", "of bare mitmdump's, 95 % interval",
            "events on their way, ms P50 / P99", "P50 more than bare mitmdump's, ms"]  # fmt: skip
    what = (
        f"{args.rounds} alternations of {args.requests} streams, {args.chunks} events each {args.gap_ms:g} ms apart, "
        f"{args.connections} kept-alive connections; the last column is the median of the paired differences:"
    )
    return f"{what}\n\n{page.table(head, lines)}"


def memory(args: argparse.Namespace, upstream: int, folder: Path) -> str:
    """The recorder's memory while requests pass over kept-alive connections."""
    lines = []
    with child(recorder(upstream, str(folder / "memory")), RECORDS) as (process, match):
        done, step = 0, max(args.memory // 8, 1)
        while done < args.memory:
            asyncio.run(load(int(match[1]), step, 32))
            done += step
            lines.append([f"{done:,}", f"{rss_mb(process.pid):.0f}"])
            print(f"  {done:,} requests: {lines[-1][1]} MB", file=sys.stderr)
    return page.table(["requests so far", "resident memory, MB"], lines)


def several(args: argparse.Namespace, upstream: int, folder: Path) -> str:
    """Requests/s of one worker and of several, in turns; rows counted."""
    from traces import parquet

    counts: dict[int, list[float]] = {1: [], args.workers: []}
    sent = dict.fromkeys(counts, 0)
    with contextlib.ExitStack() as stack:
        ports = {}
        for workers in counts:
            command = recorder(upstream, str(folder / f"w{workers}"), "--workers", str(workers))
            _, match = stack.enter_context(child(command, RECORDS))
            ports[workers] = int(match[1])
        for turn in range(args.rounds):
            for workers in list(counts) if turn % 2 else list(counts)[::-1]:
                took_s, _ = asyncio.run(load(ports[workers], args.requests * 4, 32))
                counts[workers].append(args.requests * 4 / took_s)
                sent[workers] += args.requests * 4
    lines = []
    for workers, rates in counts.items():
        rows = parquet.read(folder / f"w{workers}", ["request_id"]).column("request_id").to_pylist()
        against = "" if workers == 1 else ratio(rates, counts[1])
        lines.append([str(workers), f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})", against,
                      f"{sent[workers]:,}", f"{len(rows):,}, {len(set(rows)):,} different"])  # fmt: skip
    head = ["workers", "requests/s", "of one worker's, 95 % interval", "sent", "rows"]
    return f"Median of {args.rounds} rounds, least to largest, 32 kept-alive connections:\n\n{page.table(head, lines)}"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--gap-ms", type=float, default=3.0)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    page.option(parser)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.chunks, args.gap_ms / 1e3))
        return
    fast = args.memory or args.workers
    chunks, gap = (16, 0.0) if fast else (args.chunks, args.gap_ms)
    command = [sys.executable, __file__, "--serve", "--chunks", str(chunks), "--gap-ms", str(gap)]
    with tempfile.TemporaryDirectory() as folder, child(command, r"(\d+)\n") as (_, match):
        upstream = int(match[1])
        measure, mark = (
            (memory, "memory") if args.memory else (several, "workers") if args.workers else (compare, "overhead")
        )
        text = measure(args, upstream, Path(folder))
    page.say(f"{text}\n\n{page.machine('mitmproxy')}", args.write, mark)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
