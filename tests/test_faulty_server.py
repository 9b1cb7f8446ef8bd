"""The misbehaving server of our tests does exactly what its script says."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from pathlib import Path

import pytest

from tests.faulty_server import DONE, ERROR, Do, answer, chunk, delta, faulty, good, head, self_signed, stream, tokens


def _post(port: int, body: bytes = b"{}") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    return connection


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while data := connection.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def test_a_good_stream_is_read_by_an_independent_client_and_the_connection_is_reused():
    with faulty(good(3)) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        for _ in range(2):
            client.request("POST", "/v1/chat/completions", json.dumps({"priority": 2}))
            events = client.getresponse().read().split(b"\n\n")
            assert len(events) == 1 + 3 + 1 + 1 + 1
            assert events[-2] == b"data: [DONE]"
        client.request("GET", "/v1/models")
        assert json.load(client.getresponse())["data"][0]["id"] == "tiny"
        client.close()
        assert [request.json["priority"] for request in server.requests] == [2, 2]
        assert server.opened == 1


def test_a_reset_is_seen_as_a_reset_and_a_close_as_an_end():
    with (
        faulty([head(), chunk(delta("a")), 0.05, Do.RESET]) as server,
        _post(server.port) as connection,
        pytest.raises(ConnectionResetError),
    ):
        _read_all(connection)
    with faulty([head(), chunk(delta("a")), Do.CLOSE]) as server, _post(server.port) as connection:
        assert _read_all(connection).endswith(b"\r\n")


def test_pauses_lie_between_the_writes_and_every_write_has_its_time():
    with faulty([head(), 0.05, chunk(delta("a")), 0.05, Do.CLOSE]) as server, _post(server.port) as connection:
        _read_all(connection)
        (_, first, first_ns, _), (_, second, second_ns, _) = server.writes
        assert (first, second) == (0, 2)
        assert second_ns - first_ns >= 50e6


def test_half_an_event_arrives_before_the_rest():
    event = chunk(delta("a"))
    with faulty([head(), event[:20], 0.1, event[20:], Do.CLOSE]) as server, _post(server.port) as connection:
        connection.recv(len(head()), socket.MSG_WAITALL)
        assert connection.recv(1 << 16) == event[:20]
        assert _read_all(connection) == event[20:]


def test_a_script_can_depend_on_the_request():
    def script(request):
        return answer({"number": request.number}) if request.number else answer({}, 429, {"Retry-After": "1"})

    with faulty(script) as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        client.request("POST", "/", b"{}")
        response = client.getresponse()
        response.read()
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        client.request("POST", "/", b"{}")
        assert json.load(client.getresponse()) == {"number": 1}
        client.close()


def test_an_error_event_comes_after_five_tokens():
    with faulty([*stream(tokens(5), ERROR, DONE), Do.CLOSE]) as server, _post(server.port) as connection:
        body = _read_all(connection)
        assert body.count(b'"content"') == 5
        assert body.index(b'"error"') > body.index(b" t4")


@pytest.mark.parametrize("unread", [False, True], ids=["all read", "bytes unread: the kernel resets"])
def test_the_server_sees_when_the_client_goes_away(unread: bool):
    with faulty([head(), Do.READ_EOF]) as server, _post(server.port) as connection:
        connection.recv(len(head()), socket.MSG_WAITALL | (socket.MSG_PEEK if unread else 0))
        connection.close()
        server.wait_for(lambda seen: bool(seen.closed_ns))


def test_holding_ends_with_the_server_and_not_before():
    start = time.monotonic()
    with faulty([head(), Do.HOLD]) as server, _post(server.port) as connection:
        connection.settimeout(0.1)
        connection.recv(len(head()), socket.MSG_WAITALL)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert time.monotonic() - start < 3


def test_tls_with_a_slow_handshake(tmp_path: Path):
    files = self_signed(tmp_path)
    context = ssl.create_default_context(cafile=str(files[0]))
    with faulty(answer({}), tls=files, handshake_delay_s=0.15) as server:
        assert server.url.startswith("https://")
        start = time.monotonic()
        client = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=5)
        client.connect()
        assert time.monotonic() - start >= 0.15
        client.request("POST", "/", b"{}")
        assert client.getresponse().read() == b"{}"
        client.close()
