"""What workers say while they run: counters in one mapped file, written in place, read by the live view. No messages.

Each worker writes its own block, so nothing is locked: a few words about itself (WORKER_FIELDS), then one row per
tenant in the layout of `replay.snapshot`, which the viewer sums.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replay.snapshot import ROW, field, place

WORKER_FIELDS = ("beat_ns", "backlog", "late_max_ns", "lag_max_ns", "retries", "connections", "dropped")

_HEAD = len(WORKER_FIELDS)
_SENT, _DONE, _HELD, _TOKENS = field("sent"), field("done"), field("held"), field("output_tokens")
_OUTCOME = {"ok": field("ok"), "client_abort": field("aborted")}
_FAILED = field("failed")
_NOT_FAILED = frozenset({"cut", "unsent"})
_NS_PER_MS = 1e6


class WorkerState(NamedTuple):
    """A worker's words about itself; times in ns, `beat_ns` on the monotonic clock."""

    beat_ns: int
    backlog: int
    late_max_ns: int
    lag_max_ns: int
    retries: int
    connections: int
    dropped: int


class Counters:
    """The mapped file; `create` it once, attach in every process.

    Args:
        path: the file.
        workers: how many workers write.
        tenants: names in the plan's order.
    """

    def __init__(self, path: Path, workers: int, tenants: Sequence[str]) -> None:
        self.tenants = tuple(tenants)
        self.workers = workers
        self._size = _HEAD + len(self.tenants) * ROW
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, workers: int, tenants: Sequence[str]) -> Counters:
        """Make the file, all zero."""
        path.write_bytes(bytes(8 * workers * (_HEAD + len(tenants) * ROW)))
        return cls(path, workers, tenants)

    def block(self, worker: int) -> WorkerCounters:
        """A worker's own part, to write."""
        return WorkerCounters(self._words[worker * self._size : (worker + 1) * self._size])

    def rows(self) -> npt.NDArray[np.int64]:
        """A copy of all tenants' rows, shape (workers, tenants, ROW)."""
        words = np.frombuffer(self._map, dtype=np.int64).reshape(self.workers, self._size)
        return words[:, _HEAD:].reshape(self.workers, len(self.tenants), ROW).copy()

    def state(self, worker: int) -> WorkerState:
        """A worker about itself."""
        return WorkerState(*self._words[worker * self._size : worker * self._size + _HEAD].tolist())

    def close(self) -> None:
        """Let go of the map."""
        self._words.release()
        self._map.close()


class WorkerCounters:
    """One worker's block. Each method is a few additions: they run while requests are in flight."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def sent(self, tenant: int, late_ns: int | None) -> None:
        """A request's first attempt began, so late after its release; None in a closed loop."""
        words, base = self._words, _HEAD + tenant * ROW
        words[base + _SENT] += 1
        if late_ns is not None:
            words[base + place("late", late_ns / _NS_PER_MS)] += 1
            words[2] = max(words[2], late_ns)

    def ended(self, tenant: int) -> None:
        """A request is over, not yet measured."""
        self._words[_HEAD + tenant * ROW + _DONE] += 1

    def measured(self, tenant: int, outcome: str, output_tokens: int, times_ms: Mapping[str, float]) -> None:
        """A request's outcome is known; times by `replay.snapshot.TIMES`."""
        words, base = self._words, _HEAD + tenant * ROW
        if outcome not in _NOT_FAILED:
            words[base + _OUTCOME.get(outcome, _FAILED)] += 1
        words[base + _TOKENS] += output_tokens
        for name, value_ms in times_ms.items():
            words[base + place(name, value_ms)] += 1

    def held(self, tenant: int, count: int) -> None:
        """How many requests of a tenant wait for its cap now."""
        self._words[_HEAD + tenant * ROW + _HELD] = count

    def beat(self, now_ns: int, *, backlog: int, lag_ns: int, connections: int, dropped: int) -> None:
        """Sign of life with the worker's own state."""
        words = self._words
        words[0], words[1] = now_ns, backlog
        words[3] = max(words[3], lag_ns)
        words[5], words[6] = connections, dropped

    def retried(self) -> None:
        """A further attempt will be made."""
        self._words[4] += 1
