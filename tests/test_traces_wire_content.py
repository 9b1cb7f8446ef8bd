"""Content codings undone piece by piece, with a bound."""

from __future__ import annotations

import gzip
import itertools
import tracemalloc
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.meter import Meter
from traces.wire.content import Content, codings

BODY = b"".join(b'data: {"choices":[{"index":0,"delta":{"content":"t%d"}}]}\n\n' % i for i in range(50))
STREAM = BODY + b"data: [DONE]\n\n"
RAW = zlib.compressobj(wbits=-15)
PACKED = {
    "gzip": gzip.compress(STREAM),
    "x-gzip": gzip.compress(STREAM[:1000]) + gzip.compress(STREAM[1000:]),
    "deflate": zlib.compress(STREAM),
    "br": brotli.compress(STREAM),
    "zstd": zstandard.compress(STREAM),
}


def undone(name, pieces):
    content = Content(codings(name))
    return b"".join(part for piece in pieces for part in content.feed(piece)), content


@settings(max_examples=40)
@given(st.sampled_from(sorted(PACKED)), st.lists(st.integers(0, 2_000), max_size=20))
def test_any_cut_of_the_coded_bytes_gives_the_same_body(name, cuts):
    packed = PACKED[name]
    edges = [0, *sorted(min(cut, len(packed)) for cut in cuts), len(packed)]
    pieces = [packed[a:b] for a, b in itertools.pairwise(edges)]
    body, content = undone(name, pieces)
    assert body == STREAM
    assert content.error is None


def test_deflate_without_its_head_is_understood():
    assert undone("deflate", [RAW.compress(STREAM) + RAW.flush()])[0] == STREAM


def test_codings_in_a_row_are_undone_from_the_last_to_the_first():
    assert undone("gzip, br", [brotli.compress(gzip.compress(STREAM))])[0] == STREAM
    assert codings("identity") == []


def test_a_stream_flushed_by_its_server_is_seen_chunk_by_chunk():
    packer = zlib.compressobj(wbits=31)
    content = Content(["gzip"])
    for part in (STREAM[:100], STREAM[100:300]):
        sent = packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH)
        assert b"".join(content.feed(sent)) == part


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
def test_a_body_that_lies_about_its_coding_is_read_as_it_is_and_the_coding_named(name):
    body, content = undone(name, [STREAM])
    assert content.error == f"encoding {name}"
    assert body == STREAM


@pytest.mark.parametrize("name", ["gzip", "deflate"])
def test_a_body_that_breaks_in_the_middle_keeps_what_came_before(name):
    packed = PACKED[name]
    body, content = undone(name, [packed[:60], b"\0garbage\0" * 50])
    assert content.error == f"encoding {name}"
    assert STREAM.startswith(body)


def test_a_coding_nobody_knows_is_named_and_passed_over():
    body, content = undone("rot13", [STREAM])
    assert (body, content.error) == (STREAM, "encoding other")


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        ("gzip", gzip.compress(b"0" * 50_000_000)),
        ("gzip, gzip", gzip.compress(gzip.compress(b"0" * 50_000_000))),
        ("br", brotli.compress(b"0" * 50_000_000, quality=5)),
        ("zstd", zstandard.compress(b"0" * 50_000_000)),
    ],
    ids=["gzip", "gzip twice", "br", "zstd"],
)
def test_a_bomb_stops_early_and_costs_little_memory(name, bomb):
    content = Content(codings(name))
    tracemalloc.start()
    grown = sum(len(part) for part in content.feed(bomb))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content.error == "encoding bomb"
    assert grown < 30_000_000
    assert peak < 60_000_000


def test_the_row_names_what_was_wrong_with_the_coding():
    meter = Meter(start_ns=0)
    meter.head(1, 200, [("content-type", "text/event-stream"), ("Content-Encoding", "GZIP")])
    meter.feed(2, STREAM)
    row = meter.close(3, "eof")
    assert (row.outcome, row.error, len(row.chunk_ns)) == ("ok", "encoding gzip", 50)
