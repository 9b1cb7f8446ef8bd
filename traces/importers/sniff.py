"""Which format a file has, told by its content; never by its name. A folder is told by the files in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from traces.importers import tables
from traces.importers.source import Source

# whole strings one after the other, the last one perhaps cut off; group 2 marks a key
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*+)(?:"(\s*+:)?|\\?\Z)', re.DOTALL)
_GOR = re.compile(rb"[123] [0-9A-Za-z]+ \d+( \d+)?\r?\n")
_FLOW = re.compile(rb"\d{1,9}:")
_WINDOW = re.compile(rb"\d+(\.\d+)?,[\d.eE+-]+,[\d.eE+-]*,(Gamma|Weibull)?,[\d.eE+-]*,[\d.eE+-]*\r?$")

Test = Callable[[set[str]], bool]


def format_of(source: Source) -> str | None:
    """The name of the format, or None when it is not known. Raises BadFile when there is nothing to read."""
    if source.path.is_dir():
        return _folder(source)
    head = source.head()
    if head.startswith(b"PAR1"):
        return "parquet"
    if _GOR.match(head):
        return "gor"
    start = head.lstrip()
    if start[:1] in {b"{", b"["}:
        return _json(start)
    if _FLOW.match(head):
        return "mitm"
    line = next((line for line in head.splitlines() if line.strip()), b"")
    if _WINDOW.match(line):
        return "servegen"
    return _first(_TABLES, {name.lower() for name in tables.header(line)})


def _folder(source: Source) -> str | None:
    names = [path.name for path in source.path.iterdir()]
    if any(re.fullmatch(r"chunk-\d+-trace\.csv(\.gz)?", name) for name in names):
        return "servegen"
    inside = next((path for path in sorted(source.path.iterdir()) if path.name.endswith((".json", ".json.gz"))), None)
    return "kvcache" if inside is not None and format_of(Source(inside)) == "kvcache" else None


def _json(head: bytes) -> str | None:
    line = head.split(b"\n", 1)[0]
    try:
        record = json.loads(line)
        keys = set(record) if isinstance(record, dict) else set()
        keys |= set(record["log"]) if "log" in keys and isinstance(record["log"], dict) else set()
    except ValueError:
        keys = set()
    keys = keys or {text.decode("utf-8", "replace") for text, colon in _STRING.findall(head) if colon}
    return _first(_RECORDS, {key.lower() for key in keys})


def _first(table: tuple[tuple[str, Test], ...], names: set[str]) -> str | None:
    return next((name for name, test in table if test(names)), None)


def _has(*wanted: str) -> Test:
    return lambda names: names.issuperset(wanted)


def _any(*tests: Test) -> Test:
    return lambda names: any(test(names) for test in tests)


_TABLES: tuple[tuple[str, Test], ...] = (
    ("azure", _has("timestamp", "contexttokens", "generatedtokens")),
    ("burstgpt", _has("timestamp", "model", "request tokens", "response tokens")),
    ("vidur", _has("num_prefill_tokens", "num_decode_tokens")),
    ("csv", _has("arrival_ns")),
)
_RECORDS: tuple[tuple[str, Test], ...] = (
    ("bailian", _has("chat_id", "parent_chat_id", "timestamp")),
    ("mooncake", _has("timestamp", "input_length", "output_length")),
    ("llmservingsim", _has("input_toks", "output_toks")),
    ("vllmbench", _has("input_lens", "output_lens")),
    ("kvcache", _has("id", "block_size", "requests")),
    ("otel", _has("resourcespans")),
    ("har", _has("log", "entries")),
    ("har", _has("log", "version", "creator")),
    ("aiperf", _has("metadata", "metrics")),
    ("arex", _has("categorytype", "creationtime")),
    ("litellm", _has("starttime", "prompt_tokens", "completion_tokens")),
    ("sharegpt", _any(_has("conversations"), _has("messages", "role", "content"))),
    ("accesslog", _any(_has("start_time", "response_code"), _has("request_time", "status"))),
    ("servegen", _has("0", "output_tokens")),
    ("jsonl", _has("arrival_ns")),
)
