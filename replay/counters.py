"""What workers say while they run: counters in one mapped file, written in place, read by the live view. No messages.

Each worker writes its own block; nothing is locked. A reader may see a request counted as sent a moment before it is
counted as in flight, never a wrong total at the end. Times go into histograms of eighth octaves (each bucket 9 % wide),
good enough for a live view; the report works on the rows themselves.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TENANT_FIELDS = ("sent", "ended", "ok", "failed", "aborted", "cut", "dropped", "output_tokens")
WORKER_FIELDS = ("beat_ns", "held", "backlog", "late_max_ns", "lag_max_ns", "retries", "connections")

OCTAVE = 8
BUCKETS = 34 * OCTAVE  # 1 µs to 4.8 hours
_FLOOR_NS = 1000

_TENANT_WORDS = len(TENANT_FIELDS) + BUCKETS  # then TTFT from due
_WORKER_WORDS = len(WORKER_FIELDS) + BUCKETS  # then lateness


def bucket(value_ns: int) -> int:
    """The histogram bucket of a time: ⌊8 log2(t / 1 µs)⌋, by the position of its highest bits."""
    scaled = value_ns // _FLOOR_NS
    if scaled < 1:
        return 0
    octave = scaled.bit_length() - 1
    within = ((scaled << 3) >> octave) & 7  # linear in the octave: at most 6 % from the exact eighth
    return min(octave * OCTAVE + within, BUCKETS - 1)


def bucket_top_ns(index: int) -> int:
    """The upper end of a bucket."""
    octave, within = divmod(index, OCTAVE)
    return ((OCTAVE + within + 1) * _FLOOR_NS << octave) // OCTAVE


class TenantSnapshot(NamedTuple):
    """One tenant's sums over all workers, and its TTFT histogram (counts by `bucket`)."""

    sent: int
    ended: int
    ok: int
    failed: int
    aborted: int
    cut: int
    dropped: int
    output_tokens: int
    ttft: npt.NDArray[np.int64]

    @property
    def in_flight(self) -> int:
        """Sent and not ended."""
        return self.sent - self.ended


class Snapshot(NamedTuple):
    """All counters at one moment."""

    tenants: dict[str, TenantSnapshot]
    held: int
    backlog: int
    late_max_ns: int
    lag_max_ns: int
    retries: int
    connections: int
    lateness: npt.NDArray[np.int64]


def histogram_quantile_ns(counts: npt.NDArray[np.int64], q: float) -> float | None:
    """The upper end of the bucket that holds the quantile; None without samples."""
    total = int(counts.sum())
    if not total:
        return None
    place = int(np.searchsorted(np.cumsum(counts), max(1, int(np.ceil(q * total)))))
    return float(bucket_top_ns(place))


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
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, workers: int, tenants: Sequence[str]) -> Counters:
        """Make the file, all zero."""
        words = workers * (_WORKER_WORDS + len(tenants) * _TENANT_WORDS)
        path.write_bytes(bytes(8 * words))
        return cls(path, workers, tenants)

    def block(self, worker: int) -> WorkerCounters:
        """A worker's own part, to write."""
        size = _WORKER_WORDS + len(self.tenants) * _TENANT_WORDS
        return WorkerCounters(self._words[worker * size : (worker + 1) * size])

    def snapshot(self) -> Snapshot:
        """The sums of all workers now."""
        words = np.frombuffer(self._map, dtype=np.int64).copy().reshape(self.workers, -1)
        own = words[:, :_WORKER_WORDS]
        each = words[:, _WORKER_WORDS:].reshape(self.workers, len(self.tenants), _TENANT_WORDS).sum(axis=0)
        fields = len(TENANT_FIELDS)
        tenants = {
            name: TenantSnapshot._make([*each[index, :fields].tolist(), each[index, fields:]])
            for index, name in enumerate(self.tenants)
        }
        _, held, backlog, late, lag, retries, connections = (own[:, column] for column in range(len(WORKER_FIELDS)))
        return Snapshot(
            tenants,
            int(held.sum()),
            int(backlog.sum()),
            int(late.max()),
            int(lag.max()),
            int(retries.sum()),
            int(connections.sum()),
            own[:, len(WORKER_FIELDS) :].sum(axis=0),
        )

    def beat_ns(self, worker: int) -> int:
        """A worker's last sign of life."""
        size = _WORKER_WORDS + len(self.tenants) * _TENANT_WORDS
        return int(self._words[worker * size])

    def close(self) -> None:
        """Let go of the map."""
        self._words.release()
        self._map.close()
        self._file.close()


class WorkerCounters:
    """One worker's block. Each method is a few additions: they run while requests are in flight."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def sent(self, tenant: int, late_ns: int | None) -> None:
        """A request's first attempt began, so late after its release."""
        words = self._words
        words[_WORKER_WORDS + tenant * _TENANT_WORDS] += 1
        if late_ns is not None:
            words[len(WORKER_FIELDS) + bucket(late_ns)] += 1
            words[3] = max(words[3], late_ns)

    def ended(self, tenant: int) -> None:
        """A request is over, not yet measured."""
        self._words[_WORKER_WORDS + tenant * _TENANT_WORDS + 1] += 1

    def measured(self, tenant: int, outcome: str, output_tokens: int, ttft_ns: int | None) -> None:
        """A request's outcome is known."""
        words, base = self._words, _WORKER_WORDS + tenant * _TENANT_WORDS
        words[base + _FIELD_OF.get(outcome, 3)] += 1
        words[base + 7] += output_tokens
        if ttft_ns is not None:
            words[base + len(TENANT_FIELDS) + bucket(ttft_ns)] += 1

    def dropped(self, tenant: int) -> None:
        """A request was too late to be sent."""
        self._words[_WORKER_WORDS + tenant * _TENANT_WORDS + 6] += 1

    def beat(self, now_ns: int, held: int, backlog: int, lag_ns: int, connections: int) -> None:
        """Sign of life with the worker's own state."""
        words = self._words
        words[0] = now_ns
        words[1], words[2] = held, backlog
        words[4] = max(words[4], lag_ns)
        words[6] = connections

    def retried(self) -> None:
        """A further attempt will be made."""
        self._words[5] += 1

    def release(self) -> None:
        """Let go of the map."""
        self._words.release()


_FIELD_OF = {"ok": 2, "client_abort": 4, "cut": 5}
