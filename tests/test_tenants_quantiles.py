"""Order statistics against numpy and against counting by hand; intervals against their definition and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tenants import quantiles

finite = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=300), st.sampled_from([0.01, 0.07, 0.5, 0.9, 0.95, 0.99, 0.999]))
def test_a_quantile_is_the_smallest_value_with_at_least_that_share_at_or_below(values, q):
    found = quantiles.quantile(np.array(values), q)
    assert found in values
    at_or_below = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert at_or_below >= q * len(values) - 1e-6
    assert below < q * len(values)


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
def test_a_quantile_equals_numpys_inverted_cdf(q):
    values = np.random.default_rng(1).exponential(size=1234)
    assert quantiles.quantile(values, q) == np.quantile(values, q, method="inverted_cdf")


def test_a_rank_that_is_whole_on_paper_is_not_rounded_up():
    assert 100 * 0.07 > 7
    assert quantiles.quantile(np.arange(1.0, 101.0), 0.07) == 7


def test_k01_no_percentile_exceeds_the_maximum():
    values = np.random.default_rng(2).pareto(1.1, 1000)
    assert max(quantiles.quantile(values, q) for q in (0.5, 0.99, 0.9999, 1.0)) == values.max()


def test_k03_quantiles_of_two_shards_are_pooled_never_averaged():
    shards = [np.full(100, 10.0), np.full(100, 1000.0)]
    assert quantiles.quantile(np.concatenate(shards), 0.99) == 1000.0
    assert quantiles.quantile(np.concatenate(shards), 0.5) == 10.0


def test_failed_requests_are_infinite_and_move_the_tail_only():
    values = np.array([770.0] * 66 + [math.inf] * 34)
    assert quantiles.quantile(values, 0.5) == 770
    assert math.isinf(quantiles.quantile(values, 0.99))


def test_without_values_there_is_no_quantile():
    assert math.isnan(quantiles.quantile(np.empty(0), 0.5))


@pytest.mark.parametrize(("q", "n"), [(0.5, 6), (0.95, 72), (0.99, 368)])
def test_the_two_sided_interval_exists_from_this_sample_on(q, n):
    assert quantiles.interval(np.arange(n, dtype=float), q) is not None
    assert quantiles.interval(np.arange(n - 1, dtype=float), q) is None


@pytest.mark.parametrize(("q", "n"), [(0.5, 2), (0.95, 20), (0.99, 100), (0.999, 1000)])
def test_b20_a_percentile_is_shown_from_this_sample_on(q, n):
    assert quantiles.needed(q) == n


@pytest.mark.parametrize(("n", "q"), [(72, 0.95), (100, 0.5), (400, 0.99), (5000, 0.95)])
def test_each_tail_of_the_interval_holds_at_most_two_and_a_half_percent_and_no_less_than_it_could(n, q):
    low, high = quantiles.interval_ranks(n, q)
    binomial = stats.binom(n, q)
    assert binomial.cdf(low) <= 0.025 < binomial.cdf(low + 1)
    assert binomial.cdf(high) >= 0.975 > binomial.cdf(high - 1)


def test_the_interval_covers_the_true_quantile_in_95_percent_of_draws():
    rng, true, covered = np.random.default_rng(3), -math.log(0.05), 0
    for _ in range(1000):
        low, high = quantiles.interval(np.sort(rng.exponential(size=200)), 0.95)
        covered += low <= true <= high
    assert 935 <= covered <= 990


def test_an_interval_may_end_at_infinity():
    found = quantiles.interval(np.array([1.0] * 95 + [math.inf] * 5), 0.95)
    assert math.isinf(found.high)


@given(st.integers(1, 500), st.data())
def test_bounds_of_a_share_equal_scipys_exact_test(n, data):
    k = data.draw(st.integers(0, n))
    exact_low = stats.binomtest(k, n, alternative="greater").proportion_ci(0.95).low
    exact_high = stats.binomtest(k, n, alternative="less").proportion_ci(0.95).high
    assert quantiles.clopper_pearson(k, n) == pytest.approx((exact_low, exact_high), abs=1e-9)


@pytest.mark.parametrize(("allowed", "n"), [(0.05, 59), (0.01, 299), (0.5, 5)])
def test_this_many_requests_without_a_violation_prove_the_rule(allowed, n):
    assert quantiles.settles(0, n, allowed)
    assert not quantiles.settles(0, n - 1, allowed)
    assert quantiles.samples_to_settle(0, 10, allowed) == n
    assert quantiles.samples_to_settle(0, 0, allowed) == n


def test_more_samples_settle_a_share_off_the_limit_and_none_settle_one_on_it():
    more = quantiles.samples_to_settle(1, 10, 0.05)
    assert more is not None
    assert quantiles.settles(round(more / 10), more, 0.05)
    assert quantiles.samples_to_settle(5, 100, 0.05) is None


def test_sorting_drops_what_did_not_happen_and_keeps_infinity_last():
    assert quantiles.ordered([3.0, math.nan, math.inf, 1.0]).tolist() == [1.0, 3.0, math.inf]
