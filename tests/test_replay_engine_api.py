"""Reading requests: what is taken, what is refused, and never an exception of another kind."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from replay.engine import api, words

LIMITS = api.Limits(models=("tiny", "other"), max_model_len=100)
NONE: dict[str, str] = {}


def completion(body: dict, headers=NONE, limits: api.Limits = LIMITS) -> api.Ask:
    return api.completion(json.dumps(body).encode(), headers, limits)


def chat(body: dict, limits: api.Limits = LIMITS) -> api.Ask:
    return api.chat(json.dumps(body).encode(), NONE, limits)


PROMPTS = [
    ("ab", [words.encode("ab")]),
    (["ab", " cd"], [words.encode("ab"), words.encode(" cd")]),
    ([20, 21], [[20, 21]]),
    ([[20], [21, 22]], [[20], [21, 22]]),
    ('["', [words.encode('["')]),
    ("[[1]]", [words.encode("[[1]]")]),
]


@pytest.mark.parametrize(("prompt", "ids"), PROMPTS, ids=str)
def test_a_prompt_is_a_text_ids_or_a_list_of_either(prompt, ids):
    assert completion({"prompt": prompt}).prompts == ids


def test_white_space_in_front_of_a_prompt_does_not_matter():
    assert api.completion(b'{"prompt" : [ \n [20 , 21] ] }', NONE, LIMITS).prompts == [[20, 21]]


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], ["a", ""], {}, 3, True, [[["a"]]], [1, "a"], ["a", 1], [1.5]], ids=str
)
def test_anything_else_is_refused_with_400(prompt):
    with pytest.raises(api.ApiError) as refused:
        completion({"prompt": prompt})
    assert refused.value.status == 400


def test_a_completion_that_does_not_say_gets_16_tokens_and_a_chat_all_that_is_left():
    assert completion({"prompt": [20] * 10}).max_tokens == [16]
    asked = chat({"messages": [{"role": "user", "content": "ab"}]})
    assert asked.max_tokens == [100 - len(asked.prompts[0])]
    assert asked.model == "tiny"


def test_max_completion_tokens_counts_before_max_tokens():
    messages = [{"role": "user", "content": "ab"}]
    assert chat({"messages": messages, "max_tokens": 5, "max_completion_tokens": 7}).max_tokens == [7]


def test_content_parts_are_one_text_and_unknown_fields_and_nulls_are_no_matter():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    asked = chat({"messages": [{"role": "user", "content": parts, "name": "x"}], "tools": [], "top_k": 3, "n": None})
    assert asked.prompts == [words.chat([("user", "ab")])]
    assert asked.n == 1
    assert chat({"messages": [{"role": "assistant", "content": None}]}).prompts == [words.chat([("assistant", "")])]


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (100, "max_tokens must be at least 1, got 0."),
        (101, "contains at least 101 input tokens"),
        (102, "contains 102 input tokens"),
    ],
)
def test_a_prompt_must_leave_room_for_a_token(length, message):
    with pytest.raises(api.ApiError, match=message):
        completion({"prompt": [20] * length})
    assert completion({"prompt": [20] * 99}).max_tokens == [1]


@pytest.mark.parametrize(
    ("body", "header", "priority"),
    [
        ({}, None, None),
        ({"priority": 3}, None, 3),
        ({"priority": 3}, "-7", -7),
        ({"priority": 3}, "urgent", 3),
        ({"priority": 3}, "1.5", 3),
        ({}, " 4 ", 4),
        ({"priority": -(2**63)}, None, -(2**63)),
    ],
)
def test_the_priority_header_wins_over_the_body_when_it_is_an_integer(body, header, priority):
    headers = CIMultiDict({} if header is None else {"x-vllm-priority": header})
    assert completion({"prompt": "a"} | body, headers).priority == priority


def test_continuous_usage_needs_include_usage():
    options = {"continuous_usage_stats": True}
    asked = completion({"prompt": "a", "stream": True, "stream_options": options})
    assert (asked.include_usage, asked.continuous_usage) == (False, False)
    asked = completion({"prompt": "a", "stream": True, "stream_options": options | {"include_usage": True}})
    assert (asked.include_usage, asked.continuous_usage) == (True, True)


def test_natural_lengths_have_the_mean_that_was_asked_for_and_depend_on_the_prompt_alone():
    limits = api.Limits(models=("tiny",), max_model_len=100, natural_tokens=20.0)
    ends = [completion({"prompt": [20 + i, 30 + i % 7]}, limits=limits).ends_after[0] for i in range(3000)]
    assert min(ends) >= 1
    assert sum(ends) / len(ends) == pytest.approx(20, rel=0.08)
    assert completion({"prompt": [20, 30]}, limits=limits).ends_after == [ends[0]]
    assert completion({"prompt": [20, 30], "ignore_eos": True}, limits=limits).ends_after == [None]


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "prompt",
                            "messages",
                            "n",
                            "max_tokens",
                            "stream",
                            "stream_options",
                            "role",
                            "content",
                            "tokens",
                        ]
                    ),
                    inner,
                    max_size=5,
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_whatever_comes_is_read_or_refused_with_a_4xx(body):
    for read in (
        lambda: api.completion(body, NONE, LIMITS),
        lambda: api.chat(body, NONE, LIMITS),
        lambda: api.tokenize(body, LIMITS),
        lambda: api.detokenize(body, LIMITS),
    ):
        refusal = refused(read)
        if refusal is not None:
            assert 400 <= refusal.status < 500
            assert set(json.loads(refusal.body())["error"]) == {"message", "type", "param", "code"}


def refused(read) -> api.ApiError | None:
    try:
        read()
    except api.ApiError as error:
        return error
    return None
