"""When a limit was broken."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tenants import figures
from tenants.stretches import NICE_S, broken, nice_s, stretches


def run(slow_from_s, slow_to_s, *, per_s=10, seconds=200, slow=900.0):
    at_s = np.arange(seconds * per_s) / per_s
    return at_s, np.where((at_s >= slow_from_s) & (at_s < slow_to_s), slow, 100.0)


def test_the_minute_in_which_it_was_slow_is_found_and_neighbours_are_joined():
    at_s, values = run(60, 120)
    assert broken(stretches(at_s, values, 0.95), 800, strict=True) == [(60.0, 120.0)]


def test_two_bad_times_are_two_stretches():
    at_s, values = run(20, 40)
    values = np.where((at_s >= 100) & (at_s < 110), math.inf, values)
    assert broken(stretches(at_s, values, 0.95), 800, strict=True) == [(20.0, 40.0), (100.0, 110.0)]


def test_a_stretch_with_too_few_requests_has_no_quantile():
    at_s = np.concatenate([np.arange(100) / 10, [15.0], 20 + np.arange(100) / 10])
    found = stretches(at_s, np.full(201, 900.0), 0.95)
    assert [stretch.value for stretch in found if stretch.start_s <= 15.0 < stretch.end_s] == [None]
    assert (10.0, 20.0) not in broken(found, 800, strict=True)


def test_a_short_run_has_no_stretches():
    assert stretches(np.arange(39.0), np.full(39, 900.0), 0.95) == []


def test_censored_requests_are_left_out():
    at_s, values = run(0, 0)
    values[::2] = math.nan
    assert all(stretch.value == 100 for stretch in stretches(at_s, values, 0.95))


@pytest.mark.parametrize(("strict", "found"), [(True, [(0.0, 200.0)]), (False, [])])
def test_a_value_on_the_limit_breaks_less_than_only(strict, found):
    at_s, values = run(0, 200, slow=800.0)
    assert broken(stretches(at_s, values, 0.95), 800, strict=strict) == found


def test_stretches_have_round_lengths():
    assert [nice_s(width) for width in (0.0, 0.3, 5, 5.1, 1e9)] == [0.1, 0.5, 5, 10, NICE_S[-1]]


def test_stretches_are_shown_as_times_of_the_run():
    assert figures.spans([(40, 80), (120, 130)]) == "0:40-1:20, 2:00-2:10"
    assert figures.spans([(0, 1), (2, 3), (4, 5)]) == "0:00-0:01, 0:02-0:03 and 1 more"
