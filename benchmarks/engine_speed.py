"""How fast the virtual clock runs: requests a second, peak memory, and the speed-up over step by step.

Lengths are drawn from the Azure 2023 conversation trace where the reference data is at hand (CONVOY_DATA), else from a
log-normal with its medians. The offered load is a share of what the engine completes when it never runs dry.

    python benchmarks/engine_speed.py --requests 1000000 --load 0.8 --peer PYTHON

PYTHON is an interpreter of an environment in which vllm-sr-sim is installed. It simulates slots (M/G/c with a service
time by length), not steps, tokens or priorities: a lower bound on what a simulator of steps could cost in plain Python.
"""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from replay.engine.config import SchedulerConfig
from replay.engine.steptime import load_profile
from replay.engine.virtual import Workload, simulate

AZURE = Path("traces", "traces", "azure2023", "AzureLLMInferenceTrace_conv.rows1-11000.csv")
PEER = """
import sys, time
import numpy as np
from fleet_sim.core.fleet import Fleet, FleetConfig, PoolConfig
from fleet_sim.core.request import Request
from fleet_sim.gpu_profiles.profiles import A100_80GB
rows = np.load(sys.argv[1])
asked = [(a, Request(i, a, int(p), int(o))) for i, (a, p, o) in enumerate(rows.tolist())]
pool = PoolConfig("all", A100_80GB, 1, 8192)
start = time.process_time()
result = Fleet(FleetConfig([pool], "LeastLoadedRouter")).run(asked)
took = time.process_time() - start
print(f"vllm-sr-sim: {len(rows):,} requests, {took:.2f} s of CPU time, {len(rows) / took:,.0f} requests/s")
"""
LIMIT = 8000  # tokens of a prompt and its answer: llama3-8b serves 8192


def lengths(count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, str]:
    """Input and output lengths, and where they come from."""
    path = Path(os.environ.get("CONVOY_DATA", "../shared")) / AZURE
    if path.exists():
        with path.open() as file:
            rows = np.array([(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)])
        rows = rows[(rows.min(axis=1) > 0) & (rows.sum(axis=1) < LIMIT)]
        drawn = rows[generator.integers(0, len(rows), count)]
        return drawn[:, 0], drawn[:, 1], "lengths drawn from the Azure 2023 conversation trace"
    inputs = np.clip(generator.lognormal(np.log(1020), 0.9, count), 1, LIMIT - 1000).astype(np.int64)
    outputs = np.clip(generator.lognormal(np.log(129), 0.9, count), 1, 1000).astype(np.int64)
    return inputs, outputs, "log-normal lengths with the medians of the Azure 2023 conversation trace"


def workload(count: int, rate_per_s: float | None, generator: np.random.Generator) -> tuple[Workload, str]:
    """Poisson arrivals at that rate; all at once for None."""
    inputs, outputs, source = lengths(count, generator)
    gaps = np.zeros(count) if rate_per_s is None else generator.exponential(1 / rate_per_s, count)
    arrival = (np.cumsum(gaps) * 1e9).astype(np.int64)
    return Workload(arrival_ns=arrival, input_tokens=inputs, output_tokens=outputs), source


@click.command()
@click.option("--requests", default=1_000_000, show_default=True)
@click.option("--load", default=0.8, show_default=True)
@click.option("--profile", "name", default="llama3-8b-a100-80", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--peer", help="Python of an environment with vllm-sr-sim")
def main(requests: int, load: float, name: str, seed: int, peer: str | None) -> None:
    """Time the virtual clock."""
    profile = load_profile(name)
    config = SchedulerConfig(
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        num_gpu_blocks=profile.num_gpu_blocks,
        max_model_len=profile.max_model_len,
    )
    full, source = workload(5000, None, np.random.default_rng(seed))
    capacity = 5000 / (simulate(full, config, profile.model).end_ns.max() / 1e9)
    click.echo(f"{name}, {source}\ncapacity {capacity:.2f} requests/s, offered {load * capacity:.2f} ({load:.0%})")

    small, _ = workload(10_000, load * capacity, np.random.default_rng(seed + 1))
    timed = {}
    for stepwise in (False, True):
        start = time.process_time()
        result = simulate(small, config, profile.model, stepwise=stepwise)
        timed[stepwise] = time.process_time() - start
        click.echo(
            f"10,000 requests {'step by step' if stepwise else 'in closed form'}: {timed[stepwise]:.2f} s of CPU time, "
            f"{result.steps[0]:,} steps, P95 TTFT {p95_ms(result):.3f} ms"
        )
    click.echo(f"speed-up {timed[True] / timed[False]:.0f}x")

    if peer:
        run_peer(peer, small)
    big, _ = workload(requests, load * capacity, np.random.default_rng(seed + 2))
    start, start_cpu = time.perf_counter(), time.process_time()
    result = simulate(big, config, profile.model)
    took, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    click.echo(
        f"{requests:,} requests: {took:.1f} s on one core ({cpu:.1f} s of CPU time), "
        f"{requests / took:,.0f} requests/s, peak {peak_gb:.2f} GiB\n"
        f"simulated {result.end_ns.max() / 3.6e12:.1f} h in {result.steps[0]:,} steps, "
        f"busy {result.busy_ns[0] / result.end_ns.max():.0%}, P95 TTFT {p95_ms(result):.0f} ms, "
        f"{result.handovers} hand-overs to step by step"
    )


def run_peer(python: str, work: Workload) -> None:
    """The same trace through vllm-sr-sim, in its own environment."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, np.stack([work.arrival_ns / 1e9, work.input_tokens, work.output_tokens], axis=1))
        file.flush()
        done = subprocess.run([python, "-c", PEER, file.name], check=False, capture_output=True, text=True, timeout=600)
    click.echo(done.stdout.strip() or f"vllm-sr-sim did not run: {done.stderr.strip().splitlines()[-1]}")


def p95_ms(result: object) -> float:
    waits = result.first_token_ns - result.sent_ns  # type: ignore[attr-defined]
    return float(np.percentile(waits, 95, method="inverted_cdf")) / 1e6


if __name__ == "__main__":
    main()
