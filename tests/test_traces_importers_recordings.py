"""Recorded exchanges with LLMs become rows: lengths and outcomes from the bodies, times only where they were kept."""

from __future__ import annotations

import gzip
import json

import pytest
from mitmproxy import http
from mitmproxy import io as mitm_io
from mitmproxy.test import tflow

from traces.errors import BadFile, BadRow
from traces.importers import gor
from traces.importers.intake import Intake, Options
from traces.importers.load import batches, import_file, table

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "SECRET"}], "stream": True}).encode()
STREAM = b"".join(
    b"data: " + json.dumps({"object": "chat.completion.chunk", **event}).encode() + b"\n\n"
    for event in (
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": "SECRET"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
    )
)
DONE = b"data: [DONE]\n\n"
T = 1_700_000_000.5


def flow(body=STREAM + DONE, status=200, error=None, **headers):
    made = tflow.tflow(resp=body is not None, err=error is not None)
    made.request = http.Request.make(
        "POST", "http://llm/v1/chat/completions", CHAT, {"x-tenant": "risk", "content-type": "application/json"}
    )
    made.request.timestamp_start, made.request.timestamp_end = T, T + 0.25
    if body is not None:
        made.response = http.Response.make(status, body, {"content-type": "text/event-stream", **headers})
        made.response.timestamp_start, made.response.timestamp_end = T + 0.5, T + 2
    if error is not None:
        made.error.msg, made.error.timestamp = error, T + 1.25
    return made


def dump(tmp_path, *flows):
    path = tmp_path / "flows.mitm"
    with path.open("wb") as file:
        writer = mitm_io.FlowWriter(file)
        for one in flows:
            writer.add(one)
    return path


def test_a_flow_becomes_a_row_with_the_times_a_dump_keeps(tmp_path):
    (row,) = table("mitm", dump(tmp_path, flow())).to_pylist()
    wanted = {
        "tenant": "risk",
        "arrival_ns": 1_700_000_000_750_000_000,  # when the whole request had come
        "model": "m",
        "endpoint": "chat",
        "stream": True,
        "input_tokens": 9,
        "output_tokens": 3,
        "headers_ns": 250_000_000,
        "end_ns": 1_750_000_000,
        "outcome": "ok",
        "finish_reason": "stop",
        "error": None,
        "request_bytes": len(CHAT),
        "response_bytes": len(STREAM + DONE),
    }
    assert {name: row[name] for name in wanted} == wanted
    assert not {"first_token_ns", "last_token_ns", "chunk_ns"} & set(row)  # when the pieces came is lost
    assert "SECRET" not in str(row)


def test_a_body_on_the_wire_may_be_compressed(tmp_path):
    packed = flow()
    packed.response.headers["content-encoding"] = "gzip"
    packed.response.raw_content = gzip.compress(STREAM + DONE)
    (row,) = table("mitm", dump(tmp_path, packed)).to_pylist()
    assert (row["output_tokens"], row["error"]) == (3, None)
    assert row["response_bytes"] == len(gzip.compress(STREAM + DONE))


@pytest.mark.parametrize(
    ("made", "outcome", "error"),
    [
        (flow(error="Client disconnected."), "ok", None),  # it had everything
        (flow(STREAM[:300], error="Client disconnected."), "client_abort", None),
        (flow(b"data: {}\n\n", error="server closed connection"), "truncated", "closed"),
        (flow(None, error="connection refused"), "connect_error", "connect"),
        (flow(b"{}", status=429), "http_error", "http 429"),
        (flow(DONE), "no_token", None),
    ],
)
def test_a_flow_that_failed_says_how(tmp_path, made, outcome, error):
    (row,) = table("mitm", dump(tmp_path, made)).to_pylist()
    assert (row["outcome"], row["error"]) == (outcome, error)


def test_connects_and_other_protocols_are_left_out_and_counted(tmp_path):
    tunnel = flow()
    tunnel.request.method = "CONNECT"
    path = dump(tmp_path, tunnel, tflow.tdnsflow(), flow())
    intake = Intake(str(path))
    assert sum(batch.num_rows for batch in batches("mitm", path, intake)) == 1
    assert "2 flows that are no HTTP request left out" in intake.summary()


def test_a_flow_without_a_time_and_a_dump_cut_short_are_bad_rows(tmp_path):
    timeless = flow()
    timeless.request.timestamp_start = timeless.request.timestamp_end = 0
    with pytest.raises(BadRow, match="row 2, column timestamp_start: is missing"):
        table("mitm", dump(tmp_path, flow(), timeless))
    path = dump(tmp_path, flow(), flow())
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(BadRow, match="row 2: the flow is damaged or cut short"):
        table("mitm", path)
    assert table("mitm", path, Options(bad_rows="skip")).num_rows == 1
    path.write_bytes(b"12:garbage garb,")
    with pytest.raises(BadFile, match="not a mitmproxy dump"):
        table("mitm", path)


def message(body=CHAT):
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n" + body


def answer(body=STREAM + DONE, head=b""):
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + head + b"\r\n" + body


def gor_file(tmp_path, *records):
    path = tmp_path / "in.gor"
    path.write_bytes(b"\n\xf0\x9f\x90\xb5\xf0\x9f\x99\x88\xf0\x9f\x99\x89\n".join([*records, b""]))
    return path


def test_gor_responses_find_their_requests_whatever_comes_between(tmp_path):
    chunked = (
        b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (STREAM[:50], STREAM[50:], DONE)) + b"0\r\n\r\n"
    )
    path = gor_file(
        tmp_path,
        b"1 aa 1000\n" + message(),
        b"1 bb 2000\n" + message(),
        b"3 aa 2500 7\n" + answer(b""),  # the replayed answer is not read
        b"2 bb 3000 900\n" + answer(chunked, b"Transfer-Encoding: chunked\r\n"),
        b"2 aa 5000\n" + answer(),
        b"2 cc 6000\n" + answer(),
        b"1 dd 7000\n" + message(),
    )
    intake = Intake(str(path))
    rows = [row for batch in batches("gor", path, intake) for row in batch.to_pylist()]
    assert [(row["request_id"], row["end_ns"], row["output_tokens"], row["outcome"]) for row in rows] == [
        ("aa", 4000, 3, "ok"),
        ("bb", 900, 3, "ok"),
        ("dd", None, None, None),
    ]
    assert "1 responses without their request left out" in intake.summary()
    assert intake.out_of_order == 0


def test_gor_requests_without_responses_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(gor, "_WAITING", 3)
    path = gor_file(tmp_path, *(b"1 %d %d\n" % (number, 1000 + number) + message() for number in range(10)))
    found = gor._paired(gor.Source(path), Intake("x"))
    assert [request.id for request, _ in found] == [str(number) for number in range(10)]


def test_a_har_body_is_decoded_already_whatever_its_header_says(tmp_path):
    entry = {
        "startedDateTime": "2024-05-10T00:00:00Z",
        "time": 50,
        "request": {"url": "http://llm/v1/chat/completions", "postData": {"text": CHAT.decode()}},
        "response": {
            "status": 200,
            "headers": [
                {"name": "Content-Encoding", "value": "gzip"},
                {"name": "Content-Type", "value": "text/event-stream"},
            ],
            "content": {"text": (STREAM + DONE).decode()},
        },
    }
    path = tmp_path / "in.har"
    path.write_text(json.dumps({"log": {"entries": [entry]}}))
    (row,) = table("har", path).to_pylist()
    assert (row["output_tokens"], row["outcome"], row["error"]) == (3, "ok", None)
    assert (row["headers_ns"], row["end_ns"]) == (None, 50_000_000)


def test_litellm_says_stream_only_where_the_first_token_came_before_the_end(tmp_path):
    row = {
        "startTime": "2024-05-10T00:00:00Z",
        "endTime": "2024-05-10T00:00:02Z",
        "completionStartTime": "2024-05-10T00:00:02Z",
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "call_type": "acompletion",
    }
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"data": [row], "total": 1}))
    (found,) = table("litellm", path).to_pylist()
    assert (found["stream"], found["first_token_ns"], found["end_ns"]) == (None, None, 2 * 10**9)


@pytest.mark.parametrize(
    ("call_type", "endpoint"),
    [
        ("acompletion", "chat"),
        ("atext_completion", "completions"),
        ("aresponses", "responses"),
        ("aembedding", "embeddings"),
        ("anthropic_messages", "messages"),
        ("arerank", "rerank"),
        ("aimage_generation", "other"),
        ("", None),
        (None, None),
    ],
)
def test_litellm_call_types_are_endpoints(tmp_path, call_type, endpoint):
    row = {"startTime": "2024-05-10T00:00:00Z", "prompt_tokens": 1, "completion_tokens": 1, "call_type": call_type}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(row))
    assert table("litellm", path)["endpoint"].to_pylist() == [endpoint]


def test_requests_to_no_llm_are_kept_and_counted(tmp_path):
    shop = b"GET /cart HTTP/1.1\r\nHost: x\r\n\r\n"
    intake = import_file(
        "gor", gor_file(tmp_path, b"1 a 5\n" + shop, b"1 b 6\n" + message()), tmp_path / "out.parquet", Options()
    )
    assert intake.summary()[:2] == ["2 rows", "1 of them to no LLM endpoint"]


def test_a_wrong_import_leaves_no_file(tmp_path):
    with pytest.raises(BadFile):
        import_file("har", gor_file(tmp_path, b"1 a 5\n" + message()), tmp_path / "out.parquet", Options())
    assert [item.name for item in tmp_path.iterdir()] == ["in.gor"]
