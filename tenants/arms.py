"""The runs of an experiment by arm, and the numbers of each: times, throughput, who was overtaken, what an arm costs.

Every number is pooled over the raw rows of all trials and has an interval of `tenants.bootstrap`. Trials are its units;
where all of them repeat one plan, blocks of due time, the same ones in every arm, say what other arrivals might have
done. A block is sixteen times as long as times to the first token remember (the longest memory of any tenant in any arm
of the mix), between an eighth and a fortieth of the run: requests that waited together had the same queue.

A failed request is +∞ in every time, so no number improves by failing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tenants import bootstrap, quantiles, sla
from tenants.bootstrap import Estimate, Levels, Sample
from tenants.measures import ABORT, FAILED, OK, UNSENT, Floats, Mask, Rows
from tenants.sla import Rule, RuleResult
from tenants.summary import SHOWN, Percentiles
from tenants.tenant import Tenant

ALONE, UNTAGGED, TAGGED = "alone", "untagged", "tagged"
TIMES = ("ttft", "e2e", "tpot")
MANY_ROWS = 20_000


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its interval (null where none is given, `why` says it) and what it rests on."""

    value: float | None
    ci: tuple[float | None, float | None] | None
    n: int | None = None
    infinite: bool = False
    why: str | None = None
    rough: tuple[float | None, float | None] | None = None  # an interval of runs too short to stand up
    trials_to_settle: int | None = None


class ArmNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in an arm, all trials together. `starvation_s`: its longest wait for a first token."""

    trials: int
    planned: int
    ok: int
    failed: int
    ttft_ms: Percentiles
    e2e_ms: Percentiles
    tpot_ms: Percentiles
    output_tokens_per_s: Measured
    inverted_share: Measured
    starvation_s: float | None
    sla: tuple[RuleResult, ...]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the judged arm costs a tenant against the untagged one: ratios, below 1 is less."""

    output_tokens_per_s: Measured
    e2e: dict[str, Measured]


class ArmRun(NamedTuple):
    """One run of an experiment."""

    arm: str
    trial: int
    tenant: str | None  # of the arm alone: who
    rows: Rows
    digest: str
    invalid: tuple[str, ...]  # reasons


class Arms:
    """The runs by arm, cut into blocks, and one set of draws for every number."""

    def __init__(self, runs: Sequence[ArmRun], confidence: float, seed: int) -> None:
        self.confidence = confidence
        parts = {(run.arm, run.tenant) for run in runs}
        by_trial = {trial: [run for run in runs if run.trial == trial] for trial in sorted({run.trial for run in runs})}
        self.trials = [
            trial for trial, held in by_trial.items() if {(run.arm, run.tenant) for run in held} == parts
        ] or list(by_trial)
        self.runs = [run for run in runs if run.trial in self.trials]
        self.names = sorted({name for run in self.runs for name in run.rows.names})
        self.same_plan = (
            len({run.digest for run in self.runs if run.arm == self.runs[0].arm and run.tenant == self.runs[0].tenant})
            == 1
        )
        due = [run.rows.due_ms[~np.isnan(run.rows.due_ms)] for run in self.runs]
        self.begin_ms = min((float(d.min()) for d in due if len(d)), default=0.0)
        self.span_ms = max((float(d.max()) for d in due if len(d)), default=0.0) - self.begin_ms
        self.blocks, self.block_ms = 1, self.span_ms + 1.0
        self.blocks = self._number_of_blocks()
        self.block_ms = max(self.span_ms, 1.0) / self.blocks
        rows = max((len(run.rows.at) for run in self.runs), default=0) * len(self.trials)
        draws = bootstrap.DRAWS if rows < MANY_ROWS else bootstrap.DRAWS // 3
        self.drawn: Levels = bootstrap.levels(
            len(self.trials), self.blocks, same_plan=self.same_plan, seed=seed, draws=draws
        )

    def _number_of_blocks(self) -> int:
        """So many that the longest memory of any tenant in any mix fits into one sixteen times."""
        mixed = {(run.arm, name) for run in self.runs if run.tenant is None for name in run.rows.names}
        counts = []
        for arm, name in sorted(mixed):
            found = self.sample(arm, name, "ttft")
            counts.append(bootstrap.number_of_blocks(len(found.values) // len(self.trials), bootstrap.memory(found)))
        return min(counts, default=bootstrap.FEWEST_BLOCKS)

    def arms_of(self, tenant: str) -> set[str]:
        """Arms that have rows of a tenant."""
        return {run.arm for run in self.runs if tenant in run.rows.names and run.tenant in {None, tenant}}

    def held(self, arm: str, tenant: str) -> list[tuple[Rows, Mask]]:
        """Rows of each trial and which of them are the tenant's."""
        return [
            (run.rows, run.rows.tenant == run.rows.names.index(tenant))
            for run in sorted(self.runs, key=lambda run: run.trial)
            if run.arm == arm and run.tenant in {None, tenant} and tenant in run.rows.names
        ]

    def sample(self, arm: str, tenant: str, metric: str) -> Sample:
        """One tenant's values of a time in an arm."""
        held = self.held(arm, tenant)
        return self.of([getattr(rows, f"{metric}_ms")[mine] for rows, mine in held], arm, tenant)

    def of(self, values: list[Floats], arm: str, tenant: str) -> Sample:
        """Any values of a tenant's rows, one array a trial."""
        due = [np.nan_to_num(rows.due_ms[mine], nan=self.begin_ms) for rows, mine in self.held(arm, tenant)]
        return bootstrap.sample(values, due, begin=self.begin_ms, block=self.block_ms, blocks=self.blocks)

    def too_few(self, sample: Sample, q: float, name: str = "") -> str:
        """Why a sample is too small for an interval of its q-quantile; empty when it is not."""
        return bootstrap.too_few(sample, q, name, same_plan=self.same_plan)

    def ratio(self, upper: Sample, lower: Sample, q: float, names: tuple[str, str]) -> Estimate:
        """Quantile of one arm over that of another."""
        why = self.too_few(upper, q, names[0]) or self.too_few(lower, q, names[1])
        of_upper, of_lower = bootstrap.quantile(upper, q), bootstrap.quantile(lower, q)

        def statistic(counts: bootstrap.Counts) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore"):
                found: Floats = of_upper(counts) / of_lower(counts)
            return found

        return bootstrap.estimate(statistic, self.drawn, log=True, confidence=self.confidence, why=why)


def numbers(work: Arms, tenant: Tenant, arm: str) -> ArmNumbers:
    """All there is to say of a tenant in an arm."""
    name = tenant.name
    held = work.held(arm, name)
    outcome = np.concatenate([rows.outcome[mine] for rows, mine in held])
    times = {metric: work.sample(arm, name, metric) for metric in TIMES}
    waits = times["ttft"].values
    waited = [np.where(np.isinf(rows.ttft_ms), rows.end_ms - rows.due_ms, rows.ttft_ms)[mine] for rows, mine in held]
    longest = np.concatenate(waited) if len(waits) else np.empty(0)
    longest = longest[~np.isnan(longest)]
    return ArmNumbers(
        trials=len(held),
        planned=len(outcome),
        ok=int((outcome == OK).sum()),
        failed=int(np.isin(outcome, [*FAILED, UNSENT]).sum()),
        ttft_ms=_times(work, times["ttft"]),
        e2e_ms=_times(work, times["e2e"]),
        tpot_ms=_times(work, times["tpot"]),
        output_tokens_per_s=measured(_throughput(work, name, arm), len(outcome)),
        inverted_share=measured(_inverted(work, tenant, arm), len(outcome)),
        starvation_s=round(float(longest.max()) / 1e3, 3) if len(longest) else None,
        sla=tuple(
            _judged(held, rule)
            for rule in tenant.slas
            if rule.per_request and rule.metric not in {"itl", "inter_chunk"}
        ),
    )


def _judged(held: list[tuple[Rows, Mask]], rule: Rule) -> RuleResult:
    return sla.judge(rule, np.concatenate([getattr(rows, f"{rule.metric}_ms")[mine] for rows, mine in held]))


def _throughput(work: Arms, name: str, arm: str) -> Estimate:
    tokens = work.of([_tokens(rows)[mine] for rows, mine in work.held(arm, name)], arm, name)
    windows = np.array([_window_s(rows) for rows, _ in work.held(arm, name)])
    made = bootstrap.total(tokens)

    def statistic(counts: bootstrap.Counts) -> Floats:
        span = (counts.mean(axis=2)[:, : len(windows)] * windows).sum(axis=1)
        found: Floats = made(counts) / np.maximum(span, 1e-9)
        return found

    return bootstrap.estimate(statistic, work.drawn, log=True, confidence=work.confidence)


def _tokens(rows: Rows) -> Floats:
    return np.where(np.isin(rows.outcome, [OK, ABORT]), np.nan_to_num(rows.output_tokens), 0.0)


def _window_s(rows: Rows) -> float:
    """As `tenants.summary` has it: from the first due time to the last end."""
    ends, starts = rows.end_ms[~np.isnan(rows.end_ms)], rows.due_ms[~np.isnan(rows.due_ms)]
    return float(ends.max() - starts.min()) / 1e3 if len(ends) and len(starts) else 0.0


def _inverted(work: Arms, tenant: Tenant, arm: str) -> Estimate:
    """Share of requests that a less urgent one overtook: sent later, first token earlier."""
    held = work.held(arm, tenant.name)
    counted = work.of([overtaken(rows, mine).astype(float) for rows, mine in held], arm, tenant.name)
    overtook, all_of_them = bootstrap.total(counted), bootstrap.total(counted, np.ones(len(counted.values)))
    return bootstrap.estimate(
        lambda counts: overtook(counts) / np.maximum(all_of_them(counts), 1e-9), work.drawn, confidence=work.confidence
    )


def overtaken(rows: Rows, mine: Mask) -> Mask:
    """Which of `mine` waited while another tenant's request, sent later, got its first token.

    In an arm without priorities every other tenant counts; else those of a larger rank.
    """
    first = np.where(np.isfinite(rows.ttft_ms), rows.due_ms + rows.ttft_ms, np.inf)
    rank = np.nan_to_num(rows.priority, nan=np.inf)
    own_rank = rank[mine].min() if mine.any() else np.inf
    others = ~mine & ~np.isnan(rows.sent_ms) & ((rank > own_rank) | np.isinf(own_rank))
    sent = rows.sent_ms[others]
    order = np.argsort(sent)
    earliest_after = np.append(np.minimum.accumulate(first[others][order][::-1])[::-1], np.inf)
    at = np.searchsorted(sent[order], rows.sent_ms[mine], side="right")
    found: Mask = earliest_after[at] < first[mine]
    return found


def cost(work: Arms, name: str, arm: str) -> Cost:
    """What an arm costs a tenant against the untagged one."""

    def speed(which: str) -> tuple[bootstrap.Statistic, Floats]:
        held = work.held(which, name)
        made = bootstrap.total(work.of([_tokens(rows)[mine] for rows, mine in held], which, name))
        return made, np.array([_window_s(rows) for rows, _ in held])

    (made, spans), (made_before, spans_before) = speed(arm), speed(UNTAGGED)

    def statistic(counts: bootstrap.Counts) -> Floats:
        weight = counts.mean(axis=2)
        now = made(counts) / (weight[:, : len(spans)] * spans).sum(axis=1)
        before = made_before(counts) / (weight[:, : len(spans_before)] * spans_before).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = now / before
        return found

    now, before = work.sample(arm, name, "e2e"), work.sample(UNTAGGED, name, "e2e")
    throughput = bootstrap.estimate(statistic, work.drawn, log=True, confidence=work.confidence)
    return Cost(
        output_tokens_per_s=measured(throughput, len(now.values)),
        e2e={
            label: measured(work.ratio(now, before, q, (arm, UNTAGGED)), len(now.values))
            for label, q in SHOWN.items()
            if len(now.values) >= quantiles.needed(q)
        },
    )


def _times(work: Arms, sample: Sample) -> Percentiles:
    values: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    infinite = []
    for label, q in SHOWN.items():
        values[label] = intervals[label] = None
        if len(sample.values) < quantiles.needed(q):
            continue
        why = work.too_few(sample, q)
        found = bootstrap.estimate(
            bootstrap.quantile(sample, q), work.drawn, log=True, confidence=work.confidence, why=why
        )
        if math.isinf(found.value):
            infinite.append(label)
            continue
        values[label] = round(found.value, 3)
        if found.ci is not None and math.isfinite(found.ci[1]):
            intervals[label] = (round(found.ci[0], 3), round(found.ci[1], 3))
    return Percentiles(n=len(sample.values), ci=intervals, infinite=tuple(infinite), **values)


def measured(found: Estimate, n: int, settle: int | None = None) -> Measured:
    """A number as it is told."""
    value = None if math.isnan(found.value) or math.isinf(found.value) else round(found.value, 4)
    ci = found.ci
    shown = None if ci is None else (_finite(ci[0]), _finite(ci[1]))
    return Measured(
        value=value,
        ci=shown,
        n=n,
        infinite=math.isinf(found.value),
        why=found.why or None,
        rough=None if found.rough is None else (_finite(found.rough[0]), _finite(found.rough[1])),
        trials_to_settle=settle,
    )


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
