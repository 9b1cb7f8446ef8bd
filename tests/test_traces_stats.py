"""`traces stats`: an engineer who has never seen a trace learns from the words what kind of traffic it is."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from traces import parquet
from traces.cli import traces as group
from traces.findings import burst_word, comparison, findings, rate
from traces.record import Metadata, table
from traces.stats_text import bar, show, sparkline

S = 1_000_000_000


def run(*args):
    return CliRunner().invoke(group, ["stats", *map(str, args)], standalone_mode=False)


@pytest.fixture
def path(tmp_path):
    generator = np.random.default_rng(5)
    arrival = np.sort(generator.integers(0, 120 * S, size=900))
    trace = table(
        {
            "arrival_ns": arrival,
            "tenant": ["risk" if i % 3 else "summary" for i in range(900)],
            "input_tokens": generator.integers(1, 500, size=900),
            "output_tokens": [20 if i % 3 else 1500 for i in range(900)],
            "stream": [True] * 900,
            "model": ["m1"] * 600 + ["m2"] * 300,
        },
        Metadata(source="test"),
    )
    parquet.write(trace, tmp_path / "day.parquet")
    return tmp_path / "day.parquet"


@pytest.mark.data
def test_the_words_say_that_code_is_far_burstier_than_conv_and_by_how_much(data, tmp_path):
    for name, rows in (("conv", 11000), ("code", 5000)):
        source = data("traces", "traces", "azure2023", f"AzureLLMInferenceTrace_{name}.rows1-{rows}.csv")
        (tmp_path / f"{name}.csv").write_bytes(source.read_bytes())
    both = run(tmp_path / "conv.csv", tmp_path / "code.csv")
    assert both.exception is None
    assert (
        "code is far burstier than conv, 10.8 times: index of dispersion 14.6 against 1.35 at 1 s (Poisson 1)."
        in both.output
    )
    alone = " ".join(run(tmp_path / "code.csv").output.split())
    assert "very bursty at 1 s (dispersion 14.6, Poisson 1)" in alone
    assert "the busiest second holds 67 requests, 21.9 times the mean, where Poisson would reach 10" in alone
    assert "70 % of all seconds are empty" in alone
    alone = " ".join(run(tmp_path / "conv.csv").output.split())
    assert "slightly bursty at 1 s (dispersion 1.35, Poisson 1)" in alone


def test_json_is_json_alone_with_the_figures_and_the_words(path):
    done = run(path, "--json")
    found = json.loads(done.output)
    assert found["rows"] == 900
    assert {"span_s", "mean_rate_rps", "iat_cv", "iod_1s", "idc_curve", "input_tokens"} <= found.keys()
    assert found["tenants"]["risk"]["rows"] == 600
    assert found["models"] == {"m1": 600, "m2": 300}
    assert found["streaming_share"] == 1
    assert {finding["topic"] for finding in found["findings"]} >= {"tenants"}


def test_several_traces_are_compared_and_json_holds_them_by_name(path, tmp_path):
    (tmp_path / "other.parquet").write_bytes(path.read_bytes())
    found = json.loads(run(path, tmp_path / "other.parquet", "--json").output)
    assert list(found["traces"]) == ["day", "other"]
    assert "equally bursty" in found["comparison"][0]


def test_traces_of_one_file_name_are_told_apart_by_their_paths(path, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "day.parquet").write_bytes(path.read_bytes())
    found = json.loads(run(path, tmp_path / "b" / "day.parquet", "--json").output)
    assert list(found["traces"]) == [str(path), str(tmp_path / "b" / "day.parquet")]


def test_a_trace_is_not_overwritten_by_a_page(path):
    before = path.read_bytes()
    assert "is no page" in run(path, "--html", "-o", path).exception.format_message()
    assert path.read_bytes() == before


def test_the_first_and_the_last_line_are_the_trace_in_a_sentence(path):
    lines = run(path).output.strip().splitlines()
    assert lines[0].startswith("900 requests in 120 s at 7.5 req/s")
    assert lines[-1].startswith("900 requests in 120 s at 7.5 req/s")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_wider_than_the_terminal_and_nothing_trails(path, width, capsys):
    from traces.stats import profile_of

    show("day", profile_of(str(path)), titled=True, width=width)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert not any("\x1b" in line for line in lines)  # plain when piped
    assert not any("…" in line for line in lines)


def test_a_page_stands_alone_and_names_what_it_shows(path, tmp_path):
    done = run(path, "--html", "-o", tmp_path / "page.html")
    assert done.exception is None
    text = (tmp_path / "page.html").read_text()
    body = text[text.index("</script></head>") :]
    assert not re.search(r"(src|href)=", body)
    for words in ("Arrivals over time", "Burstiness by time scale", "Lengths: share of requests up to", "900 requests"):
        assert words in body


def test_a_run_folder_is_described_by_its_outcomes_and_unsent_rows_are_left_out(tmp_path):
    outcomes = table(
        {
            "arrival_ns": [0, S, 2 * S],
            "outcome": ["ok", "ok", "unsent"],
            "first_token_ns": [S // 10, S // 5, None],
            "last_token_ns": [S, S, None],
            "end_ns": [S, S, None],
            "output_tokens": [10, 19, None],
        },
        Metadata(),
    )
    parquet.write(outcomes, tmp_path / "outcomes.parquet")
    found = json.loads(run(tmp_path, "--json").output)
    assert (found["rows"], found["unsent_rows_left_out"]) == (2, 1)
    assert found["ttft_s"]["max"] == pytest.approx(0.2)
    assert found["tpot_s"]["min"] == pytest.approx(0.8 / 18)
    assert found["in_flight"]["max"] == 1


@pytest.mark.parametrize(
    ("content", "says"), [("no trace at all\n", "no known format"), (None, "no such file"), ("", "empty")]
)
def test_what_cannot_be_read_is_one_line_that_names_it(tmp_path, content, says):
    path = tmp_path / "thing.txt"
    if content is not None:
        path.write_text(content)
    done = run(path)
    assert "thing.txt" in str(done.exception)
    assert says in str(done.exception)


# ---- words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idc", "word"),
    [
        (0.5, "smoother than Poisson"),
        (1.05, "like Poisson"),
        (1.5, "slightly bursty"),
        (3, "bursty"),
        (9, "very bursty"),
    ],
)
def test_a_dispersion_in_words(idc, word):
    assert burst_word({"idc": idc, "poisson_band": 0.1}) == word


def test_rates_are_told_in_the_unit_where_they_are_above_one():
    assert [rate(value) for value in (3.07, 0.0107, 0.0005)] == ["3.07 req/s", "38.5 req/h", "1.8 req/h"]


def plain(**changes):
    base = {
        "rows": 10_000,
        "distinct_timestamps": 10_000,
        "span_s": 1000.0,
        "mean_rate_rps": 10.0,
        "iat_mean_s": 0.1,
        "iat_max_s": 1.0,
        "empty_seconds": 0,
        "windows_1s": 1000,
        "per_second_mean": 10.0,
        "max_in_any_1s": 20,
        "autocorrelation": {"window_s": 1, "lags": [], "values": []},
        "timestamps": {"resolution_s": 1e-6, "batch_period_s": None},
        "idc_curve": [{"window_s": w, "idc": 1.0, "windows": int(1000 / w), "poisson_band": 0.09} for w in (1, 10)],
    }
    return base | changes


@pytest.mark.parametrize(
    ("change", "topic", "words"),
    [
        ({}, "bursts", "Like Poisson at 1 s"),
        ({"empty_seconds": 500}, "silence", "50 % of all seconds are empty (Poisson: 0.0 %)"),
        (
            {"idc_curve": [{"window_s": w, "idc": w * 1.0, "windows": 100, "poisson_band": 0.09} for w in (1, 10)]},
            "slow changes",
            "Dispersion grows from 1 at 1 s to 10 at 10 s",
        ),
        (
            {"timestamps": {"resolution_s": 0.001, "batch_period_s": 3.0}, "distinct_timestamps": 70},
            "timestamps",
            "70 different times for 10,000 requests, in batches 3 s apart",
        ),
        ({"timestamps": {"resolution_s": 1.0, "batch_period_s": None}}, "timestamps", "multiples of 1 s"),
        ({"timestamps": {"resolution_s": 1.0, "batch_period_s": 1.0}}, "timestamps", "multiples of 1 s"),
        ({"prefill_decode_ratio": 75.0}, "balance", "75 input tokens for each output token: prefill-heavy"),
        (
            {"prefill_decode_ratio": 5.0, "input_output_correlation": -0.5},
            "balance",
            "Longer prompts get shorter answers",
        ),
        ({"outcomes": {"ok": 9900, "timeout_total": 100}}, "failures", "100 of 10,000 requests (1.0 %)"),
        ({"rows": 100}, "sample", "100 requests in 16.7 min"),
    ],
)
def test_each_rule_names_the_figure_it_rests_on(change, topic, words):
    found = [finding for finding in findings(plain(**change)) if finding.topic == topic]
    assert any(words in finding.text for finding in found)


def test_plain_traffic_has_nothing_unusual_but_that_it_is_plain():
    assert [finding.topic for finding in findings(plain())] == ["bursts"]


def test_a_comparison_names_the_burstier_first_whatever_the_order():
    calm = plain()
    wild = plain(idc_curve=[{"window_s": 1, "idc": 8.0, "windows": 1000, "poisson_band": 0.09}])
    assert comparison("calm", calm, "wild", wild)[0].startswith("wild is far burstier than calm, 8 times")
    assert comparison("wild", wild, "calm", calm)[0].startswith("wild is far burstier than calm, 8 times")


def test_bars_and_sparklines_start_at_zero():
    assert bar(0.5, 10) == "█████"
    assert bar(0, 10) == ""
    assert sparkline([0, 4, 8], 10) == " ▅█"
    assert len(sparkline([1.0] * 1000, 50)) == 50
