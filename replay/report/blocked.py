"""Who kept whom waiting, for the page: the blocking matrix as a table with weight, and the worst single requests."""

from __future__ import annotations

import html

import pyarrow as pa

from tenants import figures
from tenants.blocking import Blocking, blockers, blocking
from tenants.experiment import can_tell
from tenants.folder import Run
from tenants.stalls import Stalls, stalls
from tenants.steps import Floats
from traces.units import NS_PER_S

WORST = 5


def section(run: Run) -> tuple[str, str] | None:
    """Caption and table of a run; None where its rows cannot tell (no chunk times, one request, too many)."""
    if not (run.path / "outcomes.parquet").is_file():
        return None
    outcomes = run.everything()
    if not can_tell(outcomes):
        return None
    found = blocking(outcomes)
    blocked_s = float(found.blocked_ns.sum()) / NS_PER_S
    if blocked_s <= 0:
        return None
    unexplained = float(found.unexplained_ns.sum()) / NS_PER_S / blocked_s
    caption = (
        "Seconds that requests waited for their first token while the engine served others: victims in rows, culprits "
        f"in columns. Estimated from the outside (docs/blocking.md); {unexplained:.0%} of the waiting is unexplained."
    )
    return caption, _matrix(found) + _worst(outcomes, found) + _stalls(outcomes, found)


def _matrix(found: Blocking) -> str:
    rest = {
        "unexplained": found.unexplained_ns,
        "in all": found.blocked_ns,
        "by less urgent<br>tenants": found.inversion_ns,
    }
    return _table("s waited", found, rest)


def _stalls(outcomes: pa.Table, found: Blocking) -> str:
    """Whose streams stood still while whose prompt was read; empty where none did."""
    held = stalls(outcomes, found, WORST)
    if held is None or not held.worst:
        return ""
    worst = "".join(
        f"<li>{_named(outcomes, one.request)} held up {one.victims:,} streams, "
        f"{figures.digits(one.stalled_ns / NS_PER_S)} s in all</li>"
        for one in held.worst
    )
    said = "Seconds that answering streams stood still while the engine read the prompt of another request."
    return f'<p class="caption">{said}</p>{_table("s stalled", held, {})}<ul>{worst}</ul>'


def _table(what: str, found: Blocking | Stalls, rest: dict[str, Floats]) -> str:
    """Victims in rows, culprits in columns, then the sums of `rest`, ns of each request by heading."""
    matrix = found.matrix_s
    most = float(matrix.max()) or 1.0
    head = "".join(f"<th>by {html.escape(name)}</th>" for name in found.tenants)
    rows = []
    for victim, name in enumerate(found.tenants):
        mine = found.tenant == victim
        n = int(mine.sum())
        cells = "".join(_cell(float(seconds), n, float(seconds) / most) for seconds in matrix[victim])
        sums = "".join(_cell(float(part[mine].sum()) / NS_PER_S, n, 0.0) for part in rest.values())
        rows.append(f'<tr><td class="word"><b>{html.escape(name)}</b></td>{cells}{sums}<td>{n:,}</td></tr>')
    more = "".join(f"<th>{heading}</th>" for heading in (*rest, "requests"))
    table = f'<table><tr><th class="word">{what}</th>{head}{more}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll">{table}</div>'


def _cell(seconds: float, n: int, weight: float) -> str:
    """Seconds over the mean of a request, on a ground as dark as its part of the largest cell."""
    each = f"<small>{figures.digits(seconds / n * 1000)} ms each</small>" if n else ""
    ground = f' style="background:color-mix(in srgb, var(--fail) {weight * 45:.0f}%, transparent)"' if weight else ""
    return f"<td{ground}>{figures.digits(seconds)}{each}</td>"


def _worst(outcomes: pa.Table, found: Blocking) -> str:
    items = (
        f"<li>{_named(outcomes, blocker.request)} kept "
        f"{blocker.victims:,} waiting, {figures.digits(blocker.blocked_ns / NS_PER_S)} s in all</li>"
        for blocker in blockers(outcomes, found, WORST)
    )
    return f"<ul>{''.join(items)}</ul>"


def _named(outcomes: pa.Table, request: int) -> str:
    """A request with its tenant and lengths."""
    row = outcomes.slice(request, 1).to_pylist()[0]
    lengths = [f"{row[key]:,} tokens {word}" for key, word in _LENGTHS if row.get(key) is not None]
    about = ", ".join([str(row.get("tenant") or "default"), *lengths])
    name = row.get("request_id") or f"row {request + 1}"
    return f"{html.escape(str(name))} ({html.escape(about)})"


_LENGTHS = (("input_tokens", "in"), ("output_tokens", "out"))
