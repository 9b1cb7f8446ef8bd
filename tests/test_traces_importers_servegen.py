"""A drawn trace keeps each window's rate, its pattern, and the gaps that reach over a window's end."""

from __future__ import annotations

import json

import numpy as np
import pytest

from traces.errors import BadFile, BadRow
from traces.importers import servegen
from traces.importers.intake import Options
from traces.importers.load import table

HOUR_NS = 3600 * 10**9
FOUR = '{"input_tokens": "{7: 1.0}", "output_tokens": "{3: 0.5, 5: 0.5}"}'


def client(folder, number, windows, dataset=f'{{"0": {FOUR}}}'):
    rows = "".join(f"{start},{rate},{cv},{pattern},{shape},1\n" for start, rate, cv, pattern, shape in windows)
    (folder / f"chunk-{number}-trace.csv").write_text(rows)
    (folder / f"chunk-{number}-dataset.json").write_text(dataset)


def drawn(folder, hours=1, **options):
    return table("servegen", folder, Options(duration_ns=hours * HOUR_NS, **options))


def test_a_gap_longer_than_a_window_reaches_over_its_end(tmp_path):
    client(tmp_path, 0, [(600 * window, 1 / 900, 0.05, "Gamma", 400) for window in range(144)])
    arrivals = drawn(tmp_path, hours=24)["arrival_ns"].to_numpy() / 1e9
    assert len(arrivals) == pytest.approx(96, abs=3)  # one in 15 minutes, as regular as shape 400 is
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(900, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(0.05, rel=0.4)


@pytest.mark.parametrize(("pattern", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Weibull", 2.0, 0.5227), ("", 0, 1.0)])
def test_gaps_have_the_cv_of_their_pattern_and_windows_their_rate(tmp_path, pattern, shape, cv):
    client(tmp_path, 0, [(0, 20, cv, pattern, shape), (600, 0, 0, "", 0), (1200, 10, cv, pattern, shape)])
    arrivals = drawn(tmp_path, hours=0.5)["arrival_ns"].to_numpy() / 1e9
    counts = np.histogram(arrivals, [0, 600, 1200, 1800])[0]
    assert counts[0] == pytest.approx(12_000, rel=0.06)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(6_000, rel=0.08)
    gaps = np.diff(arrivals[arrivals < 600])
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_leaving_a_client_out_changes_no_other(tmp_path):
    for number in (3, 11):
        client(tmp_path, number, [(0, 0.5, 1, "", 0)] + [(600 * window, 0.5, 1, "", 0) for window in range(1, 6)])
    both = drawn(tmp_path)
    (tmp_path / "chunk-3-trace.csv").unlink()
    alone = drawn(tmp_path)
    mine = [row for row in both.to_pylist() if row["tenant"] == "client-11"]
    assert mine == alone.to_pylist()
    assert set(both["tenant"].to_pylist()) == {"client-3", "client-11"}


def test_lengths_follow_the_data_window_in_force_and_sum_the_media(tmp_path):
    early = {"text_tokens": "{10: 1.0}", "image_tokens": "{500: 1.0}", "output_tokens": "{4: 1.0}"}
    late = {"text_tokens": "{20: 1.0}", "image_tokens": "{}", "output_tokens": "{8: 1.0}"}
    dataset = json.dumps({"0": early, "1200": late, "2400": {"output_tokens": "{}"}})
    client(tmp_path, 0, [(600 * window, 1, 1, "", 0) for window in range(6)], dataset)
    lengths = {
        (row["arrival_ns"] // (1200 * 10**9), row["input_tokens"], row["output_tokens"])
        for row in drawn(tmp_path).to_pylist()
    }
    assert lengths == {(0, 510, 4), (1, 20, 8), (2, 20, 8)}


def test_reasoning_is_a_share_of_the_output(tmp_path):
    dataset = '{"0": {"input_tokens": "{7: 1.0}", "output_tokens": "{100: 1.0}", "reason_ratio": "{0.25: 1.0}"}}'
    client(tmp_path, 0, [(600 * window, 1, 1, "", 0) for window in range(6)], dataset)
    assert set(drawn(tmp_path)["reasoning_tokens"].to_pylist()) == {25}


def test_a_workload_that_servegen_drew_is_read_as_it_is(tmp_path):
    path = tmp_path / "workload.csv"
    path.write_text("request_id,timestamp,input_tokens,output_tokens\n0,0.25,7,3\n1,1.5,8,4\n")
    trace = table("servegen", path)
    assert trace.schema.metadata[b"convoy.epoch"] == b"relative"
    assert trace.select(["arrival_ns", "input_tokens", "output_tokens"]).to_pylist() == [
        {"arrival_ns": 250_000_000, "input_tokens": 7, "output_tokens": 3},
        {"arrival_ns": 1_500_000_000, "input_tokens": 8, "output_tokens": 4},
    ]


@pytest.mark.parametrize(
    ("windows", "dataset", "problem"),
    [
        ([(0, -1, 1, "", 0)], None, "row 1, column rate: '-1' is below 0"),
        ([(0, "nan", 1, "", 0)], None, "row 1, column rate: 'nan' is below 0 or not a number"),
        ([(0, 1, 1, "Pareto", 0)], None, "row 1, column pattern: 'Pareto' is not Gamma, Weibull or empty"),
        ([(0, 1, 1, "", 0), (0, 1, 1, "", 0)], None, "row 2, column start: 0 is not after 0"),
        ([(0, "fast", 1, "", 0)], None, "row 1: a value is not a number"),
        ([(0, 1, 1, "", 0)], None, "the parameters end at 600 s, before --start . --duration = 3600 s"),
        ([(0, 0, 0, "", 0)] * 1, None, "no client with lengths ever sends"),
        ([(0, 1, 1, "", 0)], '{"0": {"output_tokens": "{"}}', "not a ServeGen dataset"),
        ([(0, 1, 1, "", 0)], '{"0": {"output_tokens": "{-5: 1.0}"}}', "not a ServeGen dataset .a length or prob"),
        ([(0, 1, 1, "", 0)], '{"0": {"output_tokens": "__import__(1)"}}', "not a ServeGen dataset"),
        ([(0, 1, 1, "", 0)], "{", "not a ServeGen dataset"),
    ],
)
def test_wrong_parameters_are_named(tmp_path, windows, dataset, problem):
    client(tmp_path, 0, windows, *([] if dataset is None else [dataset]))
    with pytest.raises((BadFile, BadRow), match=problem):
        drawn(tmp_path)


def test_the_length_of_a_window_is_told_by_the_first_two():
    windows = servegen.Windows(np.array([0, 300]), np.zeros(2), np.zeros(2), ("", ""), np.zeros(2))
    assert windows.step_s == 300
