"""An HTTP/2 client over TLS for tests: several requests on one connection, and leaving in the middle."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import h2.config
import h2.connection
import h2.events


class Http2Client:
    """One connection; certificates are not looked at."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self._sock = sock
        self._http2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._http2.initiate_connection()

    def ask(self, body: bytes, headers: Mapping[str, str], *, sized: bool = True) -> int:
        """Send a POST; its stream's number. Not `sized`: without a content-length."""
        number: int = self._http2.get_next_available_stream_id()
        head = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "https", ":authority": "localhost"}
        head |= {"content-type": "application/json", **headers}
        head |= {"content-length": str(len(body))} if sized else {}
        self._http2.send_headers(number, list(head.items()))
        self._http2.send_data(number, body, end_stream=True)
        self.bodies[number] = b""
        self._flush()
        return number

    def wait(self, streams: int) -> dict[int, bytes]:
        """Bodies by stream once so many have ended."""
        while len(self.ended) < streams:
            self._receive()
        return self.bodies

    def until(self, found: bytes) -> None:
        """Wait until an answer holds these bytes."""
        while not any(found in body for body in self.bodies.values()):
            self._receive()

    def reset(self, number: int) -> None:
        """Give a stream up (CANCEL)."""
        self._http2.reset_stream(number, error_code=8)
        self._flush()

    def _receive(self) -> None:
        data = self._sock.recv(1 << 16)
        assert data, "the connection was closed"
        for event in self._http2.receive_data(data):
            self._hear(event)
        self._flush()

    def _hear(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] += event.data
            self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
            self.ended.add(event.stream_id)

    def _flush(self) -> None:
        self._sock.sendall(self._http2.data_to_send())


@contextlib.contextmanager
def http2(port: int) -> Iterator[Http2Client]:
    """A client of 127.0.0.1:port; at the end its connection is closed without a word."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as sock,
    ):
        assert sock.selected_alpn_protocol() == "h2"
        yield Http2Client(sock)
