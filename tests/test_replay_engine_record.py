"""The engine's own records: rows as they were, with their types even when there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replay.engine.record import Log, open_log
from traces.errors import TraceError

ROW = Log(
    request_id="r-1",
    tenant="risk",
    endpoint="chat",
    stream=True,
    priority=None,
    n=1,
    input_tokens=10,
    cached_tokens=0,
    output_tokens=4,
    max_tokens=4,
    preemptions=0,
    outcome="length",
    arrival_ns=1,
    scheduled_ns=2,
    first_token_ns=3,
    last_token_ns=4,
    end_ns=5,
)


def test_json_lines_are_on_disk_as_soon_as_they_are_written(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    log = open_log(path)
    log.write(ROW)
    log.write(ROW)
    lines = path.read_text().splitlines()
    log.close()
    assert len(lines) == 2
    assert json.loads(lines[0])["first_token_ns"] == 3
    assert json.loads(lines[0])["priority"] is None


@pytest.mark.parametrize("count", [0, 2])
def test_parquet_has_the_same_columns_with_and_without_rows(tmp_path: Path, count: int):
    path = tmp_path / "log.parquet"
    log = open_log(path)
    for _ in range(count):
        log.write(ROW)
    log.close()
    table = pq.read_table(path)
    assert table.num_rows == count
    assert table.schema.names == list(Log.__struct_fields__)
    assert table.schema.field("arrival_ns").type == pa.int64()
    assert table.schema.field("tenant").type == pa.string()
    assert table.schema.field("stream").type == pa.bool_()


def test_a_place_that_cannot_be_written_is_named_before_the_engine_starts(tmp_path: Path):
    with pytest.raises(TraceError, match=r"none/log.jsonl: No such file"):
        open_log(tmp_path / "none" / "log.jsonl")
