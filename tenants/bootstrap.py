"""How sure a number is that was measured in several trials: a bootstrap in two levels.

Requests of one run are no independent draws: neighbours share a queue, and all share the state of the machine that day.
So two things are resampled, never single requests:

    trials   whole runs, each with all its arms. What this varies by, S, holds both what differs between runs and
             what happened by chance within them
    blocks   stretches of due time, the same ones in every arm of a trial, longer than requests stay alike. What this
             varies by, W, is chance within the runs alone

Drawing one within the other, as the textbook two-level bootstrap does, counts W twice, and with few trials it misses
a factor T / (T − 1) of S (Davison and Hinkley 1997, section 3.8). So the levels are drawn apart and put together:

    trials of different arrivals     variance = S · T / (T − 1)           dof = T − 1
    trials that repeat one plan      variance = S · T / (T − 1) + W       dof by Satterthwaite 1946: S cannot know what
                                     (blocks drawn alike in all trials)   other arrivals would have done, W can
    interval                         value ± t(dof) · √variance           ratios in logarithms

Whole trials as the unit is the method of independent replications (Law 2015, section 9.5.2): it holds whatever makes
runs differ. Its price is an honest one: with three trials t is 4.30, with five 2.78, with ten 2.26.

No interval is given for fewer than two trials, or where the tail beyond the quantile holds too few requests that are
worth an independent one (`effective`); the caller says inconclusive. Coverage measured: docs/isolation.md.
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

DRAWS = 600
CONFIDENCE = 0.95
FLOOR = 0.02  # S never counts as less than this part of W: trials that agree by chance prove nothing
ENOUGH_BEYOND = 8.0  # requests beyond the quantile, each worth an independent one, that an interval needs
_AT_ONCE = 4_000_000  # weights in memory


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
    """The q-quantile (inverted_cdf) of a sample, pooled over trials, as a statistic of resampled counts."""

    def of(counts: Counts) -> Floats:
        result = np.full(len(counts), np.nan)
        if len(found.values) == 0:
            return result
        rows = max(1, _AT_ONCE // len(found.values))
        for start in range(0, len(counts), rows):
            weight = counts[start : start + rows, found.trial, found.block]
            below = np.cumsum(weight, axis=1, dtype=np.float64)
            total = below[:, -1:]
            at = (below >= q * total - 1e-9).argmax(axis=1)
            result[start : start + rows] = np.where(total[:, 0] > 0, found.values[at], np.nan)
        return result

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
    trials: Counts
    blocks: Counts
    same_plan: bool


def levels(trials: int, blocks: int, *, same_plan: bool, seed: int = 0, draws: int = DRAWS) -> Levels:
    """Draw both levels.

    Args:
        trials: how many.
        blocks: of due time in each.
        same_plan: every trial repeated the same arrivals, so a block is drawn in all trials or in none.
        seed: of the draws.
        draws: how many of each.
    """
    rng = np.random.default_rng(seed)
    by_trial = rng.multinomial(trials, np.full(trials, 1 / trials), size=draws)
    shape = (draws,) if same_plan else (draws, trials)
    by_block = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=shape)
    if same_plan:
        by_block = np.broadcast_to(by_block[:, None, :], (draws, trials, blocks))
    return Levels(
        whole=np.ones((1, trials, blocks), dtype=np.float32),
        trials=np.repeat(by_trial[:, :, None], blocks, axis=2).astype(np.float32),
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
    if why or math.isnan(value):
        return Estimate(value, None, None, math.nan, trials, why or "nothing was measured")
    of_trials, of_blocks = statistic(drawn.trials), statistic(drawn.blocks)
    if math.isinf(value):
        return Estimate(value, value, value, math.nan, trials, "more requests failed than the quantile leaves out")
    usable = [values[np.isfinite(values) & ((values > 0) | (not log))] for values in (of_trials, of_blocks)]
    between, within = (float(np.var(np.log(v) if log else v)) if len(v) > 1 else 0.0 for v in usable)
    error, dof = _combined(between * trials / (trials - 1), within, drawn)
    half = _t(dof, confidence) * error
    low, high = (value * math.exp(-half), value * math.exp(half)) if log else (value - half, value + half)
    tail = (1 - confidence) / 2
    if np.isinf(of_trials).mean() > tail or np.isinf(of_blocks).mean() > tail:
        high = math.inf  # failures are so many that the quantile is one of them in some draws
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


def effective(found: Sample, q: float) -> float:
    """How many independent requests a sample is worth for its q-quantile.

    n / d with the design effect d = variance of the blocks' numbers of values beyond the quantile / what a binomial
    would have, at least 1 (Kish 1965; Wilson and Pritsker's batching argument for correlated output).
    """
    n = len(found.values)
    if n == 0:
        return 0.0
    beyond = np.arange(n) >= math.ceil(n * q)
    cell = found.trial * (int(found.block.max()) + 1) + found.block
    sums = np.bincount(cell, weights=beyond, minlength=int(cell.max()) + 1)
    sizes = np.bincount(cell, minlength=int(cell.max()) + 1)
    share = beyond.mean()
    spread = float(((sums - share * sizes) ** 2).sum())
    expected = n * share * (1 - share)
    return n / max(1.0, spread / expected) if expected > 0 else float(n)


def too_few(found: Sample, q: float, name: str = "") -> str:
    """Why a sample is too small for an interval of its q-quantile; empty when it is not."""
    worth = effective(found, q)
    if worth * (1 - q) >= ENOUGH_BEYOND:
        return ""
    return (
        f"{name + ': ' if name else ''}{len(found.values):,} requests, alike enough to be worth {worth:,.0f}, "
        f"leave {worth * (1 - q):.1f} beyond P{q * 100:g}; {ENOUGH_BEYOND:.0f} are needed"
    )


def trials_to_settle(found: Estimate, limit: float, *, log: bool = True, confidence: float = CONFIDENCE) -> int | None:
    """How many trials would set the interval clear of a limit if the value stayed as it is; None beyond 1,000."""
    if math.isnan(found.se) or not math.isfinite(found.value) or (log and (found.value <= 0 or limit <= 0)):
        return None
    distance = abs(math.log(found.value / limit)) if log else abs(found.value - limit)
    for trials in range(2, 1001):
        if _t(trials - 1, confidence) * found.se / math.sqrt(trials) <= distance:
            return trials
    return None
