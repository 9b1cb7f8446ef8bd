"""report.html: one file, no network, valid figures, small, honest about what it left out."""

from __future__ import annotations

import base64
import gzip
import json
import re

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from replay.report import charts, page
from replay.report.command import report
from tenants import folder, sla
from tenants import summary as outcome
from tenants.measures import rows_of
from tenants.tenant import Tenant
from traces import parquet
from traces.errors import BadFile
from traces.record import Metadata, table

MS = 1_000_000


def outcomes(rows=600, seed=1, failed=0.05, names=("risk", "summary")):
    rng = np.random.default_rng(seed)
    due = np.sort(rng.integers(0, 60_000 * MS, rows))
    bad = rng.random(rows) < failed
    first = (rng.lognormal(5, 0.6, rows) * MS).astype(np.int64)

    def seen(values):
        return [None if miss else int(value) for value, miss in zip(values, bad, strict=True)]

    return table(
        {
            "request_id": [f"r{number:05}" for number in range(rows)],
            "arrival_ns": due,
            "due_ns": due,
            "released_ns": due,
            "sent_ns": due + rng.integers(0, MS, rows),
            "tenant": [names[number % len(names)] for number in range(rows)],
            "priority": [number % len(names) for number in range(rows)],
            "first_token_ns": seen(first),
            "last_token_ns": seen(first + 900 * MS),
            "end_ns": first + 901 * MS,
            "input_tokens": rng.integers(1, 4000, rows),
            "output_tokens": seen(rng.integers(2, 400, rows)),
            "outcome": ["http_error" if miss else "ok" for miss in bad],
            "status": [503 if miss else 200 for miss in bad],
            "error": ["http 503" if miss else None for miss in bad],
        },
        Metadata(source="test"),
    )


def write_run(path, rows=600, rules=("risk: ttft_p95 < 300ms",), **more):
    path.mkdir(parents=True)
    found = outcomes(rows, **more)
    parquet.write(found, path / "outcomes.parquet")
    summary = outcome.summarise(
        found,
        tenants=[Tenant(name="risk", priority=0), Tenant(name="summary", priority=1)],
        rules=[sla.parse(rule) for rule in rules],
        digest="abc123",
    )
    document = {
        "command": "replay sample",
        "target": "http://127.0.0.1:9",
        "summary": json.loads(outcome.to_json(summary)),
    }
    (path / "run.json").write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "today")


@pytest.fixture(scope="module")
def text(run_folder):
    return page.render([folder.load(run_folder)])


def figures_in(text):
    return json.loads(re.search(r'<script id="figures" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def without_library(text):
    return re.sub(r'(<script id="library"[^>]*>).*?(</script>)', r"\1\2", text, flags=re.DOTALL)


def test_it_leads_with_the_verdict_and_names_the_tenant(text):
    first = re.search(r"<h1>(.*?)</h1>", text)[1]
    assert "FAIL" in first
    assert "risk TTFT P95" in first
    assert text.index("<h1>") < text.index("Can this run be trusted?") < text.index("Rules") < text.index("Over time")


def test_nothing_is_loaded_from_anywhere(text):
    own = without_library(text)
    assert not re.search(r"""(?:src|href|action)\s*=|url\(|@import|fetch\(|XMLHttpRequest""", own)
    assert "default-src 'none'" in own
    assert not re.search(r"https?://(?!127\.0\.0\.1)", own)


def test_the_library_inside_is_plotlys_own(text):
    from plotly.offline import get_plotlyjs

    packed = re.search(r'<script id="library"[^>]*>(.*?)</script>', text, re.DOTALL)[1]
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()
    assert text.count('id="library"') == 1


def test_every_figure_is_valid_for_plotly_and_has_a_place(text):
    import plotly.graph_objects as go

    figures = figures_in(text)
    assert [figure["key"] for figure in figures] == ["timeline", "ecdf-ttft", "ecdf-tpot", "ecdf-e2e"]
    for figure in figures:
        go.Figure(data=figure["data"], layout=figure["layout"])
        assert f'<div class="chart" id="{figure["key"]}"' in text


def test_a_curve_ends_below_one_by_the_share_that_failed(tmp_path):
    run = folder.load(write_run(tmp_path / "half", failed=0.5))
    curve = figures_in(page.render([run]))[1]["data"][0]
    part = run.summary.tenants["risk"]
    assert curve["y"][-1] == pytest.approx(part.ok / part.planned, abs=1e-4)
    assert curve["line"]["shape"] == "hv"


def test_axes_begin_at_0_and_times_of_the_run_share_one_axis(text):
    timeline, *distributions = figures_in(text)
    axes = {name: axis for name, axis in timeline["layout"].items() if name.startswith(("xaxis", "yaxis"))}
    assert all(axis.get("rangemode") == "tozero" for axis in axes.values())
    assert all(
        axis.get("matches") == "x" for name, axis in axes.items() if name.startswith("xaxis") and name != "xaxis"
    )
    for figure in distributions:
        assert all(
            axis["range"][0] == 0 for name, axis in figure["layout"].items() if name.startswith(("xaxis", "yaxis"))
        )


def test_the_limit_is_drawn_and_stretches_that_break_it_are_shaded(text):
    shapes = figures_in(text)[0]["layout"]["shapes"]
    assert any(shape["type"] == "line" and shape["y0"] == 300 for shape in shapes)
    assert any(shape["type"] == "rect" for shape in shapes)


def test_i07_ten_thousand_requests_stay_below_a_megabyte_beside_the_library(tmp_path):
    run = folder.load(write_run(tmp_path / "big", rows=10_000))
    assert len(without_library(page.render([run]))) < 1_000_000


def test_when_points_are_left_out_the_page_says_so(tmp_path):
    run = folder.load(write_run(tmp_path / "big", rows=10_000, failed=0.0))
    shown = page.render([run])
    assert "8,000 of 10,000 requests are drawn" in shown
    assert "all 600 requests are drawn" in page.render([folder.load(write_run(tmp_path / "small", failed=0.0))])


def test_names_cannot_break_out_of_the_page(tmp_path):
    evil = "</script><script>alert(1)</script>"
    run = folder.load(write_run(tmp_path / "evil", rules=(), names=("risk", evil)))
    shown = page.render([run])
    assert evil not in shown
    assert "&lt;script&gt;alert(1)" in shown


def one_slot(path):
    """One slot: a long answer of summary from 0 to 10 s; ten short requests of risk come meanwhile and wait."""
    begins_s = np.array([0.0, *(10 + 0.2 * k for k in range(10))])
    due_s = np.array([0.0, *(1 + 0.5 * k for k in range(10))])
    tokens = [100, *[2] * 10]
    chunks = [
        ((begin - due + 0.001 + 0.1 * np.arange(count)) * 1e9).astype(np.int64)
        for begin, due, count in zip(begins_s, due_s, tokens, strict=True)
    ]
    due_ns = (due_s * 1e9).astype(np.int64)
    found = table(
        {
            "request_id": [f"r{i}" for i in range(11)],
            "arrival_ns": due_ns,
            "due_ns": due_ns,
            "released_ns": due_ns,
            "sent_ns": due_ns,
            "tenant": ["summary<b>", *["risk"] * 10],
            "priority": [1, *[0] * 10],
            "first_token_ns": [int(times[0]) for times in chunks],
            "last_token_ns": [int(times[-1]) for times in chunks],
            "end_ns": [int(times[-1]) + MS for times in chunks],
            "chunk_ns": [times.tolist() for times in chunks],
            "input_tokens": [100] * 11,
            "output_tokens": tokens,
            "outcome": ["ok"] * 11,
        },
        Metadata(),
    )
    path.mkdir()
    parquet.write(found, path / "outcomes.parquet")
    (path / "run.json").write_text(json.dumps({"summary": json.loads(outcome.to_json(outcome.summarise(found)))}))
    return page.render([folder.load(path)])


def test_who_kept_whom_waiting_is_shown_with_the_worst_request_first(tmp_path):
    shown = one_slot(tmp_path / "run")
    part = shown[shown.index("Who kept whom waiting") :]
    assert "by summary&lt;b&gt;" in part
    assert re.search(r"<li>r0 \(summary&lt;b&gt;, 100 tokens in, 100 tokens out\) kept 10 waiting", part)


def test_without_chunk_times_nothing_is_said_about_waiting(text):
    assert "Who kept whom waiting" not in text


def test_failures_are_grouped_and_the_slowest_requests_named(text):
    assert "× http_error 503, first at" in text
    assert "Slowest first tokens" in text
    assert text.count('<td class="word">r0') >= page.SLOWEST


def test_several_runs_are_compared_in_one_table_and_chart(tmp_path):
    folders = [str(write_run(tmp_path / name, seed=seed, failed=0.0)) for name, seed in (("fcfs", 1), ("priority", 2))]
    shown = page.render(folder.load_all(folders))
    assert [figure["key"] for figure in figures_in(shown)] == ["arms", "ecdf-ttft", "ecdf-tpot", "ecdf-e2e"]
    assert re.search(r"<h1>risk TTFT P95: [\d,]+ ms in fcfs, [\d,]+ ms in priority\.</h1>", shown)
    arms = figures_in(shown)[0]
    assert {label.split("<br>")[0] for trace in arms["data"] for label in trace["x"]} == {"fcfs", "priority"}


def test_runs_of_the_same_folder_name_are_told_apart(tmp_path):
    folders = [str(write_run(tmp_path / day / "run")) for day in ("monday", "tuesday")]
    assert [run.name for run in folder.load_all(folders)] == ["monday/run", "tuesday/run"]


@pytest.mark.parametrize("kind", ["nothing answered", "closed loop", "not streamed", "empty"])
def test_odd_runs_are_drawn_too(tmp_path, kind):
    found = outcomes(50, failed=1.0 if kind == "nothing answered" else 0.0)
    if kind == "empty":
        found = found.slice(0, 0)
    nulls = {"closed loop": ["due_ns", "released_ns"], "not streamed": ["first_token_ns", "last_token_ns"]}.get(
        kind, []
    )
    columns = {name: [None] * 50 if name in nulls else found.column(name) for name in found.schema.names}
    if kind == "not streamed":
        columns["stream"] = [False] * 50
    found = table(columns, Metadata())
    summary = outcome.summarise(found)
    run = folder.Run("odd", summary, found, rows_of(found), {})
    shown = page.render([run])
    import plotly.graph_objects as go

    for figure in figures_in(shown):
        go.Figure(data=figure["data"], layout=figure["layout"])


@given(st.integers(1, 3000), st.integers(4, 400), st.integers(0, 99))
def test_thinned_points_are_few_distinct_and_hold_the_slowest(count, most, seed):
    rng = np.random.default_rng(seed)
    at_s, values = np.sort(rng.uniform(0, 100, count)), rng.lognormal(5, 1, count)
    kept = charts.thinned(at_s, values, most)
    assert len(kept) == len(set(kept.tolist())) == min(count, most)
    assert int(np.argmax(values)) in kept


def test_the_command_prints_writes_and_compares(run_folder, tmp_path):
    runner = CliRunner()
    one = runner.invoke(report, [str(run_folder)])
    assert one.exit_code == 0
    assert one.stdout.splitlines()[0].startswith("FAIL")
    assert (run_folder / "report.html").stat().st_size > 1_000_000
    target = tmp_path / "arms.html"
    two = runner.invoke(report, [str(run_folder), str(write_run(tmp_path / "other")), "-o", str(target)])
    assert two.exit_code == 0
    assert "risk TTFT P95" in two.stdout.splitlines()[0]
    assert target.exists()
    assert str(target) in two.stderr


def test_json_is_all_that_is_on_stdout(run_folder, tmp_path):
    runner = CliRunner()
    one = runner.invoke(report, [str(run_folder), "--json", "--no-page"])
    assert json.loads(one.stdout)["tenants"]["risk"]["priority"] == 0
    two = runner.invoke(report, [str(run_folder), str(write_run(tmp_path / "other")), "--json", "--no-page"])
    assert set(json.loads(two.stdout)) == {"today", "other"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such run folder"),
        (lambda path: path.mkdir(), "run.json is missing"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("{")), "not JSON"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("[]")), "not a JSON object"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("{}")), "has no summary"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text('{"summary": {"planned": 1}}')), "not one of this"),
    ],
)
def test_a_folder_that_is_no_run_is_said_in_one_line(tmp_path, make, says):
    make(tmp_path / "run")
    with pytest.raises(BadFile, match=says) as caught:
        folder.load(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_summary_survives_the_run_folder(run_folder):
    summary = folder.load(run_folder).summary
    assert summary == outcome.from_json(msgspec.json.decode(outcome.to_json(summary)))
