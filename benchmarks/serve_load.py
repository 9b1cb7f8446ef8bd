"""How much the embedded engine's server carries: streams in a closed loop over loopback, from a bare client.

    python benchmarks/serve_load.py [--tokens 16] [--prompt-tokens 64] [--connections 32] [-- options of replay serve]

The step model is sped up 1,000 times, so that what is measured is the server: HTTP, scheduler, events. The client only
counts bytes and ends of answers; it shares the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import resource
import time
from pathlib import Path
from typing import cast

import uvloop

from replay.engine.child import running

END = b"0\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, request: bytes, done: list[int]) -> None:
        self.request, self.done = request, done
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Ask again when the answer is over."""
        if data.endswith(END):
            self.done[0] += 1
            assert self.transport is not None
            self.transport.write(self.request)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def listener(url: str) -> int:
    """The process that listens at a loopback URL."""
    port = int(url.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if fd.readlink().name.removeprefix("socket:[").rstrip("]") in inodes:
                return int(fd.parts[2])
        except OSError:
            continue
    raise SystemExit("the server's process was not found")


async def load(url: str, prompt_tokens: int, tokens: int, connections: int, seconds: float) -> tuple[float, float]:
    """Answers per second, and the server's CPU seconds for each."""
    prompt = [300 + i % 10_000 for i in range(prompt_tokens)]
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    loop = asyncio.get_running_loop()
    done = [0]
    port = int(url.rsplit(":", 1)[1])
    pid = listener(url)
    made = [await loop.create_connection(lambda: Client(request, done), "127.0.0.1", port) for _ in range(connections)]
    await asyncio.sleep(0.5)
    begun, at, used_s = done[0], time.monotonic(), cpu_s(pid)
    await asyncio.sleep(seconds)
    count = done[0] - begun
    result = count / (time.monotonic() - at), (cpu_s(pid) - used_s) / max(count, 1)
    for transport, _ in made:
        transport.abort()
    return result


def metrics(url: str) -> list[str]:
    """The lines of `/metrics`."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return lines


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description="How much the embedded engine's server carries.")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--speed-of-time", default="1000x")
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    with running("--speed-of-time", given.speed_of_time, *given.options) as url:
        rate, used_s = uvloop.run(load(url, given.prompt_tokens, given.tokens, given.connections, given.seconds))
        lines = metrics(url)
    steps = [line for line in lines if line.startswith("convoy:engine_") and "bucket" not in line]
    own = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{given.tokens} tokens, {given.connections} connections: {rate:,.0f} requests/s, "
        f"{rate * given.tokens:,.0f} events/s; server {used_s * 1000:.2f} ms CPU a request, "
        f"client {own.ru_utime + own.ru_stime:.1f} s CPU in all"
    )
    print("  " + "  ".join(line.split("{")[0][14:] + "=" + line.rsplit(" ", 1)[1] for line in steps))


if __name__ == "__main__":
    main()
