"""What the lookalike makes of an answer is what the meter makes of it, or nothing at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.lookalike import Lookalike
from traces.meter import Meter

HEADERS = [(b"date", b"today"), (b"content-type", b"text/event-stream; charset=utf-8")]


def chunk(own, delta, *, finish=None, **more):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    document = {"id": own, "object": "chat.completion.chunk", "created": 17, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def events(texts, own="chatcmpl-1", *, lead=True, usage=(40, 16, None), finish="length", ending=None):
    """An everyday stream, one bytes per event; `ending`: a last text that comes with the finish reason."""
    found = [chunk(own, {"role": "assistant", "content": ""})] if lead else []
    found += [chunk(own, {"content": text}) for text in texts]
    found.append(chunk(own, {} if ending is None else {"content": ending}, finish=finish))
    if usage:
        counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage[:2])}
        if usage[2] is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": usage[2]}
        document = {"id": own, "object": "chat.completion.chunk", "created": 17, "choices": [], "usage": counts}
        found.append(b"data: " + json.dumps(document).encode() + b"\n\n")
    return [*found, b"data: [DONE]\n\n"]


def timed(parts):
    return [(1_000 + 10 * place, part) for place, part in enumerate(parts)]


def metered(reads, headers=HEADERS, endpoint="chat"):
    """The meter's row without what the caller of a lookalike fills in."""
    meter = Meter(endpoint=endpoint, start_ns=100, max_tokens=99)
    meter.head(500, 200, [(name.decode(), value.decode()) for name, value in headers])
    meter.feed_all(reads)
    row = meter.close(10**6, "eof")
    row.status = row.headers_ns = row.end_ns = None
    return row


def taught(reads, headers=HEADERS, endpoint="chat"):
    alike = Lookalike()
    alike.learn(headers, reads, metered(reads, headers, endpoint))
    return alike


TEXTS = st.lists(st.text(max_size=6), min_size=1, max_size=8)
USAGE = st.tuples(
    st.integers(0, 2**31 - 100), st.integers(0, 99), st.none() | st.integers(0, 9)
)  # a total fits 31 bits


@given(TEXTS, TEXTS, st.text("abc-09", min_size=1), st.booleans(), st.none() | USAGE)
@settings(max_examples=300)
def test_other_texts_another_id_and_another_usage_are_measured_as_the_meter_does(first, second, own, lead, usage):
    alike = taught(timed(events(["a", *first], lead=lead, usage=usage and (1, 2, None))))
    reads = timed(events(second, own, lead=lead, usage=usage))
    found = alike.measure(HEADERS, reads, 100)
    assert found in (None, metered(reads))
    if all(second) and all(first):
        assert found is not None


@given(TEXTS, st.text(max_size=6), st.text("abc-09", min_size=1), st.none() | USAGE)
@settings(max_examples=300)
def test_a_last_text_may_come_with_the_finish_reason(texts, ending, own, usage):
    alike = taught(timed(events(["a", "b"], usage=usage and (1, 2, None), ending="c")))
    reads = timed(events(texts, own, usage=usage, ending=ending))
    found = alike.measure(HEADERS, reads, 100)
    assert found in (None, metered(reads))
    if all(texts) and ending:
        assert found is not None
    without = timed(events(texts, own, usage=usage))
    assert alike.measure(HEADERS, without, 100) in (None, metered(without))


@pytest.mark.parametrize("broken", [b"data: \n{", b"data: \r{", b"data: {\n", b"data:  {"])
def test_a_usage_in_several_lines_is_left_to_the_meter(broken):
    alike = taught(timed(events(["a", "b"])))
    parts = events(["c"])
    parts[-2] = parts[-2].replace(b"data: {", broken, 1)
    assert alike.measure(HEADERS, timed(parts), 100) in (None, metered(timed(parts)))


@pytest.mark.parametrize("own", ["chat\rcmpl", "chat\tcmpl", "chat\x00", ""])
def test_an_id_that_is_no_json_string_is_left_to_the_meter(own):
    alike = taught(timed(events(["a", "b"])))
    reads = timed([part.replace(b"chatcmpl-1", own.encode()) for part in events(["c"])])
    assert alike.measure(HEADERS, reads, 100) in (None, metered(reads))


@given(st.data(), TEXTS)
@settings(max_examples=300)
def test_a_stream_with_a_fault_anywhere_is_measured_as_the_meter_does_or_left_to_it(data, texts):
    alike = taught(timed(events(["a", "b", "c"])))
    parts = events(texts)
    place = data.draw(st.integers(0, len(parts) - 1))
    part = parts[place]
    at = data.draw(st.integers(0, len(part)))
    fault = data.draw(
        st.sampled_from(
            [
                part[:at] + part[at + 1 :],
                part[:at] + b"\n" + part[at:],
                part[:at] + b'"' + part[at:],
                part[:at] + b"\\" + part[at:],
                part[:at] + b"7" + part[at:],
                part[:at] + b"\r" + part[at:],
                b"",
                part + part,
                part + b": ping\n\n",
                b"\n\n",
                b'data: {"error":{"code":500}}\n\n',
            ]
        )
    )
    reads = timed([*parts[:place], fault, *parts[place + 1 :]])
    assert alike.measure(HEADERS, reads, 100) in (None, metered(reads))


@given(st.lists(st.booleans(), min_size=20, max_size=20))
def test_events_that_came_in_one_read_have_its_time(joined):
    parts = events([f" t{index}" for index in range(16)])
    alike = taught(timed(parts))
    reads: list[bytes] = []
    for part, join in zip(parts, joined, strict=True):
        if join and reads:
            reads[-1] += part
        else:
            reads.append(part)
    assert alike.measure(HEADERS, timed(reads), 100) == metered(timed(reads))


def test_a_read_that_ends_within_an_event_is_left_to_the_meter():
    whole = b"".join(events(["a", "b", "c", "d"]))
    alike = taught(timed(events(["a"])))
    for cut in range(1, len(whole)):
        reads = timed([whole[:cut], whole[cut:]])
        assert alike.measure(HEADERS, reads, 100) in (None, metered(reads))
    assert alike.measure(HEADERS, timed([whole[:50], whole[50:]]), 100) is None


@pytest.mark.parametrize(
    "headers",
    [
        [*HEADERS, (b"content-encoding", b"gzip")],
        [*HEADERS, (b"x-queue-time", b"12")],
        [HEADERS[0], (b"content-type", b"application/json")],
        HEADERS[1:],
    ],
)
def test_other_headers_are_another_kind_of_answer(headers):
    reads = timed(events(["a", "b"]))
    assert taught(reads).measure(HEADERS, reads, 100) is not None
    assert taught(reads).measure(headers, reads, 100) is None


def test_nothing_is_learnt_from_what_tells_more_than_the_form_holds():
    parts = events(["a", "b"])
    parts[1] = chunk("chatcmpl-1", {"content": "a"}, usage={"prompt_tokens": 1, "completion_tokens": 1})
    for odd in (parts, events(["a", ""]), events(["a"])[:-1], [chunk("x", {"content": "a"}), b"data: [DONE]\n\n"]):
        reads = timed(odd)
        assert taught(reads).measure(HEADERS, reads, 100) is None


def test_a_server_whose_answers_are_never_alike_is_soon_left_alone():
    alike = Lookalike()
    learnt = 0
    for number in range(200):
        parts = [part.replace(b'"created":17', b'"created":%d' % number) for part in events(["a", "b"])]
        assert alike.measure(HEADERS, timed(parts), 100) is None
        alike.learn(HEADERS, timed(parts), metered(timed(parts)))
        learnt += alike.measure(HEADERS, timed(parts), 100) is not None
        alike._misses = number + 1  # the look above is the test's own
    assert 16 <= learnt <= 20


@pytest.mark.data
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_recording_is_measured_as_the_meter_does_or_left_to_it(data, endpoint):
    served = 0
    for path in sorted(data("traces", "recordings", "sse").rglob("*.sse")):
        body = path.read_bytes()
        reads = timed([part + b"\n\n" for part in body.split(b"\n\n")[:-1]])
        if len(reads) < 3:
            continue
        found = taught(reads, endpoint=endpoint).measure(HEADERS, reads, 100)
        assert found in (None, metered(reads, endpoint=endpoint)), path
        served += found is not None
    assert served >= 3
