"""Files as people really have them: odd but right ones are read, broken ones are named; nothing else ever happens."""

from __future__ import annotations

import gzip
import random
import re

import pytest
import zstandard

from traces.errors import BadFile, BadRow, TraceError
from traces.importers.intake import Options
from traces.importers.load import import_file, table

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = b"2023-11-16 18:17:03.9799600,5,6\n"
LINE = b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'


def put(tmp_path, content):
    path = tmp_path / "in.dat"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        (HEADER + ROW).replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + HEADER + ROW,
        gzip.compress(HEADER + ROW),
        gzip.compress(HEADER) + gzip.compress(ROW),
        gzip.compress(b"\xef\xbb\xbf" + HEADER + ROW),
        zstandard.compress(HEADER + ROW),
        b"\n\n" + HEADER + b"\n" + ROW + b"\n\n",
        (HEADER + ROW).rstrip(),
        HEADER.lower() + ROW,
        HEADER.replace(b",", b" , ") + ROW,
        (HEADER + ROW).replace(b"\n", b",\n"),
        b'"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2023-11-16 18:17:03.97996","5","6"\n',
        b'note,GeneratedTokens,TIMESTAMP,ContextTokens\n"a, b",6,2023-11-16T18:17:03.97996Z,5\n',
        HEADER + b"2023-11-16 11:17:03.97996-07:00, 5 ,6.0\n",
        HEADER + b"2023-11-16 18:17:03.97996,0.5e1,6E0\n",
    ],
)
def test_a_csv_that_is_right_in_an_odd_way_is_read(tmp_path, content):
    (row,) = table("azure", put(tmp_path, content)).to_pylist()
    assert row == {"arrival_ns": 1_700_158_623_979_960_000, "input_tokens": 5, "output_tokens": 6, "outcome": "ok"}


def test_a_quoted_field_may_hold_line_ends_and_rows_are_still_counted_right(tmp_path):
    text = b'note,TIMESTAMP,ContextTokens,GeneratedTokens\n"a\nb\r\n, ""c""",2023-11-16 18:17:03,5,6\nx,noon,1,1\n'
    with pytest.raises(BadRow, match="row 2, column TIMESTAMP: 'noon' is not a time"):
        table("azure", put(tmp_path, text))
    assert table("azure", put(tmp_path, text), Options(bad_rows="skip"))["input_tokens"].to_pylist() == [5]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (LINE.replace(b"\n", b"\r\n") * 2, 2),
        (b"\xef\xbb\xbf" + LINE, 1),
        (b"\n" + LINE + b"  \n" + LINE.rstrip(), 2),
        (b"[" + LINE + b"," + LINE + b"]\n", 2),
        (b"[\n  " + LINE.replace(b", ", b",\n    ") + b"]", 1),
        (LINE.replace(b"{", b"{\n").replace(b", ", b",\n") * 3, 3),
        (LINE.replace(b": 5", b": 5.0").replace(b": 1", b': "1"'), 1),
        (LINE.replace(b"[0]", b"[18446744073709551615]"), 1),
        (gzip.compress(LINE * 4), 4),
    ],
)
def test_json_that_is_right_in_an_odd_way_is_read(tmp_path, content, rows):
    trace = table("mooncake", put(tmp_path, content))
    assert trace["input_tokens"].to_pylist() == [5] * rows
    assert trace["arrival_ns"].to_pylist() == [1_000_000] * rows


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ((HEADER + ROW).replace(b"\n", b"\r"), "lines end in CR alone"),
        (gzip.compress(HEADER + ROW * 1000)[:-12], "damaged or cut short"),
        (gzip.compress(b""), "is empty"),
        ((HEADER + ROW).decode().encode("utf-16"), "is UTF-16 text"),
        ((HEADER + ROW).decode().encode("utf-16-le"), "is not text"),
        (bytes(1000), "is not text"),
        (b"\n\n\n", "has no header line"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n", "is a Git LFS pointer"),
        (b"<html>404</html>", "column 'TIMESTAMP' is missing .found: <html>404</html>"),
        (HEADER.replace(b"\n", b",ContextTokens\n") + ROW, "column 'ContextTokens' is there twice"),
        (HEADER + ROW.replace(b"\n", b",\n"), "row 1: 4 fields where the header has 3"),
        (HEADER + b'2023-11-16 18:17:03,"1,234",6\n', "row 1, column ContextTokens: '1,234' is not a whole number"),
        (HEADER + ROW + b'"2023-11-16 18:17:03,5,6\n' + ROW, "row 2: "),
        (HEADER + b"2023-11-16 18:17:03,0x10,6\n", "row 1, column ContextTokens: '0x10' is not a whole number"),
        (HEADER + b"2023-11-16 18:17:03,1_000,6\n", "row 1, column ContextTokens: '1_000' is not a whole number"),
        (HEADER + b"2023-11-16 18:17:03,1e-3,6\n", "row 1, column ContextTokens: '1e-3' is not a whole number"),
        (HEADER + b"2023-11-16 18:17:03," + b"9" * 30 + b",6\n", "row 1, column ContextTokens: '9+' is more than 2"),
        (HEADER + b"2023-11-16 24:00:00,5,6\n", "row 1, column TIMESTAMP: '2023-11-16 24:00:00' is not a time .hour"),
        (HEADER + b"1700158623,5,6\n", "row 1, column TIMESTAMP: '1700158623' is not a time"),
        (HEADER + ROW * 3 + b"2023-11-16 18:17:03,5\xff,6,7\n", "is not UTF-8 text"),
    ],
)
def test_a_csv_that_is_wrong_is_named(tmp_path, content, problem):
    with pytest.raises((BadFile, BadRow), match=problem):
        import_file("azure", put(tmp_path, content), tmp_path / "out.parquet", Options())
    assert [item.name for item in tmp_path.iterdir()] == ["in.dat"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[" + LINE + b"," + LINE[:20], "the JSON is broken or cut short after record 1"),
        (b"[]", "no rows to import"),
        (b"5\n", "is not JSON: it does not begin with . or"),
        (b"[[1]]", "row 1: expected object, got array"),
        (LINE + b"[1]\n", "row 2: expected object, got array"),
        (LINE * 2 + LINE[:30], "row 3: is not a JSON object on one line"),
        (LINE.replace(b": 1,", b": Infinity,", 1), "row 1: is not a JSON object"),
        (LINE.replace(b": 1,", b": 1e400,", 1), "row 1, column timestamp: 1E.400 is no time"),
        (LINE.replace(b": 1,", b': "NaN",', 1), "row 1, column timestamp: NaN is no time"),
        (LINE.replace(b": 5", b": true"), "row 1, column input_length: expected int, got bool"),
        (LINE.replace(b": 5", b": 2147483648"), "row 1, column input_length: expected int <= 2147483647"),
        (LINE.replace(b"[0]", b"[0.5]"), "row 1, column hash_ids.0.: expected int, got float"),
        (LINE.replace(b"[0]", b"[99999999999999999999]"), "row 1, column hash_ids: a block id has more than 64 bits"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "broken|row 1"),
    ],
)
def test_json_that_is_wrong_is_named(tmp_path, content, problem):
    with pytest.raises((BadFile, BadRow), match=problem):
        import_file("mooncake", put(tmp_path, content), tmp_path / "out.parquet", Options())
    assert [item.name for item in tmp_path.iterdir()] == ["in.dat"]


SOURCES = {
    "azure": HEADER + ROW * 3,
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens\n5,m,4,0\n6,n,5,6\n",
    "mooncake": LINE * 2,
    "jsonl": b'{"arrival_ns": 5, "stream": true, "block_hashes": [1], "tenant": "risk"}\n',
    "gor": "1 a 5\nPOST /v1/messages HTTP/1.1\r\n\r\n{}\n🐵🙈🙉\n2 a 7 2\nHTTP/1.1 200 OK\r\n\r\n{}\n🐵🙈🙉\n".encode(),
    "accesslog": b'{"start_time": "2024-05-10T00:00:01Z", "duration": 15, "response_code": 200, "path": "/v1/chat"}\n',
}
SHARDS = [
    *(b"null", b"-1", b"NaN", b"1e999", b'""', b"[]", b"{}", b"true", b"9" * 30, b",", b"\n", b'"', b"\0", b"\xff"),
    *(b"\\", b"0.1", b"-9223372036854775809", b"18446744073709551616", b'"NaN"', b"1e9999999999", "٣".encode()),
]


@pytest.mark.parametrize("form", SOURCES)
def test_whatever_is_done_to_a_file_it_is_read_or_refused_in_one_line(tmp_path, form):
    draw = random.Random(form)
    for _ in range(120):
        content = SOURCES[form]
        for _ in range(draw.randint(1, 3)):
            spots = [*re.finditer(rb'-?\d+|"[^"]*"|true', content), None]
            spot = draw.choice(spots)
            low, high = spot.span() if spot else [draw.randrange(len(content) + 1)] * 2
            content = content[:low] + draw.choice([*SHARDS, b""]) + content[high:]
        options = Options(bad_rows=draw.choice(["error", "skip"]), failed=draw.choice(["keep", "drop"]))
        try:
            import_file(form, put(tmp_path, content), tmp_path / "out.parquet", options)
        except TraceError as error:
            assert "\n" not in str(error)  # noqa: PT017 - either way is right
            assert not (tmp_path / "out.parquet").exists()
        (tmp_path / "out.parquet").unlink(missing_ok=True)
        assert [item.name for item in tmp_path.iterdir()] == ["in.dat"]
