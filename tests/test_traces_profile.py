"""Every figure of a profile against an independent oracle: the reference statistics, numpy, or a count by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import burstiness, lengths
from traces.columns import gather
from traces.profile import in_flight, jain, leading_run, prefix, profile, sessions, together
from traces.record import Metadata, table

S = 1_000_000_000


def columns_of(arrival_ns, metadata=Metadata(), **columns):  # noqa: B008 - frozen
    made = table({"arrival_ns": np.asarray(arrival_ns, dtype=np.int64), **columns}, metadata)
    return gather(made.to_batches())


ascending = st.lists(st.integers(0, 3 * S), min_size=2, max_size=80).map(np.cumsum)


# ---- the reference statistics -----------------------------------------------------------------------------------


def reference_files(data):
    expected = json.loads(data("traces", "EXPECTED.json").read_text())["files"]
    return {name: block for name, block in expected.items() if "rows" in block}


FOLDERS = ("azure2023", "mooncake", "burstgpt", "vidur", "llmservingsim", "kv-cache-tester", "goreplay")
ELSEWHERE = {  # what the reference calls by another name
    "ttft_s_first_token_minus_queued": lambda found: found["ttft_s"],
    "e2e_s_last_token_minus_queued": lambda found: found["e2e_s"],
    "sum_think_time_s": lambda found: found["sessions"]["sum_think_time_s"],
    "sum_api_time_s": lambda found: found["e2e_s"]["mean"] * found["e2e_s"]["n"],
    "block_size": lambda found: found["prefix"]["block_size"],
}


@pytest.mark.data
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_reference_figure_is_met_within_its_rounding(data, folder):
    from traces.importers.intake import Intake, Options
    from traces.importers.load import batches
    from traces.importers.sniff import format_of
    from traces.importers.source import Source

    met = 0
    for name, block in reference_files(data).items():
        if f"/{folder}" not in name:
            continue
        path = str(data("traces", *name.split("/")))
        form = format_of(Source(path))
        met += compare(profile(gather(batches(form, path, Intake(path, Options())))), block, name)
        if "excluding_failed_rows" in block:
            found = profile(gather(batches(form, path, Intake(path, Options(failed="drop")))))
            met += compare(found, block["excluding_failed_rows"], name)
    assert met > 20


def compare(found: dict, block: dict, name: str) -> int:
    """How many of the reference figures the profile has; each must be equal within its rounding."""
    met = 0
    for key, value in block.items():
        have = ELSEWHERE[key](found) if key in ELSEWHERE else found.get(key)
        if have is None:
            continue
        for inner, figure in value.items() if isinstance(value, dict) else [(None, value)]:
            mine = have if inner is None else have[inner]
            if isinstance(figure, list):
                assert sorted(mine) == sorted(figure), f"{name} {key}"
            else:
                assert mine == pytest.approx(figure, rel=1e-9, abs=1e-12), f"{name} {key} {inner}"
            met += 1
    return met


# ---- times ------------------------------------------------------------------------------------------------------


@given(arrival=ascending, width=st.sampled_from([1, 7, S // 10, S]))
def test_counts_in_windows_are_those_of_a_histogram(arrival, width):
    if (arrival[-1] - arrival[0]) // width > 100_000:
        return
    counts = np.bincount((arrival - arrival[0]) // width)
    found = burstiness.windows(arrival, width)
    assert found.total == len(counts)
    assert found.dense().tolist() == counts.tolist()
    assert found.idc() == pytest.approx(counts.var() / counts.mean())
    assert found.percentile(99) == pytest.approx(np.percentile(counts, 99))
    assert found.empty == int((counts == 0).sum())


@given(arrival=ascending, factor=st.integers(2, 20))
def test_coarser_windows_are_the_wide_windows(arrival, factor):
    wide, merged = burstiness.windows(arrival, factor * S // 10), burstiness.windows(arrival, S // 10).coarser(factor)
    assert wide.total == merged.total
    assert wide.place.tolist() == merged.place.tolist()
    assert wide.arrivals.tolist() == merged.arrivals.tolist()


def test_poisson_arrivals_have_a_flat_curve_inside_the_band():
    arrival = np.sort(np.random.default_rng(11).integers(0, 2000 * S, size=20_000))
    for point in burstiness.counts(arrival).curve:
        assert abs(point.idc - 1) <= 1.5 * point.poisson_band
    assert max(map(abs, burstiness.autocorrelation(burstiness.windows(arrival, S))["values"])) < 0.08


def test_a_rate_that_moves_raises_dispersion_with_the_window_and_shows_in_autocorrelation():
    generator = np.random.default_rng(4)
    rates = np.repeat(np.where(np.arange(40) % 2, 2, 12), 30)  # 30 s busy, 30 s quiet
    arrival = np.concatenate(
        [np.sort(generator.integers(0, S, n)) + i * S for i, n in enumerate(generator.poisson(rates))]
    )
    curve = {point.window_s: point.idc for point in burstiness.counts(arrival).curve}
    assert curve[0.1] < 2 < curve[10]
    assert burstiness.autocorrelation(burstiness.windows(arrival, S))["values"][0] > 0.5


def test_batched_timestamps_are_seen_and_their_period_told():
    generator = np.random.default_rng(2)
    batched = np.repeat(np.arange(300) * 3 * S, generator.integers(1, 12, size=300))
    assert burstiness.grid(batched) == (3 * S, 3 * S)
    jittered = np.sort(batched + (generator.integers(-1, 2, size=300) * 1_000_000)[batched // (3 * S)])
    assert burstiness.grid(jittered).period_ns == pytest.approx(3 * S, rel=0.001)
    smooth = np.sort(generator.integers(0, 900 * S, size=2000))
    assert burstiness.grid(smooth).period_ns is None
    assert burstiness.grid(smooth // S * S).resolution_ns == S
    assert burstiness.grid(np.arange(100) * S).period_ns is None  # paced, but each has a time of its own


def test_the_daily_profile_counts_partial_days_by_the_hours_they_cover():
    hour = 3600 * S
    arrival = np.concatenate([np.arange(0, 30 * hour, hour // 4), np.arange(2 * hour, 3 * hour, hour // 400)])
    rates = burstiness.daily(np.sort(arrival))
    assert rates[10] == pytest.approx(4 / 3600)  # covered once
    assert rates[3] == pytest.approx(4 / 3600)  # covered twice
    assert rates[2] == pytest.approx((8 + 400) / 7200)
    assert burstiness.daily(np.arange(10) * S) is None


# ---- lengths ----------------------------------------------------------------------------------------------------


@given(values=st.lists(st.integers(-1, 300), min_size=1, max_size=400))
def test_percentiles_from_the_histogram_are_numpys(values):
    array = np.array(values, dtype=np.int32)
    found = lengths.describe(array)
    there = array[array >= 0]
    if not len(there):
        assert found is None
        return
    assert found["n"] == len(there)
    assert found["percentiles"] == pytest.approx(np.percentile(there, np.arange(101)).tolist())
    assert found["mean"] == pytest.approx(there.mean())
    assert found["zeros"] == int((there == 0).sum())
    top = np.sort(there)[::-1][: -(-len(there) // 100)].sum()
    if there.sum():
        assert found["top_1pct_share"] == pytest.approx(top / there.sum())


def test_the_tail_index_of_a_pareto_is_its_exponent():
    draws = (100 * (1 + np.random.default_rng(8).pareto(1.5, size=200_000))).astype(np.int64)
    assert lengths.describe(draws)["tail_index"] == pytest.approx(1.5, rel=0.05)


def test_rank_correlation_is_pearsons_of_mean_ranks_where_both_are_known():
    generator = np.random.default_rng(9)
    one = generator.integers(0, 50, size=300)
    two = one + generator.integers(0, 40, size=300)

    def ranks(values):
        return [(sum(v < value for v in values) + sum(v <= value for v in values) - 1) / 2 for value in values]

    expected = np.corrcoef(ranks(one.tolist()), ranks(two.tolist()))[0, 1]
    found = lengths.rank_correlation(np.concatenate([one, [-1, 5]]), np.concatenate([two, [5, -1]]))
    assert found == pytest.approx(expected)


# ---- load, sessions, prefix, tenants ----------------------------------------------------------------------------


def test_in_flight_is_littles_law_on_what_the_trace_tells():
    found = in_flight(columns_of([0, S, 2 * S, 10 * S], end_ns=[3 * S, 3 * S, None, 2 * S]))
    assert found["n"] == 3
    assert found["max"] == 2
    assert found["mean"] == pytest.approx(8 / 12)
    assert found["curve"]["levels"][0] == 1
    assert max(found["curve"]["levels"]) == 2
    assert in_flight(columns_of([0, S])) is None


def test_sessions_count_turns_and_think_times():
    found = sessions(columns_of([0, 1, 2, 3], session_id=["a", "b", "a", None], think_ns=[None, None, 2 * S, None]))
    assert (found["n"], found["rows_in_sessions"], found["turns"]["max"]) == (2, 3, 2)
    assert found["single_turn_share"] == 0.5
    assert found["sum_think_time_s"] == 2


def test_a_tenant_without_sessions_beside_one_with_has_none():
    found = profile(columns_of([0, 1, 2], tenant=["a", "b", "b"], session_id=[None, "s", "s"]))
    assert found["tenants"]["a"]["sessions"] is None
    assert found["tenants"]["b"]["sessions"]["n"] == 1


@given(rows=st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=20))
def test_the_ideal_hit_rate_is_that_of_a_plain_walk(rows):
    seen: set[int] = set()
    hits = 0
    for blocks in rows:
        for block in blocks:
            if block not in seen:
                break
            hits += 1
        seen |= set(blocks)
    found = prefix(columns_of(range(len(rows)), block_hashes=rows, block_size=[16] * len(rows)))
    if not any(rows):
        assert found == {}
        return
    assert found["leading_prefix_blocks_seen_before_infinite_cache"] == hits
    assert found["total_hash_ids"] == sum(map(len, rows))
    assert found["unique_hash_ids"] == len(seen)


def test_a_leading_run_ends_at_the_first_false_of_its_row():
    flags = np.array([True, True, False, True, False, True])
    assert leading_run(flags, np.array([3, 0, 1, 2])).tolist() == [2, 0, 1, 0]


def test_tenants_are_described_each_and_against_each_other():
    generator = np.random.default_rng(1)
    busy = np.repeat(np.arange(60) % 2 == 0, 10)  # 10 s busy, 10 s quiet
    arrival, tenant = [], []
    for second, on in enumerate(busy.tolist()):
        for name, rate in (("risk", 8 if on else 1), ("summary", 6 if on else 1), ("night", 0.5 if on else 5)):
            n = generator.poisson(rate)
            arrival += (generator.integers(0, S, n) + second * S).tolist()
            tenant += [name] * n
    order = np.argsort(arrival)
    columns = columns_of(
        np.array(arrival)[order],
        tenant=[tenant[i] for i in order],
        input_tokens=np.full(len(order), 10),
        output_tokens=[1000 if tenant[i] == "summary" else 10 for i in order],
    )
    found = profile(columns)
    assert found["tenants"]["risk"]["rows"] == tenant.count("risk")
    assert next(iter(found["tenant_tokens"])) == "summary"
    assert found["jain_tokens"] == pytest.approx(jain(list(found["tenant_tokens"].values())))
    pairs = {frozenset(pair["tenants"]): pair["correlation"] for pair in found["bursting_together"]}
    assert pairs[frozenset({"risk", "summary"})] > 0.5
    assert pairs[frozenset({"risk", "night"})] < -0.5
    assert together(columns, ["risk"]) == []


def test_jains_index_is_one_for_equal_shares_and_one_over_n_for_a_monopoly():
    assert jain([5, 5, 5]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) is None


def test_unsorted_rows_are_counted_and_put_in_order_with_their_blocks():
    columns = columns_of([30, 10, 20], input_tokens=[3, 1, 2], block_hashes=[[3, 4], [1], []], block_size=[16] * 3)
    assert columns.out_of_order_steps == 1
    assert columns.arrival_ns.tolist() == [10, 20, 30]
    assert columns.numbers["input_tokens"].tolist() == [1, 2, 3]
    assert columns.blocks.tolist() == [1, 3, 4]
    assert columns.block_count.tolist() == [1, 0, 2]


def test_lengths_without_times_say_nothing_about_times():
    found = profile(columns_of([0, 0], Metadata(source="lengths"), input_tokens=[5, 7]))
    assert found["input_tokens"]["mean"] == 6
    assert "mean_rate_rps" not in found


def test_one_request_and_one_instant_are_no_division_by_zero():
    assert profile(columns_of([5]))["mean_rate_rps"] is None
    assert profile(columns_of([5, 5, 5]))["iat_cv"] is None
