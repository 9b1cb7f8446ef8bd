"""Trace files: any subset of columns reads back equal, every broken rule is named by file, row and column."""

from __future__ import annotations

import stat

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import parquet
from traces.errors import BadFile, BadRow
from traces.record import SCHEMA, Metadata, table

ROWS = {
    "tenant": ["risk", "summary", None],
    "arrival_ns": [0, 5, 9],
    "input_tokens": [10, 20, None],
    "outcome": ["ok", "no_token", "truncated"],
    "stream": [True, None, False],
    "chunk_ns": [[1, 2], None, []],
}


def trace(**changes):
    return table({**ROWS, **changes}, Metadata(source="test"))


def test_a_trace_reads_back_equal(tmp_path):
    parquet.write(trace(), tmp_path / "t.parquet")
    assert parquet.read(tmp_path / "t.parquet") == trace()
    assert parquet.read(tmp_path / "t.parquet").schema.metadata == trace().schema.metadata


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50))
def test_nanoseconds_survive_to_the_last_digit(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("ns") / "t.parquet"
    parquet.write(table({"arrival_ns": times}, Metadata()), path)
    assert parquet.read(path).column("arrival_ns").to_pylist() == sorted(times)


def test_asking_for_columns_reads_those_and_the_arrival(tmp_path):
    parquet.write(trace(), tmp_path / "t.parquet")
    assert parquet.read(tmp_path / "t.parquet", ["tenant", "tools"]).schema.names == ["tenant", "arrival_ns"]


def test_a_folder_of_parts_is_one_trace_in_order_of_arrival(tmp_path):
    parquet.write(table({"arrival_ns": [5, 7]}, Metadata()), tmp_path / "part-2.parquet")
    parquet.write(table({"arrival_ns": [1, 6], "tenant": ["a", "b"]}, Metadata()), tmp_path / "part-1.parquet")
    for where in (tmp_path, tmp_path / "part-*.parquet"):
        read = parquet.read(where)
        assert read.column("arrival_ns").to_pylist() == [1, 5, 6, 7]
        assert read.column("tenant").to_pylist() == ["a", None, "b", None]


def test_parts_of_different_epochs_are_not_one_trace(tmp_path):
    parquet.write(table({"arrival_ns": [5]}, Metadata(epoch="unix")), tmp_path / "part-1.parquet")
    parquet.write(table({"arrival_ns": [5]}, Metadata(epoch="relative")), tmp_path / "part-2.parquet")
    with pytest.raises(BadFile, match=r"part-2.parquet: epoch is 'relative' but 'unix' in"):
        parquet.read(tmp_path)


def test_a_trace_without_rows_keeps_its_columns(tmp_path):
    parquet.write(trace().slice(0, 0), tmp_path / "t.parquet")
    assert parquet.read(tmp_path / "t.parquet").schema.names == trace().schema.names


def test_plain_strings_are_taken_for_words(tmp_path):
    plain = pa.table({"arrival_ns": pa.array([1], pa.int64()), "tenant": pa.array(["risk"])})
    pq.write_table(plain, tmp_path / "t.parquet")
    assert parquet.read(tmp_path / "t.parquet").schema.field("tenant").type == SCHEMA.field("tenant").type


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("arrival_ns", [1, None, 3], "row 2, column arrival_ns: a request without a time"),
        ("input_tokens", [1, 2, -7], "row 3, column input_tokens: -7 is below 0"),
        ("output_tokens", [-1, 2, 3], "row 1, column output_tokens: -1 is below 0"),
        ("first_token_ns", [1, -2, 3], "row 2, column first_token_ns: -2 is below 0"),
        ("outcome", ["ok", "fine", "ok"], "row 2, column outcome: 'fine' is not one of ok, http_error"),
        ("endpoint", ["chat", "chat", "Chat"], "row 3, column endpoint: 'Chat' is not one of chat, completions"),
        ("tokens_source", ["guess", None, None], "row 1, column tokens_source: 'guess' is not one of usage"),
    ],
)
def test_a_broken_rule_names_file_row_and_column(tmp_path, column, values, says):
    path = tmp_path / "t.parquet"
    parquet.write(trace(**{column: values}), path)
    with pytest.raises(BadRow) as caught:
        parquet.read(path)
    assert str(caught.value).startswith(f"{path}, {says}")


def test_rows_are_counted_through_batches(tmp_path):
    path = tmp_path / "t.parquet"
    values = np.ones(1000, dtype=np.int32)
    values[777] = -1
    parquet.write(table({"arrival_ns": np.arange(1000), "input_tokens": values}, Metadata()), path)
    with pytest.raises(BadRow, match="row 778, column input_tokens"):
        list(parquet.batches(path, batch_rows=100))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"TIMESTAMP,ContextTokens\n1,2\n", "import it first: traces import"),
        ("t.parquet", b"not parquet at all, and long enough to have a footer", "not a Parquet trace"),
        ("t.parquet", b"", "not a Parquet trace"),
    ],
)
def test_what_is_not_parquet_is_said_in_one_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadFile, match=says) as caught:
        parquet.read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadFile, match=r"gone.parquet: no such file"):
        parquet.read(tmp_path / "gone.parquet")


def test_an_unknown_column_is_refused_not_dropped(tmp_path):
    pq.write_table(pa.table({"arrival_ns": [1], "prompt": ["secret"]}), tmp_path / "t.parquet")
    with pytest.raises(BadFile, match="column 'prompt' is not one of a trace"):
        parquet.read(tmp_path / "t.parquet")


def test_a_file_without_times_is_refused(tmp_path):
    pq.write_table(pa.table({"input_tokens": [1]}), tmp_path / "t.parquet")
    with pytest.raises(BadFile, match="column arrival_ns is missing"):
        parquet.read(tmp_path / "t.parquet")


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write(trace(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadFile, match="not a Parquet trace"):
        parquet.read(path)


def test_nothing_is_left_when_the_source_of_rows_fails(tmp_path):
    def rows():
        yield trace().to_batches()[0]
        raise BadRow("x", 1, "y", "broken")

    with pytest.raises(BadRow):
        parquet.write_batches(rows(), trace().schema, tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_files_are_for_their_owner_alone(tmp_path):
    parquet.write(trace(), tmp_path / "t.parquet")
    assert stat.S_IMODE((tmp_path / "t.parquet").stat().st_mode) == 0o600


def test_an_older_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write(trace(), path)

    def rows():
        yield trace(arrival_ns=[7, 8, 9]).to_batches()[0]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        parquet.write_batches(rows(), trace().schema, path)
    assert parquet.read(path).column("arrival_ns").to_pylist() == [0, 5, 9]
