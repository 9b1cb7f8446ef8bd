"""How often an interval holds the truth, on queues whose truth is known.

Two tenants share a single server: Poisson arrivals, exponential services of mean 1, first come first served. The urgent
tenant sends 60 % of the load ρ. Three arms see the same arrivals and services:

    untagged   everybody                      its time in system is exponential with rate 1 − ρ
    capped     every other request of the less urgent tenant goes elsewhere          1 − 0.8 ρ
    alone      the urgent tenant                                                     1 − 0.6 ρ

so every quantile, ratio and recovered share is known exactly. A fourth is `untagged` once more, with the same arrivals
and services of its own: the A/A experiment. Each run of each arm is slowed or sped up as a whole by its own factor,
exp(N(0, σ)), as runs of real servers differ.

All experiments of a setting are worked out at once (Lindley's recursion as a cumulative sum); `by_hand` takes the
public functions of tenants.bootstrap instead, and the first experiments of every setting must agree with it. Where all
trials repeat one plan, intervals need drawn blocks, and every experiment goes through the public functions.

python -m benchmarks.coverage [--experiments 2000] [--seed 20261201] [--write docs/isolation.md]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime as dt
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenants import bootstrap, quantiles

Floats = NDArray[np.float64]

ARMS = ("untagged", "capped", "alone", "again")
LOADED = {"untagged": 1.0, "capped": 0.8, "alone": 0.6, "again": 1.0}  # part of the load that each arm carries
SHARE = LOADED["alone"]
Q = 0.95
CUSTOMERS_AT_ONCE = 2_000_000
RELAXATIONS = 10  # warm-up, in relaxation times of the queue, 1 / (1 − √ρ)² (Cohen 1982, section II.2.1)
FEW = 100  # intervals, of which no share is told
CHECKED = 2  # experiments of each setting that are also worked out by the public functions
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"


class Setting(NamedTuple):
    """One row of the table."""

    load: float
    trials: int
    requests: int  # of the urgent tenant in a run
    sigma: float = 0.05
    same_plan: bool = False  # all trials repeat the arrivals and services of the first


class Found(NamedTuple):
    """Intervals of many experiments; NaN where none is given. Each (experiments, 2)."""

    ratio: Floats  # untagged / alone
    quantile: Floats  # untagged
    recovered: Floats  # (untagged − capped) / (untagged − alone)
    identical: Floats  # untagged / again


def truth(load: float) -> tuple[float, float, float, float]:
    """What the four intervals of `Found` should hold."""
    untagged, capped, alone = (-math.log(1 - Q) / (1 - load * LOADED[arm]) for arm in ("untagged", "capped", "alone"))
    return untagged / alone, untagged, (untagged - capped) / (untagged - alone), 1.0


def times_in_system(gaps: Floats, services: Floats) -> Floats:
    """Lindley: waiting + service of each customer, along the last axis."""
    steps = np.zeros_like(services)
    steps[:, 1:] = services[:, :-1] - gaps[:, 1:]
    walk = np.cumsum(steps, axis=1)
    return walk - np.minimum.accumulate(walk, axis=1) + services


def runs(setting: Setting, count: int, rng: np.random.Generator) -> Floats:
    """(arms, runs, requests): times in system of the urgent tenant in stationarity, before the runs' own factors."""
    n = setting.requests
    warm = math.ceil(RELAXATIONS / (1 - math.sqrt(setting.load)) ** 2)
    total = warm + math.ceil((n + 6 * math.sqrt(n)) / SHARE)
    gaps = rng.exponential(1 / setting.load, (count, total))
    services, others = rng.exponential(1.0, (2, count, total))
    kind = rng.random((count, total))
    urgent = kind < SHARE
    kept = np.stack([np.flatnonzero(row[warm:])[:n] + warm for row in urgent])
    # a customer who brings no work is as good as absent
    work = {
        "untagged": services,
        "capped": np.where(kind < LOADED["capped"], services, 0.0),
        "alone": np.where(urgent, services, 0.0),
        "again": others,
    }
    return np.stack([np.take_along_axis(times_in_system(gaps, work[arm]), kept, axis=1) for arm in ARMS])


def experiments(setting: Setting, count: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Chunks of (arms, experiments, trials, requests), times in system."""
    plans = 1 if setting.same_plan else setting.trials
    at_once = max(1, int(CUSTOMERS_AT_ONCE / (setting.requests / SHARE + 500) / plans))
    while count > 0:
        now = min(count, at_once)
        times = runs(setting, now * plans, rng).reshape(len(ARMS), now, plans, setting.requests)
        yield times * np.exp(rng.normal(0, setting.sigma, (len(ARMS), now, setting.trials, 1)))
        count -= now


def quantile(values: Floats) -> Floats:
    """Along the last axis."""
    k = quantiles.rank(values.shape[-1], Q)
    found: Floats = np.partition(values, k, axis=-1)[..., k]
    return found


def worth(times: Floats) -> Floats:
    """Independent requests a run is worth, for (experiments, trials, requests): `bootstrap.memory`, all at once."""
    n = times.shape[-1]
    ranks = np.empty(times.shape)
    np.put_along_axis(ranks, times.argsort(axis=-1), np.arange(n) + 0.5 - n / 2, axis=-1)
    power = (np.abs(np.fft.rfft(ranks, 2 * n, axis=-1)) ** 2).sum(axis=1)
    covariance = np.fft.irfft(power, axis=-1)[:, :n]
    summed = 2 * np.cumsum(covariance / covariance[:, :1], axis=1) - 1
    wide = np.arange(n) >= bootstrap.WINDOW * np.maximum(summed, 1.0)
    last = np.where(wide.any(axis=1), wide.argmax(axis=1), np.abs(summed).argmax(axis=1))
    memory: Floats = np.maximum(1.0, summed[np.arange(len(summed)), last])
    return n / memory


def at_once(times: Floats) -> Found:
    """All experiments of a chunk, (arms, experiments, trials, requests), as `bootstrap.estimate` has each."""
    trials = times.shape[2]
    enough = {arm: worth(t) * (1 - Q) >= bootstrap.ENOUGH_BEYOND for arm, t in zip(ARMS, times, strict=True)}
    one = dict(zip(ARMS, quantile(times), strict=True))
    whole = dict(zip(ARMS, quantile(times.reshape(*times.shape[:2], -1)), strict=True))
    t = bootstrap.students_t(trials - 1, bootstrap.CONFIDENCE)

    def interval(value: Floats, alone: Floats, arms: tuple[str, ...]) -> Floats:
        half = t * alone.std(axis=1, ddof=1) / math.sqrt(trials)
        given = np.all([enough[arm] for arm in arms], axis=0)
        return np.where(given[:, None], np.stack([value - half, value + half], axis=1), np.nan)

    def ratio(upper: str, lower: str) -> Floats:
        value, alone = np.log(whole[upper] / whole[lower]), np.log(one[upper] / one[lower])
        return np.exp(interval(value, alone, (upper, lower)))

    part, all_of_it = whole["untagged"] - whole["capped"], whole["untagged"] - whole["alone"]
    recovered = part / all_of_it
    residual = one["untagged"] - one["capped"] - recovered[:, None] * (one["untagged"] - one["alone"])
    return Found(
        ratio("untagged", "alone"),
        np.exp(interval(np.log(whole["untagged"]), np.log(one["untagged"]), ("untagged",))),
        interval(recovered, residual / all_of_it[:, None], ("untagged", "capped", "alone")),
        ratio("untagged", "again"),
    )


def by_hand(times: Floats, *, same_plan: bool, seed: int = 0) -> Found:
    """One experiment, (arms, trials, requests), by the public functions and nothing else."""
    _, trials, n = times.shape
    due = [np.arange(n, dtype=np.float64)] * trials
    samples = {}
    blocks = bootstrap.number_of_blocks(
        n, max(bootstrap.memory(bootstrap.sample(list(arm), due, begin=0.0, block=n, blocks=1)) for arm in times)
    )
    for arm, values in zip(ARMS, times, strict=True):
        samples[arm] = bootstrap.sample(list(values), due, begin=0.0, block=n / blocks, blocks=blocks)
    drawn = bootstrap.levels(trials, blocks, same_plan=same_plan, seed=seed)
    of = {arm: bootstrap.quantile(samples[arm], Q) for arm in ARMS}

    def ends(found: bootstrap.Estimate) -> Floats:
        return np.array([found.ci or (math.nan, math.nan)])

    def short(*arms: str) -> str:
        return next(filter(None, (bootstrap.too_few(samples[arm], Q, arm, same_plan=same_plan) for arm in arms)), "")

    def ratio(upper: str, lower: str) -> Floats:
        why = short(upper, lower)
        return ends(bootstrap.estimate(lambda c: of[upper](c) / of[lower](c), drawn, log=True, why=why))

    def minus(lower: str) -> bootstrap.Statistic:
        return lambda counts: of["untagged"](counts) - of[lower](counts)

    part, whole = minus("capped"), minus("alone")
    return Found(
        ratio("untagged", "alone"),
        ends(bootstrap.estimate(of["untagged"], drawn, log=True, why=short("untagged"))),
        ends(
            bootstrap.estimate(
                lambda counts: part(counts) / whole(counts),
                drawn,
                why=short("untagged", "capped", "alone"),
                of_one=bootstrap.linearised(part, whole, drawn),
            )
        ),
        ratio("untagged", "again"),
    )


def study(setting: Setting, count: int, seed: int, checked: int = CHECKED) -> Found:
    """Many experiments of one setting.

    Raises:
        AssertionError: the cheap way and the public functions do not agree.
    """
    key = [seed, round(setting.load * 100), setting.trials, setting.requests, round(setting.sigma * 1000)]
    rng = np.random.default_rng([*key, setting.same_plan])
    parts: list[Found] = []
    for chunk in experiments(setting, count, rng):
        if setting.same_plan:
            parts += [by_hand(chunk[:, i], same_plan=True, seed=len(parts) + i) for i in range(chunk.shape[1])]
            continue
        found = at_once(chunk)
        for i in range(min(checked, chunk.shape[1]) if not parts else 0):
            for cheap, public in zip(found, by_hand(chunk[:, i], same_plan=False), strict=True):
                np.testing.assert_allclose(cheap[i], public[0], rtol=1e-9)
        parts.append(found)
    return Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def covered(intervals: Floats, value: float) -> tuple[int, int]:
    """(how many intervals hold the value, how many there are)."""
    given = intervals[~np.isnan(intervals[:, 0])]
    return int(((given[:, 0] <= value) & (value <= given[:, 1])).sum()), len(given)


def row(setting: Setting, found: Found) -> str:
    """One line of the table."""
    ratio, quantile_, recovered, identical = (
        covered(intervals, value) for intervals, value in zip(found, truth(setting.load), strict=True)
    )
    given = found.ratio[~np.isnan(found.ratio[:, 0])]
    width = f"{np.median(given[:, 1] / given[:, 0]):.2f}" if len(given) else ""
    different = f"{identical[1] - identical[0]:,} of {identical[1]:,}" if identical[1] else "none given"
    cells = (
        f"{setting.load:g}",
        f"{setting.trials}",
        f"{setting.requests:,}",
        f"{setting.sigma:g}",
        f"{len(given):,} of {len(found.ratio):,}",
        _share(*ratio, interval=True),
        _share(*quantile_),
        _share(*recovered),
        width,
        different,
    )
    return "| " + " | ".join(cells) + " |"


def _share(hits: int, of: int, *, interval: bool = False) -> str:
    """``94.8 % (93.7 to 95.7)``, with the exact 95 % interval of the share; few say little and are only counted."""
    if of < FEW:
        return f"{hits} of {of}" if of else ""
    low, high = quantiles.clopper_pearson(hits, of, 0.975)
    return f"{hits / of:.1%}".replace("%", " %") + (f" ({low * 100:.1f} to {high * 100:.1f})" if interval else "")


HEAD = (
    "| load | trials | requests a run | σ | ratio's interval given | it covers | quantile's covers "
    "| recovered share's covers | width (high / low) | identical arms said to differ |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def _line(setting: Setting, count: int, seed: int) -> str:
    line = row(setting, study(setting, count, seed))
    print(line, file=sys.stderr, flush=True)
    return line


def table(settings: list[Setting], count: int, seed: int, workers: int = 1) -> list[str]:
    """Lines of Markdown; each also goes to stderr as it is found."""
    several = len(settings)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        return [*HEAD.split("\n"), *pool.map(_line, settings, [count] * several, [seed] * several)]


OWN_ARRIVALS = [
    *(Setting(load, trials, n) for load in (0.5, 0.8) for trials in (3, 5, 10) for n in (200, 1000, 2000, 4000)),
    *(Setting(0.8, trials, 16_000) for trials in (3, 5)),
    *(Setting(load, 3, n, sigma) for load, n in ((0.5, 1000), (0.8, 4000)) for sigma in (0.0, 0.15)),
]
ONE_PLAN = [
    Setting(load, trials, n, 0.05, same_plan=True)
    for load, lengths in ((0.5, (1000, 4000)), (0.8, (4000, 16_000)))
    for n in lengths
    for trials in (3, 5)
]


def main() -> None:
    """Print the tables, or put them where the document has its markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000, help="a row")
    parser.add_argument("--repeats", type=int, default=600, help="a row, where trials repeat one plan")
    parser.add_argument("--seed", type=int, default=20261201)
    parser.add_argument("--workers", type=int, default=1, help="processes; the numbers do not depend on it")
    parser.add_argument("--write", type=Path, help="a document with the markers")
    asked = parser.parse_args()
    words = f"--experiments {asked.experiments} --repeats {asked.repeats} --seed {asked.seed}"
    today = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"
    text = "\n".join(
        [
            f"`python -m benchmarks.coverage {words}`, {today}. In brackets: the 95 % interval of the share covered.",
            "",
            f"Each trial has arrivals of its own, {asked.experiments:,} experiments a row:",
            "",
            *table(OWN_ARRIVALS, asked.experiments, asked.seed, asked.workers),
            "",
            f"All trials repeat one plan, {asked.repeats:,} experiments a row:",
            "",
            *table(ONE_PLAN, asked.repeats, asked.seed, asked.workers),
        ]
    )
    if asked.write is None:
        print(text)
        return
    before, _, rest = asked.write.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        parser.error(f"{asked.write} has no {BEGIN} ... {END}")
    asked.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
