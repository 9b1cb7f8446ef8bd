"""Predicted beside measured on a live engine: calibrate it, replay a trace, simulate the same plan; several times.

    python benchmarks/engine_real.py http://127.0.0.1:8100 --policy priority --runs 3

Two tenants: `risk` (short, 2 requests/s) and `summary` (long, 0.6 requests/s), Poisson arrivals, --seconds long. The
engine must be idle and run with the policy named. It is calibrated before, between and after the runs, for shared
machines change their speed; the prediction adds what a calibration found that the API takes before a first token.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from traces import parquet
from traces.record import Metadata, table

TENANTS = {"risk": (2.0, 60, 40), "summary": (0.6, 600, 300)}  # requests/s, tokens in, tokens out


def write_trace(path: Path, seconds: float, scale: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = []
    for rank, (name, (rate, inputs, outputs)) in enumerate(TENANTS.items()):
        count = generator.poisson(rate * scale * seconds)
        for at in np.sort(generator.uniform(0, seconds, count)):
            lengths = generator.lognormal(0, 0.3, 2) * (inputs, outputs)
            rows.append((int(at * 1e9), name, rank, max(1, int(lengths[0])), max(2, int(lengths[1]))))
    rows.sort()
    at, tenant, priority, inputs, outputs = zip(*rows, strict=True)
    columns = {
        "arrival_ns": at,
        "tenant": tenant,
        "priority": priority,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "endpoint": ["completions"] * len(rows),
        "stream": [True] * len(rows),
    }
    parquet.write(table({name: list(values) for name, values in columns.items()}, Metadata(source="lengths")), path)


def replay(*arguments: str) -> dict[str, Any]:
    """Run a `replay` command and read its JSON; exit codes of verdicts do not matter here."""
    done = subprocess.run([sys.executable, "-m", "replay", *arguments], check=False, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(f"replay {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


@click.command()
@click.argument("url")
@click.option("--policy", default="priority", show_default=True)
@click.option("--runs", default=3, show_default=True)
@click.option("--seconds", default=40.0, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Of the arrival rates.")
@click.option("--max-num-seqs", default=8, show_default=True)
@click.option("--num-gpu-blocks", default=8000, show_default=True)
@click.option(
    "--async-scheduling", is_flag=True, help="The engine schedules ahead (vLLM's default on a GPU, not on a CPU)."
)
@click.option("--profile-file", type=click.Path(path_type=Path), help="Take this profile instead of calibrating.")
@click.option("--api-ms", default=0.0, show_default=True, help="With --profile-file: what the API takes.")
def main(  # noqa: PLR0917 - click passes them by name
    url: str,
    policy: str,
    runs: int,
    seconds: float,
    scale: float,
    max_num_seqs: int,
    num_gpu_blocks: int,
    async_scheduling: bool,
    profile_file: Path | None,
    api_ms: float,
) -> None:
    """Compare."""
    engine = ["--policy", policy, "--max-num-seqs", str(max_num_seqs), "--num-gpu-blocks", str(num_gpu_blocks)]
    engine += ["--max-num-batched-tokens", "2048", "--engine-version", "0.32"]
    engine += ["--async-scheduling"] if async_scheduling else []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        trace = str(base / "trace.parquet")
        write_trace(base / "trace.parquet", seconds, scale, seed=7)
        profiles = [(profile_file, api_ms)] if profile_file else [calibrated(url, base / "live0.toml", max_num_seqs)]
        measured = []
        for number in range(runs):
            run = str(base / f"run{number}")
            measured.append(replay(trace, "--target", url, "--out", run, "--no-probe", "--json"))
            if profile_file is None:
                profiles.append(calibrated(url, base / f"live{number + 1}.toml", max_num_seqs))
        predicted = []
        for number, (profile, _) in enumerate(profiles):
            out = str(base / f"simulated{number}")
            predicted.append(replay("simulate", trace, "--profile-file", str(profile), *engine, "--out", out, "--json"))
    click.echo(
        f"{policy}, {measured[0]['planned']} requests in {seconds:g} s, {runs} real runs with calibrations between:"
    )
    click.echo("median (least to largest), ms; the time that a calibration finds the API to take is in the prediction")
    for name in TENANTS:
        for value in ("ttft_ms", "tpot_ms", "e2e_ms"):
            for quantile in ("p50", "p95"):
                real = [run["tenants"][name][value][quantile] for run in measured]
                ours = [
                    run["tenants"][name][value][quantile] + (0.0 if value == "tpot_ms" else api)
                    for run, (_, api) in zip(predicted, profiles, strict=True)
                ]
                click.echo(
                    f"  {name:8}{value[:-3]:5}{quantile:4} measured {span(real)}  predicted {span(ours)}  "
                    f"{np.median(ours) / np.median(real) - 1:+.0%}"
                )


def calibrated(url: str, path: Path, max_num_seqs: int) -> tuple[Path, float]:
    """A profile of the engine as it is now, and what the API adds to a first token, in ms."""
    batches = ",".join(str(2**k) for k in range(10) if 2**k <= max_num_seqs)
    said = replay("calibrate", url, "--out", str(path), "--batches", batches, "--json")
    click.echo(f"calibrated: {json.dumps(said['fit'])}", err=True)
    return path, float(said["fit"]["api_ms"])


def span(values: list[float]) -> str:
    """Median and range."""
    return f"{np.median(values):9,.1f} ({min(values):,.1f} to {max(values):,.1f})"


if __name__ == "__main__":
    main()
