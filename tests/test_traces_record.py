"""The record: its columns and types as settled, its metadata, and the page that tells of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from traces.record import COLUMNS, NAMES, REQUEST_SCHEMA, SCHEMA, Metadata, metadata_of, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "record.md"


def test_every_column_stands_once_in_the_page_with_its_type():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == [
        *[c.name for c in COLUMNS if not c.outcome],
        *[c.name for c in COLUMNS if c.outcome],
    ]
    for name, type_, meaning in rows:
        column = next(c for c in COLUMNS if c.name == name)
        assert meaning.strip() == column.meaning
        plain = {"string (dictionary)": pa.dictionary(pa.int32(), pa.string())}.get(type_.strip())
        assert str(plain or column.type).replace("list<element: ", "list<item: ") == str(column.type) or "list" in type_


@pytest.mark.parametrize(
    ("names", "type_"),
    [
        (
            [
                "arrival_ns",
                "think_ns",
                "headers_ns",
                "end_ns",
                "due_ns",
                "sent_ns",
                "released_ns",
                "connect_ns",
                "request_bytes",
            ],
            pa.int64(),
        ),
        (
            ["turn", "priority", "max_tokens", "n", "tools", "input_tokens", "output_tokens", "attempts", "worker"],
            pa.int32(),
        ),
        (["status"], pa.int16()),
        (["stream", "warmup"], pa.bool_()),
        (["block_hashes", "chunk_ns"], pa.list_(pa.int64())),
        (["chunk_tokens"], pa.list_(pa.int32())),
        (["request_id", "session_id", "error"], pa.string()),
        (
            ["tenant", "model", "endpoint", "outcome", "finish_reason", "tokens_source", "priority_raw", "arm"],
            pa.dictionary(pa.int32(), pa.string()),
        ),
    ],
)
def test_types_are_the_settled_ones(names, type_):
    for name in names:
        assert SCHEMA.field(name).type == type_, name


def test_a_request_has_no_outcome_columns():
    assert set(NAMES) - set(REQUEST_SCHEMA.names) == {column.name for column in COLUMNS if column.outcome}


def test_no_column_could_hold_text_of_a_prompt():
    texts = {column.name for column in COLUMNS if column.type == pa.string()}
    assert texts == {"request_id", "session_id", "error"}


def test_a_table_comes_in_record_order_whatever_order_was_given():
    made = table({"output_tokens": [1], "arrival_ns": np.array([5]), "tenant": ["risk"]}, Metadata())
    assert made.schema.names == ["tenant", "arrival_ns", "output_tokens"]
    assert made.schema.field("tenant").type == SCHEMA.field("tenant").type


def test_words_come_as_lists_or_as_numpy_text():
    for words in (["risk", "summary"], np.array(["risk", "summary"])):
        assert table({"arrival_ns": [1, 2], "tenant": words}, Metadata()).column("tenant").to_pylist() == [
            "risk",
            "summary",
        ]


def test_an_unknown_column_is_refused():
    with pytest.raises(KeyError, match="prompt"):
        table({"arrival_ns": [1], "prompt": ["x"]}, Metadata())


def test_metadata_survives_a_round_trip_and_grows_a_history():
    metadata = Metadata(epoch="unix", block_unit="characters", source="capture").done("speed 2x").done("window 0:60")
    made = table({"arrival_ns": [1]}, metadata)
    assert metadata_of(made) == metadata
    assert metadata.history == ("speed 2x", "window 0:60")


def test_another_version_is_refused():
    with pytest.raises(ValueError, match="version 9"):
        Metadata.decode({b"convoy.version": b"9"})


def test_metadata_that_is_absent_takes_its_defaults():
    assert Metadata.decode(None) == Metadata(epoch="relative", block_unit="tokens", source="", history=())
