"""A session's rows are numbered as they arrive, whatever the order and the batches they came in."""

from __future__ import annotations

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.importers.intake import Options, record_batch
from traces.importers.load import import_file, table
from traces.importers.turns import Turns, wanted
from traces.record import Metadata

HEADER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n"
ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(0, 9), st.integers(0, 30) | st.none()))


def batch(rows, start=0):
    """Rows of (session, gap to the former row, duration)."""
    arrival, moment = [], start
    for _, gap, _ in rows:
        moment += gap
        arrival.append(moment)
    columns = {"session_id": [row[0] for row in rows], "arrival_ns": arrival, "end_ns": [row[2] for row in rows]}
    return record_batch(columns, Metadata())


def slowly(batch):
    """The same by the definition, one row after the other."""
    count, end, found = {}, {}, []
    for row in batch.to_pylist():
        session, arrival = row["session_id"], row["arrival_ns"]
        turn = think = None
        if session is not None:
            turn = count.get(session, 0)
            if turn and end[session] is not None and arrival >= end[session]:
                think = arrival - end[session]
            count[session] = turn + 1
            end[session] = None if row["end_ns"] is None else arrival + row["end_ns"]
        found.append((turn, think))
    return found


@settings(deadline=None)
@given(ROWS, st.integers(1, 5))
def test_turns_and_think_times_are_those_of_the_definition_however_the_rows_are_cut(rows, size):
    whole, turns = batch(rows), Turns()
    parts = [turns.number(whole.slice(low, size)) for low in range(0, whole.num_rows, size)]
    found = [(row["turn"], row["think_ns"]) for part in parts for row in part.to_pylist()]
    assert found == slowly(whole)


def test_burstgpt_sessions_are_numbered_after_sorting(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text(HEADER + "30,s,1,m,5,5\n10,s,4,m,6,6\n11,,2,m,7,7\n20,t,3,m,8,8\n")
    import_file("burstgpt", path, tmp_path / "out.parquet", Options())
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["input_tokens"], row["turn"], row["think_ns"]) for row in rows] == [
        (6, 0, None),
        (7, None, None),
        (8, 0, None),
        (5, 1, 16 * 10**9),
    ]
    assert table("burstgpt", path).to_pylist() == rows


def test_a_source_that_tells_turns_or_has_no_session_is_left_alone():
    told = record_batch({"session_id": ["a"], "turn": [7], "arrival_ns": [0]}, Metadata())
    assert not wanted(told)
    assert wanted(told.drop_columns(["turn"]))
    assert not wanted(record_batch({"session_id": [None], "arrival_ns": [0]}, Metadata()))
    assert not wanted(record_batch({"arrival_ns": [0]}, Metadata()))
