"""What a request takes alone, learnt from a run under load as from an idle one."""

from __future__ import annotations

import numpy as np
import pytest

from replay.engine.steptime import load_profile
from tenants.alone import FEWEST, episode_points, idle_points, learn
from tenants.steps import emitting_steps, seen
from tests.virtual_runs import BUDGET, run, workload

LENGTHS = np.array([300, 1000, 2000, 3500, 6000])


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_the_curve_is_within_a_twentieth_whatever_the_load(policy, load):
    outcomes, _ = run(workload(5, load), policy)
    found = learn(emitting_steps(seen(outcomes)))
    assert found is not None
    truth = np.array([load_profile().model.alone_ns(int(length), BUDGET) for length in LENGTHS])
    assert np.abs(found.ns(LENGTHS) / truth - 1).max() < 0.07


def test_idle_moments_are_those_with_nothing_else_in_flight():
    outcomes, _ = run(workload(5, 0.05, 120.0), "fcfs")
    view = seen(outcomes)
    tokens, times = idle_points(view)
    truth = np.array([load_profile().model.alone_ns(int(length), BUDGET) for length in tokens])
    assert len(tokens) >= 5
    assert np.abs(times / truth - 1).max() < 0.05


def test_episodes_are_found_where_there_is_no_idle_moment():
    outcomes, _ = run(workload(5, 1.1), "fcfs")
    view = seen(outcomes)
    assert len(idle_points(view)[0]) <= 1
    assert len(episode_points(emitting_steps(view))[0]) > 50


def test_too_few_points_give_no_curve():
    outcomes, _ = run(workload(5, 0.3), "fcfs")
    assert learn(emitting_steps(seen(outcomes.slice(0, FEWEST - 2)))) is None
