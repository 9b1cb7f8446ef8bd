"""`report.html`: a run, or several runs of one plan, in one file that needs no network.

It leads with the verdict, then says whether the run can be trusted, the rules with their limits, the charts,
failures by cause, the slowest requests and what was asked. There is no text of a prompt in it because there is none
in the rows.

The charting library (plotly.js, from the `plotly` package) travels inside: compressed, about 2 MB; the rest grows
by less than 1 MB for 10,000 requests because points are thinned (`replay.report.charts`). A content security policy
in the file forbids the browser to load anything.
"""

from __future__ import annotations

import base64
import functools
import gzip
import html
import importlib.resources
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.report import blocked, charts
from replay.report.charts import Chart
from tenants import failures, figures, sla
from tenants.cautions import LOUD
from tenants.folder import Run
from tenants.measures import Rows
from tenants.sentence import title
from tenants.summary import SHOWN, Percentiles, Summary, TenantSummary
from tenants.terminal import WORDS, comparison_columns, comparison_sentence, trust
from traces.record import OUTCOMES

SLOWEST = 15
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Write the report of one run, or the comparison of several; the file is complete or absent."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.touch(0o600)  # names of tenants and requests: for the owner alone, as the outcomes are
        temporary.write_text(render(runs), "utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    drawn = _charts(runs)
    body = _one(runs[0], drawn) if len(runs) == 1 else _several(runs, drawn)
    heading = runs[0].name if len(runs) == 1 else " · ".join(run.name for run in runs)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{_safe(heading)} · convoy</title>",
            f"<style>{_resource('page.css')}</style></head><body><main>",
            *body,
            (
                "<footer>Every time counts from the moment a request was due; failed requests are infinite. "
                "What the numbers mean: docs/numbers.md.</footer></main>"
            ),
            f'<script id="figures" type="application/json">{_json([_figure(chart) for chart in drawn])}</script>',
            f'<script id="library" type="text/plain">{_library()}</script>',
            f"<script>{_resource('page.js')}</script>",
            "</body></html>",
            "",
        ]
    )


def _charts(runs: Sequence[Run]) -> list[Chart]:
    of_all = [(run.name, run.rows, run.summary) for run in runs]
    spread = [
        charts.distributions(of_all, metric, heading)
        for metric, heading in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E"))
        if any(np.isfinite(getattr(run.rows, f"{metric}_ms")).any() for run in runs)
    ]
    if len(runs) == 1:
        return [charts.timeline(runs[0].rows, runs[0].summary), *spread]
    return [charts.arms([(run.name, run.summary) for run in runs]), *spread]


def _one(run: Run, drawn: Sequence[Chart]) -> list[str]:
    summary = run.summary
    return [
        _header(summary.verdict, WORDS[summary.verdict], summary.sentence, _asked(run)),
        *_trust(summary),
        *_section("Rules", "Each limit with what was measured; a dashed mark is the limit.", _rules(summary)),
        *_section(
            "Tenants",
            f"Times in ms from {_zero(summary)}, with 95 % intervals where the sample is large enough.",
            _times(summary),
        ),
        _counts(summary),
        *_blocking(run),
        *[part for chart in drawn for part in _chart(chart)],
        *_failures(run),
        *_section("Slowest first tokens", f"The {SLOWEST} longest waits, failed requests aside.", _slowest(run)),
        *_configuration([run]),
    ]


def _several(runs: Sequence[Run], drawn: Sequence[Chart]) -> list[str]:
    worst = sla.worst(run.summary.verdict for run in runs)
    lines = "".join(
        f'<tr class="{run.summary.verdict}"><td class="word">{_safe(run.name)}</td>'
        f'<td class="verdict">{WORDS[run.summary.verdict]}</td><td class="word">{_safe(run.summary.sentence)}</td></tr>'
        for run in runs
    )
    columns = comparison_columns([(run.name, run.summary) for run in runs])
    return [
        _header(worst, "", comparison_sentence([(run.name, run.summary) for run in runs]), f"{len(runs)} runs"),
        f'<div class="scroll"><table>{lines}</table></div>',
        *_section(
            "Side by side",
            "One line a tenant and run; times in ms from due unless said.",
            _table(
                [column.heading for column in columns],
                list(zip(*(column.cells for column in columns), strict=True)),
                words={number for number, column in enumerate(columns) if not column.right},
            ),
        ),
        *[part for chart in drawn for part in _chart(chart)],
        *_configuration(runs),
    ]


def _header(verdict: str, word: str, sentence: str, about: str) -> str:
    mark = f'<span class="word">{word}</span>' if word else ""
    return f'<header class="{verdict}"><h1>{mark}{_safe(sentence)}</h1><p>{_safe(about)}</p></header>'


def _asked(run: Run) -> str:
    """What ran, in a line: exit code apart, only what the run folder says."""
    document, summary = run.document, run.summary
    dialect = document.get("dialect")
    known = [str(document[key]) for key in ("target", "model") if document.get(key)]
    known += [f"priority as {dialect['name']}"] if isinstance(dialect, dict) and dialect.get("name") else []
    known += [str(document["when"])] if document.get("when") else []
    return " · ".join(
        [*known, f"{summary.planned:,} requests in {figures.clock(summary.window_s)}", f"plan {summary.digest[:12]}"]
    )


def _zero(summary: Summary) -> str:
    """What times count from."""
    return "sent, as nothing is due in a closed loop" if summary.closed_loop else "due"


def _trust(summary: Summary) -> list[str]:
    items = [trust(summary)]
    if summary.warmup:
        items.append(f"{summary.warmup:,} requests of the warm-up are left out")
    items += summary.warnings
    reasons = [] if summary.valid else summary.reasons
    red = ' style="color:var(--fail);font-weight:600"'
    listed = "".join(f"<li{red if item.startswith(LOUD) else ''}>{_safe(item)}</li>" for item in [*reasons, *items])
    return _section("Can this run be trusted?", "", f"<ul>{listed}</ul>")


def _rules(summary: Summary) -> str:
    order = {sla.FAIL: 0, sla.INVALID: 0, sla.INCONCLUSIVE: 1, sla.PASS: 2}
    rows = []
    for result in sorted(summary.rules, key=lambda result: order[result.verdict]):
        ci = "" if result.ci is None else " to ".join(figures.amount(end, result.unit) for end in result.ci)
        settle = f"n {result.samples_to_settle:,} would settle it" if result.samples_to_settle else ""
        settle = f"broken {figures.spans(result.broken_s)}" if result.broken_s else settle
        verdict = "pass" if result.verdict == sla.PASS else WORDS[result.verdict]
        rows.append(
            f'<tr class="{result.verdict}"><td class="word">{_safe(result.tenant)} {_safe(title(result.metric))}</td>'
            f"<td>{figures.limit(result)}</td><td>{figures.measured(result)}<small>{ci}</small></td>"
            f"<td>{_bar(result)}</td><td>{'' if result.violations is None else f'{result.violations:,}'}</td>"
            f'<td>{result.n:,}</td><td class="verdict">{verdict}<small>{settle}</small></td></tr>'
        )
    head = _head(["rule", "limit", "measured", "against the limit", "over", "n", "verdict"], words={0, 3, 6})
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _bar(result: sla.RuleResult) -> str:
    """Value and limit on one scale from 0; full when infinite."""
    if result.value is None and not result.infinite:
        return ""
    value = result.limit * 2 if result.value is None else result.value
    top = max(value, result.limit) * 1.1 or 1.0
    return (
        f'<div class="bar"><i style="width:{value / top:.1%}"></i><b style="left:{result.limit / top:.1%}"></b></div>'
    )


def _times(summary: Summary) -> str:
    blocks: list[tuple[str, Any]] = [
        ("TTFT", lambda part: part.ttft_ms),
        ("TTFT, successes", lambda part: part.ttft_ok_ms if part.ttft_ok_ms != part.ttft_ms else None),
        ("TTFT from sent", lambda part: part.ttft_sent_ms),
        ("first visible token", lambda part: part.ttft_visible_ms if part.ttft_visible_ms != part.ttft_ms else None),
        ("TPOT", lambda part: part.tpot_ms),
        ("ITL, each gap", lambda part: part.itl_ms),
        ("inter-chunk latency, each gap", lambda part: part.inter_chunk_ms),
        ("E2E", lambda part: part.e2e_ms),
        ("held by a cap", lambda part: part.held_ms),
        ("connecting", lambda part: part.connect_ms),
    ]
    rows = []
    for name, part in summary.tenants.items():
        for number, (word, block_of) in enumerate((w, b) for w, b in blocks if _worth_showing(b(part), w)):
            block = block_of(part)
            cells = "".join(_percentile_cell(block, key) for key in SHOWN)
            who = f"<b>{_safe(name)}</b>" if number == 0 else ""
            rows.append(f'<tr><td class="word">{who}</td><td class="word">{word}</td><td>{block.n:,}</td>{cells}</tr>')
    head = _head(["tenant", "time in ms", "n", "P50", "P95", "P99"], words={0, 1})
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _worth_showing(block: Percentiles | None, word: str) -> bool:
    if block is None or block.n == 0:
        return False
    return word != "held by a cap" or bool(block.p99 or block.p95 or block.p50)


def _percentile_cell(block: Percentiles, key: str) -> str:
    return f"<td>{figures.percentile(block, key)}<small>{figures.interval(block, key)}</small></td>"


def _counts(summary: Summary) -> str:
    def cells(name: str, part: TenantSummary) -> list[str]:
        return [
            name,
            "" if part.priority is None else str(part.priority),
            *(
                f"{n:,}"
                for n in (part.planned, part.ok, part.aborted, part.cut, sum(part.failed.values()), part.unsent)
            ),
            figures.digits(part.output_tokens_per_s),
            figures.digits(part.requests_per_s),
            figures.digits(part.goodput_rps),
        ]

    head = [
        "tenant",
        "rank",
        "planned",
        "ok",
        "aborted",
        "cut",
        "failed",
        "unsent",
        "tokens/s",
        "requests/s",
        "goodput/s",
    ]
    return _table(head, [cells(name, part) for name, part in summary.tenants.items()], words={0})


def _blocking(run: Run) -> list[str]:
    found = blocked.section(run)
    return [] if found is None else _section("Who kept whom waiting", *found)


def _failures(run: Run) -> list[str]:
    found = failures.causes(run.outcomes)
    if not found:
        return _section("Failures", "None.", "")
    listed = "".join(f"<li>{_safe(cause.text)}</li>" for cause in found)
    return _section("Failures", "By cause, with the first request of each.", f"<ul>{listed}</ul>")


def _slowest(run: Run) -> str:
    rows = run.rows
    finite = np.flatnonzero(np.isfinite(rows.ttft_ms))
    if len(finite) == 0:
        return '<p class="caption">No first token was seen.</p>'
    worst = finite[np.argsort(-rows.ttft_ms[finite], kind="stable")[:SLOWEST]]
    taken = run.outcomes.take(rows.at[worst])
    ids = taken.column("request_id").to_pylist() if "request_id" in taken.schema.names else [""] * len(worst)
    tokens = taken.column("input_tokens").to_pylist() if "input_tokens" in taken.schema.names else [None] * len(worst)
    head = [
        "request",
        "tenant",
        "due s",
        "TTFT ms",
        "held ms",
        "late ms",
        "connect ms",
        "TPOT ms",
        "E2E ms",
        "tokens in",
        "out",
        "outcome",
    ]
    cells = [_slow_cells(rows, int(row), ids[i], tokens[i]) for i, row in enumerate(worst)]
    return _table(head, cells, words={0, 1, 11})


def _slow_cells(rows: Rows, row: int, request_id: str | None, input_tokens: int | None) -> list[str]:
    times = (
        rows.due_ms[row] / 1000,
        rows.ttft_ms[row],
        rows.held_ms[row],
        rows.late_ms[row],
        rows.connect_ms[row],
        rows.tpot_ms[row],
        rows.e2e_ms[row],
    )
    output = rows.output_tokens[row]
    return [
        request_id or "",
        rows.names[rows.tenant[row]],
        *(figures.digits(float(value)) for value in times),
        "" if input_tokens is None else f"{input_tokens:,}",
        "" if np.isnan(output) else f"{int(output):,}",
        OUTCOMES[rows.outcome[row]],
    ]


def _configuration(runs: Sequence[Run]) -> list[str]:
    parts = [
        f"<details><summary>{_safe(run.name)}</summary>"
        f"<pre>{_safe(json.dumps(run.document, indent=2, ensure_ascii=False, default=str))}</pre></details>"
        for run in runs
    ]
    return _section(
        "What was asked", "The run's own record: options, versions, host, notes of every stage.", "".join(parts)
    )


def _chart(chart: Chart) -> list[str]:
    place = f'<div class="chart" id="{chart.key}" style="min-height:{chart.height}px"></div>'
    return _section(chart.title, chart.caption, place)


def _section(heading: str, caption: str, body: str) -> list[str]:
    return [f"<h2>{_safe(heading)}</h2>", *([f'<p class="caption">{_safe(caption)}</p>'] if caption else []), body]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: set[int]) -> str:
    body = "".join(
        "<tr>" + "".join(f"<td{_class(i, words)}>{_safe(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{_head(head, words)}{body}</table></div>'


def _head(names: Sequence[str], words: set[int]) -> str:
    return (
        "<tr>"
        + "".join(f"<th{_class(i, words)}>{_safe(name).replace(' P', '<br>P')}</th>" for i, name in enumerate(names))
        + "</tr>"
    )


def _class(number: int, words: set[int]) -> str:
    return ' class="word"' if number in words else ""


def _figure(chart: Chart) -> dict[str, Any]:
    return {"key": chart.key, "height": chart.height, "data": chart.data, "layout": chart.layout}


def _json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element; NaN is null."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


@functools.cache
def _library() -> str:
    """plotly.js, compressed and in base64."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


def _resource(name: str) -> str:
    return importlib.resources.files("replay.report").joinpath(name).read_text("utf-8")


def _safe(text: str) -> str:
    return html.escape(text)
