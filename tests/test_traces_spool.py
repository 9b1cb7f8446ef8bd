"""The spool: whatever happens to a recorder, the rows that it had flushed are there."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from traces import parquet, spool
from traces.record import Metadata, metadata_of
from traces.recover import recover

UNIX = Metadata(epoch="unix", block_unit="characters", source="capture")


def rows(count, first=0):
    return [{"arrival_ns": first + i, "request_id": f"r{first + i}", "tenant": "risk", "outcome": "ok",
             "chunk_ns": [1, 2], "block_hashes": [-5]} for i in range(count)]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "spool-x-00001.arrows"


def test_a_finished_spool_is_a_part_with_every_row(path):
    spooled = spool.Spool(path, UNIX)
    spooled.append(rows(3))
    spooled.append(rows(2, 3))
    part = spooled.finish()
    assert part.name == "part-x-00001.parquet"
    assert not path.exists()
    trace = parquet.read(part)
    assert trace.column("arrival_ns").to_pylist() == [0, 1, 2, 3, 4]
    assert trace.column("tenant").to_pylist() == ["risk"] * 5
    assert metadata_of(trace) == UNIX
    assert part.stat().st_mode & 0o777 == 0o600


def test_an_empty_spool_leaves_nothing(path):
    assert spool.Spool(path, UNIX).finish() is None
    assert list(path.parent.iterdir()) == []


def test_i01_cut_at_any_byte_it_holds_every_batch_before(path, tmp_path):
    spooled = spool.Spool(path, UNIX)
    sizes = [spooled.size]
    for batch in range(4):
        spooled.append(rows(2, 2 * batch))
        sizes.append(spooled.size)
    spooled.let_go()
    data = path.read_bytes()
    for length in range(0, len(data), 97):
        cut = tmp_path / "cut.arrows"
        cut.write_bytes(data[:length])
        whole = max((i for i, size in enumerate(sizes) if size <= length), default=0)
        assert sum(batch.num_rows for batch in spool.batches(cut)) == 2 * whole, length


def test_a_write_that_fails_leaves_the_batches_before_it(path, monkeypatch):
    spooled = spool.Spool(path, UNIX)
    spooled.append(rows(2))
    really = os.write

    def full(file, data):
        if len(data) > 100:
            return really(file, bytes(data[:50]))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: full(file, data) if len(data) > 100 else full(file, b""))
        patch.setattr(spool, "_write_all", lambda file, data: (really(file, bytes(data)[:60]), full(file, b""))[0])
        with pytest.raises(OSError, match="No space"):
            spooled.append(rows(2, 2))
    spooled.append(rows(2, 4))
    spooled.let_go()
    assert [row["arrival_ns"] for batch in spool.batches(path) for row in batch.to_pylist()] == [0, 1, 4, 5]


def test_a_removed_file_gets_its_name_and_its_rows_again(path):
    spooled = spool.Spool(path, UNIX)
    spooled.append(rows(2))
    assert spooled.is_there()
    path.unlink()
    assert not spooled.is_there()
    spooled.put_back()
    spooled.append(rows(2, 2))
    assert parquet.read(spooled.finish()).num_rows == 4


def test_recover_leaves_a_living_recorder_alone(path):
    spooled = spool.Spool(path, UNIX)
    spooled.append(rows(2))
    result = CliRunner().invoke(recover, [str(path.parent)])
    assert result.exit_code == 0
    assert "left alone" in result.output
    assert path.exists()
    spooled.let_go()
    assert "Recovered 2 rows in 1 part" in CliRunner().invoke(recover, [str(path.parent)]).output
    assert not path.exists()


def test_a_crash_between_the_part_and_the_end_of_its_spool_doubles_nothing(path):
    spooled = spool.Spool(path, UNIX)
    spooled.append(rows(3))
    spool.to_part(path)
    spooled.let_go()
    part, found = spool.recover(path)
    assert (part.name, found) == ("part-x-00001.parquet", 3)
    assert parquet.read(path.parent).num_rows == 3


def test_recover_of_no_folder_is_one_clear_line(tmp_path):
    result = CliRunner().invoke(recover, [str(tmp_path / "nowhere")])
    assert "not a folder" in str(result.exception)
