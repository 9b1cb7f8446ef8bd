"""The null server answers as long as it is asked to, on any path, and ends with its parent."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
import uvloop

from replay.connection import HttpTransport
from replay.exchange import Exchange, WireRequest
from replay.nullserver import running
from traces.meter import Meter


def ask(url: str, *bodies: dict) -> list[Exchange]:
    async def main() -> list[Exchange]:
        transport = HttpTransport(url)
        await transport.open()
        found = []
        for body in bodies:
            future = asyncio.get_running_loop().create_future()
            transport.start(
                WireRequest("POST", "/v1/chat/completions", b"", json.dumps(body).encode()), future.set_result
            )
            found.append(await asyncio.wait_for(future, 20))
        await transport.close()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


@pytest.fixture(scope="module")
def url():
    with running() as found:
        yield found
    host, port = found.removeprefix("http://").split(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0, "it outlived its context"


@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_an_answer_has_as_many_tokens_as_were_asked_for(url, tokens, name):
    (exchange,) = ask(url, {"stream": True, name: tokens})
    meter = Meter(start_ns=exchange.started_ns)
    meter.head(exchange.headers_ns, exchange.status, exchange.headers)
    meter.feed_all(exchange.segments)
    row = meter.close(exchange.end_ns, exchange.end)
    assert (row.outcome, row.output_tokens, len(row.chunk_ns)) == ("ok", tokens, tokens)


def test_a_whole_answer_is_a_document(url):
    (exchange,) = ask(url, {"max_tokens": 5})
    assert json.loads(exchange.segments[0][1])["usage"]["completion_tokens"] == 5


def test_a_connection_carries_one_request_after_the_other(url):
    first, second = ask(url, {"stream": True, "max_tokens": 3}, {"stream": True, "max_tokens": 3})
    assert (first.end, second.end, second.reused) == ("eof", "eof", True)
