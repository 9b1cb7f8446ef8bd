"""The server's token counts beside ours: what is alike, what is explained, and what is worth a word."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import msgspec
import pytest

from replay import server_tokens, session
from replay.engine import child
from replay.options import OfferOptions, SendOptions, make_offer
from replay.preflight import Ask, parse_target
from replay.server_tokens import Tokens, reconciled, told
from tests.faulty_server import faulty, good
from traces import parquet
from traces.record import Metadata, table

MS = 1_000_000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('vllm:prompt_tokens_total{engine="0"} 35364.0\nvllm:generation_tokens_total{engine="0"} 12.0\n', (35364, 12)),
        ('sglang:prompt_tokens_total{m="}"} 5 1700000000\nsglang:generation_tokens_total{m="a"} 1e3\n', (5, 1000)),
        ("trtllm_prompt_tokens_total 5\ntrtllm_generation_tokens_total 6\n", (5, 6)),
        ("llamacpp:prompt_tokens_total 5\nllamacpp:tokens_predicted_total 6\n", (5, 6)),
        ("vllm:prompt_tokens_total{e=0} 5\nvllm:prompt_tokens_total{e=1} 6\nvllm:generation_tokens_total 1\n", (11, 1)),
        ("vllm:prompt_tokens_total 5\n", None),
        ("vllm:prompt_tokens_total 5\nvllm:generation_tokens_total NaN\n", None),
        ("vllm:prompt_tokens_total 5\nvllm:generation_tokens_total five\n", None),
        ('vllm:prompt_tokens_by_source_total{source="x"} 5\nvllm:generation_tokens_created 6\n', None),
        ("<html>404</html>", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_counters_of_each_engine_are_read_and_summed(text, found):
    assert told(text) == (found and Tokens(*found))


@pytest.mark.data
def test_the_counters_of_a_real_vllm_are_read(data):
    assert told(data("vllm-cpu", "recordings", "metrics.txt").read_text()).prompt == 35364


def rows(*changes, n=10):
    """Requests of 100 tokens in and 20 out, all answered but for what is changed in the first ones."""
    usual = {"sent_ns": 0, "outcome": "ok", "tokens_source": "usage", "input_tokens": 100, "output_tokens": 20, "n": 1}
    usual |= {"attempts": 1, "planned_input_tokens": 100, "planned_output_tokens": 20}
    found = [usual | (changes[i] if i < len(changes) else {}) for i in range(n)]
    return table({"arrival_ns": [0] * n} | {name: [row[name] for row in found] for name in usual}, Metadata())


ABORTED = {"outcome": "client_abort", "input_tokens": None, "output_tokens": 5, "tokens_source": "chunks"}
REFUSED = {"outcome": "http_error", "input_tokens": None, "output_tokens": None, "tokens_source": None}
UNSENT = REFUSED | {"outcome": "unsent", "sent_ns": None}


@pytest.mark.parametrize(
    ("changes", "server", "said"),
    [
        ([], (1000, 200), ""),
        ([], (1009, 202), ""),
        ([], (1100, 200), "1,100 prompt tokens during the run, the client 1,000 (+10.0%): other traffic"),
        ([], (1000, 300), "300 generation tokens during the run, the client 200 (+50.0%): other traffic"),
        ([], (500, 200), "(-50.0%): several servers behind one address"),
        ([], (-900, 200), "went back during the run"),
        ([ABORTED] * 5, (1000, 125), ""),  # D11: prompts read, answers not wanted any more
        ([ABORTED] * 5, (500, 125), ""),
        ([ABORTED] * 5, (1000, 200), ""),
        ([ABORTED] * 5, (1100, 125), "other traffic"),
        ([REFUSED], (900, 180), ""),
        ([UNSENT], (1000, 180), "1,000 prompt tokens during the run, the client 900"),
        ([{"attempts": 3}], (1200, 240), ""),
        ([{"n": 4, "output_tokens": 80}], (1300, 260), ""),
        ([{"tokens_source": "chunks", "output_tokens": 12}], (1000, 200), ""),
    ],
)
def test_a_difference_is_said_unless_the_client_cannot_have_seen_it(changes, server, said):
    found = reconciled(Tokens(7, 7), Tokens(7 + server[0], 7 + server[1]), rows(*changes))
    assert found.server == Tokens(*server)
    assert (said in " ".join(found.notes)) if said else found.notes == (), found


def test_a_run_without_any_row_of_ours_names_the_others_alone():
    assert "the client 0 (none of ours)" in reconciled(Tokens(0, 0), Tokens(9, 9), rows(n=0)).notes[0]


def test_a_server_that_tells_nothing_is_left_alone():
    assert reconciled(None, Tokens(1, 1), rows()) is None
    assert reconciled(Tokens(1, 1), None, rows()) is None
    with faulty(lambda _: good(3)) as server:  # answers everything with a stream
        assert server_tokens.asked(Ask(parse_target(server.url), timeout_s=5)) is None
    assert server_tokens.asked(Ask(parse_target("http://127.0.0.1:9"))) is None


@pytest.fixture(scope="module")
def engine():
    with child.running("--policy", "priority") as url:
        yield url


def play(tmp_path, url, **columns):
    """A run of six requests on the embedded engine."""
    columns = {
        "arrival_ns": [i * 20 * MS for i in range(6)],
        "input_tokens": [60] * 6,
        "output_tokens": [8] * 6,
    } | columns
    columns["endpoint"] = ["completions", "chat"] * 3
    trace, out = tmp_path / "trace.parquet", tmp_path / "run"
    parquet.write(table(columns, Metadata(source="test")), trace)
    offer = OfferOptions(trace=str(trace))
    send = SendOptions(target=url, workers=1, max_lateness_ns=20_000 * MS)
    ran = session.one(make_offer(offer), offer, send, parse_target(url), out)
    return ran, json.loads((out / "run.json").read_text())


def test_both_counts_of_a_run_stand_in_run_json_and_agree(engine, tmp_path):
    ran, document = play(tmp_path, engine)
    rows = ran.outcomes.to_pylist()
    counted = {"prompt": sum(row["input_tokens"] for row in rows), "generation": 48}
    nothing = {"prompt": 0, "generation": 0}
    assert document["server_tokens"] == {"server": counted, "client": counted, "unseen": nothing, "notes": []}
    assert not [text for text in ran.summary.warnings if "the server counted" in text]


def test_other_traffic_on_the_server_is_said_in_the_runs_notes(engine, tmp_path, monkeypatch):
    run = session.running.run

    def beside(*words, **more):
        host = http.client.HTTPConnection(urlsplit(engine).netloc)
        body = {"model": "llama3-8b", "prompt": [20_000] * 100, "max_tokens": 40}
        host.request("GET", "/v1/models")
        body["model"] = json.loads(host.getresponse().read())["data"][0]["id"]
        host.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert host.getresponse().read()
        host.close()
        return run(*words, **more)

    monkeypatch.setattr(session.running, "run", beside)
    ran, document = play(tmp_path, engine)
    found = document["server_tokens"]
    assert found["server"]["prompt"] == found["client"]["prompt"] + 100
    assert found["server"]["generation"] == 48 + 40
    assert [text for text in ran.summary.warnings if text in found["notes"]] == found["notes"]
    assert (
        "the server counted 88 generation tokens during the run, the client 48 (+83.3%): other traffic"
        in found["notes"][1]
    )


def test_d11_clients_that_gave_up_explain_what_the_server_counted_more(engine, tmp_path):
    """Five of six go after 100 ms, in the middle of an answer of four seconds, whose prompt the server has read."""
    columns = {"outcome": ["client_abort"] * 5 + ["ok"], "end_ns": [100 * MS] * 6, "output_tokens": [400] * 5 + [8]}
    ran, document = play(tmp_path, engine, **columns)
    assert [row["outcome"] for row in ran.outcomes.to_pylist()].count("client_abort") == 5
    found = document["server_tokens"]
    assert found["server"]["generation"] < found["client"]["generation"] + found["unseen"]["generation"]
    assert found["unseen"]["prompt"] > 0
    assert found["notes"] == []


def test_a_run_that_lost_a_worker_blames_nobody_for_what_that_worker_had_counted(engine, tmp_path, monkeypatch):
    run = session.running.run

    def losing(*words, **more):
        return msgspec.structs.replace(run(*words, **more), lost=("worker 1 died",))

    monkeypatch.setattr(session.running, "run", losing)
    _, document = play(tmp_path, engine)
    assert document["server_tokens"] is None
