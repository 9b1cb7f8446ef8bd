"""A server that does nothing: every answer is as long as was asked, its first token comes at once, the others evenly.

What a client measures against it is the client: its own delay, its own limit. It runs as a child process, on loopback,
on a port that the system picks, and ends with its parent.

    with running() as url:
        ...
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.descriptors import SERVER_DESCRIPTORS, make_room

GAP_S = 0.002  # between two tokens of an answer

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_(?:completion_|output_|new_)?tokens"\s*:\s*(\d+)')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WHOLE = (
    b'{"id":"null","object":"chat.completion","model":"null","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"a"},"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":%d}}'
)


def _chunk(event: bytes) -> bytes:
    data = b"data: %b\n\n" % event
    return b"%x\r\n%b\r\n" % (len(data), data)


def _token(finish: bytes) -> bytes:
    return _chunk(
        b'{"id":"null","object":"chat.completion.chunk","created":0,"model":"null","choices":[{"index":0,'
        b'"delta":{"content":" a"},"logprobs":null,"finish_reason":%b}]}' % finish
    )


_TOKEN, _LAST = _token(b"null"), _token(b'"length"')
_END = _chunk(b"[DONE]") + b"0\r\n\r\n"


def _usage(tokens: int) -> bytes:
    return _chunk(
        b'{"id":"null","object":"chat.completion.chunk","created":0,"model":"null","choices":[],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % tokens
    )


class NullServer(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = b""
        self._left = self._tokens = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody is there."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Wait for a whole request, then answer; requests in a row are answered in a row."""
        self._waiting += data
        head, found, body = self._waiting.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if not found or len(body) < size or self._left:
            return
        self._waiting = body[size:]
        tokens = _TOKENS.search(body, 0, size)
        self._tokens = max(1, int(tokens[1])) if tokens else 1
        if _STREAM.search(body, 0, size):
            self._left = self._tokens
            self._next(_HEAD)
        else:
            whole = _WHOLE % self._tokens
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole)
            self._transport.write(head + whole)

    def _next(self, before: bytes = b"") -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        if self._left:
            self._transport.write(before + _TOKEN)
            self._loop.call_later(GAP_S, self._next)
        else:
            self._transport.write(before + _LAST + _usage(self._tokens) + _END)
            if self._waiting:
                self.data_received(b"")


@contextmanager
def running() -> Iterator[str]:
    """The URL of a null server that runs as long as the context lasts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "replay.nullserver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullServer, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)  # the parent closes the pipe, or is gone
    server.close()


def main() -> None:
    """Run as the child of `running`."""
    import uvloop

    make_room(SERVER_DESCRIPTORS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())


if __name__ == "__main__":
    main()
