"""An import is complete or absent, in order, and every row that is left out is counted."""

from __future__ import annotations

import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from traces import parquet
from traces.errors import BadFile, BadRow
from traces.importers import load
from traces.importers.intake import Options

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def azure(tmp_path, rows, header=HEADER):
    path = tmp_path / "azure.csv"
    path.write_text(header + "".join(f"{row}\n" for row in rows))
    return path


def at(second, context=5, generated=6):
    return f"2024-05-10 00:00:{second:02d}.000000,{context},{generated}"


def test_rows_in_order_are_written_as_they_come(tmp_path):
    intake = load.import_file("azure", azure(tmp_path, [at(0), at(1), at(1)]), tmp_path / "out.parquet", Options())
    assert (intake.rows, intake.out_of_order, intake.failed) == (3, 0, 0)
    assert parquet.read(tmp_path / "out.parquet").num_rows == 3


def test_b13_rows_out_of_order_are_sorted_and_their_steps_counted_and_span_what_they_span(tmp_path):
    path = azure(tmp_path, [at(second, context) for context, second in enumerate([0, 5, 1, 6, 2])])
    intake = load.import_file("azure", path, tmp_path / "out.parquet", Options())
    assert intake.out_of_order == 2
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["input_tokens"].to_pylist() == [0, 2, 4, 1, 3]
    times = found["arrival_ns"].to_pylist()
    assert times[-1] - times[0] == 6_000_000_000
    assert list(tmp_path.glob(".*")) == []


def test_a_step_back_between_two_batches_counts_and_equal_times_do_not(tmp_path):
    intake = load.Intake("x")
    for part in ([1, 5], [5, 6], [4, 4], [4]):
        intake.count_order(np.array(part))
    assert intake.out_of_order == 1


def test_sorting_in_windows_equals_a_stable_sort_in_memory(tmp_path, monkeypatch):
    draw = random.Random(7)
    rows = [(draw.randrange(60), index) for index in range(5000)]
    monkeypatch.setattr(load, "_WINDOW_ROWS", 700)
    monkeypatch.setattr(load, "_GROUP_ROWS", 300)
    load.import_file("azure", azure(tmp_path, [at(*row) for row in rows]), tmp_path / "out.parquet", Options())
    found = pq.read_table(tmp_path / "out.parquet")["input_tokens"].to_pylist()
    assert found == [index for _, index in sorted(rows, key=lambda row: row[0])]


def test_zero_output_rows_are_kept_as_no_token_or_dropped_and_counted(tmp_path):
    path = azure(tmp_path, [at(0), at(1, generated=0), at(2)])
    kept = load.import_file("azure", path, tmp_path / "kept.parquet", Options())
    assert kept.failed == 1
    assert pq.read_table(tmp_path / "kept.parquet")["outcome"].to_pylist() == ["ok", "no_token", "ok"]
    dropped = load.import_file("azure", path, tmp_path / "dropped.parquet", Options(failed="drop"))
    assert (dropped.rows, dropped.failed) == (2, 1)
    assert "1 failed row (no output tokens, or an error) dropped" in dropped.summary()


WRONG = [
    ([at(0), ",5,6"], "row 2, column TIMESTAMP: is empty"),
    ([at(0), "noon,5,6"], "row 2, column TIMESTAMP: 'noon' is not a time"),
    ([at(0), at(1, -5)], "row 2, column ContextTokens: '-5' is below 0"),
    ([at(0), at(1, "NaN")], "row 2, column ContextTokens: 'NaN' is not a whole number"),
    ([at(0), at(1, "")], "row 2, column ContextTokens: is empty"),
    ([at(0), at(1, 2.5)], "row 2, column ContextTokens: '2.5' is not a whole number"),
    ([at(0), at(1, 2**31)], "row 2, column ContextTokens: '2147483648' is more than 2^31 - 1"),
    ([at(0), "", at(1), "2024-05-10 00:00:02.0"], "row 3: 1 fields where the header has 3"),
    ([at(0), at(1) + ",7"], "row 2: 4 fields where the header has 3"),
]


@pytest.mark.parametrize(("rows", "problem"), WRONG)
def test_a_bad_row_is_named_and_nothing_is_left_behind(tmp_path, rows, problem):
    path = azure(tmp_path, rows)
    with pytest.raises(BadRow) as caught:
        load.import_file("azure", path, tmp_path / "out.parquet", Options())
    assert str(caught.value) == f"{path}, {problem}"
    assert [item.name for item in tmp_path.iterdir()] == ["azure.csv"]


@pytest.mark.parametrize("rows", [rows for rows, _ in WRONG])
def test_bad_rows_can_be_skipped_and_are_counted(tmp_path, rows):
    intake = load.import_file("azure", azure(tmp_path, rows), tmp_path / "out.parquet", Options(bad_rows="skip"))
    assert (intake.bad, intake.rows) == (1, len([row for row in rows if row]) - 1)


def test_row_numbers_count_skipped_rows_too(tmp_path, monkeypatch):
    path = azure(tmp_path, [at(0), "short", at(1), "short", at(2), "noon,1,1"])
    named = []
    monkeypatch.setattr(load.Intake, "bad_row", lambda self, row, column, problem: named.append(row))
    load.import_file("azure", path, tmp_path / "out.parquet", Options(bad_rows="skip"))
    assert sorted(named) == [2, 4, 6]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text(HEADER), "no rows to import"),
        (lambda path: path.write_bytes(HEADER.encode("utf-16")), "is UTF-16 text"),
        (lambda path: path.write_text("TIMESTAMP,ContextTokens\n1,2\n"), "column 'GeneratedTokens' is missing"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08\x00broken"), "damaged or cut short"),
        (lambda path: path.write_bytes(HEADER.encode() + b"\xff\xff,1,2\n"), "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path, make, problem):
    path = tmp_path / "in.csv"
    make(path)
    with pytest.raises(BadFile, match=problem):
        load.import_file("azure", path, tmp_path / "out.parquet", Options())
    assert not (tmp_path / "out.parquet").exists()


def test_an_import_that_fails_leaves_the_former_trace_as_it_was(tmp_path):
    out = tmp_path / "out.parquet"
    load.import_file("azure", azure(tmp_path, [at(0)]), out, Options())
    before = out.read_bytes()
    with pytest.raises(BadRow):
        load.import_file("azure", azure(tmp_path, [at(0), at(1, "x")]), out, Options())
    assert out.read_bytes() == before


def test_the_result_is_a_valid_trace(tmp_path):
    load.import_file("azure", azure(tmp_path, [at(0), at(1)]), tmp_path / "out.parquet", Options())
    trace = parquet.read(tmp_path / "out.parquet")
    assert np.all(np.diff(trace["arrival_ns"].to_numpy()) == 10**9)
    assert b"azure azure.csv" in trace.schema.metadata[b"convoy.source"]
