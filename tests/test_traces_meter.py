"""The meter, as a specification: what a response's bytes and their times mean. Ids such as A01 name user reports."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.meter import Measured, Meter

MS = 1_000_000
SSE = [("Content-Type", "text/event-stream; charset=utf-8")]
JSON = [("content-type", "application/json")]


def sse(*events, done=True, end="\n\n"):
    """Events as server-sent bytes; a str is sent as it is."""
    texts = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    return [(text + end).encode() for text in [*texts, *(["data: [DONE]"] if done else [])]]


def delta(content=None, *, index=0, finish=None, usage=None, **fields):
    held = dict(fields) if content is None else {"content": content, **fields}
    chunk = {"id": "c", "choices": [{"index": index, "delta": held, "finish_reason": finish}]}
    return chunk if usage is None else {**chunk, "usage": usage}


def usage(output, given=9, **more):
    return {"id": "c", "choices": [], "usage": {"prompt_tokens": given, "completion_tokens": output, **more}}


def measure(
    pieces, times_ms=None, *, end="eof", status=200, headers=SSE, end_ms=5_000, together=False, **options
) -> Measured:
    """Feed pieces at their times (ms from the start, which is 1 s on the clock), one by one or `together`."""
    base = 1_000 * MS
    meter = Meter(start_ns=base, **{"endpoint": "chat", "stream": True, **options})
    if status is not None:
        meter.head(base + 1 * MS, status, headers)
    times_ms = times_ms or range(10, 10 + len(pieces))
    reads = [(base + round(at * MS), piece) for at, piece in zip(times_ms, pieces, strict=True)]
    if together:
        meter.feed_all(reads)
    for read in () if together else reads:
        meter.feed(*read)
    return meter.close(base + end_ms * MS, end)


def ms(value_ns):
    return None if value_ns is None else value_ns / MS


# --- the times of tokens -------------------------------------------------------------------------------------------


def test_a01_a_role_chunk_is_not_a_token():
    pieces = sse(delta(role="assistant"), delta("Hi"), delta(" you"), delta(finish="stop"))
    row = measure(pieces, [5, 200, 210, 220, 221])
    assert ms(row.first_token_ns) == 200
    assert ms(row.last_token_ns) == 210
    assert ms(row.headers_ns) == 1
    assert row.outcome == "ok"


def test_a01_a_role_chunk_with_an_empty_content_is_not_a_token_either():
    pieces = sse(delta("", role="assistant"), delta("Hi"), delta(finish="length"), usage(2))
    assert ms(measure(pieces, [5, 200, 220, 221, 222]).first_token_ns) == 200


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_a03_reasoning_is_a_token_but_not_a_visible_one(key):
    pieces = sse(*(delta(**{key: "hm"}) for _ in range(3)), delta("Yes"), delta(finish="stop"))
    row = measure(pieces, [100, 120, 140, 900, 901, 902])
    assert ms(row.first_token_ns) == 100
    assert ms(row.first_visible_ns) == 900


def test_a05_the_usage_chunk_has_no_choices_and_is_no_token():
    row = measure(sse(delta("Hi"), delta("!", finish="stop"), usage(2)), [50, 60, 70, 80])
    assert (row.input_tokens, row.output_tokens, row.tokens_source) == (9, 2, "usage")
    assert row.chunk_ns == [50 * MS, 60 * MS]


def test_a07_a_stream_with_nothing_but_done_is_a_failure_without_a_first_token():
    row = measure(sse())
    assert (row.outcome, row.first_token_ns, row.chunk_ns) == ("no_token", None, None)


def test_a09_a_chunk_of_several_tokens_is_one_chunk():
    row = measure(sse(*(delta("one two three") for _ in range(4)), delta(finish="stop"), usage(12)),
                  [60, 120, 180, 240, 241, 242, 243])  # fmt: skip
    assert len(row.chunk_ns) == 4
    assert row.output_tokens == 12
    assert row.chunk_tokens is None, "the stream does not tell how many tokens a chunk holds"


def test_a11_usage_on_every_chunk_counts_its_tokens():
    first = delta("eight tokens", usage={"prompt_tokens": 4, "completion_tokens": 8})
    rest = [delta("x", usage={"prompt_tokens": 4, "completion_tokens": 8 + i}) for i in range(1, 9)]
    row = measure(sse(first, *rest, delta(finish="stop")), [100, *range(110, 190, 10), 191, 192])
    assert row.chunk_tokens == [8, *[1] * 8]
    assert (row.output_tokens, row.tokens_source) == (16, "usage")


def test_a12_a14_tokens_come_from_usage_and_times_from_chunks():
    row = measure(sse(*(delta("ab") for _ in range(50)), delta(finish="stop"), usage(100)),
                  [1000 + 20 * i for i in range(50)] + [1985, 1990, 1995])  # fmt: skip
    assert row.output_tokens == 100
    assert ms(row.last_token_ns - row.first_token_ns) == 980
    gaps = {b - a for a, b in itertools.pairwise(row.chunk_ns)}
    assert gaps == {20 * MS}, "the time to the first token is no gap"


def test_a17_one_token_has_its_first_and_last_at_one_time():
    row = measure(sse(delta("x", finish="stop"), usage(1)), [40, 41, 42])
    assert row.first_token_ns == row.last_token_ns == 40 * MS


def test_a19_hidden_reasoning_is_kept_apart_from_what_was_streamed():
    pieces = sse(*(delta("w") for _ in range(50)), delta(finish="stop"),
                 usage(200, completion_tokens_details={"reasoning_tokens": 150}))  # fmt: skip
    row = measure(pieces)
    assert (row.output_tokens, row.reasoning_tokens, len(row.chunk_ns)) == (200, 150, 50)
    assert row.first_visible_ns == row.first_token_ns, "no reasoning was streamed"


def test_e06_a_hundred_blanks_are_as_many_tokens_as_usage_says_and_tpot_divides_by_them():
    pieces = sse(*[delta(" " * 10)] * 10, delta(finish="length"), usage(100))
    row = measure(pieces, times_ms=[10 + 99 * i / 9 for i in range(10)] + [110, 110, 110], max_tokens=100)
    assert (row.output_tokens, row.tokens_source) == (100, "usage")
    assert (ms(row.first_token_ns), ms(row.last_token_ns)) == (10, 109)  # 99 ms for 99 tokens: 1 ms each
    assert len(row.chunk_ns) == 10


def test_a21_cumulative_usage_is_not_added_up():
    row = measure(sse(*(delta("x", usage={"prompt_tokens": 3, "completion_tokens": i}) for i in range(1, 100)),
                      delta(finish="stop")))  # fmt: skip
    assert row.output_tokens == 99


def test_a22_a_token_in_the_chunk_that_finishes_is_the_last_token():
    row = measure(sse(delta("a"), delta("b", finish="length"), usage(2)), [10, 20, 30, 31])
    assert ms(row.last_token_ns) == 20
    assert len(row.chunk_ns) == 2


def test_a24_only_the_stamps_that_are_given_count(monkeypatch):
    monkeypatch.setattr("time.time", lambda: pytest.fail("the meter reads no clock"))
    monkeypatch.setattr("time.monotonic_ns", lambda: pytest.fail("the meter reads no clock"))
    assert ms(measure(sse(delta("a"), delta("b", finish="stop")), [10, 30, 31]).last_token_ns) == 30


# --- empty deltas --------------------------------------------------------------------------------------------------

EMPTY_DELTAS = [
    # events, max_tokens → chunks, last token at its position
    ("usage proves the middle one", [delta("a"), delta(""), delta("b"), delta(finish="stop"), usage(3)], None, 3),
    ("usage disproves it", [delta("a"), delta(""), delta("b"), delta(finish="stop"), usage(2)], None, 2),
    ("the finish by length carries a token", [delta("a"), delta("", finish="length"), usage(2)], None, 2),
    ("by length, without usage", [delta("a"), delta("", finish="length")], None, 2),
    ("by length, the limit known", [delta("a"), delta(""), delta("b", finish="length")], 3, 3),
    ("by length, the limit known and used up", [delta("a"), delta(""), delta("b", finish="length")], 2, 2),
    ("only the last is proven", [delta(""), delta(""), delta("b"), delta("", finish="length"), usage(2)], None, 2),
    ("chunks of several tokens prove nothing", [delta("a"), delta(""), delta("b", finish="stop"), usage(5)], None, 2),
    ("a stop proves nothing", [delta("a"), delta("", finish="stop")], None, 1),
    ("usage counts the end token", [delta("a"), delta("", finish="stop"), usage(2)], None, 2),
    ("no content at all is no delta", [delta("a"), delta(finish="length"), usage(2)], None, 1),
    ("usage on the chunk itself", [delta("a", usage={"completion_tokens": 1}),
                                   delta("", usage={"completion_tokens": 2}), delta(finish="stop")], None, 2),
]  # fmt: skip


@pytest.mark.parametrize(("why", "events", "limit", "chunks"), EMPTY_DELTAS, ids=[row[0] for row in EMPTY_DELTAS])
def test_an_empty_delta_is_a_token_only_where_something_proves_it(why, events, limit, chunks):
    row = measure(sse(*events), max_tokens=limit)
    assert len(row.chunk_ns) == chunks
    assert row.chunk_ns == sorted(row.chunk_ns)
    assert (row.first_token_ns, row.last_token_ns) == (row.chunk_ns[0], row.chunk_ns[-1])


# --- choices -------------------------------------------------------------------------------------------------------


def test_n_above_one_first_token_of_any_choice_tokens_of_all():
    pieces = sse(delta("a", index=1), delta("b", index=0), delta(index=1, finish="stop"),
                 delta("c", index=0, finish="length"), usage(4))  # fmt: skip
    row = measure(pieces, [100, 110, 120, 130, 140, 150], n=2)
    assert ms(row.first_token_ns) == 100
    assert (row.output_tokens, row.finish_reason, row.outcome) == (4, "length,stop", "ok")


def test_n_above_one_usage_per_choice_is_added_up_when_no_total_comes():
    events = [delta("x", index=i % 2, usage={"completion_tokens": i // 2 + 1}, finish="stop" if i > 7 else None)
              for i in range(10)]  # fmt: skip
    assert measure(sse(*events), n=2).output_tokens == 10
    assert measure(sse(*events), n=2).chunk_tokens == [1] * 10


def test_n_above_one_a_stream_that_ends_with_one_choice_unfinished_is_truncated():
    row = measure(sse(delta("a", index=0, finish="stop"), delta("b", index=1), done=False), n=2)
    assert (row.outcome, row.error) == ("truncated", "closed")


def test_a_tool_call_is_a_visible_token():
    call = {"index": 0, "function": {"arguments": "{"}}
    row = measure(sse(delta(role="assistant"), delta(tool_calls=[call]), delta(finish="tool_calls")), [1, 20, 30, 31])
    assert ms(row.first_visible_ns) == 20
    assert row.finish_reason == "tool_calls"


# --- how it ended --------------------------------------------------------------------------------------------------

TWO = [delta("a"), delta("b")]
ENDS = [
    # what was seen, how it ended → outcome, error
    ("all of it", sse(*TWO, delta(finish="stop")), "eof", "ok", None),
    ("finish reason without [DONE]", sse(*TWO, delta(finish="stop"), done=False), "eof", "ok", None),
    ("[DONE] without finish reason", sse(*TWO), "eof", "ok", None),
    ("D09 neither, clean close", sse(*TWO, done=False), "eof", "truncated", "closed"),
    ("neither, connection closed", sse(*TWO, done=False), "closed", "truncated", "closed"),
    ("neither, reset", sse(*TWO, done=False), "reset", "truncated", "reset"),
    ("[DONE], then closed before HTTP ended", sse(*TWO), "closed", "ok", None),
    ("only a role, then closed", sse(delta(role="assistant"), done=False), "closed", "truncated", "closed"),
    ("nothing at all", [], "eof", "truncated", "closed"),
    ("finish reason, no token", sse(delta(finish="stop")), "eof", "no_token", None),
    ("usage alone makes no token", sse(delta(finish="stop"), usage(7)), "eof", "no_token", None),
    ("D01 error event, then [DONE]", sse(*TWO, {"error": {"message": "secret", "code": 503}}), "eof", "stream_error",
     "stream 503"),
    ("error without a code", sse(*TWO, {"error": "secret words"}), "eof", "stream_error", "stream"),
    ("error named by its event", sse(*TWO, 'event: error\ndata: {"x": 1}', done=False), "closed", "stream_error",
     "stream"),
    ("finish reason abort", sse(*TWO, delta(finish="abort")), "eof", "stream_error", "stream abort"),
    ("finish reason error", sse(*TWO, delta(finish="error")), "eof", "stream_error", "stream error"),
    ("client left", sse(*TWO, done=False), "client_abort", "client_abort", None),
    ("client left after the end", sse(*TWO), "client_abort", "ok", None),
    ("run ended", sse(*TWO, done=False), "cut", "cut", None),
    ("silence", sse(*TWO, done=False), "timeout_idle", "timeout_idle", "timeout idle"),
    ("silence after a finish reason", sse(*TWO, delta(finish="stop"), done=False), "timeout_idle", "timeout_idle",
     "timeout idle"),
    ("silence after [DONE]", sse(*TWO), "timeout_idle", "ok", None),
    ("too long", sse(*TWO, done=False), "timeout_total", "timeout_total", "timeout total"),
]  # fmt: skip


@pytest.mark.parametrize(("why", "pieces", "end", "outcome", "error"), ENDS, ids=[row[0] for row in ENDS])
def test_how_a_stream_ended(why, pieces, end, outcome, error):
    row = measure(pieces, end=end)
    assert (row.outcome, row.error) == (outcome, error)
    assert row.end_ns == 5_000 * MS
    assert row.response_bytes == sum(map(len, pieces))


@pytest.mark.parametrize(
    ("end", "outcome", "error"),
    [
        ("connect_error", "connect_error", "connect"),
        ("timeout_connect", "timeout_connect", "timeout connect"),
        ("timeout_idle", "timeout_idle", "timeout idle"),
        ("closed", "truncated", "closed"),
        ("reset", "truncated", "reset"),
        ("eof", "truncated", "closed"),
        ("client_abort", "client_abort", None),
        ("cut", "cut", None),
    ],
)
def test_how_it_ended_without_a_head(end, outcome, error):
    row = measure([], end=end, status=None)
    assert (row.outcome, row.error, row.status, row.headers_ns) == (outcome, error, None, None)


@pytest.mark.parametrize("status", [301, 400, 404, 429, 500, 503])
def test_d03_any_status_but_2xx_is_an_http_error_whatever_its_body_says(status):
    body = [json.dumps({"error": {"message": "your prompt was: secret", "code": "secret"}}).encode()]
    row = measure(body, status=status, headers=JSON)
    assert (row.outcome, row.error, row.status) == ("http_error", f"http {status}", status)
    assert row.first_token_ns is None


def test_no_text_of_the_server_is_kept():
    told = "the prompt said my key is sk-12345"
    row = measure(sse(delta("a"), {"error": {"message": told, "type": told, "code": told}}, delta(finish=told)))
    assert told not in repr(row)
    assert "sk-" not in repr(row)


# --- answers that are not streamed ---------------------------------------------------------------------------------


def answer(text="Hi", *, output=2, finish="stop", **message):
    body = {"choices": [{"index": 0, "message": {"content": text, **message}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 9, "completion_tokens": output}}  # fmt: skip
    return json.dumps(body).encode()


def test_an_answer_that_is_not_streamed_has_no_first_token():
    row = measure([answer()], headers=JSON, stream=False)
    assert (row.outcome, row.finish_reason, row.input_tokens, row.output_tokens) == ("ok", "stop", 9, 2)
    assert (row.first_token_ns, row.last_token_ns, row.chunk_ns) == (None, None, None)


def test_a_server_that_answers_a_stream_request_with_a_document_is_measured_as_a_document():
    row = measure([answer()[:20], answer()[20:]], headers=JSON, stream=True)
    assert (row.outcome, row.first_token_ns, row.output_tokens) == ("ok", None, 2)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (answer(""), "no_token"),
        (answer("", output=5, finish="length"), "ok"),
        (answer(None, tool_calls=[{"id": "1"}]), "ok"),
        (answer(None, reasoning="hm"), "ok"),
        (b'{"choices": []}', "no_token"),
        (b"<html>busy</html>", "no_token"),
        (b'{"error": {"code": 503}}', "stream_error"),
    ],
)
def test_what_a_document_says(body, outcome):
    assert measure([body], headers=JSON, stream=False).outcome == outcome


def test_half_a_document_is_truncated():
    row = measure([answer()[:30]], headers=JSON, stream=False, end="closed")
    assert (row.outcome, row.error) == ("truncated", "closed")


# --- bytes ---------------------------------------------------------------------------------------------------------

MIXED = b"".join(
    [
        b": keep-alive\n\n",
        *sse(delta("", role="assistant"), delta("caf\u00e9 \u4e16"), delta('say "x"\n'), done=False),
        *sse(delta("z"), end="\r\n\r\n", done=False),
        b"event: sglext_ids\ndata: {}\n\n",
        *sse(delta("\u4e16\u754c"), delta("", finish="length"), usage(5)),
    ]
)


@pytest.mark.parametrize("cut", range(len(MIXED)))
def test_h01_h03_h04_every_cut_into_two_reads_gives_the_same_row(cut):
    whole = measure([MIXED], [10])
    parts = measure([MIXED[:cut], MIXED[cut:]], [10, 10])
    assert parts == whole
    assert len(whole.chunk_ns) == 5
    assert whole.outcome == "ok"


@given(st.lists(st.integers(0, len(MIXED)), max_size=40))
def test_h01_every_cut_into_many_reads_gives_the_same_row(cuts):
    edges = [0, *sorted(cuts), len(MIXED)]
    pieces = [MIXED[a:b] for a, b in itertools.pairwise(edges)]
    assert measure(pieces, [10] * len(pieces)) == measure([MIXED], [10])
    assert measure(pieces, [10] * len(pieces), together=True) == measure([MIXED], [10])


def test_h01_a_split_event_has_the_time_of_the_read_that_completed_it():
    first, second, *rest = sse(delta("a"), delta("b", finish="stop"))
    row = measure([first + second[:15], second[15:], *rest], [100, 150, 160])
    assert row.chunk_ns == [100 * MS, 150 * MS]


def test_events_of_one_read_share_its_stamp():
    row = measure([b"".join(sse(delta("a"), delta("b"), delta("c", finish="stop")))], [100])
    assert row.chunk_ns == [100 * MS] * 3


def test_the_last_event_needs_no_blank_line():
    row = measure([b"".join(sse(delta("a"), delta("b", finish="stop"), done=False))[:-2]], [100])
    assert (row.outcome, len(row.chunk_ns)) == ("ok", 2)


def test_c10_one_line_of_two_megabytes_is_one_event():
    line = sse(delta("x" * 2_000_000), delta(finish="stop"))
    whole = b"".join(line)
    pieces = [whole[i : i + 65_536] for i in range(0, len(whole), 65_536)]
    assert len(measure(pieces).chunk_ns) == 1


def test_data_that_is_not_json_is_counted_and_passed_over():
    row = measure(sse(delta("a"), "data: not json", "data:", delta("b", finish="stop")))
    assert (row.outcome, len(row.chunk_ns)) == ("ok", 2)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("\\ud83d", 3), ("\\udc00", 3), ("a\\ud83d\\ude00", 3), ("\\u00", 2), ("\\x41", 2), ("a\x01b", 2)],
    ids=["first half", "second half", "both", "short escape", "no escape of JSON", "a control character"],
)
@pytest.mark.parametrize("place", [0, 2])
def test_half_a_character_as_an_escape_is_a_token_and_no_json_is_none(text, tokens, place):
    pieces = sse(delta("Hi"), delta("you"), delta(finish="stop"))
    pieces.insert(place, pieces[0].replace(b"Hi", text.encode()))
    assert measure(pieces).output_tokens == tokens
    assert measure(pieces, together=True).output_tokens == tokens


def test_a_chunk_with_nan_is_a_token():
    chunk = 'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"logprob":NaN}]}}]}'
    assert measure(sse(chunk, delta("b"), delta(finish="stop"))).output_tokens == 2


def test_invalid_utf8_is_still_a_token():
    pieces = sse(delta("a"), delta("b", finish="stop"))
    pieces[0] = pieces[0].replace(b'"a"', b'"\xff\xfe"')
    assert len(measure(pieces).chunk_ns) == 2


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning", "role"]), st.text(max_size=6),
                          st.sampled_from([None, "stop", "length"])), max_size=12))  # fmt: skip
def test_a_known_chunk_is_read_as_if_it_were_decoded(deltas):
    """The template's short cut changes nothing: the same stream with spaces that defeat it gives the same row."""
    events = [delta(**{key: text}, finish=finish) for key, text, finish in deltas]
    dense = [f"data: {json.dumps(e, separators=(',', ':'), ensure_ascii=False)}" for e in events]
    slow = [f"data: {' ' * i}{json.dumps(e)}" for i, e in enumerate(events)]
    assert without_sizes(measure(sse(*dense))) == without_sizes(measure(sse(*slow)))


TEXTS = st.text(alphabet=st.sampled_from('ab "\\\n\r\u4e16{},:'), max_size=4)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(["content", "reasoning", "tool_calls"]), TEXTS), max_size=12),
    st.lists(st.integers(0, 2_000), max_size=8),
)
def test_many_reads_at_once_are_the_same_as_one_by_one(deltas, cuts):
    texts = [json.dumps(delta(**{key: text}), separators=(",", ":"), ensure_ascii=False) for key, text in deltas]
    pieces = sse(*(f"data: {text}" for text in texts), delta("", finish="length"), usage(7))
    stream = b"".join(pieces)
    edges = sorted(
        {0, len(stream), *(cut for cut in cuts if cut < len(stream)), *itertools.accumulate(map(len, pieces))}
    )
    reads = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert measure(reads, together=True) == measure(reads)


def test_raw_bytes_that_are_no_json_string_are_not_taken_for_a_known_chunk():
    pieces = sse(delta("a"), delta("b"), delta("c"), delta("d", finish="stop"))
    pieces[1] = pieces[1].replace(b'"b"', b'"b\nb"')
    pieces[2] = pieces[2].replace(b'"c"', b'"c\\"')
    for together in (False, True):
        assert len(measure(pieces, together=together).chunk_ns) == 2


def without_sizes(row):
    row.response_bytes = 0
    return row
