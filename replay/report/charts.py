"""Charts of a run as plotly figures: plain dictionaries of data and layout, drawn by the page's script.

Rules of all charts: axes begin at 0, the limit is a dashed line, times of one run share one axis, a caption says on
how many requests it stands. Lines, shares and percentiles use every row. Points are thinned when there are many: the
slowest of each stretch of time always stay, of the others an even draw, and the caption says how many are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.report.panels import BAD, Panels
from tenants import figures, quantiles, sla
from tenants.measures import FAILED, Floats, Rows
from tenants.stretches import broken, nice_s, stretches
from tenants.summary import Summary

COLOURS = ("#3a87dd", "#e07b39", "#2ca58d", "#b5579f", "#9a8a2c", "#7a6ff0", "#c4567a", "#5b8c5a")
FEW_POINTS = 500
MOST_POINTS = 4_000  # drawn of one tenant
CURVE_POINTS = 400  # of a distribution
GRID = 300  # points of a line over time


class Chart(NamedTuple):
    """One figure with what it shows in a sentence."""

    key: str
    title: str
    caption: str
    height: int
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def timeline(rows: Rows, summary: Summary) -> Chart:
    """Everything over one time axis: a panel of waits for each tenant, then arrivals, requests in flight, lateness."""
    panels = Panels()
    names = [name for name in summary.tenants if name in rows.names]
    shown, total = 0, 0
    for name in names:
        drawn, all_of_it = _waits(panels, rows, summary, name, COLOURS[names.index(name) % len(COLOURS)])
        shown, total = shown + drawn, total + all_of_it
    _arrivals(panels, rows, names)
    _in_flight(panels, rows, names)
    if not rows.closed_loop:
        _lateness(panels, rows, summary)
    some = f"{shown:,} of {total:,} requests are drawn, the slowest of each stretch among them" if shown < total else ""
    every = f"all {total:,} requests are drawn"
    caption = (
        f"Each point is a request at its {'sending' if rows.closed_loop else 'due'} time; {some or every}. × failed. "
        "The line is P95 of stretches of at least 20 requests; one whose P95 breaks the tightest limit is shaded. "
        "A click on a tenant in the legend hides it in every panel."
    )
    return Chart("timeline", "Over time", caption, 185 * panels.count + 90, panels.data, panels.layout())


def distributions(runs: Sequence[tuple[str, Rows, Summary]], metric: str, heading: str) -> Chart:
    """The share of requests answered within a time: one panel a tenant, one curve a run.

    A single run shows TTFT from due and, dotted, from sent.
    """
    names = list(dict.fromkeys(name for _, _, summary in runs for name in summary.tenants))
    panels = Panels(shared_x=False)
    alone = len(runs) == 1
    for name in names:
        limits = sorted({rule.limit for _, _, summary in runs for rule in _limits(summary, name, metric)})
        curves = [(run, _of(rows, name, metric), "solid") for run, rows, _ in runs]
        if alone and metric == "ttft" and not runs[0][1].closed_loop:
            curves.append(("from sent", _of(runs[0][1], name, "ttft_sent"), "dot"))
        curves = [(label, values, dash) for label, values, dash in curves if len(values)]
        tails = [quantiles.quantile(values[np.isfinite(values)], 0.99) for _, values, _ in curves]
        end = max([*(tail for tail in tails if not math.isnan(tail)), *limits, 1e-6]) * 1.12
        beyond = sum(
            int(np.count_nonzero(np.isfinite(values) & (values > end))) for _, values, _ in curves[: len(runs)]
        )
        counts = " / ".join(f"{len(values):,}" for _, values, _ in curves[: len(runs)])
        more = f"; {beyond:,} beyond the right edge" if beyond else ""
        panels.add(f"{name}: share within so many ms, n {counts}{more}", {"range": [0, 1.03], "tickformat": ".0%"})
        for number, (label, values, dash) in enumerate(curves):
            x, y = _ecdf(values)
            colour = COLOURS[(names.index(name) if alone else number) % len(COLOURS)]
            panels.line(x, y, label, colour, dash=dash, group="" if alone else label, legend=not alone, step=True)
        for limit in limits:
            panels.vertical(limit, f"limit {figures.digits(limit)} ms")
        panels.x_range(end)
    dotted = " Dotted: from sent instead of due." if alone and metric == "ttft" else ""
    caption = f"A curve that ends below 100 % has failed requests; a dashed vertical line is a promised limit.{dotted}"
    height = 215 * max(1, panels.count) + (30 if alone else 90)
    return Chart(f"ecdf-{metric}", heading, caption, height, panels.data, panels.layout())


def arms(runs: Sequence[tuple[str, Summary]]) -> Chart:
    """P95 TTFT of each tenant in each run with its interval, and its output tokens/s below."""
    panels = Panels(shared_x=False)
    names = list(dict.fromkeys(name for _, summary in runs for name in summary.tenants))
    for name in names:
        panels.add(f"{name}: TTFT P95 in ms", {"rangemode": "tozero"})
        blocks = [summary.tenants[name].ttft_ms if name in summary.tenants else None for _, summary in runs]
        values = [None if block is None else block.p95 for block in blocks]
        ends = [None if block is None else block.ci.get("p95") for block in blocks]
        whiskers = [
            (0.0, 0.0) if v is None or e is None else (v - e[0], e[1] - v) for v, e in zip(values, ends, strict=True)
        ]
        labels = [
            f"{run}<br><b>{figures.percentile(block, 'p95')}</b>" for (run, _), block in zip(runs, blocks, strict=True)
        ]
        error = {"type": "data", "array": [up for _, up in whiskers], "arrayminus": [down for down, _ in whiskers]}
        panels.bars(labels, values, COLOURS[names.index(name) % len(COLOURS)], error_y={**error, "thickness": 1.5})
        for limit in sorted({rule.limit for _, summary in runs for rule in _limits(summary, name, "ttft")}):
            panels.horizontal(limit, f"limit {figures.digits(limit)} ms")
    for name in names:
        panels.add(f"{name}: output tokens/s", {"rangemode": "tozero"})
        rates = [summary.tenants[name].output_tokens_per_s if name in summary.tenants else None for _, summary in runs]
        labels = [f"{run}<br><b>{figures.digits(rate)}</b>" for (run, _), rate in zip(runs, rates, strict=True)]
        panels.bars(labels, rates, COLOURS[names.index(name) % len(COLOURS)], opacity=0.6)
    caption = "Whiskers are 95 % intervals of P95 where the sample is large enough; no bar: P95 is infinite or n/a."
    columns = min(2, len(names))
    height = 245 * math.ceil(panels.count / columns) + 30
    return Chart("arms", "Runs side by side", caption, height, panels.data, panels.layout(columns))


def _of(rows: Rows, name: str, metric: str) -> Floats:
    """A tenant's values, one a request that has one; +∞ = failed."""
    if name not in rows.names:
        return np.empty(0)
    values: Floats = getattr(rows, f"{metric}_ms")[rows.tenant == rows.names.index(name)]
    return values[~np.isnan(values)]


def _waits(panels: Panels, rows: Rows, summary: Summary, name: str, colour: str) -> tuple[int, int]:
    """TTFT of a tenant's requests over time; returns how many points are drawn and how many there are."""
    mine = rows.tenant == rows.names.index(name)
    whole = not bool(np.isfinite(rows.ttft_ms[mine]).any()) and bool(np.isfinite(rows.e2e_ms[mine]).any())
    values, metric, word = (rows.e2e_ms, "e2e", "E2E") if whole else (rows.ttft_ms, "ttft", "TTFT")
    at_s = rows.due_ms / 1000
    seen = mine & np.isfinite(values) & np.isfinite(at_s)
    panels.add(f"{name}: {word} in ms", {"rangemode": "tozero"})
    kept = thinned(at_s[seen], values[seen], MOST_POINTS)
    panels.data.append(
        panels.trace(
            type="scattergl" if len(kept) > 20_000 else "scatter",
            mode="markers",
            x=_rounded(at_s[seen][kept]),
            y=_rounded(values[seen][kept]),
            name=name,
            legendgroup=name,
            marker={
                "color": colour,
                **({"size": 6, "opacity": 0.6} if len(kept) < FEW_POINTS else {"size": 4, "opacity": 0.3}),
            },
            hovertemplate=f"{name} %{{y:,.0f}} ms at %{{x:.1f}} s<extra></extra>",
        )
    )
    panels.named(name)
    rules = _limits(summary, name, metric)
    _p95_line(panels, at_s[mine], values[mine], name, colour=colour, limits=rules)
    limits = [rule.limit for rule in rules]
    top = float(np.max(values[seen], initial=0.0))
    failed = mine & np.isin(rows.outcome, FAILED) & np.isfinite(at_s)
    if failed.any():
        crosses = _evenly(np.flatnonzero(failed), MOST_POINTS // 4)
        panels.data.append(
            panels.trace(
                type="scatter",
                mode="markers",
                x=_rounded(at_s[crosses]),
                y=[max(top, *limits, 1.0) * 1.02] * len(crosses),
                name=f"{name}: {int(failed.sum()):,} failed",
                marker={"color": BAD, "symbol": "x-thin-open", "size": 7},
                hovertemplate="failed, due at %{x:.1f} s<extra></extra>",
            )
        )
    for limit in limits:
        panels.horizontal(limit, f"limit {figures.digits(limit)} ms")
    return len(kept), int(seen.sum())


def _p95_line(panels: Panels, at_s: Floats, values: Floats, name: str, *, colour: str, limits: list[sla.Rule]) -> None:
    """P95 over stretches of time, failed requests as +∞; shades those that break the tightest limit."""
    found = stretches(at_s, values, 0.95)
    if limits:
        tightest = min(limits, key=lambda rule: rule.limit)
        for start_s, end_s in broken(found, tightest.limit, strict=tightest.op == "<"):
            panels.shade(start_s, end_s)
    if any(stretch.value is not None for stretch in found):
        x = [round((stretch.start_s + stretch.end_s) / 2, 3) for stretch in found]
        y = [
            round(stretch.value, 2) if stretch.value is not None and math.isfinite(stretch.value) else None
            for stretch in found
        ]
        panels.line(x, y, f"{name} P95", colour, group=name)


def _arrivals(panels: Panels, rows: Rows, names: Sequence[str]) -> None:
    """Requests per second, planned and sent: the two lines lie on each other when the sender kept up."""
    panels.add("arrivals in requests/s: planned (dotted) and sent", {"rangemode": "tozero"})
    due, sent = rows.due_ms / 1000, rows.sent_ms / 1000
    last = float(np.nanmax(np.concatenate([due, sent]), initial=0.0)) if len(due) else 0.0
    width_s = nice_s(last / 100)
    edges = np.arange(0, last + 2 * width_s, width_s)
    for number, name in enumerate(names):
        mine = rows.tenant == rows.names.index(name)
        colour = COLOURS[number % len(COLOURS)]
        for times, dash, word in ((due, "dot", "planned"), (sent, "solid", "sent")):
            if word == "planned" and rows.closed_loop:
                continue
            counts, _ = np.histogram(times[mine & np.isfinite(times)], edges)
            panels.line(
                _rounded(edges[:-1] + width_s / 2),
                _rounded(counts / width_s),
                f"{name} {word}",
                colour,
                dash=dash,
                group=name,
            )


def _in_flight(panels: Panels, rows: Rows, names: Sequence[str]) -> None:
    """Requests sent and not ended, over time."""
    panels.add("requests in flight", {"rangemode": "tozero"})
    ends_s = rows.end_ms / 1000
    last = float(np.nanmax(ends_s, initial=0.0)) if np.isfinite(ends_s).any() else 0.0
    grid = np.linspace(0, last, GRID)
    for number, name in enumerate(names):
        mine = (rows.tenant == rows.names.index(name)) & np.isfinite(rows.sent_ms)
        sent = np.sort(rows.sent_ms[mine] / 1000)
        ends = np.sort(ends_s[mine & np.isfinite(ends_s)])
        flying = np.searchsorted(sent, grid, "right") - np.searchsorted(ends, grid, "right")
        colour = COLOURS[number % len(COLOURS)]
        panels.line(_rounded(grid), flying.tolist(), f"{name} in flight", colour, group=name, fill=True)


def _lateness(panels: Panels, rows: Rows, summary: Summary) -> None:
    """The largest lateness of each stretch of time: the sender's own fault."""
    seen = np.isfinite(rows.late_ms) & np.isfinite(rows.sent_ms)
    panels.add("lateness of sending in ms: the largest of each stretch", {"rangemode": "tozero"})
    if not seen.any():
        return
    at_s, late = rows.sent_ms[seen] / 1000, np.maximum(0.0, rows.late_ms[seen])
    width_s = nice_s(float(at_s.max()) / 100)
    bins = np.floor(at_s / width_s).astype(np.int64)
    worst = np.zeros(int(bins.max()) + 1)
    np.maximum.at(worst, bins, late)
    x = (np.arange(len(worst)) + 0.5) * width_s
    panels.data.append(
        panels.trace(
            type="bar", x=_rounded(x), y=_rounded(worst), name="lateness", marker={"color": "#8a8f98"}, showlegend=False
        )
    )
    if summary.lateness_ms.limit <= 4 * float(worst.max()):
        panels.horizontal(summary.lateness_ms.limit, f"P99 may be {figures.digits(summary.lateness_ms.limit)} ms")


def _limits(summary: Summary, name: str, metric: str) -> list[sla.Rule]:
    results = [*(summary.tenants[name].sla if name in summary.tenants else ()), *summary.sla]
    rules = [sla.parse(result.rule) for result in results]
    return [rule for rule in rules if rule.metric == metric and rule.q is not None]


def _ecdf(values: Floats) -> tuple[list[float], list[float]]:
    """The empirical distribution at its own steps, thinned to even shares; its last step is the largest value."""
    finite = np.sort(values[np.isfinite(values)])
    if len(finite) == 0:
        return [], []
    at = np.unique(np.linspace(0, len(finite) - 1, min(len(finite), CURVE_POINTS)).round().astype(np.int64))
    share = (at + 1) / len(values)
    return [0.0, *_rounded(finite[at])], [0.0, *np.round(share, 4).tolist()]


def thinned(at_s: Floats, values: Floats, most: int) -> NDArray[np.int64]:
    """Which points to draw: all when they are few, else the slowest of each stretch and an even draw of the others."""
    if len(values) <= most:
        return np.arange(len(values))
    stretches = most // 4
    span = max(1e-9, float(at_s.max() - at_s.min()))
    stretch = np.minimum(stretches - 1, ((at_s - at_s.min()) / span * stretches).astype(np.int64))
    order = np.lexsort((-values, stretch))
    slowest = order[np.r_[True, stretch[order][1:] != stretch[order][:-1]]]
    others = np.setdiff1d(np.arange(len(values)), slowest)
    return np.sort(np.concatenate([slowest, _evenly(others, most - len(slowest))]))


def _evenly(numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most so many of them, from the first to the last."""
    if len(numbers) <= most:
        return numbers
    return numbers[np.linspace(0, len(numbers) - 1, most).astype(np.int64)]


def _rounded(values: NDArray[np.floating[Any]]) -> list[float]:
    """Four significant digits are more than a screen shows; NaN becomes a gap."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.where(values == 0, 0, 3 - np.floor(np.log10(np.abs(values))))
    scale = np.power(10.0, np.clip(np.nan_to_num(digits), 0, 6))
    rounded: list[float] = np.round(np.round(values * scale) / scale, 6).tolist()
    return rounded
