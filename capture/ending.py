"""How a flow ended that mitmproxy tells as an error: from the state of its connections, then from mitmproxy's words.

mitmproxy has one message for both sides of an HTTP/2 connection ("stream reset by client" is said of a server, too), so
the connections are asked first: whose end has closed has left.
"""

from __future__ import annotations

import asyncio
import errno
import re

from mitmproxy import http
from mitmproxy.connection import ConnectionState

from traces.meter import End

_H2 = b"h2"


def end_of(flow: http.HTTPFlow, reader: object) -> End:
    """How a flow with an error ended.

    Args:
        flow: with `error` set.
        reader: the stream reader of its server connection, where one was seen.
    """
    message = (flow.error.msg if flow.error else "").lower()
    if "client disconnected" in message or "client closed" in message or _client_left(flow, message):
        return "client_abort"
    server = flow.server_conn
    connected = server is not None and (server.timestamp_tls_setup if server.tls else server.timestamp_tcp_setup)
    if flow.response is None and not connected:
        return "timeout_connect" if "timed out" in message or "timeout" in message else "connect_error"
    if "timed out" in message or "timeout" in message:
        return "timeout_idle"
    # mitmproxy takes a reset for an end like any other; the reader of the connection knows better
    gone = reader.exception() if isinstance(reader, asyncio.StreamReader) else None
    return "reset" if "reset" in message or isinstance(gone, ConnectionResetError | BrokenPipeError) else "closed"


def _client_left(flow: http.HTTPFlow, message: str) -> bool:
    """Whether it was an HTTP/2 client that gave up its stream or its connection."""
    client, server = flow.client_conn, flow.server_conn
    if client.alpn != _H2:
        return False
    if not client.state & ConnectionState.CAN_READ:
        return True
    if "stream reset by client" not in message:
        return False
    return server is None or server.alpn != _H2 or "(cancel)" in message  # CANCEL is what clients say who leave


def no_connection(message: str) -> str:
    """Class and code of a connection that could not be made, in the words of `replay`; never the message itself."""
    message = message.lower()
    if "certificate verify failed" in message:
        return "tls CERTIFICATE_VERIFY_FAILED"
    if "tls" in message or "ssl" in message:
        return "tls handshake"
    found = re.search(r"\[errno (-?\d+)\]", message)
    number = int(found[1]) if found else 0
    return f"connect {errno.errorcode.get(number, number)}" if number else "connect"
