"""Maps of time: the arithmetic behind speed, burst and re-timing.

Every re-timing here is a non-decreasing function M of trace time (ns from the first arrival), so order and count are
kept by construction. An arrival moves to M(t); a think time is a stretch of trace time and becomes
M(t) − M(t − think).

**Speed** s: M(t) = t / s, rounded half to even in exact integer arithmetic.

**Burst** f at window w: cut time into windows of w. A window that holds k arrivals gets the length

    w · ((k + ½) / scale)^(−γ)

so γ > 0 makes full windows shorter and empty ones longer, and γ < 0 evens them out. Lengths are normalised over blocks
of 60 windows, whose ends stay where they are: the rate over 60 windows, the trace's slow shape, is untouched. When
that cannot meet the dispersion, the whole trace is one block. γ is solved so that IDC(w) is f times what it was.

**Re-timing** at the same rate: the k-th arrival moves to the k-th of n new times with the same first and last.
Poisson: n − 2 sorted uniform times between them, which is the Poisson process given its count. Gamma: n − 1 gaps with
the asked coefficient of variation, scaled to the span.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from traces.burstiness import Floats, Int64s, idc, windows

BLOCK_WINDOWS = 60
_BLOCK = 1 << 20
TOLERANCE = 0.05  # a dispersion counts as met within this
_AIM = 0.002  # the solver stops here
_STEPS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # exponents tried outwards; steeper ones only grind windows to nothing
_STEPS_DOWN = (-0.125, -0.25, -0.5, -0.75, -1.0)  # at −1 every window has the same rate


def blocks(rows: int) -> Iterator[slice]:
    """Slices of a million rows, for arithmetic whose steps would each need an array of all rows."""
    for start in range(0, rows, _BLOCK):
        yield slice(start, start + _BLOCK)


class Warp(NamedTuple):
    """A piecewise linear map of trace time through knots; outside of them time is shifted, not stretched."""

    x_ns: Floats  # strictly ascending
    y_ns: Floats  # non-decreasing

    def at(self, offset_ns: Int64s) -> Int64s:
        """M of every offset."""
        moved = np.empty(len(offset_ns), dtype=np.int64)
        for block in blocks(len(offset_ns)):
            offset = offset_ns[block]
            inside = np.interp(offset, self.x_ns, self.y_ns)
            inside += np.minimum(offset - self.x_ns[0], 0) + np.maximum(offset - self.x_ns[-1], 0)
            moved[block] = np.rint(inside)
        return moved


class Solved(NamedTuple):
    """A burst warp and what it reaches."""

    warp: Warp
    exponent: float
    block_windows: int | None  # None: one block
    before: float
    achieved: float


def scaled(values_ns: Int64s, speed: float) -> Int64s:
    """Values / speed, rounded half to even, exact for every int64 (a speed is a ratio of small integers)."""
    ratio = Fraction(speed).limit_denominator(1_000_000)
    found = np.empty(len(values_ns), dtype=np.int64)
    for block in blocks(len(values_ns)):
        whole, rest = np.divmod(values_ns[block], ratio.numerator)
        floor, left = np.divmod(rest * ratio.denominator, ratio.numerator)
        floor += whole * ratio.denominator
        twice = 2 * left
        floor += (twice > ratio.numerator) | ((twice == ratio.numerator) & (floor % 2 == 1))
        found[block] = floor
    return found


def solve_burst(offset_ns: Int64s, width_ns: int, factor: float) -> Solved:
    """The warp that multiplies the index of dispersion at `width_ns` by `factor`, or comes nearest to it.

    Args:
        offset_ns: ascending, from 0.
        width_ns: the window at which the dispersion is asked; at most half the span.
        factor: above 0.

    Returns:
        The first solution that meets the tolerance, local blocks before the whole trace; else the nearest one.
    """
    before = idc(offset_ns, width_ns)
    target = before * factor
    best: Solved | None = None
    for block in (BLOCK_WINDOWS, None):
        for exponent in _candidates(_Windowed(offset_ns, width_ns, block), target, rising=factor > 1):
            warp = exponent.windowed.warp(exponent.value)
            found = Solved(warp, exponent.value, block, before, exponent.achieved)
            if best is None or abs(found.achieved - target) < abs(best.achieved - target):
                best = found
        assert best is not None
        if abs(best.achieved - target) <= TOLERANCE * target:
            break
    assert best is not None
    return best


class _Windowed:
    """The windows of a trace, ready to be stretched by any exponent."""

    def __init__(self, offset_ns: Int64s, width_ns: int, block_windows: int | None) -> None:
        self.offset_ns, self.width_ns = offset_ns, width_ns
        counted = windows(offset_ns, width_ns)
        self.index, self.total = counted.place, counted.total
        self.end_ns = float(offset_ns[-1])
        self.size = min(block_windows or self.total, self.total)
        self.block = self.index // self.size
        self.first = np.flatnonzero(np.concatenate([[True], self.block[1:] != self.block[:-1]]))
        self.of_block = np.repeat(np.arange(len(self.first)), np.diff(np.concatenate([self.first, [len(self.index)]])))
        start = self.index * float(width_ns)
        self.start = start
        self.length = np.minimum(start + width_ns, self.end_ns) - start
        self.density = counted.arrivals * float(width_ns) / np.maximum(self.length, width_ns / 4) + 0.5
        self.block_start = self.block[self.first] * float(self.size * width_ns)
        self.block_end = np.minimum(self.block_start + self.size * width_ns, self.end_ns)
        x = np.concatenate([start, start + self.length, self.block_start, self.block_end])
        self.x, self.knots = np.unique(x, return_index=True)

    def warp(self, exponent: float) -> Warp:
        """The map for one exponent."""
        scale = np.exp(-exponent * np.log(self.density / 0.5))  # relative to an empty window, whose factor is 1
        grown = self.length * scale
        old_before = self._before(self.length)
        empty_before = self.start - self.block_start[self.of_block] - old_before
        y = self._before(grown) + empty_before
        empty = (self.block_end - self.block_start) - np.add.reduceat(self.length, self.first)
        total = np.add.reduceat(grown, self.first) + empty
        norm = np.divide(self.block_end - self.block_start, total, out=np.ones_like(total), where=total > 0)
        start = y * norm[self.of_block] + self.block_start[self.of_block]
        end = start + grown * norm[self.of_block]
        y = np.concatenate([start, end, self.block_start, self.block_end])[self.knots]
        y[-1] = self.end_ns
        return Warp(self.x, np.minimum(np.maximum.accumulate(y), self.end_ns))

    def _before(self, length: Floats) -> Floats:
        """Sum of the lengths of the earlier windows in the same block."""
        running = np.cumsum(length) - length
        return running - running[self.first][self.of_block]


class _Exponent(NamedTuple):
    windowed: _Windowed
    value: float
    achieved: float


def _candidates(windowed: _Windowed, target: float, *, rising: bool) -> Iterator[_Exponent]:
    """Exponents to consider: outwards until the target is passed, then bisection between the last two."""

    def trial(exponent: float) -> _Exponent:
        moved = windowed.warp(exponent).at(windowed.offset_ns)
        return _Exponent(windowed, exponent, idc(moved, windowed.width_ns))

    def passed(found: _Exponent) -> bool:
        return found.achieved >= target if rising else found.achieved <= target

    near = trial(0.0)
    for step in _STEPS if rising else _STEPS_DOWN:
        far = trial(step)
        yield far
        if passed(far):
            break
        near = far
    else:
        return
    for _ in range(40):
        if min(abs(far.achieved - target), abs(near.achieved - target)) < _AIM * target:
            break
        middle = trial((near.value + far.value) / 2)
        yield middle
        near, far = (near, middle) if passed(middle) else (middle, far)


def poisson_times(count: int, span_ns: int, generator: np.random.Generator) -> Int64s:
    """`count` ascending times from 0 to span, both ends taken: a Poisson process given its count and ends."""
    inner = np.sort(generator.integers(0, span_ns, size=max(count - 2, 0), endpoint=True))
    return np.concatenate([[0], inner, [span_ns]])[:count].astype(np.int64)


def gamma_times(count: int, span_ns: int, cv: float, generator: np.random.Generator) -> Int64s:
    """`count` ascending times from 0 to span whose gaps are gamma with coefficient of variation `cv` (0: constant)."""
    gaps = generator.gamma(1 / (cv * cv), size=count - 1) if cv > 0 else np.ones(max(count - 1, 0))
    total = gaps.sum()
    ends = np.cumsum(gaps) / total if total > 0 else np.linspace(0, 1, count)[1:]
    return np.concatenate([[0], np.rint(ends * span_ns)]).astype(np.int64)


def through(old_ns: Int64s, new_ns: Int64s) -> Warp:
    """The map that takes each old time to the new time of the same rank (the first of those that tie)."""
    x, first = np.unique(old_ns, return_index=True)
    return Warp(x.astype(np.float64), new_ns[first].astype(np.float64))
