"""The everyday chunk is read as the general reader would read it, or not at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.wire import everyday, openai
from traces.wire.tally import Tally

NAMES = Tally.__slots__


def both(chunks: list[dict]) -> tuple[list[int], dict, dict]:
    """What each chunk was found to be, and the two tallies; what is refused goes the general way in both."""
    fast, slow = Tally(keep_all=True), Tally(keep_all=True)
    found = []
    for at_ns, chunk in enumerate(chunks):
        found.append(everyday.read(fast, at_ns, json.dumps(chunk).encode()))
        if found[-1] == everyday.OTHER:
            openai.event(fast, at_ns, None, chunk)
        openai.event(slow, at_ns, None, chunk)
    return found, *({name: getattr(tally, name) for name in NAMES} for tally in (fast, slow))


def chat(finish=None, **delta):
    return {
        "id": "x",
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }


USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

CASES = [
    ("a role", chat(role="assistant", content=""), everyday.READ),
    ("a text", chat(content="hi"), everyday.PLAIN),
    ("a text with its finish", chat("length", content="hi"), everyday.READ),
    ("a finish alone", chat("stop"), everyday.READ),
    ("a completion", {"choices": [{"index": 0, "text": " hi", "finish_reason": None}]}, everyday.PLAIN),
    ("usage", {"choices": [], "usage": USAGE}, everyday.READ),
    (
        "usage with a cache",
        {"choices": [], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}},
        everyday.READ,
    ),
    ("an empty text", chat(content=""), everyday.OTHER),
    ("reasoning", chat(reasoning_content="hm"), everyday.OTHER),
    ("a tool call", chat(tool_calls=[{"index": 0}]), everyday.OTHER),
    ("log probabilities", {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {}}]}, everyday.OTHER),
    ("two choices", {"choices": [*chat(content="a")["choices"]] * 2}, everyday.OTHER),
    ("usage on a text", chat(content="hi") | {"usage": USAGE}, everyday.OTHER),
    ("hidden reasoning", {"choices": [], "usage": USAGE | {"completion_tokens_details": {}}}, everyday.OTHER),
    ("an error", {"error": {"code": 500}}, everyday.OTHER),
    ("a field of its own", chat(content="hi") | {"timings": {}}, everyday.OTHER),
    ("a negative count", {"choices": [], "usage": USAGE | {"prompt_tokens": -1}}, everyday.OTHER),
]


@pytest.mark.parametrize(("why", "chunk", "expected"), CASES, ids=[row[0] for row in CASES])
def test_what_is_everyday(why, chunk, expected):
    found, fast, slow = both([chunk])
    assert found == [expected]
    assert fast == slow


@settings(max_examples=300)
@given(st.lists(st.sampled_from([chunk for _, chunk, _ in CASES]), max_size=8))
def test_any_mixture_gives_the_general_readers_tally(chunks):
    _, fast, slow = both(chunks)
    assert fast == slow


def test_what_is_no_json_is_refused():
    assert everyday.read(Tally(keep_all=True), 0, b'{"choices": [') == everyday.OTHER
