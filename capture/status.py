"""What the recorders of a folder say about themselves, and what is in it."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from capture.recorder import Counts, began, kept_bytes
from traces import spool
from traces.errors import BadFile

FRESH_S = 10.0


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(each recorder's counts with its state, totals of the folder). Raises BadFile when there is no such folder."""
    if not folder.is_dir():
        raise BadFile(f"{folder}: no such folder; name the one that `capture --out` writes to")
    spools = [path.name for path in folder.glob(f"spool-*{spool.SUFFIX}")]
    parts, rows = parts_of(folder)
    recorders = []
    for path in sorted(folder.glob("recorder-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            counts = msgspec.json.decode(path.read_bytes(), type=Counts)
            found = state(counts, spools)
            counts.rows = max(counts.rows, rows[counts.name])  # who was killed had written more than it had told
            counts.rows_per_s *= found == "running"
            recorders.append({**msgspec.to_builtins(counts), "state": found})
    kept = {
        "parts": parts,
        "rows_in_parts": rows.total(),
        "spools": len(spools),
        "left_behind": [path.name for path in spool.left_behind(folder)],
        "bytes": kept_bytes(folder),
    }
    return recorders, kept


def parts_of(folder: Path, pattern: str = "part-*.parquet") -> tuple[int, Counter[str]]:
    """How many parts a folder has, and their rows by recorder."""
    import pyarrow.parquet as pq

    parts, rows = 0, Counter[str]()
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError, ValueError):
            rows[path.stem.removeprefix("part-").rpartition("-")[0]] += pq.read_metadata(path).num_rows
            parts += 1
    return parts, rows


def state(counts: Counts, spools: Sequence[str]) -> str:
    """Whether a recorder runs, ended well, or died; `recovered` when it died and none of the folder's spools is its."""
    if counts.over:
        return "ended"
    if not _lives(counts):
        return "died" if any(name.startswith(f"spool-{counts.name}-") for name in spools) else "recovered"
    return "running" if time.time() - counts.now_s < FRESH_S else "silent"


def _lives(counts: Counts) -> bool:
    """Whether the recorder's process is there: its number may be another's by now."""
    try:
        os.kill(counts.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return counts.pid_began in {0, began(counts.pid)}


def describe(folder: Path, recorders: list[dict[str, Any]], kept: dict[str, Any]) -> list[str]:
    """Lines for people."""
    lines = [
        f"{each['name']}  {each['state']:<10}{each['rows']:>10,} rows {each['rows_per_s']:>8.1f}/s"
        f"{each['dropped']:>8,} dropped{each['in_flight']:>6,} in flight{each['passed']:>8,} passed"
        for each in recorders
    ]
    running = sum(each["state"] == "running" for each in recorders)
    lines.append(
        f"{running} running; {kept['rows_in_parts']:,} rows in {_many(kept['parts'], 'part')}, "
        f"{_many(kept['spools'], 'spool')}{' (rows on their way to a part)' if kept['spools'] else ''}, "
        f"{kept['bytes'] / 1e6:.1f} MB: {folder}"
    )
    if kept["left_behind"]:
        lines.append(f"left behind by a dead recorder: {', '.join(kept['left_behind'])}; traces recover {folder}")
    return lines


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"
