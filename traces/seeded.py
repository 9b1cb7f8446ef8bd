"""Random numbers that belong to a session, not to a position.

A draw is a hash of (seed, purpose, session), so it stays the same when other rows are taken away, the file is split or
the work is spread over processes: reshaping a part of a trace is the same part of the reshaped trace.

The mixer is splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UInt64s = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FNV_PRIME = 0x100000001B3
_CHUNK_ROWS = 65_536


def mix(values: UInt64s) -> UInt64s:
    """splitmix64 of every value: neighbours come out unrelated."""
    z = values + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mix_one(value: int) -> int:
    """splitmix64 of one number."""
    return int(mix(np.array([value & _MASK], dtype=np.uint64))[0])


def uniform(keys: UInt64s, seed: int, purpose: str) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for every key; equal keys get equal numbers.

    Args:
        keys: one per row, as `session_keys` gives them.
        seed: the user's.
        purpose: what the number is for; different purposes are independent.
    """
    salt = mix_one(mix_one(seed) ^ int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "big"))
    drawn = np.empty(len(keys))
    for start in range(0, len(keys), _CHUNK_ROWS):
        mixed = mix(keys[start : start + _CHUNK_ROWS] ^ np.uint64(salt))
        drawn[start : start + _CHUNK_ROWS] = (mixed >> np.uint64(11)) * 2.0**-53
    return drawn


def session_keys(trace: pa.Table) -> UInt64s:
    """A key for every row: rows of one session share it, a row without a session has its own.

    It comes from the text of `session_id`, else of `request_id`, else from the row's position.
    """
    own = mix(np.arange(trace.num_rows, dtype=np.uint64))
    if "request_id" in trace.schema.names:
        own = text_keys(trace.column("request_id"), own)
    if "session_id" in trace.schema.names:
        own = text_keys(trace.column("session_id"), own)
    return own


def text_keys(column: pa.ChunkedArray | pa.Array, otherwise: UInt64s) -> UInt64s:
    """The hash of every string of a column, `otherwise` where it is null."""
    keys = otherwise.copy()
    row = 0
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for start in range(0, len(chunk), _CHUNK_ROWS):
            piece = chunk.slice(start, _CHUNK_ROWS)
            there = ~np.asarray(piece.is_null())
            found = keys[row : row + len(piece)]
            found[there] = _hash_strings(piece.drop_null())
            row += len(piece)
    return keys


def _hash_strings(strings: pa.StringArray) -> UInt64s:
    """Polynomial hash of each string's bytes, modulo 2**64, mixed."""
    if not len(strings):
        return np.empty(0, dtype=np.uint64)
    offsets = np.frombuffer(strings.buffers()[1], dtype=np.int32)[strings.offset :][: len(strings) + 1].astype(np.int64)
    length = np.diff(offsets)
    data = np.frombuffer(strings.buffers()[2] or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    place = np.arange(len(data), dtype=np.int64) - np.repeat(offsets[:-1] - offsets[0], length)
    powers = np.cumprod(np.full(int(length.max(initial=0)) + 1, _FNV_PRIME, dtype=np.uint64))
    terms = (data.astype(np.uint64) + np.uint64(1)) * powers[place]
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms)])
    ends = offsets - offsets[0]
    return mix(sums[ends[1:]] - sums[ends[:-1]])
