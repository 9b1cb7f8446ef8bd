"""The short cut for chunks that differ in one string: what fits is the learnt chunk with another text, nothing else."""

from __future__ import annotations

import json

import pytest

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
    assert learnt.fits(block(text))
    assert learnt.fits_read(block(text) + b"\n\n")


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
        block() + b"\n",
        block()[:30] + block()[-20:],
        b": " + block(),
        b"",
    ],
)
def test_anything_else_does_not(learnt, other):
    assert not learnt.fits(other)
    assert not learnt.fits_read(other + b"\n\n")


def test_two_events_in_one_read_are_not_one(learnt):
    assert not learnt.fits_read(block() + b"\n\n" + block() + b"\n\n")
    assert not learnt.fits_read(block() + b"\n\n" + block())
    assert not learnt.fits_read(block())


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
