"""Which format a file has, told by its first bytes; never by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from traces.importers import tables
from traces.importers.source import Source

_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')


def format_of(source: Source) -> str | None:
    """The name of the format, or None when it is not known. Raises BadFile when there is nothing to read."""
    head = source.head()
    if head[:1] in {b"{", b"["} or head.lstrip()[:1] in {b"{", b"["}:
        return _json(head.lstrip())
    line = next((line for line in head.splitlines() if line.strip()), b"")
    names = {name.lower() for name in tables.header(line)}
    return _first(_TABLES, names)


def _json(head: bytes) -> str | None:
    line = head.split(b"\n", 1)[0]
    try:
        record = json.loads(line)
        keys = set(record) if isinstance(record, dict) else set()
    except ValueError:
        keys = set()
    keys = keys or {key.decode("utf-8", "replace") for key in _KEY.findall(head)}
    return _first(_RECORDS, {key.lower() for key in keys})


def _first(table: tuple[tuple[str, Callable[[set[str]], bool]], ...], names: set[str]) -> str | None:
    return next((name for name, test in table if test(names)), None)


def _has(*wanted: str) -> Callable[[set[str]], bool]:
    return lambda names: names.issuperset(wanted)


_TABLES = (
    ("azure", _has("timestamp", "contexttokens", "generatedtokens")),
    ("burstgpt", _has("timestamp", "model", "request tokens", "response tokens")),
    ("csv", _has("arrival_ns")),
)
_RECORDS = (("mooncake", _has("timestamp", "input_length", "output_length")),)
