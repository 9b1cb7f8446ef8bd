"""Two recorder processes behind one port: sockets handed out by the parent, or spread by the kernel (SO_REUSEPORT).

    python benchmarks/capture_ports.py [--rounds 5] [--write docs/capture.md]

`handed out` is `capture --workers 2`. `reuseport` is two recorders of one process each, whose listening sockets share a
port: the kernel gives each new connection to one of them by hash. Kept-alive clients (8 and 32 connections, each opened
once a round and used for all its requests) and clients that open a connection for every request take turns on both.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import capture_overhead as overhead
import page

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = 160
KINDS = {"8 kept alive": (8, 1), "32 kept alive": (32, 1), "a new one for each request": (REQUESTS // 5, 5)}


def shared(host: str, port: int) -> socket.socket:
    """A listening socket whose port others may listen on, too."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind((host, port))
    found.listen(1024)
    found.setblocking(False)
    return found


def serve_shared(words: list[str]) -> None:
    """`capture` as it is, but for the way it listens."""
    from capture import workers
    from capture.cli import main as capture

    workers.bound = shared  # type: ignore[assignment]
    sys.argv = ["capture", *words]
    capture()


def rates(ports: dict[str, int], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Requests/s by (way, kind of client), one figure a round."""
    found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for turn in range(rounds):
        for kind, (connections, times) in KINDS.items():
            for way in list(ports)[:: 1 if turn % 2 else -1]:
                took_s = 0.0
                for _ in range(times):
                    took_s += asyncio.run(overhead.load(ports[way], REQUESTS // times, connections))[0]
                found[way, kind].append(REQUESTS / took_s)
                print(f"  {way}, {kind}: {found[way, kind][-1]:.0f} requests/s", file=sys.stderr)
    return found


def measure(rounds: int) -> str:
    """The table."""
    from traces import parquet

    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        server = [sys.executable, str(ROOT / "benchmarks/capture_overhead.py"), "--serve", "--chunks", "16"]
        _, said = stack.enter_context(overhead.child([*server, "--gap-ms", "0"], r"(\d+)\n"))
        upstream = int(said[1])
        handed = overhead.recorder(upstream, str(folder / "handed out"), "--workers", "2")
        _, said = stack.enter_context(overhead.child(handed, overhead.RECORDS))
        ports = {"handed out": int(said[1])}
        one = [sys.executable, str(Path(__file__).resolve()), "--serve", "--upstream", f"http://127.0.0.1:{upstream}"]
        one += ["--out", str(folder / "reuseport"), "--listen"]
        _, said = stack.enter_context(overhead.child([*one, "127.0.0.1:0"], overhead.RECORDS))
        ports["reuseport"] = int(said[1])
        stack.enter_context(overhead.child([*one, f"127.0.0.1:{said[1]}"], overhead.RECORDS))
        rates(ports, 1)  # to warm up
        found = rates(ports, rounds)
        time.sleep(2.5)
        stack.close()
        lines = []
        for way in ports:
            ids = parquet.read(folder / way, ["request_id"]).column("request_id").to_pylist()
            shares = sorted(collections.Counter(text.rpartition("-")[0] for text in ids).values())
            cells = [f"{statistics.median(found[way, kind]):.0f} ({min(found[way, kind]):.0f} to "
                     f"{max(found[way, kind]):.0f})" for kind in KINDS]  # fmt: skip
            doubled = "all different" if len(set(ids)) == len(ids) else f"{len(ids) - len(set(ids))} doubled"
            sent = (rounds + 1) * len(KINDS) * REQUESTS
            lines.append([way, *cells, f"{len(ids):,} of {sent:,}, {doubled}", " / ".join(map(str, shares))])
    head = ["sockets", *(f"{kind}, requests/s" for kind in KINDS), "rows", "by worker"]
    return f"Median of {rounds} rounds, least to largest:\n\n{page.table(head, lines)}\n\n{page.machine('mitmproxy')}"


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve_shared(sys.argv[2:])
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    page.option(options)
    asked = options.parse_args()
    page.say(measure(asked.rounds), asked.write, "ports")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
