"""Server-sent events, by the rules of the WHATWG."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.wire import sse


def events(*pieces):
    """(name, data) of each event in bytes cut as given."""
    splitter = sse.Splitter()
    blocks = [block for piece in pieces for block in splitter.feed(piece)] + splitter.close()
    parsed = [sse.parse(block) for block in blocks]
    return [(name, data) for name, data, _ in parsed if data is not None]


CASES = [
    ("LF", b"data: a\n\ndata: b\n\n", [(None, b"a"), (None, b"b")]),
    ("CRLF", b"data: a\r\n\r\ndata: b\r\n\r\n", [(None, b"a"), (None, b"b")]),
    ("CRLF, several data lines", b"data: a\r\ndata: b\r\n\r\n", [(None, b"a\nb")]),
    ("CR", b"data: a\r\rdata: b\r\r", [(None, b"a"), (None, b"b")]),
    ("mixed", b"data: a\r\n\ndata: b\n\r\n", [(None, b"a"), (None, b"b")]),
    ("a name", b"event: x\ndata: a\n\n", [("x", b"a")]),
    ("several data lines", b"data: a\ndata: b\n\n", [(None, b"a\nb")]),
    ("no space", b"data:a\n\n", [(None, b"a")]),
    ("only one space is taken", b"data:  a\n\n", [(None, b" a")]),
    ("a comment between", b": hello\n\ndata: a\n\n", [(None, b"a")]),
    ("a comment inside", b"data: a\n: c\ndata: b\n\n", [(None, b"a\nb")]),
    ("many blank lines", b"\n\n\n\ndata: a\n\n\n\ndata: b\n\n", [(None, b"a"), (None, b"b")]),
    ("other fields", b"id: 1\nretry: 5\nfoo: x\ndata: a\n\n", [(None, b"a")]),
    ("no data, no event", b"event: x\n\ndata: a\n\n", [(None, b"a")]),
    ("a byte order mark", b"\xef\xbb\xbfdata: a\n\n", [(None, b"a")]),
    ("no blank line at the end", b"data: a\n\ndata: b", [(None, b"a"), (None, b"b")]),
    ("a field without a colon", b"data\n\n", [(None, b"")]),
    ("nothing", b"", []),
]


@pytest.mark.parametrize(("why", "data", "expected"), CASES, ids=[case[0] for case in CASES])
def test_what_the_bytes_mean(why, data, expected):
    assert events(data) == expected
    for cut in range(len(data) + 1):
        assert events(data[:cut], data[cut:]) == expected, cut
    assert events(*(data[i : i + 1] for i in range(len(data)))) == expected


PARTS = st.sampled_from([b"data: a", b"data: \xff", b"\n", b"\r", b"\r\n", b":", b"event: e", b" "])


@given(st.lists(PARTS, max_size=30), st.lists(st.integers(0, 200), max_size=10))
def test_any_bytes_in_any_pieces_give_the_same_events(parts, cuts):
    data = b"".join(parts)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert events(*(data[a:b] for a, b in itertools.pairwise(edges))) == events(data)


def test_an_event_beyond_the_limit_is_skipped_and_the_next_one_read(monkeypatch):
    monkeypatch.setattr(sse, "LIMIT", 1000)
    splitter = sse.Splitter()
    blocks = [block for _ in range(30) for block in splitter.feed(b"x" * 100)]
    blocks += splitter.feed(b"xx\n\ndata: a\n\n")
    assert blocks == [b"data: a"]
    assert splitter.oversized == 1
