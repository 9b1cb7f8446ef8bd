"""Bodies: exact lengths, real shared prefixes, nothing shared by accident."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import plan as planning
from replay.prompts import Bodies, Wiring
from replay.vocabulary import Vocabulary
from traces.record import Metadata, table

VOCABULARY = Vocabulary(
    ids=tuple(range(100, 1100)), words=tuple(f"w{index}" for index in range(300)), source="tokenizer"
)


def bodies(wiring=None, **columns):
    rows = len(columns["input_tokens"])
    columns.setdefault("arrival_ns", list(range(rows)))
    columns.setdefault("output_tokens", [5] * rows)
    made = planning.build(table(columns, Metadata()))
    return Bodies(made, wiring or Wiring(model="m", salt=7), VOCABULARY)


def sent(made, row):
    return json.loads(made.request(row).body)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(0, 2**63))
def test_an_id_prompt_has_exactly_the_planned_length(lengths, salt):
    made = bodies(Wiring(model="m", salt=salt), input_tokens=lengths, endpoint=["completions"] * len(lengths))
    for row, length in enumerate(lengths):
        prompt = sent(made, row)["prompt"]
        assert len(prompt) == length
        assert set(prompt) <= set(VOCABULARY.ids)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 30))
def test_a_text_prompt_is_the_planned_length_less_what_the_template_adds(length, overhead):
    wiring = Wiring(model="m", overhead={"chat": overhead}, salt=3)
    made = bodies(wiring, input_tokens=[length], endpoint=["chat"])
    text = sent(made, 0)["messages"][0]["content"]
    assert text.startswith(" ")
    assert len(text.split()) == max(1, length - overhead)


def test_words_of_several_tokens_are_corrected_by_their_mean_cost():
    made = bodies(input_tokens=[900], endpoint=["chat"])
    made.vocabulary = Vocabulary(words=VOCABULARY.words, tokens_per_word=3.0, source="usage")
    assert len(sent(made, 0)["messages"][0]["content"].split()) == 300


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_no_two_requests_share_their_first_block_by_accident(endpoint):
    made = bodies(input_tokens=[64] * 2000, endpoint=[endpoint] * 2000)

    def first(row):
        body = sent(made, row)
        return tuple(body["prompt"][:16]) if endpoint == "completions" else body["messages"][0]["content"][:64]

    assert len({first(row) for row in range(2000)}) == 2000


def test_equal_block_hashes_are_equal_tokens_and_only_they():
    made = bodies(
        input_tokens=[40, 48, 40, 33],
        block_size=[16] * 4,
        block_hashes=[[1, 2, 3], [1, 2, 4], [9, 2, 3], [1, 2]],
    )
    one, two, three, four = (sent(made, row)["prompt"] for row in range(4))
    assert one[:32] == two[:32] == four[:32]
    assert one[32:] != two[32:40]
    assert one[:16] != three[:16]
    assert one[32:40] == three[32:40], "a block's tokens depend on its hash alone"
    assert [len(prompt) for prompt in (one, two, three, four)] == [40, 48, 40, 33]


def test_what_no_block_covers_is_private():
    made = bodies(input_tokens=[64, 64], block_size=[16] * 2, block_hashes=[[1], [1]])
    one, two = (sent(made, row)["prompt"] for row in range(2))
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]


def test_another_run_shares_no_prefix_unless_the_salt_is_kept():
    first, again, other = (
        sent(bodies(Wiring(model="m", salt=salt), input_tokens=[64], block_size=[16], block_hashes=[[1, 2, 3, 4]]), 0)
        for salt in (7, 7, 8)
    )
    assert first == again
    assert first["prompt"][:16] != other["prompt"][:16]


def test_output_length_is_forced_where_the_dialect_allows():
    asked = {"input_tokens": [9], "output_tokens": [77], "endpoint": ["chat"]}
    assert sent(bodies(**asked), 0) | {"messages": None} == {
        "model": "m",
        "messages": None,
        "max_tokens": 77,
        "ignore_eos": True,
        "min_tokens": 77,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    openai = sent(bodies(Wiring(model="m", dialect="openai"), **asked), 0)
    assert openai["max_completion_tokens"] == 77
    assert "ignore_eos" not in openai


def test_n_answers_share_the_planned_output():
    body = sent(bodies(input_tokens=[9], output_tokens=[10], n=[3]), 0)
    assert (body["n"], body["max_tokens"]) == (3, 4)


def test_answers_at_once_ask_for_no_stream():
    body = sent(bodies(input_tokens=[9], stream=[False]), 0)
    assert body["stream"] is False
    assert "stream_options" not in body


@pytest.mark.parametrize(
    ("endpoint", "dialect", "path", "keys"),
    [
        ("chat", "vllm", "/base/v1/chat/completions", {"messages", "max_tokens"}),
        ("completions", "vllm", "/base/v1/completions", {"prompt", "max_tokens"}),
        ("responses", "vllm", "/base/v1/responses", {"input", "max_output_tokens"}),
        ("messages", "vllm", "/base/v1/messages", {"messages", "max_tokens"}),
        ("generate", "sglang", "/base/generate", {"input_ids", "sampling_params"}),
        ("generate", "tgi", "/base/generate_stream", {"inputs", "parameters"}),
    ],
)
def test_every_endpoint_has_its_path_and_fields(endpoint, dialect, path, keys):
    made = bodies(Wiring(model="m", dialect=dialect, base_path="/base"), input_tokens=[9], endpoint=[endpoint])
    assert made.request(0).path == path
    assert keys <= set(sent(made, 0))


def test_priority_tenant_and_keys_are_where_the_wiring_says():
    wiring = Wiring(
        model="m",
        priority={0: ({"priority": 0}, {}), 3: ({"nvext": {"agent_hints": {"priority": -3}}}, {"x-tier": "low"})},
        headers={"authorization": "Bearer k"},
        tenant_headers={"risk": {"x-tenant": "risk"}},
        tenant_models={"batch": "lora"},
    )
    made = bodies(wiring, input_tokens=[9, 9], tenant=["risk", "batch"], priority=[0, 3])
    first, second = made.request(0), made.request(1)
    assert json.loads(first.body)["priority"] == 0
    assert json.loads(second.body)["nvext"]["agent_hints"]["priority"] == -3
    assert json.loads(second.body)["model"] == "lora"
    assert b"x-tenant: risk\r\n" in first.header
    assert b"x-tier: low\r\n" in second.header
    assert b"authorization: Bearer k\r\n" in second.header
    assert first.header != bodies(wiring, input_tokens=[9, 9]).request(1).header
    assert b"X-Request-Id: " in first.header
