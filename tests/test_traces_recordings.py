"""Recorded responses of real servers against what their collectors, and our own eyes, read in them.

Each event is fed at a time equal to its ordinal (1 = first block of the stream; comments are blocks too), so that a
time in a row names an event.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path

import pytest

from tests.conftest import data_root
from traces.meter import Meter

pytestmark = pytest.mark.data

SSE = data_root() / "traces" / "recordings" / "sse"
NAMES = sorted(path.stem for path in SSE.glob("*.*") if path.suffix in {".sse", ".ndjson"}) if SSE.is_dir() else []

# Where the collector's expectation leaves out what the stream holds (its own notes say so): what we read instead.
EXPECTATION_SHORT = {
    "groq__chat__groq_llama3-8b-8192_streamed_chat__i0": ("usage is in x_groq.usage", {"0": "stop"}, 12, 24),
    "groq__chat__test_groq_model_web_search_tool_stream__i0": ("usage is in x_groq.usage", {"0": "stop"}, 5003, 359),
    "watsonx__ibm.watsonx.text_stream__test_generate_stream_metrics__i6": (
        "counts and the stop reason are in results[]",
        {"0": "eos_token"},
        8,
        11,
    ),
}


def stored(name):
    meta = json.loads((SSE / f"{name}.meta.json").read_text())
    path = next(path for path in (SSE / f"{name}.sse", SSE / f"{name}.ndjson") if path.exists())
    return path.read_bytes(), meta


def blocks(body, suffix_is_lines):
    """The stream cut after each event."""
    ends, at = [], 0
    marks = (b"\n",) if suffix_is_lines else (b"\r\n\r\n", b"\n\n")
    while at < len(body):
        found = [(body.find(mark, at), mark) for mark in marks]
        found = [(start, mark) for start, mark in found if start >= 0]
        if not found:
            ends.append(body[at:])
            break
        start, mark = min(found)
        ends.append(body[at : start + len(mark)])
        at = start + len(mark)
    return [block for block in ends if block.strip()]


def begun(meta):
    choices = (meta.get("expected") or {}).get("choice_indexes") or ["0"]
    meter = Meter(start_ns=0, stream=True, n=len(choices))
    kind = meta.get("content_type")
    meter.head(0, meta["http_status"], [("content-type", kind)] if kind else [])
    return meter


def measured(name):
    body, meta = stored(name)
    meter = begun(meta)
    for ordinal, block in enumerate(blocks(body, (SSE / f"{name}.ndjson").exists()), 1):
        meter.feed(ordinal, block)
    return meter, meter.close(1_000_000, "eof")


@pytest.mark.parametrize("name", NAMES)
def test_events_finish_reason_and_usage_are_as_the_collector_read_them(name, data):
    expected = json.loads(data("traces", "EXPECTED.json").read_text())["sse"][name]
    meter, row = measured(name)
    tally = meter.tally
    reasons = expected["finish_reason"]
    reasons = reasons if isinstance(reasons, dict) else {"0": reasons}
    usage = expected["usage_reported"] or {}
    given, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if name in EXPECTATION_SHORT:
        _, reasons, given, made = EXPECTATION_SHORT[name]
    assert tally.events + expected.get("done_sentinel", 0) == expected.get(
        "data_events_total", expected.get("json_lines")
    )
    assert {str(index): reason for index, reason in tally.finishes.items()} == reasons
    assert row.input_tokens == given
    assert (row.output_tokens if row.tokens_source == "usage" else None) == made
    assert tally.comments == expected.get("comment_lines", 0)
    assert (tally.error is not None) == (expected.get("error") is not None)
    assert tally.unreadable == expected.get("non_json_events", 0)


@pytest.mark.parametrize("name", EXPECTATION_SHORT)
def test_an_expectation_that_is_short_leaves_out_what_the_stream_holds(name, data):
    """So the exceptions above stay exceptions: the note has no usage, and the bytes have the counts we read."""
    expected = json.loads(data("traces", "EXPECTED.json").read_text())["sse"][name]
    why, _, given, made = EXPECTATION_SHORT[name]
    assert not expected["usage_reported"], "the note is complete now: take it out of EXPECTATION_SHORT"
    body, _ = stored(name)
    place = "x_groq" if "x_groq" in why else "results"
    held = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data:") and place.encode() in line]
    if place == "x_groq":
        counts = [chunk["x_groq"]["usage"] for chunk in held if "usage" in (chunk.get("x_groq") or {})][-1]
        assert (counts["prompt_tokens"], counts["completion_tokens"]) == (given, made)
    else:
        results = [result for chunk in held for result in chunk["results"]]
        assert max(result["input_token_count"] for result in results) == given
        assert max(result["generated_token_count"] for result in results) == made


# Read by hand in the files: outcome, finish reason, input and output tokens, reasoning tokens, token chunks, and the
# events of the first token, the first visible one, and the last one.
BY_HAND = {
    "anthropic__messages__anthropic_claude-haiku-4-5_can_use_tools_with_multi-turn_streaming_con-fb62__i0":
        ("ok", "tool_use", 633, 75, None, 7, 4, 4, 10),  # the ping is 3, the empty first piece of the call 4
    "anthropic__messages__anthropic_claude-haiku-4-5_streams_thinking_content_when_available__i0":
        ("ok", "end_turn", 80, 638, 353, 25, 4, 20, 31),  # 13 thinking, a signature, 12 text
    "anthropic__messages__chat_citations_with_anthropic_claude-haiku-4-5_streams_citations__i0":
        ("ok", "end_turn", 672, 39, None, 1, 5, 5, 5),  # 4 is a citation
    "anthropic__messages__test_tools__i0": ("ok", "tool_use", 542, 62, None, 2, 4, 4, 7),  # tools without input
    "anthropic__messages__test_prompt_with_prefill_and_stop_sequences__i0":
        ("ok", "stop_sequence", 16, 28, None, 4, 4, 4, 7),
    "azure-foundry__chat__azure_grok-4-1-fast-non-reasoning_can_use_tools_without_parameters_in_-c6a5__i0":
        ("ok", "tool_calls", 205, 18, 0, 1, 1, 1, 1),  # role and call in one chunk
    "azure-foundry__responses__chat_responses_protocol_dialects_with_azure_gpt-5-nano_streams_respons-de45__i0":
        ("ok", "completed", 18, 120, 64, 1, 7, 7, 7),  # reasoning hidden
    "azure-openai__chat__test_chat_async_streaming__i0": ("ok", "stop", None, 28, None, 28, 3, 3, 30),
    "cohere__cohere.v2__chat_citations_with_cohere_command-a-plus-05-2026_streams_citations__i0":
        ("ok", "COMPLETE", 508, 86, 28, 62, 3, 32, 70),
    "cohere__cohere.v2__cohere_command-a-03-2025_can_use_tools_with_multi-turn_streaming_conve-ad83__i0":
        ("ok", "TOOL_CALL", 1508, 67, None, 38, 2, 2, 39),
    "crusoe-vllm0.24__chat__test_crusoe_model_streaming__i0": ("ok", "stop", 46, 14, None, 13, 2, 2, 14),
    "deepseek__chat__deepseek_deepseek-chat_can_use_tools_with_multi-turn_streaming_convers-370b__i0":
        ("ok", "tool_calls", 348, 65, None, 25, 2, 2, 26),
    "deepseek__responses__chat_responses_protocol_dialects_with_deepseek_deepseek-v4-flash_strea-f1e1__i0":
        ("ok", "completed", 95, 14, 12, 13, 5, 22, 22),
    "gemini__gemini__gemini_gemini-2_5-flash_can_use_tools_with_multi-turn_streaming_conver-5759__i0":
        ("ok", "STOP", 103, 73, 43, 1, 1, 1, 1),  # 30 + 43 thoughts
    "gemini__gemini__gemini_gemini-2_5-flash_can_use_tools_with_multi-turn_streaming_conver-5759__i1":
        ("ok", "STOP", 233, 21, None, 2, 1, 1, 2),
    "gpustack-llamabox__chat__gpustack_qwen3_supports_streaming_responses__i0":
        ("ok", "stop", 15, 171, 160, 171, 1, 162, 171),  # 168 with text, 3 empty: usage says 171
    "groq__chat__groq_llama3-8b-8192_streamed_chat__i0": ("ok", "stop", 12, 24, None, 24, 2, 2, 25),
    "groq__chat__test_tool_use_failed_error_streaming_with_text__i0":
        ("stream_error", None, None, 84, None, 84, 2, 85, 85),
    "hf-router__chat__test_hf_model_thinking_part_iter__i0": ("ok", "stop", 10, 955, None, 955, 1, 1, 955),
    "local5002__completions__test_completion_streaming__i0": ("ok", "stop", None, 431, None, 431, 1, 1, 431),
    "mistral__chat__mistral_mistral-small-latest_can_use_tools_with_multi-turn_streaming_c-4ccb__i0":
        ("ok", "tool_calls", 159, 28, None, 1, 2, 2, 2),
    "mistral__chat__test_mistral_model_thinking_part_iter__i0":
        ("ok", "stop", 10, 232, None, 154, 3, 61, 157),  # 60 ends the thinking and holds none
    "ollama-cloud__chat__ollama_cloud_gpt-oss_120b_can_use_tools_with_multi-turn_streaming_conv-8523__i0":
        ("ok", "tool_calls", 169, 55, None, 16, 1, 16, 16),
    "ollama-native__ollama.native__test_ollama_async_streaming_chat_legacy__i0":
        ("ok", "stop", 17, 63, None, 63, 1, 1, 63),  # 62 with text, the last line is the end token
    "openai__chat__test_async_chat_completion_multiple_choices_streaming__i0":
        ("ok", "stop", 26, 133, 0, 133, 2, 2, 135),  # n = 2
    "openai__chat__test_tools_streaming_variant_a__i0": ("ok", None, 57, 17, 0, 2, 3, 3, 4),  # [DONE] alone
    "openai__completions__completion-streaming__i0": ("ok", "length", None, 25, None, 25, 1, 1, 25),
    "openai__responses__responses_stream__i0": ("ok", "completed", 27, 11, 0, 10, 5, 5, 14),
    "openai__responses__test_music_composer_handoff_hierarchy__i1": ("ok", "completed", 75, 16, 0, 1, 4, 4, 4),
    "openrouter__chat__test_openrouter_stream_error__i0": ("stream_error", "length", 43, 10, 11, 2, 18, None, 19),
    "perplexity__chat__perplexity_sonar_supports_streaming_responses__i0": ("ok", "stop", 8, 5, None, 5, 1, 1, 5),
    "vertex__gemini__vertexai_gemini-3-flash-preview_streams_thinking_content_when_availabl-52a9__i1":
        ("ok", "STOP", 43, 1375, 757, 29, 1, 4, 29),  # 618 + 757 thoughts
    "vllm-2024__chat__test_trace_propagation_stream-ChatOpenAI-__i0": ("ok", "length", None, 20, None, 20, 2, 2, 21),
    "vllm-2024__completions__test_trace_propagation_stream-OpenAI-__i0":
        ("ok", "length", None, 20, None, 20, 1, 1, 20),
    "watsonx__ibm.watsonx.text_stream__test_generate_stream_metrics__i6":
        ("ok", "eos_token", 8, 11, None, 11, 2, 2, 12),
    "writer__chat__test_writer_async_streaming_chat_legacy__i0": ("ok", "stop", 39, 37, None, 37, 2, 2, 38),
    "x__responses__xai_grok-4-1-fast-non-reasoning_supports_streaming_responses__i0":
        ("ok", "completed", 199, 160, 152, 21, 5, 23, 30),
    "z__chat__test_zai_thinking_stream__i0": ("ok", "stop", 13, 564, 561, 91, 1, 91, 91),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_row_is_what_a_reader_finds_in_the_file(name, data):
    data("traces", "recordings", "sse")
    _, row = measured(name)
    assert (
        row.outcome,
        row.finish_reason,
        row.input_tokens,
        row.output_tokens,
        row.reasoning_tokens,
        len(row.chunk_ns),
        row.first_token_ns,
        row.first_visible_ns,
        row.last_token_ns,
    ) == BY_HAND[name]


def state(meter):
    """All that a meter holds, to compare two of them."""
    held = {}
    for name in meter.__slots__:
        value = getattr(meter, name)
        held[name] = {slot: getattr(value, slot) for slot in value.__slots__} if hasattr(value, "__slots__") else value
    return held


def test_every_cut_into_two_reads_leaves_the_same_state(data):
    """A cut inside an event, at every byte of it, changes nothing once the event is complete; so no cut changes a row.

    Short streams whole; of long ones some events (all of them with CONVOY_ALL_CUTS=1).
    """
    data("traces", "recordings", "sse")
    draw = random.Random(7)
    cuts = 0
    for name in NAMES:
        body, meta = stored(name)
        meter = begun(meta)
        parts = blocks(body, (SSE / f"{name}.ndjson").exists())
        everything = os.environ.get("CONVOY_ALL_CUTS") == "1"
        chosen = {0, len(parts) - 1, draw.randrange(len(parts))}
        for ordinal, block in enumerate(parts):
            if everything or (ordinal in chosen and len(block) < 1500):
                whole = copy.deepcopy(meter)
                whole.feed(ordinal, block)
                expected = state(whole)
                for cut in range(1, len(block), 1 if everything or len(block) < 300 else 5):
                    twice = copy.deepcopy(meter)
                    twice.feed(ordinal, block[:cut])
                    twice.feed(ordinal, block[cut:])
                    assert state(twice) == expected, (name, ordinal, cut)
                    cuts += 1
            meter.feed(ordinal, block)
    assert cuts > 5_000


def http(path: Path):
    """A recorded HTTP response: status, headers, body with the chunked framing removed."""
    head, _, body = path.read_bytes().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines[1:]]
    if ("transfer-encoding", "chunked") in headers:
        pieces = []
        while body:
            size, _, body = body.partition(b"\r\n")
            pieces.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return int(lines[0].split()[1]), headers, body


VLLM = {  # vLLM 0.32: outcome, finish reason, input and output tokens, chunks, and where they come from
    "chat_stream": ("ok", "length", 24, 12, 12, "usage"),
    "chat_nostream": ("ok", "length", 24, 12, None, "usage"),
    "completions_stream": ("ok", "length", 20, 12, 12, "usage"),
    "completions_nostream": ("ok", "length", 20, 12, None, "usage"),
    "completions_nousage": ("ok", "length", None, 12, 12, "chunks"),
    "messages_stream": ("ok", "max_tokens", 24, 12, 12, "usage"),
    "responses_stream": ("ok", "max_output_tokens", 24, 12, 7, "usage"),  # several tokens in some deltas
    "too_long": ("http_error", None, None, None, None, None),
}


@pytest.mark.parametrize("name", VLLM)
def test_what_vllm_itself_answers(name, data):
    recordings = data("vllm-cpu", "recordings")
    status, headers, body = http(recordings / f"{name}.http")
    asked = json.loads((recordings / f"{name}.meta.json").read_text())["request"]["body"]
    meter = Meter(start_ns=0, stream=bool(asked.get("stream")), max_tokens=asked.get("max_tokens"))
    meter.head(1, status, headers)
    for start in range(0, len(body), 100):
        meter.feed(2 + start, body[start : start + 100])
    row = meter.close(99_999, "eof")
    chunks = None if row.chunk_ns is None else len(row.chunk_ns)
    assert (row.outcome, row.finish_reason, row.input_tokens, row.output_tokens, chunks, row.tokens_source) == VLLM[
        name
    ]
