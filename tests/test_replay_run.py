"""Whole runs through real worker processes against a server that does as it is told: nothing is lost, nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from replay import session
from replay.options import OfferOptions, SendOptions, make_offer
from replay.run import Crew
from replay.target import Refused
from tests.faulty_server import Do, answer, faulty, good, self_signed, stream, text, tokens
from traces import parquet
from traces.record import Metadata, table

MS = 1_000_000


def write_trace(folder, at_ms, **columns):
    rows = len(at_ms)
    columns["arrival_ns"] = [int(ms * MS) for ms in at_ms]
    columns.setdefault("input_tokens", [8] * rows)
    columns.setdefault("output_tokens", [3] * rows)
    columns.setdefault("endpoint", ["chat"] * rows)
    path = folder / "trace.parquet"
    parquet.write(table(columns, Metadata(source="test")), path)
    return str(path)


def play(folder, server, trace, *, offer=None, during=lambda crew: None, **send):
    """One run of a trace against a server; returns what `replay` would have judged."""
    offer = OfferOptions(trace=trace, **(offer or {}))
    send.setdefault("workers", 1)
    send.setdefault("max_lateness_ns", 20_000 * MS)  # the machine of a test may be busy with others
    send = SendOptions(target=server.url, **send)
    offered = make_offer(offer)
    out = folder / "run"
    out.mkdir()
    with Crew(send.workers) as crew, session.server(send, session.EngineOptions()) as target:
        ready = session.prepare(offered, send, target)
        timer = threading.Timer(0.0, lambda: during(crew))
        timer.start()
        try:
            return session.perform(offered, send, ready, out, crew, asked=offer)
        finally:
            timer.join()


def script(received):
    """Three tokens 1 ms apart; the sizing request of the preflight is answered with usage."""
    return good(3)


def outcomes(ran):
    return ran.outcomes.to_pylist()


def test_a_run_leaves_every_row_in_order_of_sending_with_plan_and_deed(tmp_path):
    trace = write_trace(
        tmp_path,
        [0, 40, 80, 120],
        tenant=["risk", "summary", "risk", "summary"],
        priority=[0, 1, 0, 1],
        request_id=["a", "b", "c", "d"],
    )
    with faulty(script) as server:
        ran = play(tmp_path, server, trace, workers=2, offer={"sla": ("risk: ttft_p95 < 800ms",)})
    rows = outcomes(ran)
    assert [row["request_id"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["tenant"] for row in rows] == ["risk", "summary", "risk", "summary"]
    assert [row["due_ns"] for row in rows] == [0, 40 * MS, 80 * MS, 120 * MS]
    assert [row["worker"] for row in rows] == [0, 1, 0, 1]
    assert {row["outcome"] for row in rows} == {"ok"}
    assert {row["planned_output_tokens"] for row in rows} == {3}
    assert all(row["sent_ns"] >= row["due_ns"] for row in rows)
    assert all(row["arrival_ns"] == row["sent_ns"] for row in rows)
    bodies = [request.json for request in server.requests if request.json.get("stream")]
    assert [body["priority"] for body in bodies] == [0, 1, 0, 1]
    assert not (tmp_path / "run" / ".work").exists()
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["summary"]["planned"] == 4
    assert document["summary"]["digest"] == document["plan"]["digest"]


def test_three_hundred_arrivals_at_once_are_three_hundred_in_flight_b06(tmp_path):
    trace = write_trace(tmp_path, [0] * 300)
    gate = threading.Event()

    def when_all_are_there(received):
        if received.json.get("stream"):
            if sum(1 for request in server.requests if request.json.get("stream")) == 300:
                gate.set()
            gate.wait(20)
        return good(3)

    with faulty(when_all_are_there) as server:
        ran = play(tmp_path, server, trace)
    assert server.most_open >= 300
    assert ran.summary.ok == 300


def test_a_failed_request_is_a_row_and_fails_the_run_d05_d06(tmp_path):
    trace = write_trace(tmp_path, [0, 5, 10, 15])
    with faulty(lambda received: answer({"error": {"message": "no"}}, 503)) as server:
        ran = play(tmp_path, server, trace)
    assert ran.summary.failed == {"http_error": 4}
    assert ran.summary.ok == 0
    assert ran.summary.verdict == "fail"
    assert {row["error"] for row in outcomes(ran)} == {"http 503"}


def test_a_stream_that_is_reset_is_truncated(tmp_path):
    trace = write_trace(tmp_path, [0])
    with faulty(lambda r: [*stream(tokens(2), end=False), Do.RESET] if r.json.get("stream") else good(3)) as server:
        ran = play(tmp_path, server, trace)
    (row,) = outcomes(ran)
    assert (row["outcome"], row["error"].split()[0]) == ("truncated", "reset")
    assert row["first_token_ns"] is not None


def test_a_worker_that_dies_makes_the_run_invalid_and_loses_no_other_row(tmp_path):
    trace = write_trace(tmp_path, range(0, 1600, 20))
    with faulty(script) as server:

        def murder(crew):
            server.wait_for(lambda it: len(it.requests) > 20, 20)
            os.kill(crew.pids[1], signal.SIGKILL)

        ran = play(tmp_path, server, trace, workers=2, during=murder)
    rows = outcomes(ran)
    assert len(rows) == 80
    assert [row["outcome"] for row in rows if row["worker"] == 0] == ["ok"] * 40
    assert {row["outcome"] for row in rows if row["worker"] != 0} <= {"ok", "unsent"}
    assert ran.summary.unsent > 0
    assert ran.summary.verdict == "invalid"
    assert any("worker 1" in reason and "signal 9" in reason for reason in ran.summary.reasons)


def test_a_linked_session_waits_for_its_answers(tmp_path):
    trace = write_trace(tmp_path, [0, 10, 20], session_id=["s"] * 3, turn=[0, 1, 2], think_ns=[None, 50 * MS, 50 * MS])
    with faulty(lambda received: good(3, first_s=0.1) if received.json.get("stream") else good(3)) as server:
        ran = play(tmp_path, server, trace)
    rows = outcomes(ran)
    for before, after in pairwise(rows):
        assert after["due_ns"] == pytest.approx(before["sent_ns"] + before["end_ns"] + 50 * MS, abs=1000)


def test_a_cap_holds_across_workers(tmp_path):
    trace = write_trace(tmp_path, [0] * 8, tenant=["summary"] * 8)
    with faulty(lambda received: good(3, first_s=0.05) if received.json.get("stream") else good(3)) as server:
        ran = play(tmp_path, server, trace, workers=2, offer={"cap": ("summary=2",)})
    rows = outcomes(ran)
    changes = sorted([(row["sent_ns"], 1) for row in rows] + [(row["sent_ns"] + row["end_ns"], -1) for row in rows])
    assert np.cumsum([change for _, change in changes]).max() == 2
    assert {row["due_ns"] for row in rows} == {0}
    assert max(row["released_ns"] for row in rows) > 100 * MS


def test_no_key_and_no_text_reach_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-test")
    trace = write_trace(tmp_path, [0, 30], input_tokens=[200, 200])
    with faulty(script) as server:
        ran = play(tmp_path, server, trace, header=("x-hidden: value-of-the-test",))
    sent = [request for request in server.requests if request.json.get("stream")]
    assert sent[0].headers["authorization"] == "Bearer sk-secret-of-the-test"
    words = sent[0].json["messages"][0]["content"].split()
    needles = [b"sk-secret", b"value-of-the-test", " ".join(words[:3]).encode()]
    for file in ran.folder.iterdir():
        data = file.read_bytes()
        assert not [needle for needle in needles if needle in data], file.name


def test_two_runs_share_no_prefix_and_runs_that_ask_for_it_do(tmp_path):
    trace = write_trace(tmp_path, [0], input_tokens=[64])
    found = []
    with faulty(script) as server:
        for name, keep in (("a", False), ("b", False), ("c", True), ("d", True)):
            (tmp_path / name).mkdir()
            play(tmp_path / name, server, trace, keep_prefix_cache=keep)
        found = [r.json["messages"][0]["content"] for r in server.requests if r.json.get("stream")]
    assert found[0][:40] != found[1][:40]
    assert found[2] == found[3]


def test_the_measured_window_leaves_the_warm_up_out(tmp_path):
    trace = write_trace(tmp_path, [0, 20, 100, 120])
    with faulty(script) as server:
        ran = play(tmp_path, server, trace, offer={"warmup_ns": 50 * MS})
    assert (ran.summary.planned, ran.summary.warmup) == (2, 2)
    assert [row["warmup"] for row in outcomes(ran)] == [True, True, False, False]


def test_a_closed_loop_keeps_its_users_busy_and_says_so(tmp_path):
    trace = write_trace(tmp_path, [0] * 10)
    with faulty(lambda received: good(3, first_s=0.02) if received.json.get("stream") else good(3)) as server:
        ran = play(tmp_path, server, trace, concurrency=2)
    assert ran.summary.closed_loop
    assert ran.summary.ok == 10
    assert {row["due_ns"] for row in outcomes(ran)} == {None}


@pytest.mark.parametrize(
    ("steps", "send", "outcome"),
    [
        ([Do.HOLD], {"timeout_idle_ns": 150 * MS}, "timeout_idle"),
        ([*stream(tokens(1), end=False), Do.HOLD], {"timeout_ns": 200 * MS}, "timeout_total"),
        ([*stream(tokens(1), end=False), Do.HOLD], {"drain_ns": 200 * MS}, "cut"),
    ],
)
def test_nothing_waits_for_ever(tmp_path, steps, send, outcome):
    trace = write_trace(tmp_path, [0])
    began = time.monotonic()
    with faulty(lambda received: steps if received.json.get("stream") else good(3)) as server:
        ran = play(tmp_path, server, trace, **send)
    assert [row["outcome"] for row in outcomes(ran)] == [outcome]
    assert time.monotonic() - began < 15


def test_completions_text_is_measured_too(tmp_path):
    trace = write_trace(tmp_path, [0], endpoint=["completions"])

    def completions(received):
        if not received.json.get("stream"):
            return answer({"usage": {"prompt_tokens": len(received.json["prompt"].split())}, "choices": []})
        return stream(text("a"), text("b", finish="length"))

    with faulty(completions) as server:
        ran = play(tmp_path, server, trace)
    assert [row["outcome"] for row in outcomes(ran)] == ["ok"]


@pytest.mark.parametrize("transport", ["protocol", "aiohttp"])
def test_tls_and_a_base_path_by_either_transport(tmp_path, transport):
    trace = write_trace(tmp_path, [0, 10])
    certificate = self_signed(tmp_path)
    gets = {"/team/v1/models": answer({"data": [{"id": "m"}]})}
    with faulty(script, tls=certificate, gets=gets) as server:
        server.url += "/team/v1"
        ran = play(tmp_path, server, trace, ca_file=str(certificate[0]), transport=transport)
    assert ran.summary.ok == 2
    assert {request.path for request in server.requests} == {"/team/tokenize", "/team/v1/chat/completions"}
    assert ran.document["transport"] == [transport]
    assert all(row["connect_ns"] is None or row["connect_ns"] > 0 for row in outcomes(ran))


def test_an_unknown_certificate_is_refused_in_one_line(tmp_path):
    trace = write_trace(tmp_path, [0])
    with faulty(script, tls=self_signed(tmp_path)) as server, pytest.raises(Refused, match=r"TLS failed.*--ca-file"):
        play(tmp_path, server, trace)


def test_an_answer_at_once_has_no_first_token(tmp_path):
    trace = write_trace(tmp_path, [0], stream=[False])
    whole = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a b c"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 3},
    }
    with faulty(lambda received: answer(whole)) as server:
        ran = play(tmp_path, server, trace)
    (row,) = outcomes(ran)
    assert (row["outcome"], row["first_token_ns"], row["output_tokens"]) == ("ok", None, 3)


def test_a_client_that_left_leaves_again_at_its_point(tmp_path):
    trace = write_trace(tmp_path, [0, 10], outcome=["client_abort", "ok"], end_ns=[100 * MS, 100 * MS])
    slow = [*stream(tokens(1), end=False), Do.READ_EOF]
    with faulty(lambda r: slow if r.json.get("max_tokens", 0) > 3 else good(3)) as server:
        ran = play(tmp_path, server, trace)
    gone, stayed = outcomes(ran)
    assert (gone["outcome"], stayed["outcome"]) == ("client_abort", "ok")
    assert 100 * MS <= gone["end_ns"] < 2000 * MS
    assert (ran.summary.aborted, ran.summary.ok, sum(ran.summary.failed.values())) == (1, 1, 0)


def test_a_client_that_retries_loads_the_server_twice_and_says_so(tmp_path):
    trace = write_trace(tmp_path, [0, 10])
    seen = []

    def busy_once(received):
        if not received.json.get("stream"):
            return good(3)
        seen.append(received.headers["x-request-id"])
        return answer({"error": {}}, 429, {"Retry-After": "0"}) if seen.count(seen[-1]) == 1 else good(3)

    with faulty(busy_once) as server:
        ran = play(tmp_path, server, trace, retry=1)
    assert ran.summary.ok == 2
    assert [row["attempts"] for row in outcomes(ran)] == [2, 2]
    assert any("2 further attempts" in warning for warning in ran.summary.warnings)


def test_a_trace_without_known_models_goes_to_the_only_one_and_that_is_said(tmp_path):
    trace = write_trace(tmp_path, [0], model=["gpt-4"])
    with faulty(script) as server:
        ran = play(tmp_path, server, trace)
    assert {request.json["model"] for request in server.requests} == {ran.document["model"]}
    assert any("gpt-4" in note for note in ran.document["notes"])
