"""The columns that statistics need, as compact numpy arrays in order of arrival.

A trace of five million requests is a few hundred megabytes as a table and a fraction of that here: words become codes,
session ids hashes, prefix blocks one flat array. Batches are read one after the other and let go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from traces.burstiness import Int64s
from traces.record import Metadata, metadata_of
from traces.seeded import UInt64s, text_keys

NUMBERS = (
    "priority",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "tools",
    "think_ns",
    "first_token_ns",
    "last_token_ns",
    "end_ns",
)
WORDS = ("tenant", "model", "endpoint", "outcome", "finish_reason", "tokens_source")
NEEDED = ("arrival_ns", *NUMBERS, *WORDS, "stream", "session_id", "block_size", "block_hashes")

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """A column of few different words: a code a row (−1 is null) and the words by code."""

    codes: npt.NDArray[np.int32]
    names: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """Rows of each word, most frequent first; nulls left out."""
        found = np.bincount(self.codes + np.int32(1), minlength=len(self.names) + 1)[1:]
        order = np.argsort(-found, kind="stable")
        return {self.names[code]: int(found[code]) for code in order.tolist() if found[code]}


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """A trace by arrival. Absent columns are absent from the dicts; −1 stands for null in numbers."""

    metadata: Metadata
    arrival_ns: Int64s
    numbers: dict[str, npt.NDArray[Any]]
    words: dict[str, Words]
    stream: npt.NDArray[np.int8] | None = None  # 1, 0, −1 for null
    session: UInt64s | None = None  # 0 for null
    block_size: int = 0
    block_count: Int64s | None = None  # prefix blocks of a row
    blocks: Int64s | None = None  # the hashes of all rows, one after the other
    out_of_order_steps: int = 0  # in the order of the file

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def take(self, chosen: Mask | npt.NDArray[np.intp]) -> Columns:
        """Some rows, or all in another order."""
        blocks = self.blocks
        if blocks is not None and self.block_count is not None:
            index = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
            count = self.block_count[index]
            start = (np.cumsum(self.block_count) - self.block_count)[index]
            inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            blocks = blocks[np.repeat(start, count) + inside]
        return dataclasses.replace(
            self,
            arrival_ns=self.arrival_ns[chosen],
            numbers={name: values[chosen] for name, values in self.numbers.items()},
            words={name: Words(words.codes[chosen], words.names) for name, words in self.words.items()},
            stream=None if self.stream is None else self.stream[chosen],
            session=None if self.session is None else self.session[chosen],
            block_count=None if self.block_count is None else self.block_count[chosen],
            blocks=blocks,
        )


def gather(batches: Iterable[pa.RecordBatch]) -> Columns | None:
    """Read batches into columns, sorted by arrival; None when there is no row."""
    grown: dict[str, Growing] = {}
    vocabularies: dict[str, dict[str, int]] = {}
    metadata, block_size = Metadata(), 0
    for batch in batches:
        metadata = metadata_of(batch)
        for name, values in _arrays(batch, vocabularies).items():
            grown.setdefault(name, Growing(values.dtype)).append(values)
        if not block_size and "block_size" in batch.schema.names:
            block_size = pc.max(batch.column("block_size")).as_py() or 0
    if "arrival_ns" not in grown or not grown["arrival_ns"].rows:
        return None
    joined = {name: column.values() for name, column in grown.items()}
    arrival = joined.pop("arrival_ns")
    columns = Columns(
        metadata=metadata,
        arrival_ns=arrival,
        numbers={name: joined[name] for name in NUMBERS if name in joined and joined[name].max() >= 0},
        words={name: Words(joined[name], tuple(vocabularies[name])) for name in WORDS if vocabularies.get(name)},
        stream=_unless_null(joined.get("stream"), -1),
        session=_unless_null(joined.get("session_id"), 0),
        block_size=block_size,
        block_count=_unless_null(joined.get("block_count"), 0),
        blocks=joined.get("blocks"),
        out_of_order_steps=int(np.count_nonzero(arrival[1:] < arrival[:-1])),
    )
    return columns.take(np.argsort(arrival, kind="stable")) if columns.out_of_order_steps else columns


class Growing:
    """An array that takes more values: doubled when full, so that no batch stays behind."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.rows = 0
        self.room = np.empty(1 << 16, dtype=dtype)

    def append(self, values: npt.NDArray[Any]) -> None:
        """Add values at the end."""
        need = self.rows + len(values)
        if need > len(self.room):
            room = np.empty(max(need, 2 * len(self.room)), dtype=self.room.dtype)  # touched, so paid for, when filled
            room[: self.rows] = self.room[: self.rows]
            self.room = room
        self.room[self.rows : need] = values
        self.rows = need

    def values(self) -> npt.NDArray[Any]:
        """All that was added."""
        return self.room[: self.rows]


def _unless_null(values: npt.NDArray[Any] | None, null: int) -> npt.NDArray[Any] | None:
    return None if values is None or not (values != null).any() else values


def _arrays(batch: pa.RecordBatch, vocabularies: dict[str, dict[str, int]]) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if name == "arrival_ns":
            found[name] = column.to_numpy()
        elif name in NUMBERS:
            found[name] = pc.fill_null(column, -1).to_numpy(zero_copy_only=False)
        elif name in WORDS:
            found[name] = coded(column, vocabularies.setdefault(name, {}))
        elif name == "stream":
            found[name] = pc.fill_null(column.cast(pa.int8()), -1).to_numpy(zero_copy_only=False)
        elif name == "session_id":
            found[name] = text_keys(column, np.zeros(len(column), dtype=np.uint64))
        elif name == "block_hashes":
            found["block_count"] = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
            found["blocks"] = column.flatten().to_numpy(zero_copy_only=False)
    return found


def coded(column: pa.Array, vocabulary: dict[str, int]) -> npt.NDArray[np.int32]:
    """Codes of words by a vocabulary that grows with them; −1 is null."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    for word in column.dictionary.to_pylist():
        vocabulary.setdefault(word, len(vocabulary))
    if not vocabulary:
        return np.full(len(column), -1, dtype=np.int32)
    lookup = np.array([vocabulary[word] for word in column.dictionary.to_pylist()] + [-1], dtype=np.int32)
    return np.asarray(lookup[pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False)])
