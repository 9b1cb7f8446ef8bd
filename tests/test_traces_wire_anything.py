"""A broken server never breaks the meter: whatever comes, there is a row, and it holds together."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.meter import Meter
from traces.record import ENDPOINTS, OUTCOMES

KEYS = """
    choices delta index content text role reasoning tool_calls finish_reason usage prompt_tokens completion_tokens error
    code type message event response output status incomplete_details reason input_tokens output_tokens content_block
    thinking partial_json stop_reason meta_info output_ids token special generated_text details prefill stop stop_type
    timings prompt_ms tokens results generated_token_count done done_reason eval_count candidates parts thought metrics
    finishReason usageMetadata candidatesTokenCount promptFeedback event_type x_groq queue_time_ms data embeddings meta
    billed_units completion_tokens_details input_tokens_details queue_time object
""".split()  # noqa: SIM905 - a table of words reads better than a list
WORDS = """
    a stop length error abort response.output_text.delta response.completed response.failed content_block_delta
    content_block_start message_start message_delta message_stop text_delta thinking_delta input_json_delta message
    content-delta message-end stream-end text-generation
""".split()  # noqa: SIM905


def anything(draw, depth=0):
    """Some JSON value, rich in the words that formats know."""
    kind = draw.random()
    if depth < 4 and kind < 0.45:
        return an_object(draw, depth + 1)
    if depth < 4 and kind < 0.65:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(3))]
    return draw.choice([None, True, False, "", draw.choice(WORDS), draw.randrange(-5, 50), 2**40, 1.5, -0.5, 1e300])


def an_object(draw, depth=0):
    return {draw.choice(KEYS): anything(draw, depth) for _ in range(draw.randrange(1, 6))}


TYPES = st.sampled_from(["text/event-stream", "application/json", "application/x-ndjson", "text/html", ""])
CODINGS = st.sampled_from(["", "", "", "gzip", "br", "zstd", "deflate, gzip", "nonsense"])
ENDS = st.sampled_from(["eof", "closed", "reset", "client_abort", "cut", "timeout_idle"])


def hold_together(row):
    assert row.outcome in OUTCOMES
    times = row.chunk_ns or []
    assert times == sorted(times)
    if times:
        assert (row.first_token_ns, row.last_token_ns) == (times[0], times[-1])
    if row.chunk_tokens is not None:
        assert len(row.chunk_tokens) == len(times)
    if row.first_visible_ns is not None:
        assert row.first_visible_ns >= row.first_token_ns
    for name in ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "queue_ns", "prefill_ns"):
        value = getattr(row, name)
        assert value is None or value >= 0


@pytest.mark.parametrize("seed", range(40))
def test_any_json_in_any_format_gives_a_row_that_holds_together(seed):
    draw = random.Random(seed)
    for _ in range(100):
        kind = draw.choice(["text/event-stream", "application/json", "application/x-ndjson", "text/html", ""])
        meter = Meter(endpoint=draw.choice(ENDPOINTS), stream=draw.random() < 0.7, start_ns=0)
        meter.head(0, 200, [("content-type", kind)])
        for at in range(1, draw.randrange(1, 8)):
            text = json.dumps(an_object(draw))
            name = draw.choice(WORDS)
            meter.feed(at, f"event: {name}\ndata: {text}\n\n".encode() if "event" in kind else f"{text}\n".encode())
        hold_together(meter.close(99, draw.choice(["eof", "closed", "reset", "client_abort", "cut", "timeout_idle"])))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6), TYPES, CODINGS, ENDS, st.integers(100, 599))
def test_any_bytes_give_a_row(pieces, kind, coding, end, status):
    meter = Meter(start_ns=0)
    meter.head(0, status, [("content-type", kind), ("content-encoding", coding), ("x-queue-time", "soon")])
    for at, piece in enumerate(pieces, 1):
        meter.feed(at, piece)
    hold_together(meter.close(99, end))
