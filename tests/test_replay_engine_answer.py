"""Answers compared, event by event and field by field, with what a real vLLM sent."""

from __future__ import annotations

import asyncio
import json

import pytest

from replay.engine import api, words
from replay.engine.answer import Reply, Streamed, Style, output_id, seed_of, whole
from replay.engine.loop import Choice
from replay.engine.request import EngineRequest

LIMITS = api.Limits(models=("tiny",), max_model_len=8192)
BARE = Style(fingerprint="vllm-0.33.0-convoy", request_metrics=False, prompt_details=False)
FULL = Style(fingerprint="vllm-0.33.0-convoy")
PARSE = {"/v1/chat/completions": (api.chat, "chatcmpl-1"), "/v1/completions": (api.completion, "cmpl-1")}


def reply_to(
    path: str, body: dict, style: Style, written: list[bytes] | None = None, *, chunked: bool = False
) -> Reply:
    """The reply after all its tokens, given one step each."""
    parse, name = PARSE[path]
    ask = parse(json.dumps(body).encode(), {}, LIMITS)
    if written is None:
        reply = Reply(ask, name, 1_000_000, None, style)
    else:
        reply = Streamed(ask, name, 1_000_000, None, style, write=written.append, chunked=chunked)
    for number, prompt in enumerate(ask.prompts):
        for copy in range(ask.n):
            index = number * ask.n + copy
            request = EngineRequest(str(index), prompt_tokens=prompt, max_tokens=ask.max_tokens[number])
            reply.choices.append(Choice(reply, index, number, seed_of(prompt, index), request, 1_000_000))
    for step in range(ask.max_tokens[0]):
        for choice in reply.choices:
            choice.scheduled_ns = 3_000_000
            choice.first_ns = choice.first_ns or 13_000_000
            choice.last_ns = 13_000_000 + 10_000_000 * step
            choice.request.output_tokens += 1
            if choice.request.output_tokens == choice.request.max_tokens:
                choice.request.finish = "length"
            reply.token(choice)
        reply.flush()
    assert reply.done.done()
    return reply


def in_loop(function):
    async def main():
        return function()

    return asyncio.run(main())


def streamed(path: str, body: dict, style: Style, *, chunked: bool = False) -> list[bytes]:
    written: list[bytes] = []
    in_loop(lambda: reply_to(path, body | {"stream": True}, style, written, chunked=chunked))
    return written


def events_of(data: bytes) -> list[str]:
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    return [event.removeprefix("data: ") for event in events]


def dechunk(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        out += rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]
    return out


def normal(value: object, key: str = "") -> object:
    """A JSON value with what rightly differs (ids, times, texts, counts) replaced; keys and their order stay."""
    if isinstance(value, dict):
        return {name: normal(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [normal(inner) for inner in value]
    if key in {"id", "content", "text", "system_fingerprint"} and isinstance(value, str):
        return key if value or key != "content" else value
    if key in {"created", "prompt_tokens", "total_tokens"}:
        return key
    return value


def shapes(events: list[str]) -> list[str]:
    """Normalised events; the text of tokens does not matter, that of the role event does (it is empty)."""
    lines = []
    for event in events:
        if event == "[DONE]":
            lines.append(event)
            continue
        value = json.loads(event)
        for choice in value["choices"]:
            if "role" not in choice.get("delta", {}):
                choice.get("delta", choice)["content" if "delta" in choice else "text"] = "some"
        lines.append(json.dumps(normal(value)))
    return lines


@pytest.mark.data
@pytest.mark.parametrize("name", ["chat_stream", "completions_stream", "completions_nousage"])
def test_every_event_has_the_fields_of_vllms_in_the_same_order(data, name: str):
    request = json.loads(data("vllm-cpu", "recordings", f"{name}.meta.json").read_text())["request"]
    recorded = data("vllm-cpu", "recordings", f"{name}.http").read_bytes().partition(b"\r\n\r\n")[2]
    ours = b"".join(streamed(request["path"], request["body"], BARE))
    assert shapes(events_of(ours)) == shapes(events_of(dechunk(recorded)))


@pytest.mark.data
@pytest.mark.parametrize("name", ["chat_nostream", "completions_nostream"])
def test_a_whole_answer_has_the_fields_of_vllms_in_the_same_order(data, name: str):
    request = json.loads(data("vllm-cpu", "recordings", f"{name}.meta.json").read_text())["request"]
    recorded = json.loads(data("vllm-cpu", "recordings", f"{name}.http").read_bytes().partition(b"\r\n\r\n")[2])
    ours = json.loads(in_loop(lambda: whole(reply_to(request["path"], request["body"], BARE))))
    assert json.dumps(normal(ours)) == json.dumps(normal(recorded))


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def test_the_usage_event_has_cached_tokens_and_vllms_timing_where_time_to_first_token_counts_from_scheduled():
    (usage,) = [
        json.loads(e) for e in events_of(b"".join(streamed("/v1/chat/completions", CHAT | WITH_USAGE, FULL)))[-2:-1]
    ]
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["metrics"] == {
        "time_to_first_token_ms": 10.0,
        "generation_time_ms": 20.0,
        "queue_time_ms": 2.0,
        "mean_itl_ms": 10.0,
        "tokens_per_second": pytest.approx(3 / 0.030),
    }


def test_a_single_token_has_no_mean_inter_token_latency():
    data = b"".join(streamed("/v1/chat/completions", CHAT | WITH_USAGE | {"max_tokens": 1}, FULL))
    assert "mean_itl_ms" not in json.loads(events_of(data)[-2])["metrics"]


def test_role_and_first_token_are_one_write_and_each_event_a_chunk_of_its_own():
    writes = streamed("/v1/chat/completions", CHAT, FULL, chunked=True)
    assert len(writes) == 3
    assert writes[0].count(b"\r\ndata: ") == 2
    assert events_of(dechunk(b"".join(writes)))[-1] == "[DONE]"
    assert writes[-1].endswith(b"e\r\ndata: [DONE]\n\n\r\n")


def test_the_same_prompt_is_answered_with_the_same_words_and_another_with_others():
    first = streamed("/v1/completions", {"prompt": "a", "max_tokens": 20}, BARE)
    again = streamed("/v1/completions", {"prompt": "a", "max_tokens": 20}, BARE)
    other = streamed("/v1/completions", {"prompt": "b", "max_tokens": 20}, BARE)

    def said(writes: list[bytes]) -> str:
        return "".join(json.loads(event)["choices"][0]["text"] for event in events_of(b"".join(writes))[:-1])

    assert said(first) == said(again) != said(other)
    assert len(words.encode(said(first))) == 20


def test_output_ids_are_words():
    ids = {output_id(seed, k) for seed in (0, 2**32 - 1) for k in range(500)}
    assert all(words.FIRST_WORD <= token < words.VOCABULARY for token in ids)
    assert len(ids) > 900


def test_a_reply_with_several_choices_ends_with_the_last_of_them():
    def scenario() -> None:
        written: list[bytes] = []
        reply = reply_to("/v1/chat/completions", CHAT | {"n": 3, "stream": True}, FULL, written)
        events = events_of(b"".join(written))
        assert events.count("[DONE]") == 1
        assert sum('"finish_reason":"length"' in event for event in events) == 3
        row = reply.log()
        assert (row.n, row.output_tokens, row.outcome) == (3, 9, "length")

    in_loop(scenario)
