"""How sure a number is that was measured in several trials: resampling in two levels.

Requests of one run are no independent draws: neighbours share a queue, and all share the state of the machine that day.
So two things are resampled, never single requests:

    trials   whole runs, each with all its arms, one left out at a time (the jackknife: Quenouille 1956, Tukey 1958).
             S holds both what differs between runs and what happened by chance within them:
             S = (T − 1) / T · Σ (value without trial t − their mean)²
    blocks   stretches of due time, the same ones in every arm of a trial, longer than requests stay alike, drawn with
             replacement (moving from Künsch 1989). W is chance within the runs alone

The textbook two-level bootstrap draws one within the other: that counts W twice, and with few trials it misses a factor
T / (T − 1) of S (Davison and Hinkley 1997, section 3.8); drawing three trials with replacement also ties values, which
widens the interval of a tail quantile (98 % instead of 95 % with 200 requests a run). So the levels are taken apart:

    trials of different arrivals     variance = S         dof = T − 1
    trials that repeat one plan      variance = S + W     dof by Satterthwaite 1946: S cannot know what other arrivals
                                                          would have done; W can (a block is drawn in all trials)
    interval                         value ± t(dof) · √variance           ratios in logarithms

Whole trials as the unit is the method of independent replications (Law 2015, section 9.5.2): it holds whatever makes
runs differ. Its price is an honest one: with three trials t is 4.30, with five 2.78, with ten 2.26.

A run must also be long against how long its queue remembers: in a short one no quantile of a busy server has settled.
No interval is given for fewer than two trials, or where the tail of a run holds too few requests that are worth an
independent one (`effective`). What there would be is kept as `rough` and the caller says inconclusive. Coverage
measured: docs/isolation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.float32]  # (draws, trials, blocks): how often each block counts in a draw
Statistic = Callable[[Counts], Floats]  # one value per draw

DRAWS = 400
CONFIDENCE = 0.95
FLOOR = 0.02  # S never counts as less than this part of W: trials that agree by chance prove nothing
ENOUGH_BEYOND = 8.0  # requests of a run beyond the quantile, each worth an independent one, that an interval needs


class Sample(NamedTuple):
    """One tenant's values of one metric in one arm, all trials; sorted, NaN left out, +∞ (failed) at the end."""

    values: Floats
    trial: Ints
    block: Ints


class Estimate(NamedTuple):
    """A number with its interval; `low` and `high` are None where none is given, and `why` says it."""

    value: float
    low: float | None
    high: float | None
    se: float  # of one trial, in the scale of the interval (logarithms for ratios); NaN where unknown
    trials: int
    why: str = ""
    rough: tuple[float, float] | None = None  # what the interval would be if the runs were long enough

    @property
    def ci(self) -> tuple[float, float] | None:
        """Both ends."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def sample(values: Sequence[Floats], due: Sequence[Floats], *, begin: float, block: float, blocks: int) -> Sample:
    """Values of each trial with their due times, in one.

    Args:
        values: per trial; +∞ for failed, NaN for what did not happen.
        due: per trial, due times in any unit.
        begin: due time at which the first block begins.
        block: length of a block, in the same unit.
        blocks: how many there are; later rows belong to the last.
    """
    trial = np.concatenate([np.full(len(v), index) for index, v in enumerate(values)]).astype(np.int64)
    flat, times = np.concatenate(values), np.concatenate(due)
    place = np.clip((times - begin) // block, 0, blocks - 1).astype(np.int64)
    kept = ~np.isnan(flat)
    flat, trial, place = flat[kept], trial[kept], place[kept]
    order = np.argsort(flat, kind="stable")
    return Sample(flat[order], trial[order], place[order])


def quantile(found: Sample, q: float) -> Statistic:
    """The q-quantile (inverted_cdf) of a sample, pooled over trials, as a statistic of resampled counts.

    Exact, in two looks: how many rows each draw has below every √n-th value is one matrix product of the cells' counts
    with the draws; the stretch between two of them is then looked through row by row.
    """
    n = len(found.values)
    stride = max(1, math.isqrt(n))
    edges = np.arange(0, n, stride)

    def of(counts: Counts) -> Floats:
        if n == 0:
            return np.full(len(counts), np.nan)
        _, trials, blocks = counts.shape
        cell = found.trial * blocks + found.block
        cells = trials * blocks
        held = np.bincount(np.arange(n) // stride * cells + cell, minlength=len(edges) * cells)
        held = held.reshape(len(edges), cells).astype(np.float32)
        flat = counts.reshape(len(counts), -1)
        below = np.cumsum(flat @ held.T, axis=1, dtype=np.float64)  # rows up to the end of each stretch
        wanted = q * below[:, -1] - 1e-9
        stretch = (below >= wanted[:, None]).argmax(axis=1)
        before = np.where(stretch > 0, below[np.arange(len(counts)), stretch - 1], 0.0)
        rows = np.minimum(edges[stretch][:, None] + np.arange(stride), n - 1)
        weight = np.take_along_axis(flat, cell[rows], axis=1)
        reached = before[:, None] + np.cumsum(weight, axis=1) >= wanted[:, None]
        values = found.values[rows[np.arange(len(counts)), reached.argmax(axis=1)]]
        return np.where(below[:, -1] > 0, values, np.nan)

    return of


def total(found: Sample, weights: Floats | None = None) -> Statistic:
    """The sum over a sample (of `weights`, else of its values), as a statistic of resampled counts."""
    trials, blocks = int(found.trial.max(initial=0)) + 1, int(found.block.max(initial=0)) + 1
    cells = np.zeros((trials, blocks))
    np.add.at(cells, (found.trial, found.block), found.values if weights is None else weights)

    def of(counts: Counts) -> Floats:
        result: Floats = np.tensordot(counts[:, :trials, :blocks].astype(np.float64), cells, axes=2)
        return result

    return of


class Levels(NamedTuple):
    """The draws of an experiment, the same for every number taken from it."""

    whole: Counts  # (1, trials, blocks): everything once
    trials: Counts  # each left out once
    blocks: Counts
    same_plan: bool


def levels(trials: int, blocks: int, *, same_plan: bool, seed: int = 0, draws: int = DRAWS) -> Levels:
    """Both levels: every trial left out once, and blocks drawn.

    Args:
        trials: how many.
        blocks: of due time in each.
        same_plan: every trial repeated the same arrivals, so a block is drawn in all trials or in none.
        seed: of the draws.
        draws: how many of the blocks.
    """
    rng = np.random.default_rng(seed)
    without_one = 1 - np.eye(trials)
    shape = (draws,) if same_plan else (draws, trials)
    by_block = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=shape)
    if same_plan:
        by_block = np.broadcast_to(by_block[:, None, :], (draws, trials, blocks))
    return Levels(
        whole=np.ones((1, trials, blocks), dtype=np.float32),
        trials=np.repeat(without_one[:, :, None], blocks, axis=2).astype(np.float32),
        blocks=np.asarray(by_block, dtype=np.float32),
        same_plan=same_plan,
    )


def estimate(
    statistic: Statistic, drawn: Levels, *, log: bool = False, confidence: float = CONFIDENCE, why: str = ""
) -> Estimate:
    """A number and its interval.

    Args:
        statistic: of resampled counts.
        drawn: from `levels`.
        log: the interval is symmetric in the logarithm (ratios, times).
        confidence: of the interval.
        why: a reason to give no interval, found by the caller (see `too_few`).
    """
    value = float(statistic(drawn.whole)[0])
    trials = drawn.whole.shape[1]
    if trials < 2:
        why = "a single trial cannot tell what differs between runs from what differs between arms"
    if trials < 2 or math.isnan(value):
        return Estimate(value, None, None, math.nan, trials, why or "nothing was measured")
    of_trials, of_blocks = statistic(drawn.trials), statistic(drawn.blocks)
    if math.isinf(value):
        return Estimate(value, value, value, math.nan, trials, "more requests failed than the quantile leaves out")
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            of_trials, of_blocks = np.log(of_trials), np.log(of_blocks)
    left, drawn_values = of_trials[np.isfinite(of_trials)], of_blocks[np.isfinite(of_blocks)]
    between = (trials - 1) * float(np.var(left)) if len(left) else 0.0
    error, dof = _combined(between, float(np.var(drawn_values)) if len(drawn_values) else 0.0, drawn)
    half = _t(dof, confidence) * error
    low, high = (value * math.exp(-half), value * math.exp(half)) if log else (value - half, value + half)
    tail = (1 - confidence) / 2
    if (of_trials == np.inf).any() or (of_blocks == np.inf).mean() > tail:
        high = math.inf  # failures are so many that the quantile is one of them in some draws
    if why:
        return Estimate(value, None, None, error * math.sqrt(trials), trials, why, (low, high))
    return Estimate(value, low, high, error * math.sqrt(trials), trials)


def _combined(between: float, within: float, drawn: Levels) -> tuple[float, float]:
    """Standard error and degrees of freedom."""
    _, trials, blocks = drawn.blocks.shape
    between = max(between, FLOOR * within, 1e-18)
    if not drawn.same_plan:
        return math.sqrt(between), float(trials - 1)
    both = between + within
    dof = both**2 / (between**2 / (trials - 1) + within**2 / max(1, blocks - 1))
    return math.sqrt(both), dof


def _t(dof: float, confidence: float) -> float:
    from scipy import special

    return float(special.stdtrit(dof, 0.5 + confidence / 2))


def effective(found: Sample) -> float:
    """How many independent requests a sample is worth.

    n / d with the design effect d = variance of the blocks' sums of ranks / what independent ranks would have (1/12 a
    row), at least 1 (Kish 1965). Ranks within each run, for what differs between runs is S's affair; not the tail
    alone, which is too small to tell.
    """
    n = len(found.values)
    if n == 0:
        return 0.0
    by_trial = np.argsort(found.trial, kind="stable")  # values are sorted already, so they stay so within a trial
    sizes = np.bincount(found.trial)
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    ranks = np.empty(n)
    ranks[by_trial] = (np.arange(n) - begins + 0.5) / np.repeat(sizes, sizes) - 0.5
    cell = found.trial * (int(found.block.max()) + 1) + found.block
    sums = np.bincount(cell, weights=ranks)
    return n / max(1.0, float((sums**2).sum()) / (n / 12))


def too_few(found: Sample, q: float, name: str = "") -> str:
    """Why a sample is too small for an interval of its q-quantile; empty when it is not."""
    trials = len(np.unique(found.trial)) or 1
    worth = effective(found) / trials
    if worth * (1 - q) >= ENOUGH_BEYOND:
        return ""
    arm = f"{name}: " if name else ""
    return (
        f"{arm}runs too short: {len(found.values) // trials:,} requests each, alike enough to be worth {worth:,.0f}, "
        f"leave {worth * (1 - q):.1f} beyond P{q * 100:g}; {ENOUGH_BEYOND:.0f} are needed"
    )


def times_longer(found: Sample, q: float) -> float:
    """How many times as long the runs must be for an interval, requests as alike as they are; 1: long enough."""
    trials = len(np.unique(found.trial)) or 1
    return max(1.0, ENOUGH_BEYOND / max(effective(found) / trials * (1 - q), 1e-9))


def trials_to_settle(found: Estimate, limit: float, *, log: bool = True, confidence: float = CONFIDENCE) -> int | None:
    """How many trials would set the interval clear of a limit if the value stayed as it is; None beyond 1,000."""
    if math.isnan(found.se) or not math.isfinite(found.value) or (log and (found.value <= 0 or limit <= 0)):
        return None
    distance = abs(math.log(found.value / limit)) if log else abs(found.value - limit)
    for trials in range(2, 1001):
        if _t(trials - 1, confidence) * found.se / math.sqrt(trials) <= distance:
            return trials
    return None
