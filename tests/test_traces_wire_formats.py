"""Every family of formats, as small hand-made answers: what each event means."""

from __future__ import annotations

import json

import pytest

from traces.meter import Meter

SSE = [("content-type", "text/event-stream")]
LINES = [("content-type", "application/x-ndjson")]
JSON = [("content-type", "application/json")]


def sse(*events):
    """Events; (name, value) gives the event a name, a str is sent as it is."""
    pieces = []
    for event in events:
        name, value = event if isinstance(event, tuple) else (None, event)
        head = f"event: {name}\n" if name else ""
        data = value if isinstance(value, str) else json.dumps(value)
        pieces.append(f"{head}data: {data}\n\n".encode())
    return pieces


def lines(*events):
    return [json.dumps(event).encode() + b"\n" for event in events]


def row_of(pieces, headers=SSE, *, end="eof", endpoint="chat", stream=True, n=1):
    """Piece i comes at time i (from 1)."""
    meter = Meter(endpoint=endpoint, stream=stream, n=n, start_ns=0)
    meter.head(0, 200, headers)
    for at, piece in enumerate(pieces, 1):
        meter.feed(at, piece)
    return meter.close(99, end)


def typed(kind, **more):
    return (kind, {"type": kind, **more})


RESPONSES = sse(
    typed("response.created", response={"status": "in_progress"}),
    typed("response.reasoning_text.delta", delta="hm"),
    typed("response.output_text.delta", delta="Hi"),
    typed("response.output_text.done", text="Hi"),
)
DONE = {"usage": {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 8},
                  "output_tokens_details": {"reasoning_tokens": 3}}}  # fmt: skip
ANTHROPIC = sse(
    typed("message_start", message={"usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "output_tokens": 1}}),
    typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    typed("ping"),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hi"}),
)


def sgl(text, tokens, finish=None, **meta):
    return {
        "text": text,
        "meta_info": {"prompt_tokens": 7, "completion_tokens": tokens, "finish_reason": finish, **meta},
    }


def tgi(text, **more):
    return {"index": 1, "token": {"id": 1, "text": text, "special": False}, "generated_text": None, **more}


def gem(*parts, finish=None, **usage):
    candidate = {"content": {"parts": list(parts)}} | ({"finishReason": finish} if finish else {})
    return {"candidates": [candidate], "usageMetadata": {"promptTokenCount": 6, **usage}}


COHERE_END = typed("message-end", delta={"finish_reason": "COMPLETE",
                                         "usage": {"billed_units": {"input_tokens": 1, "output_tokens": 2},
                                                   "tokens": {"input_tokens": 70, "output_tokens": 3}}})  # fmt: skip

STREAMS = [
    # name, pieces, headers → outcome, finish, input, output, first token, first visible, last token
    ("responses", [*RESPONSES, *sse(typed("response.completed", response={"status": "completed", **DONE}))], SSE,
     ("ok", "completed", 9, 4, 2, 3, 3)),
    ("responses cut by length", [*RESPONSES, *sse(typed("response.incomplete", response={
        "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, **DONE}))], SSE,
     ("ok", "max_output_tokens", 9, 4, 2, 3, 3)),
    ("responses failed", [*RESPONSES, *sse(typed("response.failed", response={
        "status": "failed", "error": {"code": "server_error", "message": "you said: x"}}))], SSE,
     ("stream_error", "failed", None, 2, 2, 3, 3)),
    ("responses error", [*RESPONSES, *sse(typed("error", code="rate_limit_exceeded", message="x"))], SSE,
     ("stream_error", None, None, 2, 2, 3, 3)),
    ("responses broken off", RESPONSES, SSE, ("truncated", None, None, 2, 2, 3, 3)),
    ("messages", [*ANTHROPIC, *sse(typed("message_delta", delta={"stop_reason": "end_turn"},
                                         usage={"output_tokens": 12}), typed("message_stop"))], SSE,
     ("ok", "end_turn", 25, 12, 4, 4, 4)),
    ("messages overloaded", [*ANTHROPIC, *sse(typed("error", error={"type": "overloaded_error", "message": "x"}))], SSE,
     ("stream_error", None, 25, 1, 4, 4, 4)),
    ("messages broken off", ANTHROPIC, SSE, ("truncated", None, 25, 1, 4, 4, 4)),
    ("sglang, cumulative text", sse(sgl("a", 1), sgl("ab", 2), sgl("abcd", 4, {"type": "length", "length": 4}),
                                    "[DONE]"), SSE, ("ok", "length", 7, 4, 1, 1, 3)),
    ("sglang, queue full", sse({"error": {"message": "x", "code": 503}}, "[DONE]"), SSE,
     ("stream_error", None, None, None, None, None, None)),
    ("sglang, displaced", sse(sgl("a", 1), sgl("a", 1, {"type": "abort", "status_code": 503}), "[DONE]"), SSE,
     ("stream_error", "abort", 7, 1, 1, 1, 1)),
    ("tgi", sse(tgi("a"), tgi("b"), tgi("c", generated_text="abc", details={
        "finish_reason": "length", "generated_tokens": 3, "input_length": 8})), SSE, ("ok", "length", 8, 3, 1, 1, 3)),
    ("tgi error", sse(tgi("a"), {"error": "x", "error_type": "generation"}), SSE,
     ("stream_error", None, None, 1, 1, 1, 1)),
    ("tgi broken off", sse(tgi("a"), tgi("b")), SSE, ("truncated", None, None, 2, 1, 1, 2)),
    ("llama.cpp", sse({"content": "a", "tokens": [1], "stop": False}, {"content": "b", "tokens": [2], "stop": False},
                      {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 2,
                       "tokens_evaluated": 5, "timings": {"prompt_ms": 12.5, "predicted_n": 2}}), SSE,
     ("ok", "length", 5, 2, 1, 1, 2)),
    ("ollama chat", lines({"message": {"role": "assistant", "thinking": "hm"}, "done": False},
                          {"message": {"role": "assistant", "content": "a"}, "done": False},
                          {"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 3,
                           "prompt_eval_count": 11, "prompt_eval_duration": 5_000_000}), LINES,
     ("ok", "stop", 11, 3, 1, 2, 3)),
    ("ollama generate error", lines({"response": "a", "done": False}, {"error": "model runner died"}), LINES,
     ("stream_error", None, None, 1, 1, 1, 1)),
    ("ollama broken off", lines({"response": "a", "done": False}), LINES, ("truncated", None, None, 1, 1, 1, 1)),
    ("gemini", sse(gem({"text": "hm", "thought": True}), gem({"text": "a"}, candidatesTokenCount=2),
                   gem({"text": "b"}, finish="STOP", candidatesTokenCount=3, thoughtsTokenCount=4)), SSE,
     ("ok", "STOP", 6, 7, 1, 2, 3)),
    ("gemini as one array", [b"[" + lines(gem({"text": "a"}))[0], b"," + lines(gem({"text": "b"}, finish="STOP"))[0],
                             b"]"], JSON, ("ok", "STOP", 6, 2, 1, 1, 2)),
    ("gemini, prompt blocked", sse({"promptFeedback": {"blockReason": "SAFETY"}}), SSE,
     ("no_token", "SAFETY", None, None, None, None, None)),
    ("cohere", sse(typed("message-start"), typed("content-delta", delta={"message": {"content": {"text": "a"}}}),
                   typed("citation-start", delta={"message": {"citations": {}}}), COHERE_END), SSE,
     ("ok", "COMPLETE", 70, 3, 2, 2, 2)),
    ("cohere v1", lines({"event_type": "stream-start"}, {"event_type": "text-generation", "text": "a"},
                        {"event_type": "stream-end", "finish_reason": "COMPLETE", "response": {
                            "meta": {"tokens": {"input_tokens": 4, "output_tokens": 1}}}}), LINES,
     ("ok", "COMPLETE", 4, 1, 2, 2, 2)),
    ("lines labelled as JSON", lines({"response": "a", "done": False}, {"response": "", "done": True,
                                                                        "eval_count": 2}), JSON,
     ("ok", "stop", None, 2, 1, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pieces", "headers", "expected"), STREAMS, ids=[stream[0] for stream in STREAMS])
def test_a_stream_of_each_family(name, pieces, headers, expected):
    row = row_of(pieces, headers)
    assert (
        row.outcome,
        row.finish_reason,
        row.input_tokens,
        row.output_tokens,
        row.first_token_ns,
        row.first_visible_ns,
        row.last_token_ns,
    ) == expected


@pytest.mark.parametrize(("name", "pieces", "headers", "expected"), STREAMS, ids=[stream[0] for stream in STREAMS])
def test_a_stream_byte_by_byte_is_the_same_stream(name, pieces, headers, expected):
    whole = row_of([b"".join(pieces)], headers)
    single = b"".join(pieces)
    meter = Meter(start_ns=0)
    meter.head(0, 200, headers)
    for at in range(len(single)):
        meter.feed(1, single[at : at + 1])
    assert meter.close(99, "eof") == whole


ANSWERS = [
    # name, body → outcome, finish, input, output
    ("responses", {"object": "response", "status": "completed", "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}], **DONE}, ("ok", "completed", 9, 4)),
    ("messages", {"type": "message", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn",
                  "usage": {"input_tokens": 5, "output_tokens": 2}}, ("ok", "end_turn", 5, 2)),
    ("sglang", sgl("abc", 3, {"type": "stop"}), ("ok", "stop", 7, 3)),
    ("sglang, two samples", [sgl("abc", 3, {"type": "stop"}), sgl("ab", 2, {"type": "length"})],
     ("ok", "stop,length", 7, 5)),
    ("tgi", {"generated_text": "a", "details": {"finish_reason": "length", "generated_tokens": 3, "input_length": 2}},
     ("ok", "length", 2, 3)),
    ("tgi, as a list", [{"generated_text": "abc"}], ("ok", None, None, None)),
    ("llama.cpp", {"content": "ab", "stop": True, "stop_type": "eos", "tokens_predicted": 2, "tokens_evaluated": 5},
     ("ok", "stop", 5, 2)),
    ("ollama", {"message": {"content": "a"}, "done": True, "eval_count": 3, "prompt_eval_count": 11},
     ("ok", "stop", 11, 3)),
    ("gemini", gem({"text": "a"}, finish="STOP", candidatesTokenCount=3), ("ok", "STOP", 6, 3)),
    ("cohere", {"message": {"content": [{"type": "text", "text": "a"}]}, "finish_reason": "COMPLETE",
                "usage": {"tokens": {"input_tokens": 70, "output_tokens": 3}}}, ("ok", "COMPLETE", 70, 3)),
    ("nothing said", {"type": "message", "content": [], "stop_reason": "end_turn", "usage": {"output_tokens": 2}},
     ("no_token", "end_turn", None, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "expected"), ANSWERS, ids=[answer[0] for answer in ANSWERS])
def test_a_whole_answer_of_each_family(name, body, expected):
    row = row_of([json.dumps(body).encode()], JSON, stream=False)
    assert (row.outcome, row.finish_reason, row.input_tokens, row.output_tokens) == expected
    assert (row.first_token_ns, row.chunk_ns) == (None, None)


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        ("embeddings", {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 12, "total_tokens": 12}}, 12),
        ("embeddings", {"embeddings": [[0.1]], "prompt_eval_count": 7}, 7),
        (
            "rerank",
            {"results": [{"index": 0, "relevance_score": 0.5}], "meta": {"billed_units": {"input_tokens": 5}}},
            5,
        ),
        ("rerank", {"results": [{"index": 0}], "usage": {"total_tokens": 40}}, 40),
    ],
)
def test_embeddings_and_rerank_are_rows_of_length_only(endpoint, body, tokens):
    row = row_of([json.dumps(body).encode()], JSON, endpoint=endpoint, stream=False)
    assert (row.outcome, row.input_tokens, row.output_tokens, row.first_token_ns) == ("ok", tokens, None, None)


def test_servers_say_how_long_they_queued_and_prefilled():
    vllm = {"choices": [], "usage": {"completion_tokens": 1},
            "metrics": {"queue_time_ms": 2.5, "time_to_first_token_ms": 40.0}}  # fmt: skip
    token = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    row = row_of(sse(token, vllm, "[DONE]"))
    assert (row.queue_ns, row.prefill_ns) == (2_500_000, 40_000_000)
    sglang = row_of(sse(sgl("a", 1, {"type": "stop"}, queue_time=0.25), "[DONE]"))
    assert sglang.queue_ns == 250_000_000
    groq = row_of(sse(token, {"choices": [], "x_groq": {"usage": {"queue_time": 0.09, "prompt_time": 0.005}}}))
    assert (groq.queue_ns, groq.prefill_ns) == (90_000_000, 5_000_000)
    headers = [*JSON, ("x-queue-time", "3"), ("x-prompt-tokens", "8"), ("x-generated-tokens", "2")]
    tgi_answer = row_of([b'{"generated_text": "ab"}'], headers, stream=False)
    assert (tgi_answer.queue_ns, tgi_answer.input_tokens, tgi_answer.output_tokens) == (3_000_000, 8, 2)


def test_a_stream_that_hides_its_content_type_is_known_by_its_first_bytes():
    pieces = sse({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}, "[DONE]")
    assert row_of(pieces, []).outcome == "ok"
    assert row_of([b"da", pieces[0][2:], pieces[1]], [("content-type", "text/plain")]).first_token_ns == 2


def test_counts_that_are_no_counts_are_left_out():
    chunk = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
             "usage": {"prompt_tokens": -1, "completion_tokens": "many"}}  # fmt: skip
    row = row_of(sse(chunk, "[DONE]"))
    assert (row.input_tokens, row.output_tokens, row.tokens_source) == (None, 1, "chunks")
