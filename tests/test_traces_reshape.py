"""The options of `traces shape` and `replay`: what they accept, in which order they act, what the file remembers."""

from __future__ import annotations

import json

import click
import numpy as np
import pytest
from click.testing import CliRunner

from traces import parquet, reshape
from traces.cli import traces as group
from traces.record import Metadata, metadata_of, table
from traces.reshape import Burst, LengthFactors, PerSecond, ShapeOptions, Window

S = 1_000_000_000


def minute(rows: int = 600) -> object:
    arrival = np.sort(np.random.default_rng(5).integers(0, 60 * S, size=rows))
    return table(
        {"request_id": [f"r{i}" for i in range(rows)], "arrival_ns": arrival, "input_tokens": np.full(rows, 100)},
        Metadata(source="test"),
    )


@pytest.fixture
def path(tmp_path):
    parquet.write(minute(), tmp_path / "minute.parquet")
    return tmp_path / "minute.parquet"


def run(*args):
    return CliRunner().invoke(group, ["shape", *map(str, args)], standalone_mode=False)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (reshape.parse_burst, "2x", Burst(2.0, S)),
        (reshape.parse_burst, "2x@250ms", Burst(2.0, 250_000_000)),
        (reshape.parse_burst, "50%@1m", Burst(0.5, 60 * S)),
        (reshape.parse_window, "10m:20m", Window(600 * S, 1200 * S)),
        (reshape.parse_window, ":60s", Window(0, 60 * S)),
        (reshape.parse_window, "10m:", Window(600 * S, None)),
        (reshape.parse_lengths, "1.5x", LengthFactors(1.5, 1.5)),
        (reshape.parse_lengths, "input=0.5x,output=2x,max=1500", LengthFactors(0.5, 2.0, 1500)),
        (reshape.parse_lengths, "0.5x,max=1500", LengthFactors(0.5, 0.5, 1500)),
        (reshape.parse_rate, "1.5x", 1.5),
        (reshape.parse_rate, "5rps", PerSecond(5.0)),
        (reshape.parse_gamma, "0", 0.0),
        (reshape.parse_share, "10%", 0.1),
    ],
)
def test_what_people_write(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "example"),
    [
        (reshape.parse_burst, "2x@0s", "2x@1s"),
        (reshape.parse_burst, "fast", "2x"),
        (reshape.parse_window, "10m", "10m:20m"),
        (reshape.parse_window, ":", "10m:20m"),
        (reshape.parse_window, "20m:10m", "10m:20m"),
        (reshape.parse_lengths, "max=lots", "max=1500"),
        (reshape.parse_lengths, "outputs=2x", "2x"),
        (reshape.parse_rate, "fast", "5rps"),
        (reshape.parse_rate, "0rps", "5rps"),
        (reshape.parse_gamma, "inf", "number from 0"),  # K08
        (reshape.parse_gamma, "nan", "number from 0"),
        (reshape.parse_gamma, "-1", "number from 0"),
        (reshape.parse_share, "2x", "10%"),
    ],
)
def test_what_is_wrong_comes_back_with_an_example(parse, text, example):
    with pytest.raises(ValueError, match=example):
        parse(text)


def test_steps_act_in_the_documented_order_whatever_the_order_of_the_options(path, tmp_path):
    done = run(path, "-o", tmp_path / "out.parquet", "--burst", "2x@1s", "--speed", "2x", "--rate", "2x", "--json",
               "--window", "0s:40s")  # fmt: skip
    assert done.exception is None
    steps = json.loads(done.output)["steps"]
    assert [step["step"] for step in steps] == ["window", "rate", "speed", "burst"]
    out = parquet.read(tmp_path / "out.parquet")
    assert out.num_rows == 2 * steps[0]["achieved"]


def test_the_file_remembers_what_was_done_to_it(path, tmp_path):
    run(path, "-o", tmp_path / "one.parquet", "--speed", "2x")
    run(tmp_path / "one.parquet", "-o", tmp_path / "two.parquet", "--window", "0s:10s", "--seed", "7")
    history = metadata_of(parquet.read(tmp_path / "two.parquet")).history
    assert len(history) == 2
    assert history[0].startswith("shape (seed 0): speed 2x: span [s] ")
    assert history[1].startswith("shape (seed 7): window 0s:10s: requests 600 → ")


def test_every_step_prints_planned_beside_achieved(path, tmp_path):
    done = run(path, "-o", tmp_path / "out.parquet", "--speed", "2x", "--rate", "1.5x")
    lines = done.output.splitlines()
    assert lines[0] == "rate 1.5x: requests 600 → 900 (planned 900)"
    assert lines[1].startswith("speed 2x: span [s] 59.")
    assert lines[2] == f"900 requests written to {tmp_path / 'out.parquet'}"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "nothing to do"),
        (["--speed", "0"], "above 0"),
        (["--speed", "fast"], "2x"),
        (["--poisson", "--gamma", "2"], "exclude each other"),
        (["--loop", "0"], "--loop"),
        (["--window", "5m:6m"], "no request arrives then"),
        (["--tenant", "risk"], "no such tenant"),
        (["--burst", "900x"], "the nearest is"),
        (["--merge", "absent.parquet"], "absent.parquet"),
    ],
)
def test_what_cannot_be_met_is_one_clear_line_and_leaves_no_file(path, tmp_path, args, says):
    done = run(path, "-o", tmp_path / "out.parquet", *args)
    assert done.exception is not None
    message = (
        done.exception.format_message() if isinstance(done.exception, click.ClickException) else str(done.exception)
    )
    assert says in message
    assert "\n" not in message
    assert [file.name for file in tmp_path.iterdir()] == ["minute.parquet"]


def test_an_existing_output_is_not_overwritten(path):
    done = run(path, "-o", path, "--speed", "2x")
    assert "exists" in done.exception.format_message()


def test_a_command_gets_its_options_as_one_argument():
    seen = []

    @click.command()
    @click.option("--seed", default=0)
    @reshape.shape_options
    def command(shape: ShapeOptions, seed: int) -> None:
        seen.append((shape, seed))

    CliRunner().invoke(command, ["--speed", "2x", "--seed", "7"], catch_exceptions=False)
    assert seen == [(ShapeOptions(speed=2.0), 7)]


def test_no_option_gives_back_the_very_same_trace():
    trace = minute()
    assert reshape.apply(trace, ShapeOptions(), seed=0) == (trace, [])


def test_merging_a_trace_with_itself_doubles_it_with_private_ids(path, tmp_path):
    done = run(path, "-o", tmp_path / "out.parquet", "--merge", path)
    assert done.exception is None
    out = parquet.read(tmp_path / "out.parquet")
    assert out.num_rows == 1200
    assert len(set(out.column("request_id").to_pylist())) == 1200


OPTIONS = [
    ShapeOptions(speed=2.0),
    ShapeOptions(rate=1.5, burst=Burst(2.0), window=Window(0, 40 * S)),
    ShapeOptions(loop=3, lengths=LengthFactors(0.5, 2.0, 150)),
    ShapeOptions(sample=0.3, tenant=("risk",), gamma=2.0),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows_in_a_group", [100, 100_000])
def test_a_file_is_reshaped_chunk_by_chunk_as_a_table_is_in_memory(options, rows_in_a_group, tmp_path, monkeypatch):
    generator = np.random.default_rng(3)
    rows = 600
    trace = table(
        {
            "request_id": [f"r{i}~" for i in range(rows)],
            "session_id": [f"s{i // 3}" if i % 5 else None for i in range(rows)],
            "tenant": ["risk" if i % 2 else "summary" for i in range(rows)],
            "think_ns": [S if i % 3 else None for i in range(rows)],
            "arrival_ns": generator.integers(0, 60 * S, size=rows),  # not in order
            "input_tokens": generator.integers(1, 200, size=rows),
            "output_tokens": generator.integers(1, 200, size=rows),
            "block_size": [16] * rows,
            "block_hashes": [list(range(i % 4)) for i in range(rows)],
            "chunk_ns": [[1, 2]] * rows,
        },
        Metadata(source="test"),
    )
    monkeypatch.setattr("traces.parquet.BATCH_ROWS", rows_in_a_group // 4)
    monkeypatch.setattr("traces.rows.CHUNK_ROWS", 77)
    for part in range(2):  # a folder of two parts
        parquet.write(trace.slice(part * rows // 2, rows // 2), tmp_path / "in" / f"part-{part}.parquet")
    whole, reports = reshape.apply(parquet.read(tmp_path / "in"), options, seed=4)
    count, streamed = reshape.apply_to_file(tmp_path / "in", tmp_path / "out.parquet", options, seed=4)
    assert streamed == reports
    assert count == whole.num_rows
    assert parquet.read(tmp_path / "out.parquet").to_pylist() == whole.to_pylist()
    assert metadata_of(parquet.read(tmp_path / "out.parquet")) == metadata_of(whole)


def test_a_rate_to_reach_is_reached(path, tmp_path):
    done = run(path, "-o", tmp_path / "out.parquet", "--rate", "25rps")
    assert done.exception is None
    out = parquet.read(tmp_path / "out.parquet").column("arrival_ns").to_numpy()
    assert (len(out) - 1) / ((out[-1] - out[0]) / S) == pytest.approx(25, rel=0.01)


def test_lengths_alone_get_times_from_a_rate_and_a_process(tmp_path):
    lengths = table({"arrival_ns": [0] * 500, "input_tokens": [7] * 500}, Metadata(source="lengths"))
    parquet.write(lengths, tmp_path / "lengths.parquet")
    out = tmp_path / "out.parquet"
    assert "say how fast" in str(run(tmp_path / "lengths.parquet", "-o", out, "--poisson").exception)
    assert "add --poisson" in str(run(tmp_path / "lengths.parquet", "-o", out, "--rate", "5rps").exception)
    assert run(tmp_path / "lengths.parquet", "-o", out, "--rate", "5rps", "--poisson").exception is None
    timed = parquet.read(out)
    assert timed.column("arrival_ns")[-1].as_py() == pytest.approx(499 / 5 * S)
    assert metadata_of(timed).source == "lengths, timed"


@pytest.mark.parametrize("options", [ShapeOptions(sample=0.5), ShapeOptions(rate=1.5)])
def test_rows_without_any_id_are_drawn_alike_from_a_file_and_in_memory(options, tmp_path):
    arrival = np.random.default_rng(2).integers(0, 60 * S, size=300)  # not in order
    parquet.write(table({"arrival_ns": arrival, "input_tokens": np.arange(300)}, Metadata()), tmp_path / "in.parquet")
    whole, _ = reshape.apply(parquet.read(tmp_path / "in.parquet"), options, seed=4)
    reshape.apply_to_file(tmp_path / "in.parquet", tmp_path / "out.parquet", options, seed=4)
    assert parquet.read(tmp_path / "out.parquet").to_pylist() == whole.to_pylist()
