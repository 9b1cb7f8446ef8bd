"""How sure a number is that was measured in several trials.

Requests of one run are no independent draws: neighbours share a queue, and all share the state of the machine that day.
So two things are looked at, never single requests:

    trials   whole runs, each with all its arms: independent replications (Law 2015, section 9.5.2). The number is taken
             from all runs together, its error from how the runs differ one by one:
             S = variance of (value of trial t alone) / T
    blocks   stretches of due time, the same ones in every arm of a trial, longer than requests stay alike, drawn with
             replacement (Künsch 1989). W is chance within the runs alone

Centre and error are apart on purpose. A tail quantile of one run is biased by 1 / length and the mean of T such values
keeps that bias; the quantile of all rows has a T-th of it. So the interval sits on the latter (sectioning: Asmussen and
Glynn 2007, section III.5), while S is taken about the mean of the trials: taken about the centre it is too wide for
three trials (97 % instead of 95 %); from trials left out one at a time (the jackknife) somewhat too narrow.

    trials of different arrivals     variance = S         dof = T − 1
    trials that repeat one plan      variance = S + W     dof by Satterthwaite 1946: S cannot know what other arrivals
                                                          would have done; W can (a block is drawn in all trials)
    interval                         value ± t(dof) · √variance           ratios in logarithms

The price is an honest one: with three trials t is 4.30, with five 2.78, with ten 2.26.

**Too short.** A run must be long against how long its queue remembers: in a short one no quantile of a busy server has
settled, and it errs downwards. n requests are worth n / τ independent ones,

    τ = 1 + 2 Σ ρ(l),  l = 1 ... m     ρ(l) = autocorrelation, l requests apart in order of due time, of their ranks
                                       within the run, over all trials (ranks: an infinite time has no variance)
    m = the first m >= 3 τ(m)          the window of Sokal 1997, section 3 (his τ is half of this one, his factor 6)

and an interval needs six of them beyond the quantile in each run; thirty where all runs repeat one plan, for then they
are the only ones. The rule looks at the same data as the interval, so it must be sharp: where chance decides that a run
is long enough, it prefers those that happened to see a calm queue. Sums over a few blocks measure the same memory with
twice the noise and do just that.

No interval is given for fewer than two trials, or for runs too short. What there would be is kept as `rough` and the
caller says inconclusive. Coverage measured: docs/isolation.md.
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
FLOOR = 0.02  # S never counts as less than this part of W: repeats that agree by chance prove nothing
ENOUGH_BEYOND = 6.0  # requests of a run beyond the quantile, each worth an independent one, that an interval needs
ENOUGH_OF_ONE_PLAN = 30.0  # the same where every trial repeats the same arrivals
WINDOW = 3.0  # autocorrelation is summed over so many of its own times
MEMORIES = 16.0  # a block is so many of them long: shorter ones miss a part of W
FEWEST_BLOCKS, MOST_BLOCKS = 8, 40


class Sample(NamedTuple):
    """One tenant's values of one metric in one arm, all trials; sorted, NaN left out, +∞ (failed) at the end."""

    values: Floats
    trial: Ints
    block: Ints
    turn: Ints  # place in its trial in order of due time, from 0


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
    in_time = np.lexsort((times[kept], trial))
    turn = np.empty(len(flat), dtype=np.int64)
    turn[in_time] = np.arange(len(flat)) - np.searchsorted(trial, trial)  # trials stand one after another
    order = np.argsort(flat, kind="stable")
    return Sample(flat[order], trial[order], place[order], turn[order])


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
    trials: Counts  # each of them alone
    blocks: Counts
    same_plan: bool


def levels(trials: int, blocks: int, *, same_plan: bool, seed: int = 0, draws: int = DRAWS) -> Levels:
    """Both levels: every trial alone, and blocks drawn.

    Args:
        trials: how many.
        blocks: of due time in each.
        same_plan: every trial repeated the same arrivals, so a block is drawn in all trials or in none.
        seed: of the draws.
        draws: how many of the blocks.
    """
    rng = np.random.default_rng(seed)
    shape = (draws,) if same_plan else (draws, trials)
    by_block = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=shape)
    if same_plan:
        by_block = np.broadcast_to(by_block[:, None, :], (draws, trials, blocks))
    return Levels(
        whole=np.ones((1, trials, blocks), dtype=np.float32),
        trials=np.repeat(np.eye(trials)[:, :, None], blocks, axis=2).astype(np.float32),
        blocks=np.asarray(by_block, dtype=np.float32),
        same_plan=same_plan,
    )


def estimate(
    statistic: Statistic,
    drawn: Levels,
    *,
    log: bool = False,
    confidence: float = CONFIDENCE,
    why: str = "",
    of_one: Statistic | None = None,
) -> Estimate:
    """A number and its interval.

    Args:
        statistic: of resampled counts.
        drawn: from `levels`.
        log: the interval is symmetric in the logarithm (ratios, times).
        confidence: of the interval.
        why: a reason to give no interval, found by the caller (see `too_few`).
        of_one: the statistic of one trial, where a single one has none that means anything (see `linearised`).
    """
    value = float(statistic(drawn.whole)[0])
    trials = drawn.whole.shape[1]
    if trials < 2:
        why = "a single trial cannot tell what differs between runs from what differs between arms"
    if trials < 2 or math.isnan(value):
        return Estimate(value, None, None, math.nan, trials, why or "nothing was measured")
    if math.isinf(value):
        return Estimate(value, value, value, math.nan, trials, "more requests failed than the quantile leaves out")
    of_trials = (of_one or statistic)(drawn.trials)
    of_blocks = statistic(drawn.blocks) if drawn.same_plan else np.empty(0)
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            of_trials, of_blocks = np.log(of_trials), np.log(of_blocks)
    alone, resampled = of_trials[np.isfinite(of_trials)], of_blocks[np.isfinite(of_blocks)]
    if len(alone) < 2:
        return Estimate(value, None, None, math.nan, trials, why or "fewer than two trials have a value of their own")
    error, dof = _combined(alone, float(np.var(resampled)) if len(resampled) else 0.0, drawn)
    half = students_t(dof, confidence) * error
    low, high = (value * math.exp(-half), value * math.exp(half)) if log else (value - half, value + half)
    if (of_trials == np.inf).any() or np.count_nonzero(of_blocks == np.inf) > len(of_blocks) * (1 - confidence) / 2:
        high = math.inf  # failures are so many that the quantile is one of them in some trials
    if why:
        return Estimate(value, None, None, error * math.sqrt(trials), trials, why, (low, high))
    return Estimate(value, low, high, error * math.sqrt(trials), trials)


def linearised(part: Statistic, whole: Statistic, drawn: Levels) -> Statistic:
    """What single trials say of part / whole, where a trial's own `whole` may come near 0 (see `estimate`).

    A ratio of two differences has no variance when its denominator can cross 0. So trial t is taken about the ratio s
    of all trials: s + (part(t) − s · whole(t)) / whole (Cochran 1977, section 6.3).
    """
    of_part, of_whole = float(part(drawn.whole)[0]), float(whole(drawn.whole)[0])

    def of_one(counts: Counts) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.divide(of_part, of_whole)
            found: Floats = ratio + (part(counts) - ratio * whole(counts)) / of_whole
        return found

    return of_one


def _combined(alone: Floats, within: float, drawn: Levels) -> tuple[float, float]:
    """Standard error and degrees of freedom, from the values of single trials and the variance of drawn blocks."""
    blocks = drawn.blocks.shape[2]
    between = max(float(np.var(alone, ddof=1)) / len(alone), FLOOR * within, 1e-18)
    dof = float(len(alone) - 1)
    if not drawn.same_plan:
        return math.sqrt(between), dof
    within *= blocks / (blocks - 1)  # the bootstrap divides by the number of blocks, not by one less
    both = between + within
    return math.sqrt(both), both**2 / (between**2 / dof + within**2 / (blocks - 1))


def students_t(dof: float, confidence: float) -> float:
    """Half the width of a two-sided interval in standard errors."""
    from scipy import special

    return float(special.stdtrit(dof, 0.5 + confidence / 2))


def memory(found: Sample) -> float:
    """How many requests in a row are worth one independent request: τ of the module's docstring, at least 1."""
    n = len(found.values)
    sizes = np.bincount(found.trial)
    longest = int(sizes.max(initial=0))
    if longest < 2:
        return 1.0
    ranks = np.zeros((len(sizes), longest))
    for trial, size in enumerate(sizes):
        mine = found.trial == trial
        values, turns = found.values[mine], found.turn[mine]
        low, high = np.searchsorted(values, values, "left"), np.searchsorted(values, values, "right")
        ranks[trial, turns] = (low + high) / 2 - size / 2  # ties share the middle one
    power = np.abs(np.fft.rfft(ranks, 2 * longest, axis=1)) ** 2
    covariance = np.fft.irfft(power.sum(axis=0))[:longest]
    if covariance[0] < 1e-9 * n:  # all values alike
        return 1.0
    summed = 2 * np.cumsum(covariance / covariance[0]) - 1
    wide = np.arange(longest) >= WINDOW * np.maximum(summed, 1.0)
    return max(1.0, float(summed[wide.argmax() if wide.any() else np.abs(summed).argmax()]))


def effective(found: Sample) -> float:
    """How many independent requests a sample is worth, all trials together: n / τ."""
    return len(found.values) / memory(found)


def number_of_blocks(requests: int, remembered: float) -> int:
    """Into how many blocks of due time a run is cut.

    Args:
        requests: in a run.
        remembered: `memory` of them.
    """
    return int(np.clip(requests / (MEMORIES * remembered), FEWEST_BLOCKS, MOST_BLOCKS))


def too_few(found: Sample, q: float, name: str = "", *, same_plan: bool = False) -> str:
    """Why a sample is too small for an interval of its q-quantile; empty when it is not."""
    trials = len(np.unique(found.trial)) or 1
    worth = effective(found) / trials
    needed = _needed(same_plan)
    if worth * (1 - q) >= needed:
        return ""
    arm = f"{name}: " if name else ""
    repeats = ", all of one plan," if same_plan else ","
    instead = f" ({ENOUGH_BEYOND:.0f} where each trial has arrivals of its own: --poisson)" if same_plan else ""
    return (
        f"{arm}runs too short: {len(found.values) // trials:,} requests each{repeats} alike enough to be worth "
        f"{worth:,.0f}, leave {worth * (1 - q):.1f} beyond P{q * 100:g}; {needed:.0f} are needed{instead}"
    )


def times_longer(found: Sample, q: float, *, same_plan: bool = False) -> float:
    """How many times as long the runs must be for an interval, requests as alike as they are; 1: long enough."""
    trials = len(np.unique(found.trial)) or 1
    return max(1.0, _needed(same_plan) / max(effective(found) / trials * (1 - q), 1e-9))


def _needed(same_plan: bool) -> float:
    return ENOUGH_OF_ONE_PLAN if same_plan else ENOUGH_BEYOND


def trials_to_settle(found: Estimate, limit: float, *, log: bool = True, confidence: float = CONFIDENCE) -> int | None:
    """How many trials would set the interval clear of a limit if the value stayed as it is; None beyond 1,000."""
    if math.isnan(found.se) or not math.isfinite(found.value) or (log and (found.value <= 0 or limit <= 0)):
        return None
    distance = abs(math.log(found.value / limit)) if log else abs(found.value - limit)
    for trials in range(2, 1001):
        if students_t(trials - 1, confidence) * found.se / math.sqrt(trials) <= distance:
            return trials
    return None
