"""The recorder's thread: what it keeps, what it drops, what it says, and what bounds it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import time

import msgspec
import pytest
from click.testing import CliRunner

from capture import recorder as recorders
from capture import status
from capture.command import capture
from capture.exchange import Exchange
from capture.recorder import Recorder, prepared
from capture.settings import Settings
from traces import parquet, spool
from traces.errors import BadFile
from traces.meter import Meter
from traces.recover import recover


def exchange(number, body=b'{"model": "m", "stream": true}'):
    meter = Meter(start_ns=0)
    meter.head(1, 200, [("content-type", "text/event-stream")])
    meter.feed(2, b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
    return Exchange(number=number, endpoint="chat", path="/v1/chat/completions", headers={"x-tenant": "risk"},
                    arrival_ns=1_800_000_000_000_000_000 + number, body=body, request_bytes=len(body or b""),
                    meter=meter, end="eof", end_ns=9)  # fmt: skip


def recorder(out, said=None, **settings):
    return Recorder(prepared(Settings(out=str(out), **settings)), (said if said is not None else []).append)


def test_rows_go_through_the_spool_into_parts(tmp_path):
    recording = recorder(tmp_path / "out", part_rows=10)
    for number in range(25):
        recording.put(exchange(number))
        if number % 10 == 9:
            recording._turn()
    recording._turn()
    recording._close_part()
    trace = parquet.read(tmp_path / "out")
    assert trace.num_rows == 25
    assert len(list((tmp_path / "out").glob("part-*"))) == 3
    assert set(trace.column("tenant").to_pylist()) == {"risk"}
    assert recording.counts.dropped == 0


def test_c14_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "QUEUE_ROWS", 5)
    recording = recorder(tmp_path / "out")
    for number in range(8):
        recording.put(exchange(number))
    recording._turn()
    assert (recording.counts.rows, recording.counts.dropped) == (5, 3)


@pytest.mark.parametrize(("waiting", "most"), [(10, 10), (64, 64), (1_000, 300)])
def test_a_recorder_that_is_behind_pauses_less_often_and_writes_as_it_goes(waiting, most, tmp_path, monkeypatch):
    pauses, spooled = [], []
    monkeypatch.setattr(recorders.time, "sleep", pauses.append)
    recorder = Recorder(prepared(Settings(out=tmp_path)), lambda _: None)
    for number in range(waiting):
        recorder.put(exchange(number))
    monkeypatch.setattr(recorder, "_write", lambda rows: spooled.append(len(rows)))
    recorder._flush()
    assert 0 < len(pauses) <= most
    assert sum(spooled) == waiting
    assert max(spooled) <= 500


def test_bodies_that_do_not_fit_are_let_go_and_their_rows_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "QUEUE_BYTES", 100)
    recording = recorder(tmp_path / "out")
    for number in range(5):
        recording.put(exchange(number, b'{"model": "m", "x": "%b"}' % (b"y" * 40)))
    recording._turn()
    recording._close_part()
    assert parquet.read(tmp_path / "out").column("model").to_pylist() == ["m", None, None, None, None]


def test_a_part_that_could_not_be_written_is_made_as_soon_as_there_is_room(tmp_path, monkeypatch):
    said: list[str] = []
    recording = recorder(tmp_path / "out", said, part_rows=1)
    full = True

    def to_part(path, make=spool.to_part):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(path)

    monkeypatch.setattr(spool, "to_part", to_part)
    for number in range(2):
        recording.put(exchange(number))
        recording._turn()
    assert len(list((tmp_path / "out").glob("spool-*"))) == 2
    full = False
    recording.put(exchange(2))
    recording._turn()
    assert list((tmp_path / "out").glob("spool-*")) == []
    assert parquet.read(tmp_path / "out").num_rows == 3


def test_a_spool_that_is_left_at_the_end_is_said(tmp_path, monkeypatch):
    said: list[str] = []
    recording = recorder(tmp_path / "out", said)

    def to_part(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool, "to_part", to_part)
    recording.put(exchange(0))
    recording.start()
    recording.stop()
    assert said[-1] == f"1 spools are left: make room, then traces recover {tmp_path / 'out'}"


def test_a_trace_that_is_still_in_its_spool_is_told_from_none(tmp_path):
    recording = recorder(tmp_path / "out")
    recording.put(exchange(0))
    recording._turn()
    with pytest.raises(BadFile, match=r"no part yet.*--part-every.*traces recover"):
        parquet.read(tmp_path / "out")
    recording._close_part()
    assert parquet.read(tmp_path / "out").num_rows == 1


def test_one_odd_request_does_not_end_the_recording(tmp_path):
    recording = recorder(tmp_path / "out")
    odd = exchange(0)
    odd.meter = None
    recording.put(odd)
    recording.put(exchange(1))
    recording._turn()
    assert (recording.counts.rows, recording.counts.failed, recording.counts.dropped) == (1, 1, 1)


def test_of_rows_that_arrow_does_not_take_only_the_odd_ones_are_lost(tmp_path):
    recording = recorder(tmp_path / "out")
    for number in range(7):
        recording.put(exchange(number))
    recording.put(msgspec.structs.replace(exchange(7), request_bytes=2**70))
    for number in range(8, 20):
        recording.put(exchange(number))
    recording._turn()
    assert (recording.counts.rows, recording.counts.failed, recording.counts.dropped) == (19, 1, 1)
    recording.put(exchange(20))
    recording._turn()
    recording._close_part()
    kept = parquet.read(tmp_path / "out").column("request_id").to_pylist()
    assert [int(name.rpartition("-")[2]) for name in kept] == [number for number in range(21) if number != 7]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"model": "m", "messages": ' + b"[" * 900 + b"]" * 900 + b"}", {}),
        (b'{"model": "m", "tools": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}", {}),
        (b'{"model": "m", "prompt": "\\ud800 alone"}', {}),
        (b'{"model": "m"}', {"content-encoding": "gzip"}),
        (b"\xff\xfe\x00", {"content-encoding": "br, zstd"}),
        (b'{"max_tokens": 1e400, "n": -3, "priority": {"a": 1}, "prompt": [[1, 2], "x", null]}', {}),
    ],
)
def test_a_body_that_cannot_be_read_costs_its_own_columns_only(tmp_path, body, headers):
    recording = recorder(tmp_path / "out")
    recording.put(msgspec.structs.replace(exchange(0), body=body, headers=headers))
    recording._turn()
    assert (recording.counts.rows, recording.counts.dropped) == (1, 0)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)],
                                           check=False, capture_output=True).returncode:  # fmt: skip
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_drops_rows_counts_them_says_so_and_goes_on_when_there_is_room(small_disk):
    said: list[str] = []
    recording = recorder(small_disk / "out", said)
    number = 0
    while not recording.counts.dropped and number < 20_000:
        for _ in range(200):
            recording.put(exchange(number))
            number += 1
        recording._flush()
    assert recording.counts.dropped > 0
    assert any("No space left" in line and "traffic passes on" in line for line in said)
    kept = recording.counts.rows
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    recording.put(exchange(number))
    recording._turn()
    assert any("recording again" in line for line in said)
    recording._close_part()
    assert parquet.read(small_disk / "out").num_rows == kept + 1
    assert number == kept + recording.counts.dropped


def test_a_folder_removed_in_mid_run_is_made_again(tmp_path):
    said: list[str] = []
    recording = recorder(tmp_path / "out", said)
    recording.put(exchange(0))
    recording._turn()
    shutil.rmtree(tmp_path / "out")
    recording.put(exchange(1))
    recording._turn()
    recording._close_part()
    assert parquet.read(tmp_path / "out").num_rows == 2
    assert any("no row lost" in line for line in said)


def test_what_an_earlier_recorder_left_behind_becomes_a_part_at_the_next_start(tmp_path):
    first = recorder(tmp_path / "out")
    first.put(exchange(0))
    first._turn()
    first._spool.let_go()
    said: list[str] = []
    second = recorder(tmp_path / "out", said)
    second.start()
    second.put(exchange(1))
    second.stop()
    assert any("recovered 1 rows" in line for line in said)
    assert parquet.read(tmp_path / "out").num_rows == 2


def test_several_recorders_write_to_one_folder(tmp_path):
    several = [recorder(tmp_path / "out") for _ in range(3)]
    for each in several:
        each.start()
        each.put(exchange(0))
    for each in several:
        each.stop()
    assert parquet.read(tmp_path / "out").num_rows == 3
    assert len(set(parquet.read(tmp_path / "out").column("request_id").to_pylist())) == 3


def test_max_bytes_and_max_age_remove_the_oldest_parts(tmp_path):
    out = tmp_path / "out"
    for number in range(4):
        recording = recorder(out)
        recording.put(exchange(number))
        recording._turn()
        recording._close_part()
        newest = max(out.glob("part-*"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, 2 * (time.time() - 100 + 20 * number,))
    size = max(path.stat().st_size for path in out.glob("part-*"))
    bounded = recorder(out, max_bytes=2 * size + size // 2)
    bounded._forget_old()
    assert sorted(parquet.read(out).column("arrival_ns").to_numpy() % 10) == [2, 3]
    recorder(out, max_age_s=50)._forget_old()
    assert sorted(parquet.read(out).column("arrival_ns").to_numpy() % 10) == [3]
    recorder(out, max_age_s=10)._forget_old()
    assert list(out.glob("part-*")) == []


def test_the_salt_is_new_for_every_recording_and_kept_only_when_asked(tmp_path):
    one, two = prepared(Settings(out=str(tmp_path / "a"))), prepared(Settings(out=str(tmp_path / "a")))
    assert one.salt != two.salt
    assert list((tmp_path / "a").iterdir()) == []
    kept = [prepared(Settings(out=str(tmp_path / "b"), keep_salt=True)).salt for _ in range(2)]
    assert kept[0] == kept[1]
    assert (tmp_path / "b" / "salt").stat().st_mode & 0o777 == 0o600


def test_status_is_not_taken_in_by_a_process_that_has_a_dead_recorders_number(tmp_path):
    out = tmp_path / "out"
    killed = recorder(out)
    killed.put(exchange(0))
    killed._turn()
    assert status.state(killed.counts, [killed._spool.path.name]) == "running"
    killed.counts.pid_began -= 1
    assert status.state(killed.counts, [killed._spool.path.name]) == "died"


def test_status_says_who_ended_who_died_and_whose_rows_were_recovered(tmp_path):
    out = tmp_path / "out"
    recording = recorder(out)
    recording.start()
    recording.put(exchange(0))
    recording.stop()
    killed = recorder(out)
    killed.put(exchange(1))
    killed._turn()
    killed._spool.let_go()
    dead = msgspec.structs.replace(killed.counts, pid=2**22 - 1, rows=0, rows_per_s=3.0)
    (out / f"recorder-{dead.name}.json").write_bytes(msgspec.json.encode(dead))
    shown = CliRunner().invoke(capture, ["status", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "ended" in shown.output
    assert "died" in shown.output
    assert "0 running; 1 rows in 1 part, 1 spool" in shown.output
    assert f"traces recover {out}" in shown.output
    told = json.loads(CliRunner().invoke(capture, ["status", str(out), "--json"]).output)
    assert {each["name"]: each["state"] for each in told["recorders"]} == {recording.name: "ended", dead.name: "died"}
    assert told["rows_in_parts"] == 1
    assert CliRunner().invoke(recover, [str(out)]).exit_code == 0
    shown = CliRunner().invoke(capture, ["status", str(out)]).output
    assert re.search(rf"{dead.name}  recovered +1 rows +0\.0/s", shown), "what it had not told of is counted"
    assert "0 running; 2 rows in 2 parts, 0 spools" in shown
    assert "died" not in shown
    assert "left behind" not in shown
