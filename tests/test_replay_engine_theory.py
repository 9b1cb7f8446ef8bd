"""Queueing theory as an oracle: with one slot and steps of one millisecond the engine is a single server.

A request of one prompt token and k output tokens takes k steps, its service time S. Poisson arrivals, two classes, the
urgent one first, nobody interrupted (Cobham 1954). With λ_i, E[S_i], ρ_i = λ_i·E[S_i] and the work in service that an
arrival finds, W₀ = Σ λ_i·E[S_i²]/2:

    W_urgent = W₀ / (1 − ρ_1)                    W_other = W₀ / ((1 − ρ_1)·(1 − ρ_1 − ρ_2))

and first come first served for both (Pollaczek and Khinchine): W = W₀ / (1 − ρ). For exponential S this is ρ/(μ − λ).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from replay.engine.config import SchedulerConfig
from replay.engine.steptime import StepModel
from replay.engine.virtual import Workload, simulate

STEP_MS = StepModel(t0_ms=1.0)
REQUESTS = 25_000
BATCHES = 20


def geometric(generator, mean, size):
    """Whole milliseconds with the moments of an exponential time, but for the grid."""
    return generator.geometric(1 / mean, size)


def bimodal(generator, mean, size):
    """Nine short ones for a long one, as chats and summaries on one engine."""
    return np.where(generator.random(size) < 0.9, mean // 2, mean * 11 // 2)


def played(policy, service, shares, load, seed):
    """Waits in ms by class, and service times by class; class i has priority i and share shares[i] of the requests."""
    generator = np.random.default_rng(seed)
    kind = generator.choice(len(shares), REQUESTS, p=shares)
    steps = service(generator, 200, REQUESTS)
    gap_ms = steps.mean() / load
    arrival = np.cumsum(generator.exponential(gap_ms, REQUESTS)) * 1e6
    work = Workload(
        arrival_ns=arrival.astype(np.int64),
        input_tokens=np.ones(REQUESTS, dtype=np.int64),
        output_tokens=steps.astype(np.int64),
        priority=kind,
    )
    result = simulate(work, SchedulerConfig(scheduling_policy=policy, max_num_seqs=1), STEP_MS)
    waits = (result.end_ns - result.sent_ns) / 1e6 - steps
    rate = 1 / np.diff(arrival / 1e6).mean()
    return [(waits[kind == k], steps[kind == k].astype(float), rate * np.mean(kind == k)) for k in range(len(shares))]


def interval(waits):
    """Mean and its 99.9 % interval from batch means (waits of one batch hang together, batches hardly)."""
    means = np.array([batch.mean() for batch in np.array_split(waits, BATCHES)])
    half = stats.t.ppf(0.9995, BATCHES - 1) * means.std(ddof=1) / np.sqrt(BATCHES)
    return means.mean() - half, means.mean() + half


@pytest.mark.parametrize("service", [geometric, bimodal], ids=["M/M/1", "M/G/1"])
@pytest.mark.parametrize(("shares", "load"), [((0.3, 0.7), 0.7), ((0.7, 0.3), 0.6)])
def test_mean_waits_of_two_classes_agree_with_the_priority_formula(service, shares, load):
    urgent, other = played("priority", service, shares, load, seed=11)
    w0 = sum(rate * np.mean(steps**2) / 2 for _, steps, rate in (urgent, other))
    rho1, rho2 = (rate * steps.mean() for _, steps, rate in (urgent, other))
    for waits, expected in ((urgent[0], w0 / (1 - rho1)), (other[0], w0 / ((1 - rho1) * (1 - rho1 - rho2)))):
        low, high = interval(waits)
        assert low <= expected <= high
        assert high - low < 0.6 * expected  # an interval that wide could not fail


@pytest.mark.parametrize("service", [geometric, bimodal], ids=["M/M/1", "M/G/1"])
def test_mean_wait_first_come_first_served_agrees_with_pollaczek_and_khinchine(service):
    ((waits, steps, rate),) = played("fcfs", service, (1.0,), 0.7, seed=5)
    low, high = interval(waits)
    assert low <= rate * np.mean(steps**2) / 2 / (1 - rate * steps.mean()) <= high


def test_without_priority_both_classes_wait_alike():
    classes = played("fcfs", geometric, (0.3, 0.7), 0.7, seed=3)
    assert classes[0][0].mean() == pytest.approx(classes[1][0].mean(), rel=0.1)
