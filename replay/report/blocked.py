"""Who kept whom waiting, for the page: the blocking matrix as a table with weight, and the worst single requests."""

from __future__ import annotations

import html
from typing import Any

from tenants import experiment, figures
from tenants.experiment import BlockingOfArm
from tenants.folder import Run


def section(run: Run) -> tuple[str, str] | None:
    """Caption and tables of a run; None where its rows cannot tell (no chunk times, one request, too many)."""
    told = run.document.get("blocking") or {}
    readable = not told and (run.path / "outcomes.parquet").is_file()
    if "error" in told or not (told or (readable and experiment.can_tell(run.everything()))):
        return None
    found = experiment.of_run(run)
    if sum(found.waited_s.values()) <= 0:
        return None
    caption = (
        "Seconds that requests waited for their first token while the engine served others: victims in rows, culprits "
        f"in columns. Estimated from {html.escape(found.source)} (docs/blocking.md); {found.unexplained_share:.0%} of "
        "the waiting is unexplained."
    )
    return caption, _matrix(found) + _worst(found) + stalls(found)


def _matrix(found: BlockingOfArm) -> str:
    rest = {
        "unexplained": {name: s - sum(found.blocking_s[name].values()) for name, s in found.waited_s.items()},
        "in all": found.waited_s,
        "by less urgent<br>tenants": found.inversion_s,
    }
    return _table("s waited", found.blocking_s, found.requests, rest)


def stalls(found: BlockingOfArm) -> str:
    """Whose streams stood still while whose prompt was read; empty where none did."""
    if not found.worst_stalls:
        return ""
    worst = "".join(
        f"<li>{_named(one)} held up {one['victims']:,} streams, {figures.digits(one['stalled_s'])} s in all</li>"
        for one in found.worst_stalls
    )
    said = "Seconds that answering streams stood still while the engine read the prompt of another request."
    table = _table("s stalled", found.stalls_s, found.requests, {})
    return f'<p class="caption">{said}</p>{table}<ul>{worst}</ul>'


def _table(
    what: str, matrix_s: dict[str, dict[str, float]], requests: dict[str, int], rest: dict[str, dict[str, float]]
) -> str:
    """Victims in rows, culprits in columns, then the sums of `rest`, by heading and victim."""
    most = max((seconds for row in matrix_s.values() for seconds in row.values()), default=0.0) or 1.0
    head = "".join(f"<th>by {html.escape(name)}</th>" for name in matrix_s)
    rows = []
    for victim, row in matrix_s.items():
        n = requests[victim]
        cells = "".join(_cell(row[culprit], n, row[culprit] / most) for culprit in matrix_s)
        sums = "".join(_cell(max(0.0, part[victim]), n, 0.0) for part in rest.values())
        rows.append(f'<tr><td class="word"><b>{html.escape(victim)}</b></td>{cells}{sums}<td>{n:,}</td></tr>')
    more = "".join(f"<th>{heading}</th>" for heading in (*rest, "requests"))
    table = f'<table><tr><th class="word">{what}</th>{head}{more}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll">{table}</div>'


def _cell(seconds: float, n: int, weight: float) -> str:
    """Seconds over the mean of a request, on a ground as dark as its part of the largest cell."""
    each = f"<small>{figures.digits(seconds / n * 1000)} ms each</small>" if n else ""
    ground = f' style="background:color-mix(in srgb, var(--fail) {weight * 45:.0f}%, transparent)"' if weight else ""
    return f"<td{ground}>{figures.digits(seconds)}{each}</td>"


def _worst(found: BlockingOfArm) -> str:
    items = (
        f"<li>{_named(one)} kept {one['victims']:,} waiting, {figures.digits(one['blocked_s'])} s in all</li>"
        for one in found.worst
    )
    return f"<ul>{''.join(items)}</ul>"


def _named(row: dict[str, Any]) -> str:
    """A request with its tenant and lengths."""
    lengths = [f"{row[key]:,} tokens {word}" for key, word in _LENGTHS if row.get(key) is not None]
    about = ", ".join([str(row.get("tenant") or "default"), *lengths])
    name = row.get("request_id") or f"sent at {figures.digits(row['sent_s'])} s"
    return f"{html.escape(str(name))} ({html.escape(about)})"


_LENGTHS = (("input_tokens", "in"), ("output_tokens", "out"))
