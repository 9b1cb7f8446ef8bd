"""Five million rows: import, statistics and a reshaped plan, beside pandas doing the same reading.

    python benchmarks/import_5m.py [--rows 5000000] [--shuffled] [--keep DIR]

Rows are drawn to look like BurstGPT's (seconds, two models, log-normal lengths, 3 % failures, fixed seed) and written
to a temporary folder. Each step is a process of its own, so that its peak memory is its own (`ru_maxrss` of the child).
Wall and processor time both include the start of Python; on a busy machine only the latter can be compared. pandas is
measured when it is installed.

Aims: import at most 20 s, statistics at most 5 s, never more than 600 MB.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

ROOT = Path(__file__).resolve().parent.parent
PANDAS = """
import sys, pandas as pd
frame = pd.read_csv(sys.argv[1]).sort_values("Timestamp", kind="stable")
print(len(frame), frame["Request tokens"].quantile([.5, .95, .99]).tolist())
"""


class Step(NamedTuple):
    """A child process and what it took."""

    name: str
    seconds: float
    cpu_s: float
    peak_mb: float
    status: int


def draw(path: Path, rows: int, *, shuffled: bool) -> None:
    random, start = np.random.default_rng(7), 0
    with path.open("wb") as file:
        file.write(b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
        for low in range(0, rows, 500_000):
            count = min(500_000, rows - low)
            times = start + np.cumsum(random.random(count) < 0.3)
            start = int(times[-1])
            asked = random.lognormal(6, 1, count).astype(np.int64)
            answered = random.lognormal(5, 1, count).astype(np.int64)
            answered[random.random(count) < 0.03] = 0
            model = np.where(random.random(count) < 0.8, "ChatGPT", "GPT-4")
            kind = np.where(random.random(count) < 0.9, "Conversation log", "API log")
            order = random.permutation(count) if shuffled else np.arange(count)
            columns = [times, model, asked, answered, asked + answered, kind]
            table = pa.table([column[order] for column in columns], names=list("abcdef"))
            pacsv.write_csv(table, file, pacsv.WriteOptions(include_header=False, quoting_style="none"))


def run(name: str, *args: str | Path) -> Step:
    with tempfile.TemporaryFile() as sink:
        start = time.perf_counter()
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, *map(str, args)],
            {**os.environ, "PYTHONPATH": str(ROOT)},
            file_actions=[(os.POSIX_SPAWN_DUP2, sink.fileno(), 1), (os.POSIX_SPAWN_DUP2, sink.fileno(), 2)],
        )
        _, status, usage = os.wait4(child, 0)
        took, cpu_s = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
        step = Step(name, took, cpu_s, usage.ru_maxrss / 1024, os.waitstatus_to_exitcode(status))
        if step.status:
            sink.seek(0)
            print(f"{name} failed:\n{sink.read().decode()[-2000:]}", file=sys.stderr)
        return step


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=5_000_000)
    options.add_argument("--shuffled", action="store_true", help="rows out of order within half a million")
    options.add_argument("--keep", type=Path, help="leave the files in this folder")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        source, trace, shaped = folder / "burst.csv", folder / "burst.parquet", folder / "shaped.parquet"
        draw(source, asked.rows, shuffled=asked.shuffled)
        shaped.unlink(missing_ok=True)
        steps = [
            run("traces import burstgpt", "-m", "traces", "import", "burstgpt", source, "-o", trace),
            run("traces stats --json", "-m", "traces", "stats", trace, "--json"),
            run("traces shape --speed 2x", "-m", "traces", "shape", trace, "-o", shaped, "--speed", "2x"),
        ]
        if find_spec("pandas"):
            steps.append(run("pandas read_csv, sort, quantiles", "-c", PANDAS, source))
        else:
            print("pandas is not installed: not measured", file=sys.stderr)
        print(f"{asked.rows:,} rows, {source.stat().st_size / 1e6:,.0f} MB of CSV" + ", shuffled" * asked.shuffled)
        head = f"{'wall (s)':>9} {'CPU (s)':>8} {'rows/s':>12} {'peak (MB)':>10}"
        print(f"{'step':<34} {head}  exit")
        for step in steps:
            rate = f"{asked.rows / step.seconds:,.0f}"
            cost = f"{step.seconds:>9.1f} {step.cpu_s:>8.1f} {rate:>12} {step.peak_mb:>10,.0f}"
            print(f"{step.name:<34} {cost}  {step.status}")


if __name__ == "__main__":
    main()
