"""What a simulated engine writes down: token times of every request, and the ground truth of its waits.

Times are whole picoseconds on the virtual clock. Columns are flat arrays indexed by request; the token times are not
stored but follow from the steps: a request gets a token in every step from its first on, save where it was preempted
or starved
(`breaks`). A run of decode steps is one entry: step d + m ends at

    t_d + (m + 1)·first + growth·m·(m + 1)/2

since every row's context grows by one token a step and step time is linear in context.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

CAUSES = ("seqs", "budget", "kv", "preempted", "chunk")
PS_PER_NS = 1000
UNFINISHED, LENGTH, STOP, ABORT, REFUSED = range(5)

Ints = npt.NDArray[np.int64]


class Timeline:
    """When each step of one replica ended."""

    def __init__(self) -> None:
        self.step = array("q")
        self.start_ps = array("q")
        self.first_ps = array("q")
        self.growth_ps = array("q")

    def add(self, step: int, start_ps: int, first_ps: int, growth_ps: int) -> None:
        """Steps from `step` on start at `start_ps`; the first takes `first_ps`, each next one `growth_ps` more."""
        self.step.append(step)
        self.start_ps.append(start_ps)
        self.first_ps.append(first_ps)
        self.growth_ps.append(growth_ps)

    def ends_ns(self, steps: Ints) -> Ints:
        """End of each of these steps, in ns."""
        starts = np.frombuffer(self.step, dtype=np.int64)
        entry = np.searchsorted(starts, steps, side="right") - 1
        m = steps - starts[entry]
        first = np.frombuffer(self.first_ps, dtype=np.int64)[entry]
        growth = np.frombuffer(self.growth_ps, dtype=np.int64)[entry]
        ends = np.frombuffer(self.start_ps, dtype=np.int64)[entry] + (m + 1) * first + growth * (m * (m + 1) // 2)
        return rounded_ns(ends)


class Ledger:
    """Columns for `size` requests of `tenants` tenants; -1 where a time did not come.

    Cumulative counters run along: `waited[cause]` and `served[tenant]` are what all steps so far add up to, so that
    what a request lived through is the difference of two readings.
    """

    def __init__(self, size: int, tenants: int) -> None:
        self.first_ps = _filled(size, -1)
        self.last_ps = _filled(size, -1)
        self.end_ps = _filled(size, -1)
        self.admitted_ps = _filled(size, -1)
        self.first_step = _filled(size, -1)
        self.output_tokens = _filled(size, 0)
        self.cached_tokens = _filled(size, 0)
        self.preemptions = _filled(size, 0)
        self.finish = _filled(size, UNFINISHED)
        self.replica = _filled(size, -1)
        self.wait_step_ps = _filled(size, 0)
        self.wait_ps = [_filled(size, 0) for _ in CAUSES]
        self.resume_wait_ps = _filled(size, 0)
        self.own_ps = _filled(size, 0)
        self.served_ps = [_filled(size, 0) for _ in range(tenants)]
        self.breaks: dict[int, list[tuple[int, int]]] = {}

    def chunk_ns(self, timeline: Timeline, request: int) -> Ints:
        """End of the step of every token of a request, in ns."""
        count = self.output_tokens[request]
        steps = np.arange(count, dtype=np.int64) + self.first_step[request]
        for token, step in self.breaks.get(request, ()):
            steps[token:] = np.arange(count - token, dtype=np.int64) + step
        return timeline.ends_ns(steps) if count else steps


def rounded_ns(values_ps: Ints) -> Ints:
    """Picoseconds to the nearest nanosecond; negative values (did not come) stay -1."""
    return np.where(values_ps < 0, -1, (values_ps + PS_PER_NS // 2) // PS_PER_NS)


def column(values: array[int]) -> Ints:
    """A column as a numpy array (no copy)."""
    return np.frombuffer(values, dtype=np.int64)


def _filled(size: int, value: int) -> array[int]:
    return array("q", [value]) * size
