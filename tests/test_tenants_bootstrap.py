"""How sure a number is: both levels of the bootstrap against what is known on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import coverage
from tenants import bootstrap
from tenants.bootstrap import Estimate


def drawn_sample(seed, trials, n, spread_between=0.0, blocks=10):
    """Values of `trials` runs: exponential, times a factor of each run."""
    rng = np.random.default_rng(seed)
    factors = np.exp(rng.normal(0, spread_between, trials))
    values = [rng.exponential(100.0, n) * factor for factor in factors]
    due = [np.sort(rng.uniform(0, 100, n)) for _ in range(trials)]
    return bootstrap.sample(values, due, begin=0.0, block=10.0, blocks=blocks), values


def test_everything_once_is_the_pooled_quantile():
    found, values = drawn_sample(1, 3, 200)
    drawn = bootstrap.levels(3, 10, same_plan=False)
    for q in (0.5, 0.95, 0.99):
        expected = np.quantile(np.concatenate(values), q, method="inverted_cdf")
        assert bootstrap.estimate(bootstrap.quantile(found, q), drawn, log=True).value == expected


def test_a_resampled_quantile_is_that_of_the_repeated_rows():
    found, _ = drawn_sample(2, 3, 50)
    drawn = bootstrap.levels(3, 10, same_plan=False, draws=20)
    got = bootstrap.quantile(found, 0.9)(drawn.blocks)
    for draw in range(20):
        times = drawn.blocks[draw][found.trial, found.block].astype(int)
        assert got[draw] == np.quantile(np.repeat(found.values, times), 0.9, method="inverted_cdf")


def test_the_interval_of_a_mean_of_runs_is_students():
    """A linear statistic: the whole-trial level must be the textbook t interval of the runs' means."""
    found, values = drawn_sample(3, 5, 100, 0.3)
    drawn = bootstrap.levels(5, 10, same_plan=False, draws=20_000)
    total, count = bootstrap.total(found), bootstrap.total(found, np.ones(500))
    got = bootstrap.estimate(lambda counts: total(counts) / count(counts), drawn)
    means = np.array([v.mean() for v in values])
    half = 2.776 * means.std(ddof=1) / math.sqrt(5)
    assert got.value == pytest.approx(means.mean())
    assert got.high - got.value == pytest.approx(half, rel=0.03)


def test_with_one_trial_no_interval_is_given():
    found, _ = drawn_sample(4, 1, 500)
    got = bootstrap.estimate(bootstrap.quantile(found, 0.5), bootstrap.levels(1, 10, same_plan=True), log=True)
    assert got.ci is None
    assert "single trial" in got.why


def test_trials_that_repeat_one_plan_keep_the_doubt_about_other_arrivals():
    """Three identical runs agree perfectly; what other arrivals would do is still unknown."""
    _, values = drawn_sample(5, 1, 300)
    thrice = bootstrap.sample(values * 3, [np.linspace(0, 99, 300)] * 3, begin=0.0, block=10.0, blocks=10)
    statistic = bootstrap.quantile(thrice, 0.9)
    one_plan = bootstrap.estimate(statistic, bootstrap.levels(3, 10, same_plan=True), log=True)
    assert one_plan.high / one_plan.low > 1.2


def test_runs_too_short_get_no_interval_and_alike_requests_count_less():
    rng = np.random.default_rng(6)
    due = [np.linspace(0, 99.9, 400)] * 3
    alike = [np.repeat(rng.exponential(100.0, 10), 40) + rng.normal(0, 0.01, 400) for _ in range(3)]
    free = [rng.exponential(100.0, 400) for _ in range(3)]
    cut = {"begin": 0.0, "block": 10.0, "blocks": 10}
    assert bootstrap.too_few(bootstrap.sample(free, due, **cut), 0.95) == ""
    short = bootstrap.sample(alike, due, **cut)
    why = bootstrap.too_few(short, 0.95)
    assert "too short" in why
    assert bootstrap.effective(short) < 100
    assert bootstrap.times_longer(short, 0.95) > 4
    got = bootstrap.estimate(
        bootstrap.quantile(short, 0.95), bootstrap.levels(3, 10, same_plan=False), log=True, why=why
    )
    assert got.ci is None
    assert got.rough[0] < got.value < got.rough[1]


def test_failures_in_the_tail_open_the_interval_upwards():
    _, values = drawn_sample(7, 3, 200)
    worse = [np.where(np.arange(200) < k, np.inf, v) for k, v in zip((0, 2, 25), values, strict=True)]
    failing = bootstrap.sample(worse, [np.linspace(0, 99, 200)] * 3, begin=0.0, block=10.0, blocks=10)
    got = bootstrap.estimate(bootstrap.quantile(failing, 0.95), bootstrap.levels(3, 10, same_plan=False), log=True)
    assert math.isfinite(got.value)
    assert got.high == math.inf


def test_more_trials_settle_what_is_open():
    found = Estimate(1.1, 0.8, 1.5, 0.1, 3)
    needed = bootstrap.trials_to_settle(found, 1.25)
    assert 4 <= needed <= 8  # ln(1.25 / 1.1) = 0.128: t(T − 1) · 0.1 / √T is below it from five trials on
    assert bootstrap.trials_to_settle(found._replace(value=1.25), 1.25) is None


def test_the_interval_covers_a_known_ratio_about_as_often_as_it_says():
    """A small version of benchmarks/coverage.py; what is measured stands in docs/isolation.md."""
    row = coverage.coverage(coverage.Setting(0.5, 3, 1000, 0.05), 120)
    assert row.given >= 110
    assert 0.89 <= row.covered <= 0.995


def test_short_runs_of_a_busy_server_are_given_no_interval():
    assert coverage.coverage(coverage.Setting(0.8, 3, 200, 0.05), 60).given == 0


def test_two_identical_arms_are_seldom_called_different():
    row = coverage.coverage(coverage.Setting(0.5, 3, 1000, 0.05, same=True), 100)
    assert row.given >= 90
    assert row.differs <= 12
