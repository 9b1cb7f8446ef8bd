"""What reshaping promises: counts, order, sessions and prefix structure stay; what was asked is met or refused.

Ids such as B11 name user reports of other tools.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from datetime import UTC, datetime
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import assemble, reshape, resize, shape, warp
from traces.burstiness import idc, windows
from traces.draft import ShapeError, draft_of
from traces.record import Metadata, table

S = 1_000_000_000
AZURE = {
    "conv": "AzureLLMInferenceTrace_conv.rows1-11000.csv",
    "code": "AzureLLMInferenceTrace_code.rows1-5000.csv",
}


def trace_of(arrival_ns, **columns) -> pa.Table:
    """A small trace; ids are r0, r1, ... in order."""
    rows = len(arrival_ns)
    ids = [f"r{i}" for i in range(rows)]
    return table({"request_id": ids, "arrival_ns": np.asarray(arrival_ns, dtype=np.int64), **columns}, Metadata())


def azure(data, name) -> pa.Table:
    """An Azure trace, read here on its own so that the test does not lean on the importer."""
    arrival, inputs, outputs = [], [], []
    with data("traces", "traces", "azure2023", AZURE[name]).open(newline="") as file:
        for row in csv.DictReader(file):
            whole, fraction = row["TIMESTAMP"].split(".")
            moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
            arrival.append(int(moment.timestamp()) * S + int(fraction.ljust(9, "0")))
            inputs.append(int(row["ContextTokens"]))
            outputs.append(int(row["GeneratedTokens"]))
    return trace_of(arrival, input_tokens=inputs, output_tokens=outputs)


@st.composite
def traces(draw, *, sessions=True) -> pa.Table:
    """Arrivals with ties and lulls, sessions with think times, two tenants, shared prefixes."""
    gaps = draw(st.lists(st.integers(0, 5 * S), min_size=2, max_size=60))
    arrival = draw(st.sampled_from([0, 5 * S, 1_700_000_000 * S])) + np.cumsum(gaps)
    rows = len(arrival)
    of = draw(st.lists(st.integers(0, max(rows // 3, 1)), min_size=rows, max_size=rows))
    first = {session: i for i, session in reversed(list(enumerate(of)))}
    return trace_of(
        arrival,
        session_id=[f"s{session}" for session in of] if sessions else None,
        tenant=["risk" if session % 3 else "summary" for session in of],
        think_ns=[None if first[session] == i else int(gaps[i]) // 2 for i, session in enumerate(of)],
        input_tokens=[10 + 16 * session for session in of],
        block_size=[16] * rows,
        block_hashes=[list(range(1, 2 + session)) for session in of],
    )


def rows_of(trace: pa.Table) -> list[dict]:
    return trace.to_pylist()


# ---- speed ------------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.integers(0, 10**16), min_size=1, max_size=20),
    speed=st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.1, 1.5, 2.0, 3.0, 7.25, 1000.0]),
)
def test_speed_is_exact_division_rounded_half_to_even(values, speed):
    ratio = Fraction(str(speed))
    expected = [round(Fraction(value) / ratio) for value in values]
    assert warp.scaled(np.array(values, dtype=np.int64), speed).tolist() == expected


@given(trace=traces(), speed=st.sampled_from([0.25, 0.5, 2.0, 3.0, 10.0]))
def test_speed_then_its_inverse_is_the_identity_within_rounding(trace, speed):
    draft = draft_of(trace)
    there, _ = shape.speed(draft, speed)
    back, _ = shape.speed(there, 1 / speed)
    slack = max(speed, 1.0)
    assert np.abs(back.arrival_ns - draft.arrival_ns).max() <= slack
    if draft.think_ns is not None:
        assert np.abs(back.think_ns - draft.think_ns).max() <= slack


def test_speed_2x_halves_the_span_exactly_and_does_not_touch_the_epoch():  # B12
    start = 1_700_000_000 * S
    faster, report = shape.speed(draft_of(trace_of([start, start + 7, start + 600 * S])), 2.0)
    assert faster.arrival_ns.tolist() == [start, start + 4, start + 300 * S]  # 3.5 rounds to the even 4
    assert (report.before, report.planned, report.achieved) == (600, 300, 300)


def test_speed_halves_think_times_and_leaves_nulls_null():
    trace = trace_of([0, 10, 20], session_id=["a"] * 3, think_ns=[None, 8, 6])
    faster, _ = shape.speed(draft_of(trace), 2.0)
    assert assemble.build(trace, faster).column("think_ns").to_pylist() == [None, 4, 3]


# ---- window, tenant, sample -------------------------------------------------------------------------------------


def test_a_window_is_half_open_and_counts_from_the_first_arrival():
    trace = trace_of([5 * S, 6 * S, 7 * S, 8 * S])
    kept, report = shape.window(draft_of(trace), 1 * S, 3 * S)
    assert kept.arrival_ns.tolist() == [6 * S, 7 * S]
    assert report.achieved == 2


def test_an_empty_window_is_refused_with_what_there_is():
    draft = draft_of(trace_of([0, S, 20 * S]))
    with pytest.raises(ShapeError, match=r"idle from 5 s to 20 s"):
        shape.window(draft, 5 * S, 10 * S)
    with pytest.raises(ShapeError, match=r"lasts 20 s and is over before 30 s"):
        shape.window(draft, 30 * S, None)


def test_an_unknown_tenant_is_named_with_those_that_exist():
    trace = trace_of([0, 1], tenant=["risk", "summary"])
    with pytest.raises(ShapeError, match=r"chat: no such tenant in the trace \(it has risk, summary\)"):
        shape.only_tenants(draft_of(trace), ["chat"], ["risk", "summary"])


@given(trace=traces(), share=st.floats(0.2, 0.9), seed=st.integers(0, 5))
def test_thinning_takes_whole_sessions_and_keeps_tenants_shares(trace, share, seed):
    draft = draft_of(trace)
    try:
        kept, _ = shape.thin(draft, share, seed)
    except ShapeError:
        return
    assert len(kept) == int(np.isin(draft.session, kept.session).sum())
    for code in np.unique(draft.tenant):
        of_tenant = draft.session[draft.tenant == code]
        largest = np.unique(of_tenant, return_counts=True)[1].max()
        assert abs((kept.tenant == code).sum() - share * len(of_tenant)) <= largest


# ---- rate and loop ----------------------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize("name", AZURE)
def test_rate_2x_doubles_the_count_and_keeps_the_rate_over_60_s(data, name):
    draft = draft_of(azure(data, name))
    grown, report = shape.rate(draft, 2.0, seed=1)
    assert len(grown.row) == 2 * len(draft.row)
    assert report.achieved == report.planned
    minutes = int(draft.span_ns() // (60 * S)) + 1
    before = np.bincount(draft.offset_ns() // (60 * S), minlength=minutes)
    after = np.bincount((grown.arrival_ns - draft.arrival_ns[0]) // (60 * S), minlength=minutes)
    assert np.corrcoef(before, after)[0, 1] > 0.95
    assert after.sum() == 2 * before.sum()


@pytest.mark.data
@pytest.mark.parametrize(("name", "slack"), [("code", 0.1), ("conv", 0.3)])
def test_rate_2x_has_the_dispersion_of_twice_as_many_independent_users(data, name, slack):
    draft = draft_of(azure(data, name))
    grown, _ = shape.rate(draft, 2.0, seed=1)
    for width_ns in (S // 10, S, 10 * S, 60 * S):
        expected = 1 + 2 * (idc(draft.arrival_ns, width_ns) - 1)
        assert idc(grown.arrival_ns, width_ns) == pytest.approx(expected, rel=slack)


@given(trace=traces(), factor=st.sampled_from([1.25, 1.5, 2.0, 3.0]), seed=st.integers(0, 5))
def test_added_sessions_are_private_copies_inside_the_span(trace, factor, seed):
    draft = draft_of(trace)
    grown, _ = shape.rate(draft, factor, seed)
    assert grown.arrival_ns[0] >= draft.arrival_ns[0]
    assert grown.arrival_ns[-1] <= draft.arrival_ns[-1]
    assert (np.diff(grown.arrival_ns) >= 0).all()
    assert grown.row[grown.copy == 0].tolist() == draft.row.tolist()
    built = assemble.build(trace, grown)
    ids = built.column("request_id").to_pylist()
    assert len(set(ids)) == len(ids)
    copied = [row for row, number in zip(rows_of(built), grown.copy, strict=True) if number]
    originals = {row["request_id"]: row for row in rows_of(trace)}
    theirs = {value for row in originals.values() for value in row["block_hashes"]}
    for row in copied:
        old = originals[row["request_id"].split("~")[0]]
        assert row["session_id"].split("~")[0] == old["session_id"]
        assert row["session_id"] != old["session_id"]
        assert len(row["block_hashes"]) == len(old["block_hashes"])
        assert not theirs & set(row["block_hashes"])
    for number in np.unique(grown.copy):  # sharing inside a copy is as it was
        part = [row for row, n in zip(rows_of(built), grown.copy, strict=True) if n == number]
        for one, two in itertools.pairwise(part):
            old = [originals[row["request_id"].split("~")[0]]["block_hashes"] for row in (one, two)]
            assert len(set(one["block_hashes"]) & set(two["block_hashes"])) == len(set(old[0]) & set(old[1]))


@given(trace=traces(), factor=st.sampled_from([1.5, 2.0]))
def test_a_copied_session_moves_as_a_whole(trace, factor):
    draft = draft_of(trace)
    grown, _ = shape.rate(draft, factor, seed=3)
    moved: dict[tuple[int, int], set[int]] = {}
    for row, copy, arrival in zip(grown.row, grown.copy, grown.arrival_ns, strict=True):
        moved.setdefault((copy, draft.session[row]), set()).add(int(arrival - draft.arrival_ns[row]))
    assert all(len(shifts) == 1 for shifts in moved.values())


@given(arrivals=st.lists(st.integers(0, 10 * S), min_size=2, max_size=50), seed=st.integers(0, 9))
def test_rows_without_sessions_are_copied_as_sessions_of_one(arrivals, seed):
    draft = draft_of(trace_of(sorted(arrivals)))
    alone = shape.jittered_copy(draft, draft.arrival_ns, 1, seed)
    grouped = shape.jittered_copy(dataclasses.replace(draft, alone=False), draft.arrival_ns, 1, seed)
    assert alone.arrival_ns.tolist() == grouped.arrival_ns.tolist()


def test_copies_of_copies_have_ids_and_blocks_of_their_own():
    trace = trace_of([0, S], block_hashes=[[1], [1, 2]], block_size=[16, 16])
    for _ in range(3):
        trace, _ = reshape.apply(trace, reshape.ShapeOptions(rate=2.0), seed=0)
    assert len(set(trace.column("request_id").to_pylist())) == 16
    assert len({row[0] for row in trace.column("block_hashes").to_pylist()}) == 8


def test_prefix_blocks_alone_are_enough_to_keep_copies_of_copies_apart():
    trace = table({"arrival_ns": [0, S], "block_hashes": [[1], [1, 2]], "block_size": [16, 16]}, Metadata())
    for _ in range(3):
        trace, _ = reshape.apply(trace, reshape.ShapeOptions(rate=2.0), seed=0)
    assert len({row[0] for row in trace.column("block_hashes").to_pylist()}) == 8


def test_a_loop_of_copies_has_no_id_twice():
    trace = trace_of([0, S, 2 * S], session_id=["a", "a", "b"])
    twice, _ = shape.rate(draft_of(trace), 2.0, seed=1)
    ids = assemble.build(trace, shape.loop(twice, 3)[0]).column("request_id").to_pylist()
    assert len(ids) == len(set(ids)) == 18


@pytest.mark.parametrize(("share", "kept"), [(0.2, 0), (0.49, 0), (0.51, 10), (0.9, 10)])
def test_a_session_at_the_cut_is_taken_when_that_is_nearer(share, kept):
    draft = draft_of(trace_of(range(10), session_id=["one"] * 10))
    limits = shape.cuts(draft, share, 7, "test")
    assert shape.below(draft, limits, 7, "test").sum() == kept


def test_loops_join_a_mean_gap_apart_and_are_scaled_by_speed_as_one():  # B11
    draft = draft_of(trace_of([0, 10, 20]))
    thrice, _ = shape.loop(draft, 3)
    assert thrice.arrival_ns.tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    slower, _ = shape.speed(thrice, 0.5)
    assert slower.arrival_ns.tolist() == [0, 20, 40, 60, 80, 100, 120, 140, 160]
    ids = assemble.build(trace_of([0, 10, 20]), thrice).column("request_id").to_pylist()
    assert ids[:4] == ["r0", "r1", "r2", "r0~1"]


# ---- burst and re-timing ----------------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize("name", AZURE)
@pytest.mark.parametrize("width_s", [0.1, 1, 10, 60])
def test_burst_2x_doubles_the_dispersion_and_keeps_count_order_and_mean_rate(data, name, width_s):
    draft = draft_of(azure(data, name))
    width_ns = round(width_s * S)
    warped, report = shape.burst(draft, 2.0, width_ns)
    assert idc(warped.arrival_ns, width_ns) / idc(draft.arrival_ns, width_ns) == pytest.approx(2, rel=0.05)
    assert report.achieved == pytest.approx(idc(warped.arrival_ns, width_ns))
    assert warped.row.tolist() == draft.row.tolist()
    assert (np.diff(warped.arrival_ns) >= 0).all()
    assert [warped.arrival_ns[0], warped.arrival_ns[-1]] == [draft.arrival_ns[0], draft.arrival_ns[-1]]


@pytest.mark.data
def test_burst_leaves_the_rate_over_60_windows_alone(data):
    draft = draft_of(azure(data, "conv"))
    warped, _ = shape.burst(draft, 2.0, S)
    before, after = (windows(d.arrival_ns, 60 * S).arrivals for d in (draft, warped))
    assert np.abs(before - after).max() <= 1  # an arrival on a boundary may round across it


@pytest.mark.data
def test_burst_can_smooth_too(data):
    draft = draft_of(azure(data, "code"))
    _, report = shape.burst(draft, 0.5, S)
    assert report.achieved / report.before == pytest.approx(0.5, rel=0.05)


def test_a_dispersion_out_of_reach_is_refused_with_the_nearest():
    arrival = np.sort(np.random.default_rng(3).integers(0, 100 * S, size=200))
    with pytest.raises(ShapeError, match=r"the nearest is \d+\.?\d*x"):
        shape.burst(draft_of(trace_of(arrival)), 500.0, S)


def test_burst_needs_ten_windows():
    with pytest.raises(ShapeError, match=r"needs 10 windows: the widest window here is 400 ms"):
        shape.burst(draft_of(trace_of([0, S, 4 * S])), 2.0, S)


def test_constant_gaps_have_no_dispersion_to_double():
    with pytest.raises(ShapeError, match="nearest is 1x"):
        shape.burst(draft_of(trace_of(np.arange(100) * S)), 2.0, S)


@given(trace=traces(), factor=st.sampled_from([0.5, 1.5, 2.0]))
@settings(max_examples=40)
def test_any_warp_keeps_order_ends_and_sessions(trace, factor):
    draft = draft_of(trace)
    try:
        warped, _ = shape.burst(draft, factor, S)
    except ShapeError:
        return
    assert (np.diff(warped.arrival_ns) >= 0).all()
    assert [warped.arrival_ns[0], warped.arrival_ns[-1]] == [draft.arrival_ns[0], draft.arrival_ns[-1]]
    assert (warped.think_ns is None) == (draft.think_ns is None)
    if warped.think_ns is not None:
        assert ((warped.think_ns < 0) == (draft.think_ns < 0)).all()


@pytest.mark.parametrize(("cv", "poisson"), [(1.0, True), (0.0, False), (0.5, False), (3.0, False)])
def test_new_times_have_the_asked_variation_at_the_same_rate(cv, poisson):  # K09
    draft = draft_of(trace_of(np.sort(np.random.default_rng(1).integers(0, 1000 * S, size=5000))))
    moved, report = shape.retime(draft, cv, seed=2, poisson=poisson)
    assert report.achieved == pytest.approx(cv, rel=0.1, abs=1e-6)
    assert [moved.arrival_ns[0], moved.arrival_ns[-1]] == [draft.arrival_ns[0], draft.arrival_ns[-1]]
    assert len(moved.row) == 5000
    again, _ = shape.retime(draft, cv, seed=2, poisson=poisson)
    other, _ = shape.retime(draft, cv, seed=3, poisson=poisson)
    assert (moved.arrival_ns == again.arrival_ns).all()
    assert cv == 0 or (moved.arrival_ns != other.arrival_ns).any()


# ---- a part of a trace is reshaped as the whole is ---------------------------------------------------------------


@given(trace=traces(), seed=st.integers(0, 3))
def test_reshaping_commutes_with_splitting_by_session(trace, seed):
    """A part, given the figures of the whole (origin, cuts, curve, map of time), is that part of the whole's result."""
    whole = draft_of(trace)
    mine = np.isin(whole.session, np.unique(whole.session)[::2])
    part = whole.take(mine)
    origin = whole.arrival_ns[0]

    speeds = [warp.scaled(draft.arrival_ns - origin, 3.0) for draft in (whole, part)]
    assert speeds[0][mine].tolist() == speeds[1].tolist()

    limits = shape.cuts(whole, 0.5, seed, "test")
    taken = [shape.below(draft, limits, seed, "test") for draft in (whole, part)]
    assert taken[0][mine].tolist() == taken[1].tolist()

    copies = [shape.jittered_copy(draft, whole.arrival_ns, 1, seed) for draft in (whole, part)]
    assert copies[0].arrival_ns[mine].tolist() == copies[1].arrival_ns.tolist()

    if whole.span_ns() > 10 * S:
        curve = warp.solve_burst(whole.offset_ns(), S, 1.5).warp
        assert curve.at(whole.offset_ns())[mine].tolist() == curve.at(part.arrival_ns - origin).tolist()

    built = [assemble.build(trace, copy) for copy in copies]
    assert rows_of(built[0].filter(pa.array(mine))) == rows_of(built[1])


# ---- lengths and merging ----------------------------------------------------------------------------------------


def test_lengths_scale_with_what_belongs_to_them():
    trace = trace_of(
        [0, 1, 2],
        input_tokens=[100, 1, 0],
        output_tokens=[10, None, 3],
        cached_tokens=[64, 1, 0],
        max_tokens=[16, 8, None],
        block_size=[16, 16, 16],
        block_hashes=[[1, 2, 3, 4, 5, 6], [], []],
        chunk_ns=[[1, 2], None, None],
    )
    longer, tally = resize.scale_lengths(trace, 1.5, 0.5)
    reports = resize.length_reports(tally, 1.5, 0.5)
    assert longer.column("input_tokens").to_pylist() == [150, 2, 0]
    assert longer.column("output_tokens").to_pylist() == [5, None, 2]
    assert longer.column("cached_tokens").to_pylist() == [96, 2, 0]
    assert longer.column("max_tokens").to_pylist() == [8, 4, None]
    assert longer.column("block_size").to_pylist() == [24, 24, 24]
    assert "chunk_ns" not in longer.schema.names
    assert [(r.before, r.planned, r.achieved) for r in reports] == [(101, 151.5, 152), (13, 6.5, 7)]


def test_a_limit_on_tokens_cuts_both_parts_and_counts_the_cut():
    trace = trace_of([0, 1], input_tokens=[3000, 100], output_tokens=[1000, 10])
    cut, tally = resize.scale_lengths(trace, most=1500)
    reports = resize.length_reports(tally, most=1500)
    assert cut.column("input_tokens").to_pylist() == [1125, 100]
    assert cut.column("output_tokens").to_pylist() == [375, 10]
    assert reports[0].note == "1 requests cut to 1,500 tokens"


def test_merging_keeps_clock_time_where_both_have_one_and_else_starts_together():
    unix, relative = Metadata(epoch="unix"), Metadata()
    one, two = trace_of([100, 300]), trace_of([200, 400])
    both, report = assemble.merge(one, two, unix, unix)
    assert both.column("arrival_ns").to_pylist() == [100, 200, 300, 400]
    assert report.note == "by clock time"
    both, report = assemble.merge(one, two, unix, relative)
    assert both.column("arrival_ns").to_pylist() == [100, 100, 300, 300]
    assert both.column("request_id").to_pylist() == ["r0", "r0~1", "r1", "r1~1"]


def test_every_step_tells_the_same_story_from_the_same_seed():
    draft = draft_of(trace_of(np.arange(200) * S // 3))
    for step in (lambda seed: shape.rate(draft, 1.5, seed), lambda seed: shape.thin(draft, 0.5, seed)):
        one, two, other = (step(seed)[0] for seed in (1, 1, 2))
        assert all(
            np.array_equal(getattr(one, field.name), getattr(two, field.name))
            for field in dataclasses.fields(one)
            if getattr(one, field.name) is not None
        )
        assert not np.array_equal(one.row, other.row) or not np.array_equal(one.arrival_ns, other.arrival_ns)
