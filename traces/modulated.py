"""Arrivals whose rate is a hidden Markov chain: fit from counts, drawn state by state.

In every window of w seconds the process is in one of K states; state k sends Poisson arrivals at rate rₖ and the next
state is drawn from row k of the transition matrix P: a Markov-modulated Poisson process on a time grid. Its rate moves
in steps, so it has idle times and waves that no renewal process has (Fischer, Meier-Hellstern, "The Markov-modulated
Poisson process cookbook", Performance Evaluation 18, 1993).

Fit: Baum and Welch's expectation maximisation on the counts of at most 2,000 windows, for 2, 3, 4 and 6 states; the
Bayesian information criterion picks. Every state keeps one imagined visit to the others by their shares, so a trend is
not learnt as a one-way street, and rates are scaled so that the stationary mean is the trace's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from traces.burstiness import NS, Floats, Int64s, windows

_STATES = (2, 3, 4, 6)
_MOST_WINDOWS = 2000
_WIDTHS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
_ROUNDS = 40


class Chain(NamedTuple):
    """The fitted process."""

    window_s: float
    rates_rps: Floats  # K
    transitions: Floats  # K × K, rows sum to 1

    def stationary(self) -> Floats:
        """Share of time in each state."""
        states = len(self.rates_rps)
        system = np.vstack([self.transitions.T - np.eye(states), np.ones(states)])
        found = np.linalg.lstsq(system, np.append(np.zeros(states), 1.0), rcond=None)[0]
        return np.asarray(np.maximum(found, 0) / np.maximum(found, 0).sum())


def fit(arrival_ns: Int64s) -> Chain | None:
    """The chain that explains the counts best; None where the trace has fewer than 20 windows."""
    span_s = int(arrival_ns[-1] - arrival_ns[0]) / NS
    width_s = next((w for w in _WIDTHS_S if w >= 1 and span_s / w <= _MOST_WINDOWS), _WIDTHS_S[-1])
    if span_s / width_s < 100:  # a short trace: finer windows
        width_s = next(w for w in _WIDTHS_S if span_s / w <= _MOST_WINDOWS)
    counted = windows(arrival_ns, round(width_s * NS)).without_last()
    if counted is None or counted.total < 20 or counted.total > 50 * _MOST_WINDOWS:
        return None
    counts = counted.dense().astype(np.float64)
    best, least = None, np.inf
    for states in _STATES:
        rates, moves, likelihood = _baum_welch(counts, states)
        criterion = -2 * likelihood + states * states * np.log(len(counts))
        if criterion < least:
            best, least = (rates, moves), criterion
    assert best is not None
    rates, moves = best
    chain = Chain(width_s, rates / width_s, moves)
    mean = counts.mean() / width_s
    return chain._replace(rates_rps=chain.rates_rps * mean / max(float(chain.stationary() @ chain.rates_rps), 1e-12))


def _baum_welch(counts: Floats, states: int) -> tuple[Floats, Floats, float]:
    """Rates a window, transition matrix and log likelihood (up to a constant of the counts)."""
    rates = np.array([part.mean() for part in np.array_split(np.sort(counts), states)])
    rates += 0.05 * np.arange(1, states + 1)
    moves = np.full((states, states), 0.1 / (states - 1))
    np.fill_diagonal(moves, 0.9)
    start, before = np.full(states, 1 / states), -np.inf
    likelihood = before
    for _ in range(_ROUNDS):
        log_fit = counts[:, None] * np.log(rates) - rates
        top = log_fit.max(axis=1)
        weight, pairs, likelihood = _forward_backward(np.exp(log_fit - top[:, None]), moves, start)
        likelihood += float(top.sum())
        share = weight.sum(axis=0)
        pairs += share / share.sum()
        moves = pairs / pairs.sum(axis=1, keepdims=True)
        start = weight[0] / weight[0].sum()
        rates = np.maximum(weight.T @ counts / np.maximum(share, 1e-9), 1e-6)
        if likelihood - before < 0.01:
            break
        before = likelihood
    return rates, moves, likelihood


def _forward_backward(fit: Floats, moves: Floats, start: Floats) -> tuple[Floats, Floats, float]:
    """Posterior of the states, expected transitions, and log likelihood; scaled at every step against underflow."""
    steps, states = fit.shape
    forward, backward, scale = np.empty((steps, states)), np.empty((steps, states)), np.empty(steps)
    state = start * fit[0]
    for step in range(steps):
        if step:
            state = (state @ moves) * fit[step]
        scale[step] = state.sum()
        state = state / scale[step]
        forward[step] = state
    backward[-1] = state = np.ones(states)
    for step in range(steps - 2, -1, -1):
        state = moves @ (fit[step + 1] * state) / scale[step + 1]
        backward[step] = state
    pairs = moves * (forward[:-1].T @ (fit[1:] * backward[1:] / scale[1:, None]))
    return forward * backward, pairs, float(np.log(scale).sum())


def draw(chain: Chain, duration_s: float, generator: np.random.Generator) -> Floats:
    """Arrivals in [0, duration) seconds, ascending."""
    stay = np.minimum(np.diag(chain.transitions), 1 - 1e-9)
    leave = chain.transitions - np.diag(np.diag(chain.transitions))
    onward = np.cumsum(leave / np.maximum(leave.sum(axis=1, keepdims=True), 1e-300), axis=1)
    state = int(generator.choice(len(stay), p=chain.stationary()))
    now, pieces = -float(generator.random()) * chain.window_s, []
    while now < duration_s:
        length = float(generator.geometric(1 - stay[state])) * chain.window_s
        count = generator.poisson(chain.rates_rps[state] * length)
        pieces.append(np.sort(now + generator.random(count) * length))
        now += length
        state = min(int(np.searchsorted(onward[state], generator.random(), side="right")), len(stay) - 1)
    times = np.concatenate(pieces)
    return times[(times >= 0) & (times < duration_s)]
