"""Write a trace of two tenants, made of nothing but a seed: risk asks short questions, summary writes long answers.

python examples/risk-and-summary/trace.py mix.parquet --minutes 4 --risk 0.8 --summary 0.3 --summary-tokens 1500
"""

from __future__ import annotations

import argparse

import numpy as np

from traces import parquet
from traces.record import Metadata, table

SPREAD = 0.4  # deviation of the logarithm of lengths
INPUT_TOKENS = {"risk": 120, "summary": 900}  # medians


def write(path: str, *, minutes: float, rates: dict[str, float], answers: dict[str, int], seed: int) -> int:
    """Poisson arrivals of each tenant at its rate (requests/s), answers of these median lengths; returns the rows."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[int] | list[str]] = {"arrival_ns": [], "tenant": [], "priority": []}
    columns |= {"input_tokens": [], "output_tokens": []}
    rows = []
    for rank, (name, rate) in enumerate(rates.items()):
        number = round(rate * minutes * 60)  # as many as expected: arms of other seeds are as heavy
        times = np.sort(rng.uniform(0, minutes * 60e9, number)).astype(np.int64)
        asked, answered = INPUT_TOKENS[name], answers[name]
        inputs = np.clip(rng.lognormal(np.log(asked), SPREAD, number), 16, 4000).astype(int)
        outputs = np.clip(rng.lognormal(np.log(answered), SPREAD, number), 8, 4000).astype(int)
        rows += [(int(at), name, rank, int(i), int(o)) for at, i, o in zip(times, inputs, outputs, strict=True)]
    for name, values in zip(columns, zip(*sorted(rows), strict=True), strict=True):
        columns[name] = list(values)
    columns["endpoint"] = ["completions"] * len(rows)
    columns["stream"] = [True] * len(rows)  # type: ignore[assignment]
    parquet.write(table(columns, Metadata(source="risk and summary, made", epoch="relative")), path)
    return len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--risk", type=float, default=0.8, help="requests/s")
    parser.add_argument("--summary", type=float, default=0.3, help="requests/s")
    parser.add_argument("--risk-tokens", type=int, default=80, help="tokens out, median")
    parser.add_argument("--summary-tokens", type=int, default=1500, help="tokens out, median")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    made = write(
        asked.path,
        minutes=asked.minutes,
        rates={"risk": asked.risk, "summary": asked.summary},
        answers={"risk": asked.risk_tokens, "summary": asked.summary_tokens},
        seed=asked.seed,
    )
    print(f"{asked.path}: {made:,} requests in {asked.minutes:g} min")
