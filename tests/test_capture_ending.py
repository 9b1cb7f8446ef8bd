"""Who ended a flow: mitmproxy has the same words for both sides of an HTTP/2 connection."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what mitmproxy itself imports
    from mitmproxy.connection import ConnectionState
    from mitmproxy.flow import Error
    from mitmproxy.test import tflow

    from capture.ending import end_of, no_connection

GONE, OPEN = ConnectionState.CLOSED, ConnectionState.OPEN


def broken(message, client=(None, OPEN), server=None):
    flow = tflow.tflow(resp=True)
    flow.error = Error(message)
    flow.client_conn.alpn, flow.client_conn.state = client
    flow.server_conn.alpn = server
    flow.server_conn.timestamp_tcp_setup = 1.0
    return flow


@pytest.mark.parametrize(
    ("flow", "end"),
    [
        (broken("Client disconnected."), "client_abort"),
        (broken("stream reset by client (CANCEL)", client=(b"h2", OPEN)), "client_abort"),
        (broken("stream reset by client (INTERNAL_ERROR)", client=(b"h2", OPEN)), "client_abort"),
        (broken("stream reset by client (CANCEL)", client=(b"h2", OPEN), server=b"h2"), "client_abort"),
        (broken("stream reset by client (INTERNAL_ERROR)", client=(b"h2", OPEN), server=b"h2"), "reset"),
        (broken("stream reset by client (CANCEL)", server=b"h2"), "reset"),
        (broken("peer closed connection", client=(b"h2", GONE)), "client_abort"),
        (broken("peer closed connection", client=(b"h2", OPEN), server=b"h2"), "closed"),
        (
            broken("HTTP/2 connection closed: <ConnectionTerminated>", client=(b"h2", GONE), server=b"h2"),
            "client_abort",
        ),
        (broken("server closed connection"), "closed"),
        (broken("connection timed out"), "timeout_idle"),
    ],
)
def test_who_ended_it(flow, end):
    assert end_of(flow, None) == end


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("[Errno 111] Connect call failed ('127.0.0.1', 1)", "connect ECONNREFUSED"),
        ("certificate verify failed: self-signed certificate", "tls CERTIFICATE_VERIFY_FAILED"),
        ("The server does not speak TLS.", "tls handshake"),
        ("no word of what it was", "connect"),
    ],
)
def test_a_connection_that_could_not_be_made_is_told_in_replays_words(message, text):
    assert no_connection(message) == text
