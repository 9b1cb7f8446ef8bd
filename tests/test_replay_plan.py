"""The plan: pure, reproducible, and nothing of the trace lost on the way."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import plan as planning
from traces.errors import BadFile
from traces.record import ENDPOINTS, Metadata, table

S = 1_000_000_000
EPOCH = 1_700_000_000 * S


def trace(**columns):
    rows = len(columns["arrival_ns"])
    columns.setdefault("input_tokens", [10] * rows)
    columns.setdefault("output_tokens", [5] * rows)
    return table(columns, Metadata())


def test_the_first_request_is_due_at_zero_whatever_the_epoch_b12():
    made = planning.build(trace(arrival_ns=[EPOCH, EPOCH + 3 * S, EPOCH + 4 * S]))
    assert made.at_ns.tolist() == [0, 3 * S, 4 * S]
    assert made.span_ns == 4 * S


def test_a_plain_trace_is_first_turns_of_one_tenant():
    made = planning.build(trace(arrival_ns=[0, 1]))
    assert made.tenants == ("default",)
    assert made.tenant.tolist() == [0, 0]
    assert made.rank.tolist() == [-1, -1]
    assert made.previous.tolist() == [-1, -1]
    assert made.stream.tolist() == [True, True]
    assert not made.linked


def test_the_endpoint_of_the_trace_is_kept_and_a_null_one_is_completions():
    made = planning.build(trace(arrival_ns=[0, 1], endpoint=["chat", None]))
    assert [ENDPOINTS[index] for index in made.endpoint] == ["chat", "completions"]


def test_a_forced_endpoint_is_said():
    made = planning.build(trace(arrival_ns=[0, 1], endpoint=["chat", "chat"]), endpoint="completions")
    assert {ENDPOINTS[index] for index in made.endpoint} == {"completions"}
    assert any("chat" in note and "completions" in note for note in made.notes)


def test_rows_that_cannot_be_replayed_are_refused_by_count():
    with pytest.raises(BadFile, match=r"2 rows are of endpoint 'rerank'.*--endpoint completions"):
        planning.build(trace(arrival_ns=[0, 1, 2], endpoint=["chat", "rerank", "rerank"]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival_ns": [], "input_tokens": [], "output_tokens": []}, "no rows"),
        ({"arrival_ns": [0, 1], "input_tokens": [None, None]}, r"input_tokens is missing.*again with --tokenizer"),
        ({"arrival_ns": [0, 1], "output_tokens": [None, None]}, r"output_tokens is missing.*--map output_tokens="),
        ({"arrival_ns": [5, 1]}, "not in order"),
    ],
)
def test_a_trace_that_cannot_be_planned_is_refused_in_one_line(columns, message):
    with pytest.raises(BadFile, match=message):
        planning.build(trace(**columns))


def test_missing_lengths_take_the_median_and_empty_ones_become_one_token_and_both_are_said():
    made = planning.build(trace(arrival_ns=[0, 1, 2], input_tokens=[10, None, 30], output_tokens=[0, 4, 4]))
    assert made.input_tokens.tolist() == [10, 20, 30]
    assert made.output_tokens.tolist() == [1, 4, 4]
    assert len([note for note in made.notes if "tokens" in note]) == 2


SESSION = {
    "arrival_ns": [0, 1 * S, 10 * S, 11 * S, 30 * S],
    "session_id": ["a", None, "a", "b", "a"],
    "turn": [0, 0, 1, 0, 2],
}


def test_later_turns_wait_for_their_predecessor_plus_think_time():
    made = planning.build(trace(**SESSION, think_ns=[None, None, 4 * S, None, 7 * S]))
    assert made.previous.tolist() == [-1, -1, 0, -1, 2]
    assert made.think_ns.tolist() == [-1, -1, 4 * S, -1, 7 * S]


def test_think_time_is_derived_from_the_recorded_end_where_it_is_not_recorded():
    made = planning.build(trace(**SESSION, end_ns=[6 * S, 1, 25 * S, 1, 1]))
    assert made.think_ns.tolist() == [-1, -1, 4 * S, -1, 0], "the third turn began before the second had ended"


def test_an_unknown_think_time_stays_unknown_and_is_said():
    made = planning.build(trace(**SESSION))
    assert made.previous.tolist() == [-1, -1, 0, -1, 2]
    assert made.think_ns.tolist() == [-1] * 5
    assert any("think time" in note for note in made.notes)


def test_timed_turns_wait_for_nobody():
    made = planning.build(trace(**SESSION), turns="timed")
    assert not made.linked


def test_turn_numbers_order_a_session_even_when_arrivals_tie():
    made = planning.build(trace(arrival_ns=[0, 0, 0], session_id=["s"] * 3, turn=[2, 0, 1]))
    assert made.previous.tolist() == [2, -1, 1]


def test_recorded_aborts_keep_their_patience_and_ask_for_more_than_came():
    made = planning.build(
        trace(
            arrival_ns=[0, 1, 2],
            outcome=["ok", "client_abort", "client_abort"],
            end_ns=[9, 2 * S, 3 * S],
            output_tokens=[5, 40, 40],
            max_tokens=[None, 500, None],
        )
    )
    assert made.abort_ns.tolist() == [-1, 2 * S, 3 * S]
    assert made.output_tokens.tolist() == [5, 500, 336]


def test_the_warm_up_is_the_first_stretch_by_due_time():
    made = planning.build(trace(arrival_ns=[0, 9 * S, 10 * S, 20 * S]), warmup_ns=10 * S)
    assert made.warmup.tolist() == [True, True, False, False]


def test_the_digest_is_the_same_twice_and_sees_every_change():
    base = {
        **SESSION,
        "tenant": ["r", "s", "r", "s", "r"],
        "priority": [0, 1, 0, 1, 0],
        "think_ns": [None, None, 5, None, 5],
    }
    digests = [planning.digest(planning.build(trace(**base))) for _ in range(2)]
    assert digests[0] == digests[1]
    changes = [
        {"arrival_ns": [0, 2 * S, 10 * S, 11 * S, 30 * S]},
        {"input_tokens": [10, 10, 10, 10, 11]},
        {"output_tokens": [5, 5, 5, 5, 6]},
        {"tenant": ["r", "s", "r", "s", "s"]},
        {"priority": [0, 1, 0, 1, 1]},
        {"think_ns": [None, None, 5, None, 6]},
        {"stream": [True, True, False, True, True]},
        {"block_size": [16] * 5, "block_hashes": [[1], [2], [3], [4], [5]]},
    ]
    changed = [planning.digest(planning.build(trace(**{**base, **change}))) for change in changes]
    assert len({digests[0], *changed}) == len(changes) + 1


def test_a_later_turns_own_time_is_no_part_of_the_digest():
    moved = {**SESSION, "arrival_ns": [0, 1 * S, 12 * S, 12 * S, 30 * S]}
    moved["arrival_ns"][3] = 11 * S
    moved["arrival_ns"] = sorted(moved["arrival_ns"])
    same = {"session_id": ["a", None, "b", "a", "a"], "turn": [0, 0, 0, 1, 2], "think_ns": [None, None, None, 4, 7]}
    one = planning.build(trace(arrival_ns=[0, 1 * S, 11 * S, 12 * S, 30 * S], **same))
    other = planning.build(trace(arrival_ns=[0, 1 * S, 11 * S, 13 * S, 31 * S], **same))
    assert planning.digest(one) == planning.digest(other)


def test_a_saved_plan_loads_as_it_was_and_constants_cost_nothing(tmp_path):
    made = planning.build(trace(**SESSION, block_size=[16] * 5, block_hashes=[[1, 2], None, [1, 2, 3], [9], []]))
    planning.save(made, tmp_path)
    loaded = planning.load(tmp_path)
    assert planning.digest(loaded) == planning.digest(made)
    assert loaded.block_offsets.tolist() == [0, 2, 2, 5, 6, 6]
    assert (tmp_path / "abort_ns.npy").stat().st_size < 200


def test_prefix_blocks_counted_in_characters_become_tokens_by_the_traces_own_lengths():
    """Four characters a token: a block of 256 characters is 64 tokens, whoever shares it."""
    columns = {"arrival_ns": [0, 1, 2], "input_tokens": [96, 160, 20], "output_tokens": [5] * 3,
               "block_size": [256, 256, None], "block_hashes": [[1], [1, 2], None]}  # fmt: skip
    made = planning.build(table(columns, Metadata(block_unit="characters")))
    assert made.block_size.tolist() == [64, 64, planning.NONE]
    assert any("256 characters are taken as 64 tokens" in note for note in made.notes)
    assert planning.build(table(columns, Metadata(block_unit="tokens"))).block_size.tolist()[:2] == [256, 256]


def test_a_saved_plan_of_one_row_without_blocks_loads(tmp_path):
    made = planning.build(trace(arrival_ns=[7]))
    planning.save(made, tmp_path)
    assert planning.load(tmp_path).rows == 1
    assert planning.load(tmp_path).block_offsets.tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from(["x", "y", "z"])), min_size=1, max_size=40
    ),
    st.integers(1, 4),
    st.sets(st.sampled_from(["x", "y", "z"])),
)
def test_sharding_keeps_linked_sessions_and_capped_tenants_whole(rows, workers, capped):
    made = planning.build(
        trace(
            arrival_ns=list(range(len(rows))),
            session_id=[session for session, _ in rows],
            tenant=[tenant for _, tenant in rows],
        )
    )
    owner = planning.shard(made, workers, tuple(capped))
    assert owner.min() >= 0
    assert owner.max() < workers
    for row, before in enumerate(made.previous.tolist()):
        if before >= 0:
            assert owner[row] == owner[before]
    for name in capped:
        owners = {int(owner[row]) for row, (_, tenant) in enumerate(rows) if tenant == name}
        assert len(owners) <= 1


def test_the_digest_does_not_depend_on_how_a_file_numbers_its_words():
    plain = trace(arrival_ns=[0, 1, 2], tenant=["b", None, "a"])
    index = pa.array([2, None, 1], pa.int32())
    words = pa.DictionaryArray.from_arrays(index, pa.array(["unused", "a", "b"]))
    other = plain.set_column(plain.schema.get_field_index("tenant"), plain.schema.field("tenant"), words)
    one, two = planning.build(plain), planning.build(other)
    assert one.tenants == two.tenants == ("b", "default", "a")
    assert one.tenant.tolist() == two.tenant.tolist() == [0, 1, 2]
    assert planning.digest(one) == planning.digest(two)


def test_single_requests_are_dealt_round_by_due_time():
    made = planning.build(trace(arrival_ns=list(range(10))))
    assert planning.shard(made, 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_five_million_rows_take_a_hundred_bytes_each_at_most():
    made = planning.build(
        trace(arrival_ns=np.arange(1000), input_tokens=np.full(1000, 9), output_tokens=np.full(1000, 9))
    )
    real = sum(array.nbytes for name in planning._SHARED if (array := getattr(made, name)).strides != (0,))
    assert real / 1000 <= 40, "a trace of times and lengths costs its own columns only"
