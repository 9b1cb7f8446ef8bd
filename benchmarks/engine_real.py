"""Predicted beside measured on a live engine: calibrate it, replay one trace several times, simulate the same plan.

    python benchmarks/engine_real.py http://127.0.0.1:8100 --policy priority --runs 3

Two tenants: `risk` (short, 2 requests/s) and `summary` (long, 0.6 requests/s), Poisson arrivals, --seconds long. The
engine must be idle and run with the policy named. The prediction adds what the calibration found that the API takes
before a first token.
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
    profile_file: Path | None,
    api_ms: float,
) -> None:
    """Compare."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_trace(base / "trace.parquet", seconds, scale, seed=7)
        if profile_file is None:
            profile_file = base / "live.toml"
            batches = ",".join(str(2**k) for k in range(10) if 2**k <= max_num_seqs)
            said = replay("calibrate", url, "--out", str(profile_file), "--batches", batches, "--json")
            api_ms = said["fit"]["api_ms"]
            click.echo(f"calibrated: {json.dumps(said['fit'])}")
        measured = [
            replay(str(base / "trace.parquet"), "--target", url, "--out", str(base / f"run{n}"), "--no-probe", "--json")
            for n in range(runs)
        ]
        predicted = replay(
            "simulate",
            str(base / "trace.parquet"),
            "--profile-file",
            str(profile_file),
            *("--policy", policy, "--max-num-seqs", str(max_num_seqs), "--num-gpu-blocks", str(num_gpu_blocks)),
            *("--max-num-batched-tokens", "2048", "--async-scheduling", "--engine-version", "0.32"),
            *("--out", str(base / "simulated"), "--json"),
        )
    click.echo(
        f"{policy}: {predicted['planned']} requests, {runs} real runs, API {api_ms:.1f} ms added to predicted TTFT"
    )
    for name in TENANTS:
        for value, added in (("ttft_ms", api_ms), ("tpot_ms", 0.0), ("e2e_ms", api_ms)):
            for quantile in ("p50", "p95"):
                real = [run["tenants"][name][value][quantile] for run in measured]
                ours = predicted["tenants"][name][value][quantile]
                if ours is None or None in real:
                    continue
                middle = float(np.median(real))
                click.echo(
                    f"  {name:8}{value[:-3]:5}{quantile:4} measured {middle:10.1f} ms "
                    f"({min(real):.1f} to {max(real):.1f})  predicted {ours + added:10.1f} ms  "
                    f"{(ours + added) / middle - 1:+.0%}"
                )


if __name__ == "__main__":
    main()
