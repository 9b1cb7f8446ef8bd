"""How often an interval holds the truth, on queues whose truth is known.

Two tenants share a single server, Poisson arrivals, exponential service (M/M/1). The urgent tenant's time in system is
exponential in the mix, exp(μ − λ), and alone, exp(μ − λ·share), so every quantile and ratio is known exactly. The same
arrivals and services are used in both arms of a trial; each run of each arm is slowed or sped up as a whole by a factor
of its own, exp(N(0, σ)), as runs of real servers differ. Waiting is by Lindley's recursion.

python benchmarks/coverage.py [--experiments 2000] [--trials 3] [--requests 2000] [--load 0.8] [--sigma 0.05]
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np

from tenants import bootstrap

SHARE = 0.6  # of the load that is the urgent tenant's
Q = 0.95
BLOCKS = 8


class Setting(NamedTuple):
    """One row of the table."""

    load: float
    trials: int
    requests: int  # of the urgent tenant in a run
    sigma: float
    same: bool = False  # A/A: both arms are the mix


class Row(NamedTuple):
    """What was found."""

    given: int  # experiments that were given an interval
    covered: float  # share of them whose interval holds the truth
    quantile_covered: float  # the same for the mix's own quantile
    differs: int  # experiments whose interval leaves out 1
    width: float  # median of high / low


def times_in_system(gaps: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Lindley: waiting + service of each customer, along the last axis."""
    steps = np.concatenate([np.zeros((*gaps.shape[:-1], 1)), services[..., :-1] - gaps[..., 1:]], axis=-1)
    walk = np.cumsum(steps, axis=-1)
    return walk - np.minimum.accumulate(walk, axis=-1) + services


def run(setting: Setting, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(due, time in the mix, time alone) of the urgent tenant in one trial, in stationarity."""
    warm = math.ceil(20 / (1 - math.sqrt(setting.load)) ** 2)
    total = math.ceil(setting.requests / SHARE) + warm
    gaps = rng.exponential(1 / setting.load, total)
    services = rng.exponential(1.0, total)
    urgent = rng.random(total) < SHARE
    due = np.cumsum(gaps)
    mix = times_in_system(gaps, services)[urgent]
    alone = times_in_system(np.diff(due[urgent], prepend=0.0), services[urgent])
    kept = due[urgent] > due[warm]
    factor = np.exp(rng.normal(0, setting.sigma, 2))
    if setting.same:
        again = run(setting._replace(same=False), rng)
        return due[urgent][kept], mix[kept] * factor[0], again[1]
    return due[urgent][kept], mix[kept] * factor[0], alone[kept] * factor[1]


def truth(setting: Setting) -> tuple[float, float]:
    """The mix's quantile and its ratio to that of the other arm."""
    quantile = -math.log(1 - Q) / (1 - setting.load)
    alone = -math.log(1 - Q) / (1 - setting.load * SHARE)
    return quantile, 1.0 if setting.same else quantile / alone


def experiment(setting: Setting, seed: int) -> tuple[bootstrap.Estimate, bootstrap.Estimate]:
    """(ratio, the mix's quantile) as the verdict would have them."""
    rng = np.random.default_rng(seed)
    runs = [run(setting, rng) for _ in range(setting.trials)]
    span = max(float(due.max() - due.min()) for due, _, _ in runs)
    due = [due - due.min() for due, _, _ in runs]
    other = [np.resize(due[i], len(alone)) for i, (_, _, alone) in enumerate(runs)]
    cut = {"begin": 0.0, "block": span / BLOCKS, "blocks": BLOCKS}
    mix = bootstrap.sample([mix for _, mix, _ in runs], due, **cut)
    alone = bootstrap.sample([alone for _, _, alone in runs], other if setting.same else due, **cut)
    drawn = bootstrap.levels(setting.trials, BLOCKS, same_plan=False, seed=seed)
    why = bootstrap.too_few(mix, Q) or bootstrap.too_few(alone, Q)
    of_mix, of_alone = bootstrap.quantile(mix, Q), bootstrap.quantile(alone, Q)
    ratio = bootstrap.estimate(lambda counts: of_mix(counts) / of_alone(counts), drawn, log=True, why=why)
    return ratio, bootstrap.estimate(of_mix, drawn, log=True, why=bootstrap.too_few(mix, Q))


def coverage(setting: Setting, experiments: int, seed: int = 1) -> Row:
    """Many experiments of one setting."""
    quantile, ratio = truth(setting)
    found = [experiment(setting, seed * 1_000_003 + index) for index in range(experiments)]
    given = [r for r, _ in found if r.ci is not None]
    own = [e for _, e in found if e.ci is not None]

    def holds(estimates: list[bootstrap.Estimate], value: float) -> float:
        return float(np.mean([e.low <= value <= e.high for e in estimates])) if estimates else math.nan

    return Row(
        given=len(given),
        covered=holds(given, ratio),
        quantile_covered=holds(own, quantile),
        differs=sum(not e.low <= 1 <= e.high for e in given),
        width=float(np.median([e.high / e.low for e in given])) if given else math.nan,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8])
    parser.add_argument("--trials", type=int, nargs="*", default=[3, 5, 10])
    parser.add_argument("--requests", type=int, nargs="*", default=[200, 1000, 4000, 16000])
    parser.add_argument("--sigma", type=float, nargs="*", default=[0.05])
    asked = parser.parse_args()
    print(
        "load trials requests sigma arms   given  ratio covered  quantile covered  says different  high/low", flush=True
    )
    for load in asked.load:
        for trials in asked.trials:
            for requests in asked.requests:
                for sigma in asked.sigma:
                    for same in (False, True):
                        row = coverage(Setting(load, trials, requests, sigma, same), asked.experiments)
                        arms = "A/A" if same else "mix"
                        print(
                            f"{load:4.1f} {trials:6d} {requests:8d} {sigma:5.2f} {arms}   {row.given:6d}"
                            f"  {row.covered:13.1%}  {row.quantile_covered:16.1%}  {row.differs:14d}  {row.width:8.2f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
