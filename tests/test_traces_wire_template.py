"""The short cut for chunks that differ in one string: what fits is the learnt chunk with another text, nothing else."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.wire.template import Template


def block(text='"hi"', *, index=0, finish="null", more="", before="data: "):
    return (
        f'{before}{{"id":"c","choices":[{{"index":{index},"delta":{{"content":{text}}},"finish_reason":{finish}}}]{more}}}'
    ).encode()


@pytest.fixture
def learnt():
    template = Template()
    template.learn(block(), json.loads(block()[6:]))
    return template


@pytest.mark.parametrize("text", ['"x"', '" two words"', '"caf\\u00e9"', '"say \\"x\\""', '"a\\\\"', '"\u4e16"'])
def test_another_text_fits(learnt, text):
    event = block(text) + b"\n\n"
    assert learnt.fits(block(text))
    assert learnt.lead(event, 0) == (1, len(event))
    assert passed(learnt, event) == 1


@pytest.mark.parametrize(
    "other",
    [
        block('""'),
        block("null"),
        block('"x","role":"assistant"'),
        block('"x"},"delta":{"content":"y"'),
        block(finish='"ab"'),  # as long as null
        block(index=1),
        block(more=',"usage":{"completion_tokens":1}'),
        block('"a\nb"'),
        block('"a\rb"'),
        block('"a\\"'),
        block()[:-1],
        block()[:30] + block()[-20:],
        b": " + block(),
        b"",
    ],
)
def test_anything_else_does_not(learnt, other):
    assert not learnt.fits(other)
    assert learnt.lead(other + b"\n\n", 0) == (0, 0)
    assert passed(learnt, other + b"\n\n") == 0


def passed(template, data):
    """How many of the reads `data`, then a known one, are passed over."""
    times_ns = []
    template.run([(5, data), (6, block() + b"\n\n")], 0, 0, times_ns)
    return min(len(times_ns), 1)


@pytest.mark.parametrize("read", [block() + b"\n\n" + block() + b"\n\n", block() + b"\n\n" + block(), block()])
def test_a_read_that_is_not_one_whole_event_is_not_passed_over(learnt, read):
    assert passed(learnt, read) == 0


@given(st.data())
def test_as_many_lead_as_fit_one_by_one(data):
    """The short cut against the obvious way: cut at blank lines, ask each."""
    template = Template()
    template.learn(block(), None)
    texts = st.text(st.sampled_from('ab "\\\n\r{}:é,'), max_size=6)
    other = st.sampled_from([b": ping", block('""'), block(finish='"stop"'), block()[:40], b"", b"data: [DONE]"])
    raw = texts.map(lambda text: block('"' + text + '"'))  # a text that was not escaped: often no text at all
    events = data.draw(st.lists(texts.map(lambda text: block(json.dumps(text))) | raw | other, max_size=8))
    stream = b"".join(event + b"\n\n" for event in events) + data.draw(st.sampled_from([b"", block(), block()[:20]]))
    one_by_one = list(itertools.takewhile(template.fits, stream.split(b"\n\n")[:-1]))
    assert template.lead(stream, 0) == (len(one_by_one), sum(len(event) + 2 for event in one_by_one))


@pytest.mark.parametrize(
    "chunk",
    [
        block('""'),
        block(finish='"stop"'),
        block(more=',"usage":{"completion_tokens":1}'),
        block(more=',"error":{"code":1}'),
        block(more=',"x":{"content":"again"}'),
        block('"x"},{"index":1,"delta":{"content":"y"}'),
    ],
)
def test_a_chunk_that_is_not_a_plain_token_is_not_learnt(chunk):
    template = Template()
    try:
        decoded = json.loads(chunk[6:])
    except ValueError:
        decoded = {"choices": []}
    template.learn(chunk, decoded)
    assert not template.fits(chunk)
    assert not template.fits(block())


def test_completions_have_a_template_too():
    chunk = b'data: {"id":"c","choices":[{"index":0,"text":" a","finish_reason":null}]}'
    template = Template()
    template.learn(chunk, json.loads(chunk[6:]))
    assert template.fits(chunk.replace(b'" a"', b'" b"'))
