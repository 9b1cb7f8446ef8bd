"""The two yardsticks: as little client as Python can be, on asyncio's protocol layer and on aiohttp.

    python benchmarks/minimal.py protocol|aiohttp URL OUT.npz closed COUNT IN_FLIGHT TOKENS
    python benchmarks/minimal.py protocol|aiohttp URL OUT.npz fixed COUNT RATE TOKENS

Both send the same body on kept connections, stamp every read, count its events, and know the end of an answer by its
last bytes: no check of anything, no outcome, no row. What a load generator can be in Python lies below them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replay.alarm import Alarm

HOST = "127.0.0.1"
LEAD_NS = 200_000_000
PROMPT = "the quick brown fox jumps over a lazy dog and then runs far away " * 3


class Record:
    """Stamps of all requests."""

    def __init__(self, count: int) -> None:
        self.due = [0] * count
        self.sent = [0] * count
        self.first = [0] * count
        self.reads: list[list[int]] = [[] for _ in range(count)]
        self.events = [0] * count
        self.left = count
        self.done = asyncio.Event()

    def ended(self) -> None:  # noqa: D102
        self.left -= 1
        if not self.left:
            self.done.set()


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, free: Callable[[Client], None], record: Record) -> None:
        self.free, self.record = free, record
        self.index = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self.descriptor = transport.get_extra_info("socket").fileno()

    def send(self, index: int, data: bytes) -> None:  # noqa: D102
        self.index = index
        self.reads = self.record.reads[index]
        self.record.sent[index] = time.monotonic_ns()
        os.write(self.descriptor, data)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self.reads.append(time.monotonic_ns())
        record = self.record
        record.events[self.index] += data.count(b"data: ")
        if data.endswith(b"0\r\n\r\n"):
            record.ended()
            self.free(self)


def request(index: int, port: int, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": "truth",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s:%d\r\nx-request-id: %08d\r\ncontent-length: %d\r\n\r\n%s"
        % (
            HOST.encode(),
            port,
            index,
            len(body),
            body,
        )
    )


async def protocol_closed(port: int, count: int, in_flight: int, tokens: int) -> Record:
    record = Record(count)
    loop = asyncio.get_running_loop()
    todo = iter(range(count))

    def free(client: Client) -> None:
        index = next(todo, None)
        if index is not None:
            client.send(index, request(index, port, tokens))

    for _ in range(in_flight):
        _, client = await loop.create_connection(lambda: Client(free, record), HOST, port)
        free(client)
    await record.done.wait()
    return record


async def protocol_fixed(port: int, count: int, rate: float, tokens: int) -> Record:
    record = Record(count)
    loop = asyncio.get_running_loop()
    idle: list[Client] = []
    data = [request(index, port, tokens) for index in range(count)]
    begin_ns = time.monotonic_ns() + LEAD_NS
    record.due = [begin_ns + round(index * 1e9 / rate) for index in range(count)]
    place = 0
    pending = set()

    async def connect(index: int) -> None:
        _, client = await loop.create_connection(lambda: Client(idle.append, record), HOST, port)
        client.send(index, data[index])

    def send() -> None:
        nonlocal place
        while place < count and record.due[place] <= time.monotonic_ns():
            if idle:
                idle.pop().send(place, data[place])
            else:
                task = asyncio.ensure_future(connect(place))
                pending.add(task)
                task.add_done_callback(pending.discard)
            place += 1
        if place < count:
            alarm.at(record.due[place])

    alarm = Alarm(send)
    alarm.at(record.due[0])
    await record.done.wait()
    alarm.close()
    return record


async def aiohttp_request(session: object, url: str, index: int, tokens: int, record: Record) -> None:
    record.sent[index] = time.monotonic_ns()
    body = {
        "model": "truth",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reads = record.reads[index]
    async with session.post(url, json=body, headers={"x-request-id": f"{index:08d}"}) as answer:  # type: ignore[attr-defined]
        async for data in answer.content.iter_any():
            reads.append(time.monotonic_ns())
            record.events[index] += data.count(b"data: ")
    record.ended()


async def aiohttp_closed(port: int, count: int, in_flight: int, tokens: int) -> Record:
    import aiohttp

    record = Record(count)
    todo = iter(range(count))
    url = f"http://{HOST}:{port}/v1/chat/completions"

    async def user(session: aiohttp.ClientSession) -> None:
        for index in todo:
            await aiohttp_request(session, url, index, tokens, record)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(user(session) for _ in range(in_flight)))
    return record


async def aiohttp_fixed(port: int, count: int, rate: float, tokens: int) -> Record:
    import aiohttp

    record = Record(count)
    url = f"http://{HOST}:{port}/v1/chat/completions"
    begin_ns = time.monotonic_ns() + LEAD_NS
    record.due = [begin_ns + round(index * 1e9 / rate) for index in range(count)]
    place, tasks = 0, set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        def send() -> None:
            nonlocal place
            while place < count and record.due[place] <= time.monotonic_ns():
                task = asyncio.ensure_future(aiohttp_request(session, url, place, tokens, record))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                place += 1
            if place < count:
                alarm.at(record.due[place])

        alarm = Alarm(send)
        alarm.at(record.due[0])
        await record.done.wait()
        alarm.close()
    return record


def main() -> None:
    kind, url, out, mode, count, how, tokens = sys.argv[1:]
    port = int(url.rsplit(":", 1)[1])
    run = globals()[f"{kind}_{mode}"]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        record = runner.run(run(port, int(count), float(how) if mode == "fixed" else int(how), int(tokens)))
    reads = [np.array(stamps, dtype=np.int64) for stamps in record.reads]
    np.savez(
        out,
        due_ns=np.array(record.due),
        sent_ns=np.array(record.sent),
        first_ns=np.array([stamps[0] for stamps in reads]),
        end_ns=np.array([stamps[-1] for stamps in reads]),
        events=np.array(record.events),
        reads=np.concatenate(reads),
        reads_count=np.array([len(stamps) for stamps in reads]),
    )


if __name__ == "__main__":
    main()
