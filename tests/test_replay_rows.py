"""Rows on their way to disk: a batch is made by small steps, and what was not measured is told apart."""

from __future__ import annotations

import pyarrow as pa
import pytest

from replay import rows as writing
from replay.rows import BATCH_CHUNKS, BATCH_ROWS, PART_SCHEMA, RowWriter, read_part
from traces.measured import Measured

SENT = (10, 10, 12, None, 1, 200)  # due_ns, released_ns, sent_ns, connect_ns, attempts, request_bytes


@pytest.fixture
def writer(tmp_path):
    made = RowWriter(tmp_path / "part.arrow")
    yield made
    made.close()


def answer(tokens=2):
    return Measured(status=200, outcome="ok", chunk_ns=list(range(tokens)), output_tokens=tokens, tokens_source="usage")


def fill(writer, count, tokens=2):
    first = writer.written + len(writer)
    for row in range(first, first + count):
        writer.append(row, SENT, answer(tokens))


def read(tmp_path):
    return [row for batch in read_part(tmp_path / "part.arrow") for row in batch.to_pylist()]


def test_a_batch_has_gathered_by_its_rows_or_by_the_chunks_in_them(writer):
    fill(writer, BATCH_ROWS - 1)
    assert not writer.full
    fill(writer, 1)
    assert writer.full
    writer.flush()
    assert not writer.full
    fill(writer, 1, tokens=BATCH_CHUNKS)
    assert writer.full


def test_a_step_makes_one_column_and_the_last_writes(writer, monkeypatch):
    arrays = []

    def array(values, **kind):
        arrays.append(values)
        return make(values, **kind)

    make = pa.array
    monkeypatch.setattr(writing.pa, "array", array)
    fill(writer, 3)
    steps = 0
    writer.step()  # begins
    while writer.making:
        before = len(arrays)
        writer.step()
        steps += 1
        assert len(arrays) - before == (steps <= len(PART_SCHEMA))
    assert steps == len(PART_SCHEMA) + 1
    assert writer.written == 3


def test_rows_that_come_while_a_batch_is_made_are_the_next_ones(writer, tmp_path):
    fill(writer, 3)
    writer.step()
    writer.append(3, SENT, answer())
    assert (len(writer), writer.making) == (1, True)
    writer.flush()
    assert (len(writer), writer.making, writer.written) == (0, False, 4)
    assert [row["row"] for row in read(tmp_path)] == [0, 1, 2, 3]


def test_what_is_read_is_what_was_appended(writer, tmp_path):
    writer.append(7, SENT, answer(3))
    writer.flush()
    (row,) = read(tmp_path)
    assert row["row"] == 7
    assert tuple(row[name] for name in writing.SENT) == SENT
    assert (row["status"], row["outcome"], row["chunk_ns"], row["output_tokens"]) == (200, "ok", [0, 1, 2], 3)
    assert row["first_token_ns"] is None


def test_a_writer_that_died_leaves_its_complete_batches(tmp_path):
    writer = RowWriter(tmp_path / "part.arrow")
    fill(writer, 2)
    writer.flush()
    size = (tmp_path / "part.arrow").stat().st_size
    fill(writer, 5)
    writer.close()
    whole = (tmp_path / "part.arrow").read_bytes()
    (tmp_path / "part.arrow").write_bytes(whole[: size + (len(whole) - size) // 2])
    assert [row["row"] for row in read(tmp_path)] == [0, 1]


def test_an_empty_file_and_none_at_all_are_no_rows(tmp_path):
    (tmp_path / "part.arrow").touch()
    assert read(tmp_path) == []
    assert list(read_part(tmp_path / "none")) == []
