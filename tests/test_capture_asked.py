"""What a request's body says without its words: limits, counts, prefix hashes, sessions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture import asked, rules


def user(text):
    return {"role": "user", "content": text}


def reply(text):
    return {"role": "assistant", "content": text}


def read(body, endpoint="chat", path="/v1/chat/completions"):
    return asked.read(body, endpoint, path, streams=rules.streams_by_path(path))


@pytest.mark.parametrize(
    ("body", "endpoint", "path", "expected"),
    [
        ({"model": "m", "stream": True, "max_tokens": 5, "n": 2, "tools": [{}, {}]}, "chat", "/v1/chat/completions",
         ("m", True, 5, 2, 2, 2)),
        ({"model": "m", "max_completion_tokens": 7, "max_tokens": 5}, "chat", "/", ("m", False, 7, None, None, 1)),
        ({"prompt": ["a", "b", "c"], "n": 2}, "completions", "/v1/completions", (None, False, None, 2, None, 6)),
        ({"input": "x", "max_output_tokens": 9}, "responses", "/v1/responses", (None, False, 9, None, None, 1)),
        ({"inputs": "x", "parameters": {"max_new_tokens": 4}}, "generate", "/generate_stream",
         (None, True, 4, None, None, 1)),
        ({"text": "x", "sampling_params": {"max_new_tokens": 4, "n": 3}}, "generate", "/generate",
         (None, False, 4, 3, None, 3)),
        ({"model": "q", "options": {"num_predict": 6}}, "chat", "/api/chat", ("q", True, 6, None, None, 1)),
        ({"model": "q", "stream": False}, "chat", "/api/chat", ("q", False, None, None, None, 1)),
        ({"contents": [], "generationConfig": {"maxOutputTokens": 8, "candidateCount": 2}}, "chat",
         "/v1beta/models/gemini-2.5:streamGenerateContent", ("gemini-2.5", True, 8, 2, None, 2)),
        ({"model": "e", "input": ["a"] * 9}, "embeddings", "/v1/embeddings", ("e", False, None, None, None, 0)),
        ({"max_tokens": "many", "n": -1, "stream": "yes"}, "chat", "/", (None, False, None, None, None, 1)),
        ({}, "chat", "/", (None, False, None, None, None, 1)),
    ],
)  # fmt: skip
def test_what_was_asked(body, endpoint, path, expected):
    found = read(body, endpoint, path)
    assert (found.model, found.stream, found.max_tokens, found.n, found.tools, found.answers) == expected


PREFIXES = asked.Prefixes(b"salt", 16)


@given(st.text(max_size=100), st.text(max_size=100), st.text(max_size=100))
def test_equal_prefixes_have_equal_hashes_and_nothing_else_has(shared, one, other):
    a, _ = PREFIXES.of(read({"prompt": shared + one}))
    b, _ = PREFIXES.of(read({"prompt": shared + other}))
    full = len(shared) // 16
    assert a[:full] == b[:full]
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        same = (shared + one)[: 16 * (at + 1)] == (shared + other)[: 16 * (at + 1)]
        assert (x == y) == same


def test_only_full_blocks_have_a_hash_and_another_salt_gives_others():
    assert len(PREFIXES.of(read({"prompt": "x" * 33}))[0]) == 2
    assert len(PREFIXES.of(read({"prompt": "x" * 15}))[0]) == 0
    other = asked.Prefixes(b"other", 16)
    assert other.of(read({"prompt": "x" * 33}))[0] != PREFIXES.of(read({"prompt": "x" * 33}))[0]


def test_a_block_is_told_by_all_that_comes_before_it():
    one, other = (
        PREFIXES.of(read({"prompt": "x" * 16 + "y" * 16}))[0],
        PREFIXES.of(read({"prompt": "z" * 16 + "y" * 16}))[0],
    )
    assert one[1] != other[1]


def test_tools_and_system_text_stand_before_the_messages():
    plain = read({"messages": [user("hello")]})
    with_tools = read({"tools": [{"name": "t"}], "system": "be kind", "messages": [user("hello")]})
    assert with_tools.pieces[-1:] == plain.pieces
    assert len(with_tools.pieces) == 3


def test_parts_images_and_calls_are_part_of_the_prefix():
    see, picture = {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:x"}}
    text = read({"messages": [user([see])]})
    image = read({"messages": [user([see, picture])]})
    assert text.pieces == ["user\nsee"]
    assert image.pieces != text.pieces


def test_with_a_tokenizer_blocks_are_tokens_and_token_ids_need_none():
    tokens = asked.Prefixes(b"salt", 4, lambda text: [ord(letter) for letter in text])
    hashes, count = tokens.of(read({"prompt": "abcdefghi"}))
    assert (len(hashes), count) == (2, 9)
    ids, given_count = tokens.of(read({"prompt": [ord(letter) for letter in "abcdefghi"]}))
    assert (ids, given_count) == (hashes, 9)
    assert PREFIXES.of(read({"prompt": [1, 2, 3]})) == ([], 3)


def sessions():
    return asked.Sessions(rules.salted(b"salt"))


def texts(*messages):
    return read({"messages": list(messages)}).messages


def test_a_request_that_begins_with_an_earlier_one_is_its_next_turn():
    told = sessions()
    first, second = texts(user("a")), texts(user("a"), reply("b"), user("c"))
    third = texts(user("a"), reply("b"), user("c"), reply("d"), user("e"))
    one = told.of(None, first, "r0", 0, 100)
    two = told.of(None, second, "r1", 150, 300)
    three = told.of(None, third, "r2", 1_000, 1_200)
    assert [one[1:], two[1:], three[1:]] == [(0, None), (1, 50), (2, 700)]
    assert one[0] == two[0] == three[0]


def test_other_conversations_are_other_sessions():
    told = sessions()
    one = told.of(None, texts(user("a")), "r0", 0, 1)
    other = told.of(None, texts(user("x"), reply("b"), user("c")), "r1", 2, 3)
    again = told.of(None, texts(user("a")), "r2", 4, 5)
    assert len({one[0], other[0], again[0]}) == 3
    assert [one[1], other[1], again[1]] == [0, 0, 0]


def test_the_longest_earlier_conversation_is_the_one_that_goes_on():
    told = sessions()
    first = told.of(None, texts(user("a")), "r0", 0, 1)
    told.of(None, texts(user("a"), reply("b"), user("c")), "r1", 2, 3)
    another = told.of(None, texts(user("a")), "r2", 4, 5)
    third = told.of(None, texts(user("a"), reply("b"), user("c"), reply("d"), user("e")), "r3", 6, 7)
    assert third[:2] == (first[0], 2)
    assert another[0] != first[0]


def test_a_session_header_wins_and_only_its_hash_is_kept():
    told = sessions()
    one = told.of("chat-1", texts(user("a")), "r0", 0, 100)
    two = told.of("chat-1", texts(user("quite different")), "r1", 400, 500)
    assert (one[1], two[1], two[2]) == (0, 1, 300)
    assert one[0] == two[0] == rules.salted(b"salt")("chat-1")


def test_a_prompt_without_messages_has_no_session():
    assert sessions().of(None, [], "r0", 0, 1) == (None, None, None)


def test_one_worker_of_several_knows_a_named_session_but_no_turn_of_it():
    told = asked.Sessions(rules.salted(b"salt"), sole=False)
    assert [told.of("chat-1", texts(user("a")), f"r{i}", i, i) for i in range(2)] == [
        (rules.salted(b"salt")("chat-1"), None, None)
    ] * 2
    assert told.of(None, texts(user("a")), "r2", 4, 5) == (None, None, None)


def test_what_is_remembered_has_an_end(monkeypatch):
    monkeypatch.setattr(asked, "KNOWN_PREFIXES", 3)
    told = sessions()
    for i in range(10):
        told.of(f"s{i}", [], f"r{i}", 0, 1)
    assert len(told._by_header) <= 4
