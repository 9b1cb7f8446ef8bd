"""The words of answers without usage, counted: the same for any split, each word once, in every format."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faulty_server import DONE, delta, role, sse, text
from traces import said
from traces.said import Said

EVENTS, JSON, LINES = "text/event-stream", "application/json", "application/x-ndjson"


def encode(words):
    """One token per letter: what is counted can be read off."""
    return list(words)


def count(body, content_type=EVENTS, endpoint="chat", pieces=None):
    reader = Said(endpoint=endpoint, stream=content_type != JSON)
    reader.head(0, 200, [("content-type", content_type)])
    for piece in pieces or [body]:
        reader.feed(0, piece)
    reader.close(0, "eof")
    return reader.count(encode)


def document(value):
    return json.dumps(value, ensure_ascii=False).encode()


def lines(*values):
    return b"".join(document(value) + b"\n" for value in values)


CHAT = b"".join([role(), *(delta(word) for word in ("ab", "c", "dé")), delta("", finish="stop"), DONE])
CASES = [
    ("chat", CHAT, EVENTS, 5),
    ("chat, reasoning apart", role() + delta("abc", kind="reasoning_content") + delta("d") + DONE, EVENTS, 4),
    ("chat, reasoning under two names",
     sse({"choices": [{"index": 0, "delta": {"reasoning": "abc", "reasoning_content": "abc"}}]}), EVENTS, 3),
    ("chat, two choices", delta("ab") + delta("xyz", index=1) + DONE, EVENTS, 5),
    ("chat, a call", sse({"choices": [{"index": 0, "delta": {"tool_calls": [
        {"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}]}), EVENTS, 3),
    ("chat, whole",
     document({"choices": [{"index": 0, "message": {"content": "abc"}, "finish_reason": "stop"}]}), JSON, 3),
    ("completions", text("ab") + text("c") + DONE, EVENTS, 3),
    ("completions, whole", document({"choices": [{"index": 0, "text": "abcd", "finish_reason": "stop"}]}), JSON, 4),
    ("responses", sse({"type": "response.output_text.delta", "output_index": 0, "delta": "ab"})
     + sse({"type": "response.output_text.done", "output_index": 0, "text": "ab"})
     + sse({"type": "response.completed", "response": {"status": "completed", "output": [
         {"type": "message", "content": [{"type": "output_text", "text": "ab"}]}]}}), EVENTS, 2),
    ("responses, whole", document({"object": "response", "status": "completed", "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "abc"}]}]}), JSON, 3),
    ("messages", sse({"type": "message_start", "message": {"content": []}})
     + sse({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
     + sse({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "abc"}})
     + sse({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
     EVENTS, 5),
    ("messages, whole", document({"type": "message", "content": [{"type": "text", "text": "abc"}],
                                  "stop_reason": "end_turn"}), JSON, 3),
    ("ollama",
     lines({"message": {"content": "ab"}, "done": False}, {"message": {"content": ""}, "done": True}), LINES, 2),
    ("gemini", document([{"candidates": [{"content": {"parts": [{"text": "ab"}]}}]},
                         {"candidates": [{"content": {"parts": [{"text": "c"}]}}]}]), JSON, 3),
    ("cohere", sse({"type": "content-delta", "delta": {"message": {"content": {"text": "abc"}}}})
     + sse({"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}), EVENTS, 3),
    ("tgi, whole", document({"generated_text": "abcd"}), JSON, 4),
    ("llama.cpp", sse({"content": "ab", "stop": False}) + sse({"content": "", "stop": True}), EVENTS, 2),
    ("watsonx", sse({"results": [{"generated_text": "ab", "stop_reason": "not_finished"}]})
     + sse({"results": [{"generated_text": "c", "stop_reason": "eos_token"}]}), EVENTS, 3),
    ("watsonx, whole",
     document({"results": [{"generated_text": "abcd", "stop_reason": "max_tokens"}]}), JSON, 4),
    ("sglang, cumulative", sse({"text": "ab", "meta_info": {}}) + sse({"text": "abc", "meta_info": {}}), EVENTS, 3),
    ("no words", role() + DONE, EVENTS, None),
    ("no JSON", b"data: hello\n\n", EVENTS, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "content_type", "tokens"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_every_word_is_counted_once(body, content_type, tokens):
    assert count(body, content_type) == tokens


@given(st.lists(st.integers(0, len(CHAT)), max_size=6))
def test_how_the_bytes_are_cut_changes_nothing(cuts):
    places = [0, *sorted(cuts), len(CHAT)]
    assert count(CHAT, pieces=[CHAT[a:b] for a, b in itertools.pairwise(places)]) == 5


def test_an_answer_with_more_words_than_the_limit_is_not_counted(monkeypatch):
    monkeypatch.setattr(said, "LIMIT", 3)
    assert count(delta("ab") + delta("c") + DONE) == 3
    assert count(delta("ab") + delta("cd") + DONE) is None
