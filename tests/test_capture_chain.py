"""Real bytes through a recorder: what the client gets, and the row that stays. Ids such as G01 name user reports."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.capturing import Recording, body_of, read_to_end, recording, request
from tests.conftest import ROOT
from tests.faulty_server import (
    DONE,
    ERROR,
    LAST_CHUNK,
    Do,
    answer,
    chunk,
    delta,
    faulty,
    good,
    head,
    role,
    self_signed,
    stream,
    tokens,
    usage,
)
from tests.http2_client import http2

SECRET = "sk-live-4711"
PROMPT = "the quick brown fox asks about its blood pressure"
ASK = json.dumps(
    {"model": "tiny", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": PROMPT}]}
).encode()


def told(received):
    """The script that the request's own `x-script` header names."""
    return SCRIPTS[received.headers["x-script"]]


BIG = delta("x" * 20_000_000)
BOMB = gzip.compress(b"data: " + b"0" * 60_000_000)
SCRIPTS = {
    "good": good(5, pause_s=0.01),
    "whole": answer({"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}],
                     "usage": {"prompt_tokens": 9, "completion_tokens": 1}}),
    "404": answer({"error": {"message": f"no model; you sent {PROMPT}", "code": 404}}, 404),
    "reset": [head(), chunk(role()), chunk(delta("a")), 0.05, Do.RESET],
    "half": [head(), chunk(role()), chunk(delta("a")), chunk(delta("b")[:25]), 0.05, Do.CLOSE],
    "no end": stream(tokens(3)),
    "no DONE": stream(tokens(3, last="stop")),
    "utf8": stream(tokens(2), delta("z").replace(b"z", b"\xff\xfe"), delta("e", finish="stop"), DONE),
    "line": [head(), chunk(BIG), chunk(delta("e", finish="stop")), chunk(DONE), LAST_CHUNK],
    "bomb": [head(200, {"content-type": "text/event-stream", "content-encoding": "gzip",
                        "content-length": str(len(BOMB))}) + BOMB],
    "lie": [head(200, {"content-type": "text/event-stream", "content-encoding": "gzip",
                       "transfer-encoding": "chunked"}),
            *map(chunk, (*tokens(3, last="stop"), DONE)), LAST_CHUNK],
    "no json": stream(tokens(2), b"data: hello\n\n", b"data:\n\n", delta("e", finish="stop"), DONE),
    "error": stream(role(), tokens(5), ERROR, DONE),
    "slow": stream(role(), tokens(40, pause_s=0.05), DONE),
    "slower": stream(role(), tokens(9, pause_s=0.5), DONE),
    "empty": [head(204, {})],
    "busy": answer({"error": "busy"}, 503, {"retry-after": "1"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with faulty(told) as running:
        yield running


@pytest.fixture(scope="module")
def recorder(server, tmp_path_factory):
    with recording(server.url, tmp_path_factory.mktemp("chain") / "out", "--session-header", "x-session") as running:
        yield running


def asked(recorder: Recording, script: str, body: bytes = ASK, **headers: str):
    """Ask through the recorder: (response bytes, the row that it left)."""
    before = len(recorder.rows())
    response = recorder.ask(body, {"x-script": script, "x-tenant": "risk", **headers})
    return response, recorder.rows(before + 1)[-1]


ROWS = [
    # script → outcome, error, status, chunks, output tokens
    ("good", "ok", None, 200, 5, 5),
    ("whole", "ok", None, 200, None, 1),
    ("404", "http_error", "http 404", 404, None, None),
    ("busy", "http_error", "http 503", 503, None, None),
    ("reset", "truncated", "reset", 200, 1, 1),
    ("half", "truncated", "closed", 200, 1, 1),
    ("no end", "truncated", "closed", 200, 3, 3),
    ("no DONE", "ok", None, 200, 3, 3),
    ("utf8", "ok", None, 200, 4, 4),
    ("line", "ok", None, 200, 2, 2),
    ("bomb", "truncated", "encoding bomb", 200, None, None),
    ("lie", "ok", "encoding gzip", 200, 3, 3),
    ("no json", "ok", None, 200, 3, 3),
    ("error", "stream_error", "stream 500", 200, 5, 5),
    ("empty", "truncated", "closed", 204, None, None),
]


@pytest.mark.parametrize(("script", "outcome", "error", "status", "chunks", "output"), ROWS, ids=[r[0] for r in ROWS])
def test_whatever_a_server_does_is_one_row_and_the_client_gets_its_bytes(
    recorder, server, script, outcome, error, status, chunks, output
):
    response, row = asked(recorder, script)
    assert (row["outcome"], row["error"], row["status"]) == (outcome, error, status)
    assert (row["chunk_ns"] and len(row["chunk_ns"]), row["output_tokens"]) == (chunks, output)
    assert (row["tenant"], row["endpoint"], row["model"], row["max_tokens"]) == ("risk", "chat", "tiny", 9)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(request(ASK, {"x-script": script}))
        sock.shutdown(socket.SHUT_WR)
        assert body_of(read_to_end(sock)).startswith(body_of(response))
    if script not in {"reset", "half", "empty"}:
        assert len(body_of(response)) == row["response_bytes"]


def test_g01_every_chunk_reaches_the_client_before_the_next_is_written(recorder, server):
    with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
        before, number = len(recorder.rows()), len(server.requests)
        sock.sendall(request(ASK, {"x-script": "slow"}))
        seen = []
        while not seen or b"[DONE]" not in seen[-1][1]:
            data = sock.recv(1 << 16)
            assert data
            seen.append((time.monotonic_ns(), data))
        written = [at for request_number, _, at, _ in server.writes if request_number == number][1:]
        arrived = [at for at, data in seen for _ in range(data.count(b"data: "))]
        late_ms = sorted((there - here) / 1e6 for there, here in zip(arrived, written, strict=False))
        assert late_ms[len(late_ms) // 2] < 40, "each is written 50 ms after the one before"
    recorder.rows(before + 1)


def test_g08_a_client_that_leaves_in_mid_stream_is_one_row(recorder):
    before = len(recorder.rows())
    with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
        sock.sendall(request(ASK, {"x-script": "slow"}))
        received = b""
        while b"t2" not in received:
            received += sock.recv(1 << 16)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    row = recorder.rows(before + 1)[-1]
    assert row["outcome"] == "client_abort"
    assert 3 <= len(row["chunk_ns"]) < 40
    assert row["end_ns"] >= row["last_token_ns"]
    time.sleep(0.6)
    assert len(recorder.rows()) == before + 1, "one row, not two"


def test_other_requests_pass_and_leave_no_row(recorder):
    before = len(recorder.rows())
    with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"tiny" in read_to_end(sock)
    recorder.ask(b'{"name": "x"}', {"x-script": "whole"}, path="/metrics/push")
    time.sleep(0.7)
    assert len(recorder.rows()) == before


def test_a_request_on_a_path_of_a_gateways_own_is_known_by_its_shape(recorder):
    before = len(recorder.rows())
    recorder.ask(ASK, {"x-script": "good"}, path="/tenants/a/llm")
    assert recorder.rows(before + 1)[-1]["endpoint"] == "chat"


def test_kept_alive_connections_give_a_row_for_each_request(recorder):
    before = len(recorder.rows())
    with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
        for _ in range(5):
            sock.sendall(request(ASK, {"x-script": "good"}, close=False))
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += sock.recv(1 << 16)
    rows = recorder.rows(before + 5)[before:]
    assert [row["outcome"] for row in rows] == ["ok"] * 5
    assert len({row["request_id"] for row in rows}) == 5


def test_sessions_priorities_and_prefixes_are_read(recorder):
    before = len(recorder.rows())
    long = {"role": "system", "content": "You are careful. " * 60}
    first = {"model": "tiny", "stream": True, "priority": 3, "messages": [long, {"role": "user", "content": "one"}]}
    second = {**first, "messages": [*first["messages"], {"role": "assistant", "content": "t0 t1"},
                                    {"role": "user", "content": "two"}]}  # fmt: skip
    recorder.ask(json.dumps(first).encode(), {"x-script": "good"})
    recorder.rows(before + 1)
    recorder.ask(json.dumps(second).encode(), {"x-script": "good"})
    one, two = recorder.rows(before + 2)[before:]
    assert (one["turn"], two["turn"]) == (0, 1)
    assert one["session_id"] == two["session_id"]
    assert two["think_ns"] == two["arrival_ns"] - one["arrival_ns"] - one["end_ns"]
    assert (one["priority"], one["priority_raw"]) == (3, "3")
    shared = [a == b for a, b in zip(one["block_hashes"], two["block_hashes"], strict=False)]
    assert one["block_size"] == 256
    assert shared[:3] == [True] * 3


def test_g11_a_prompt_of_ten_megabytes_passes(recorder):
    body = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x" * 10_000_000}]})
    response, row = asked(recorder, "good", body.encode())
    assert row["request_bytes"] == len(body)
    assert len(row["block_hashes"]) == 10_000_005 // 256
    assert b"[DONE]" in response


def test_a_body_longer_than_is_read_streams_through_and_is_counted(recorder):
    body = json.dumps({"model": "tiny", "stream": True, "prompt": "x" * (33 << 20)}).encode()
    _, row = asked(recorder, "good", body)
    assert (row["request_bytes"], row["model"], row["outcome"]) == (len(body), None, "ok")


def test_g04_http_2_from_the_client_is_one_row_like_any_other(recorder):
    before = len(recorder.rows())
    body = over_http2(recorder.port, ASK, {"x-script": "good", "x-tenant": "risk"})
    row = recorder.rows(before + 1)[-1]
    assert body.endswith(DONE)
    assert (row["outcome"], row["tenant"], len(row["chunk_ns"]), row["input_tokens"]) == ("ok", "risk", 5, 10)


def test_g04_a_request_over_http_2_does_not_wait_for_the_others_of_its_connection(recorder):
    before, many = len(recorder.rows()), 12
    with http2(recorder.port) as client:
        for _ in range(many):
            client.ask(ASK, {"x-script": "slow"}, sized=False)
        assert all(body.endswith(DONE) for body in client.wait(many).values())
    rows = recorder.rows(before + many)[before:]
    last_began = max(row["arrival_ns"] + row["headers_ns"] for row in rows)
    assert last_began < min(row["arrival_ns"] + row["last_token_ns"] for row in rows), "all at once"


@pytest.mark.parametrize("leave", ["stream", "connection"])
def test_g08_a_client_that_leaves_over_http_2_is_one_row(recorder, leave):
    before = len(recorder.rows())
    with http2(recorder.port) as client:
        stream_id = client.ask(ASK, {"x-script": "slow"})
        client.until(b'" t0"')  # the event before it has no text
        if leave == "stream":
            client.reset(stream_id)
            recorder.rows(before + 1)  # while the connection is there
    row = recorder.rows(before + 1)[-1]
    assert (row["outcome"], row["status"]) == ("client_abort", 200)
    assert 1 <= len(row["chunk_ns"]) < 40


def test_a_body_in_chunks_reaches_the_server_before_it_is_whole_and_is_read_all_the_same(tmp_path):
    listening = socket.create_server(("127.0.0.1", 0))
    half = threading.Event()

    def serve():
        with listening, listening.accept()[0] as sock:
            received = b""
            while not received.endswith(LAST_CHUNK):
                received += sock.recv(1 << 16)
                if PROMPT.encode() in received:
                    half.set()
            for step in SCRIPTS["whole"]:
                sock.sendall(step)

    server = threading.Thread(target=serve)
    server.start()
    start = (b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
             b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")  # fmt: skip
    with (
        recording(f"http://127.0.0.1:{listening.getsockname()[1]}", tmp_path / "out") as recorder,
        socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock,
    ):
        sock.sendall(start + chunk(ASK[:-2]))
        assert half.wait(10), "passed on as it comes"
        sock.sendall(chunk(ASK[-2:]) + LAST_CHUNK)
        server.join(10)
        (row,) = recorder.rows(1)
    assert (row["model"], row["max_tokens"], row["request_bytes"], row["outcome"]) == ("tiny", 9, len(ASK), "ok")


def test_g04_large_bodies_streamed_by_mitmproxy_itself_change_no_row(server, tmp_path):
    with recording(server.url, tmp_path / "out", "--set", "stream_large_bodies=1") as recorder:
        recorder.ask(ASK, {"x-script": "good"})
        recorder.rows(1)
        over_http2(recorder.port, ASK, {"x-script": "good"})
        rows = recorder.rows(2)
    assert [(row["outcome"], len(row["chunk_ns"]), row["output_tokens"]) for row in rows] == [("ok", 5, 5)] * 2


def test_g13_as_many_rows_as_the_server_saw_requests(recorder, server):
    before, seen = len(recorder.rows()), len(server.requests)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: recorder.ask(ASK, {"x-script": "good"}), range(24)))
    assert all(b"[DONE]" in answer for answer in answers)
    rows = recorder.rows(before + 24)[before:]
    assert len(rows) == len(server.requests) - seen == 24
    assert {(row["model"], row["request_bytes"]) for row in rows} == {("tiny", len(ASK))}


def over_http2(port, body, headers):
    """One POST over TLS and HTTP/2; the response's body."""
    with http2(port) as client:
        number = client.ask(body, headers)
        return client.wait(1)[number]


def test_the_addon_loads_in_plain_mitmdump_from_a_checkout_that_is_not_installed(server, tmp_path):
    """mitmproxy puts the script's folder on sys.path; nothing may be hidden by it, everything be found."""
    run = "from mitmproxy.tools.main import mitmdump; mitmdump()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-c", run, "-s", str(ROOT / "capture" / "addon.py"), "--mode", f"reverse:{server.url}",
         "--listen-host", "127.0.0.1", "--listen-port", "0", "--set", f"capture_out={tmp_path / 'out'}",
         "--set", f"confdir={tmp_path / 'conf'}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, env=environment,
    )  # fmt: skip
    recorder = Recording(process, tmp_path / "out", 0, [])
    try:
        said = b""
        while not (match := re.search(rb"listening at \S*?:(\d+)", said)):
            more = os.read(process.stdout.fileno(), 1 << 16)
            assert more, said
            said += more
        recorder.port = int(match[1])
        assert b"[DONE]" in recorder.ask(ASK, {"x-script": "good"})
        assert [row["outcome"] for row in recorder.rows(1)] == ["ok"]
        process.terminate()
        rest = process.communicate(timeout=40)[0]
        assert b"recorded 1 rows, 0 dropped" in rest
        assert b"Traceback" not in said + rest
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert len(recorder.rows()) == 1


def test_g09_as_a_regular_proxy_it_records_requests_and_never_a_connect(server, tmp_path):
    with recording("regular", tmp_path / "out") as recorder, socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
        gone.close()
        with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
            sock.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
            sock.settimeout(2)
            with contextlib.suppress(TimeoutError):
                read_to_end(sock)
        answered = recorder.ask(ASK, {"x-script": "good"}, f"{server.url}/v1/chat/completions")
        assert b"[DONE]" in answered
        (row,) = recorder.rows(1)
        assert (row["outcome"], row["endpoint"]) == ("ok", "chat")
        assert recorder.stop() == 0
        assert len(recorder.rows()) == 1


def test_an_upstream_that_is_not_there_is_a_row(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with recording(f"http://127.0.0.1:{port}", tmp_path / "out") as recorder:
        response = recorder.ask(ASK)
        row = recorder.rows(1)[0]
    assert b" 502 " in response.splitlines()[0]
    assert (row["outcome"], row["error"], row["status"]) == ("connect_error", "connect ECONNREFUSED", None)


BEFORE_A_HEAD = [
    # what the server does → outcome, error
    ("resets", "truncated", "reset"),
    ("closes", "truncated", "closed"),
    ("half a head", "truncated", "closed"),
    ("half a head, reset", "truncated", "reset"),
    ("refuses", "connect_error", "connect ECONNREFUSED"),
    ("has no address", "connect_error", "connect -"),
    ("speaks no TLS", "connect_error", "tls handshake"),
    ("has a certificate nobody knows", "connect_error", "tls CERTIFICATE_VERIFY_FAILED"),
]
SCRIPTS |= {
    "resets": [0.05, Do.RESET],
    "closes": [0.05, Do.CLOSE],
    "half a head": [head()[:30], 0.05, Do.CLOSE],
    "half a head, reset": [head()[:30], 0.05, Do.RESET],
}


@pytest.fixture(scope="module")
def regular(tmp_path_factory):
    with recording("regular", tmp_path_factory.mktemp("regular") / "out") as running:
        yield running


@contextlib.contextmanager
def no_tls():
    """A server that answers a TLS hello in plain words."""

    def answer():
        sock, _ = listening.accept()
        with sock:
            sock.recv(1 << 16)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(("does", "outcome", "error"), BEFORE_A_HEAD, ids=[each[0] for each in BEFORE_A_HEAD])
def test_a_server_that_fails_before_any_head_is_a_row_that_says_how(regular, server, tmp_path, does, outcome, error):
    with contextlib.ExitStack() as stack:
        if does == "refuses":
            with socket.create_server(("127.0.0.1", 0)) as gone:
                url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        elif does == "has no address":
            url = "http://nowhere.invalid"
        elif does == "speaks no TLS":
            url = stack.enter_context(no_tls())
        elif does == "has a certificate nobody knows":
            url = stack.enter_context(faulty(good(1), tls=self_signed(tmp_path))).url
        else:
            url = server.url
        before = len(regular.rows())
        response = regular.ask(ASK, {"x-script": does}, f"{url}/v1/chat/completions")
        row = regular.rows(before + 1)[-1]
    assert b" 502 " in response.splitlines()[0]
    assert (row["outcome"], row["status"]) == (outcome, None)
    assert row["error"].startswith(error), "which number the resolver gives depends on the machine"
    assert row["headers_ns"] is row["first_token_ns"] is row["output_tokens"] is None
    assert row["end_ns"] > 0


def test_the_text_the_key_and_the_headers_are_in_no_file(recorder):
    reply = "completion-words-99"
    SCRIPTS["reply"] = stream(role(), delta(reply), delta("", finish="stop"), usage(9, 2), DONE)
    asked(recorder, "reply", authorization=f"Bearer {SECRET}", **{"x-session": "session-77", "x-team": "team-88"})
    asked(recorder, "404", authorization=f"Bearer {SECRET}")
    files = [path for path in recorder.out.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        data = path.read_bytes()
        for word in (PROMPT, "blood pressure", reply, SECRET, "session-77", "team-88", "no model"):
            assert word.encode() not in data, (path.name, word)


def test_sigterm_writes_every_row_and_what_was_in_flight(server, tmp_path):
    with recording(server.url, tmp_path / "out") as recorder:
        for _ in range(3):
            recorder.ask(ASK, {"x-script": "good"})
        with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
            sock.sendall(request(ASK, {"x-script": "slow"}))
            while b"t0" not in sock.recv(1 << 16):
                pass
            assert recorder.stop() == 0
            assert b"[DONE]" in read_to_end(sock), "what was in flight could end"
        rows = recorder.rows()
        assert [row["outcome"] for row in rows] == ["ok"] * 4
        assert list(recorder.out.glob("spool-*")) == []
        assert "Recorded 4 rows, none dropped" in "".join(recorder.said)
        assert "in flight: 1, with 5 s to end; a second signal ends them now" in "".join(recorder.said)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_ctrl_c_ends_what_is_in_flight_now(server, tmp_path, workers):
    with recording(server.url, tmp_path / "out", "--workers", workers) as recorder:
        with socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock:
            sock.sendall(request(ASK, {"x-script": "slower"}))
            while b"t0" not in sock.recv(1 << 16):
                pass
            recorder.process.send_signal(signal.SIGINT)
            while b"in flight: 1" not in (line := os.read(recorder.process.stderr.fileno(), 1 << 16)):
                assert line
            assert recorder.stop(signal.SIGINT) == 0
            assert b"[DONE]" not in read_to_end(sock)
        assert [row["outcome"] for row in recorder.rows()] == ["cut"]


def test_ctrl_c_with_clients_that_keep_their_connections_ends_without_a_traceback(server, tmp_path):
    """Python 3.11 tells of a connection's cancelled task as an exception of its own."""
    with (
        recording(server.url, tmp_path / "out") as recorder,
        socket.create_connection(("127.0.0.1", recorder.port), timeout=20) as sock,
    ):
        sock.sendall(request(ASK, {"x-script": "good"}, close=False))
        recorder.rows(1)
        assert recorder.stop(signal.SIGINT) == 0
    _, out, err = recorder.said
    assert out == f"Recorded 1 row, none dropped: {tmp_path / 'out'}\n"
    assert [line for line in err.split("\n") if line and not line.startswith("capture: ")] == []


def test_i01_after_kill_9_all_rows_up_to_a_second_before_are_there(server, tmp_path):
    from click.testing import CliRunner

    from traces.recover import recover

    with recording(server.url, tmp_path / "out") as recorder:
        for _ in range(8):
            recorder.ask(ASK, {"x-script": "good"})
        time.sleep(1.0)
        recorder.stop(signal.SIGKILL)
        (left,) = recorder.out.glob("spool-*.arrows")
        with left.open("ab") as file:
            file.write(b"\xff\xff\xff\xff\x40\x00\x00\x00half a batch")
        result = CliRunner().invoke(recover, [str(recorder.out)])
        assert result.exit_code == 0, result.output
        assert "Recovered 8 rows in 1 part" in result.output
        assert len(recorder.rows()) == 8
        assert not left.exists()
        assert "Nothing to recover" in CliRunner().invoke(recover, [str(recorder.out)]).output


def test_the_folder_removed_in_mid_run_is_made_again_and_no_row_is_lost(server, tmp_path):
    with recording(server.url, tmp_path / "out") as recorder:
        recorder.ask(ASK, {"x-script": "good"})
        recorder.rows(1)
        for path in recorder.out.iterdir():
            path.unlink()
        recorder.out.rmdir()
        assert b"[DONE]" in recorder.ask(ASK, {"x-script": "good"})
        assert recorder.stop() == 0
        assert len(recorder.rows()) == 2
        assert "had been removed" in "".join(recorder.said)


@pytest.fixture(scope="module")
def words_file(tmp_path_factory):
    """A tokenizer that counts words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_counts_the_answers_that_tell_no_usage(server, tmp_path, words_file):
    reply = "seldom-said-word"
    streamed = stream(role(), delta(f"one two {reply} "), delta("four five", finish="stop"), DONE)
    SCRIPTS["three chunks, five words"] = streamed
    SCRIPTS["zipped"] = [head(200, {"content-type": "text/event-stream", "content-encoding": "gzip",
                                    "transfer-encoding": "chunked"}),
                         chunk(gzip.compress(body_of(b"".join([head(), *streamed[1:]])))), LAST_CHUNK]  # fmt: skip
    SCRIPTS["whole, no usage"] = answer({"choices": [{"index": 0, "message": {"content": f"one {reply}"},
                                                      "finish_reason": "stop"}]})  # fmt: skip
    SCRIPTS["broken off"] = [head(), chunk(role()), chunk(delta("one two")), 0.05, Do.RESET]
    scripts = ["three chunks, five words", "zipped", "whole, no usage", "broken off", "good", "404"]
    with recording(server.url, tmp_path / "out", "--tokenizer", str(words_file)) as recorder:
        for number, script in enumerate(scripts):
            recorder.ask(ASK, {"x-script": script})
            recorder.rows(number + 1)
        rows = recorder.rows()
        assert recorder.stop() == 0
    counted = [(row["outcome"], row["output_tokens"], row["tokens_source"]) for row in rows]
    assert counted == [
        ("ok", 5, "tokenizer"),
        ("ok", 5, "tokenizer"),
        ("ok", 2, "tokenizer"),
        ("truncated", 2, "tokenizer"),
        ("ok", 5, "usage"),
        ("http_error", None, "tokenizer"),
    ]
    assert rows[0]["input_tokens"] == len(f"user {PROMPT}".split())
    for path in (tmp_path / "out").iterdir():
        assert reply.encode() not in path.read_bytes(), path.name


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)],
                                           check=False, capture_output=True).returncode:  # fmt: skip
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def hear(recorder, words):
    """Wait until the recorder has said some words."""
    end, text = time.monotonic() + 20, ""
    while words not in text:
        assert time.monotonic() < end, text
        if select.select([recorder.process.stderr], [], [], 0.5)[0]:
            text += os.read(recorder.process.stderr.fileno(), 1 << 16).decode()
    recorder.said.append(text)
    return text


def test_while_the_disk_is_full_traffic_passes_and_what_is_lost_is_counted_and_said(server, small_disk):
    wide = json.dumps({"model": "tiny", "stream": True, "prompt": "x" * 400_000}).encode()  # 12 KiB of hashes in a row
    with recording(server.url, small_disk / "out") as recorder:
        recorder.ask(ASK, {"x-script": "good"})
        recorder.rows(1)
        with (small_disk / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(b"x" * 4096)
        answers = [recorder.ask(wide, {"x-script": "good"}) for _ in range(3)]
        said = hear(recorder, "No space left on device; rows are dropped, traffic passes on")
        answers.append(recorder.ask(wide, {"x-script": "good"}))
        assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers)
        time.sleep(1.2)  # so that the last of them has met the full disk, too
        assert len(recorder.rows()) == 1
        (small_disk / "fill").unlink()
        recorder.ask(wide, {"x-script": "good"})
        said = hear(recorder, "recording again; 4 rows were dropped")
        assert said.count("No space left") <= 1, "said once, not for every row"
        assert len(recorder.rows(2)) == 2
        assert recorder.stop() == 0
        assert [row["outcome"] for row in recorder.rows()] == ["ok", "ok"]
    assert "Recorded 2 rows, 4 dropped" in "".join(recorder.said)
