"""Is a tenant isolated from the others, what does that cost them, and how sure are we. Pure: arms in, verdicts out.

An experiment offers the same plan in several arms (alone, untagged, tagged, capped ...) in several trials. For a
metric m (P95 of TTFT, say) of a tenant, with Q(arm) its quantile over the raw rows of all trials:

    interference ratio   R = Q(tagged) / Q(alone)
    contention           C = Q(untagged) / Q(alone)
    recovered share      s = (Q(untagged) − Q(tagged)) / (Q(untagged) − Q(alone))

each with a 95 % interval of `tenants.bootstrap`: trials are the units, blocks of due time the second level. In order:

    INCONCLUSIVE   a number has no interval, or C's holds 1: there was no contention to be isolated from
    INVERTED       s below 0: the tag harms
    ISOLATED       R's upper end within the tenant's bound (1.25 unless it says otherwise)
    INEFFECTIVE    s includes 0 and stays below 0.2
    LEAKY          R's lower end above the bound, s above 0: it helps and is not enough
    INCONCLUSIVE   else, with the number of trials that would settle it

A failed request is +∞ in every time, so no number improves by failing. Length of a block: four times the P95 of how
long requests stay, between an eighth and a fortieth of the run: requests that stayed together had the same queue.
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
ISOLATED, LEAKY, INEFFECTIVE, INVERTED = "ISOLATED", "LEAKY", "INEFFECTIVE", "INVERTED"
INCONCLUSIVE, INVALID = "INCONCLUSIVE", "INVALID"
WORST_FIRST = (INVALID, INVERTED, INEFFECTIVE, LEAKY, INCONCLUSIVE, ISOLATED)
FAILING = (INVERTED, INEFFECTIVE, LEAKY)

DEFAULT_BOUND = 1.25
SMALL_SHARE = 0.2
TIMES = ("ttft", "e2e", "tpot")
STAYS, FEWEST_BLOCKS, MOST_BLOCKS = 4.0, 8, 40
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


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm does for a tenant's metric."""

    arm: str
    bound: float
    interference_ratio: Measured
    contention: Measured | None
    recovered_share: Measured | None
    verdict: str
    sentence: str
    bound_missed: bool


class TenantIsolation(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's part. `verdict` is null for tenants that nobody promised isolation."""

    priority: int | None
    verdict: str | None
    sentence: str | None
    interference_ratio: dict[str, Measured]
    recovered_share: dict[str, Measured]
    by_arm: dict[str, dict[str, Effect]]  # arm → metric
    arms: dict[str, ArmNumbers]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the judged arm costs a tenant against the untagged one: ratios, below 1 is less."""

    output_tokens_per_s: Measured
    e2e: dict[str, Measured]


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """The whole judgement, without the blocking matrix (which needs chunk times)."""

    arm: str
    trials: int
    block_s: float
    blocks: int
    same_plan: bool
    tenants: dict[str, TenantIsolation]
    cost: dict[str, Cost]
    reasons: tuple[str, ...]
    sentence: str
    verdict: str


class ArmRun(NamedTuple):
    """One run of an experiment."""

    arm: str
    trial: int
    tenant: str | None  # of the arm alone: who
    rows: Rows
    digest: str
    invalid: tuple[str, ...]  # reasons


def judge(
    runs: Sequence[ArmRun], tenants: Sequence[Tenant], *, arm: str = TAGGED, confidence: float = 0.95, seed: int = 0
) -> Isolation:
    """Judge an experiment.

    Args:
        runs: of all arms and trials; trials that lack an arm are left out.
        tenants: with priorities and isolation bounds; without any, the most urgent tenant is judged by the default.
        arm: which one is held against the bounds.
        confidence: of every interval.
        seed: of the draws.
    """
    work = _Experiment(runs, confidence, seed)
    promised = _promises(tenants)
    found = {
        tenant.name: _tenant(work, tenant, promised.get(tenant.name, ()), arm)
        for tenant in tenants
        if tenant.name in work.names
    }
    reasons = tuple(dict.fromkeys(f"{run.arm}, trial {run.trial}: {why}" for run in runs for why in run.invalid))
    verdicts = [part.verdict for part in found.values() if part.verdict is not None]
    verdict = INVALID if reasons else next((v for v in WORST_FIRST if v in verdicts), INCONCLUSIVE)
    cost = {
        tenant.name: _cost(work, tenant.name, arm)
        for tenant in tenants
        if tenant.name not in promised and {arm, UNTAGGED} <= work.arms_of(tenant.name)
    }
    return Isolation(
        arm=arm,
        trials=len(work.trials),
        block_s=round(work.block_ms / 1e3, 3),
        blocks=work.blocks,
        same_plan=work.same_plan,
        tenants=found,
        cost=cost,
        reasons=reasons,
        sentence=_sentence(found, verdict, reasons),
        verdict=verdict,
    )


def _promises(tenants: Sequence[Tenant]) -> dict[str, tuple[Rule, ...]]:
    """Tenant → its bounds; the default for the most urgent where nobody has any."""
    bounds = {tenant.name: tenant.bounds for tenant in tenants if tenant.bounds}
    if bounds:
        return bounds
    ranked = [tenant for tenant in tenants if tenant.priority is not None]
    first = min((tenant.priority for tenant in ranked if tenant.priority is not None), default=None)
    return {
        t.name: (sla.parse(f"{t.name}: ttft_p95 <= {DEFAULT_BOUND}x alone"),) for t in ranked if t.priority == first
    }


class _Experiment:
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
        self.blocks = self._number_of_blocks()
        self.block_ms = max(self.span_ms, 1.0) / self.blocks
        rows = max((len(run.rows.at) for run in self.runs), default=0) * len(self.trials)
        draws = bootstrap.DRAWS if rows < MANY_ROWS else bootstrap.DRAWS // 3
        self.drawn: Levels = bootstrap.levels(
            len(self.trials), self.blocks, same_plan=self.same_plan, seed=seed, draws=draws
        )

    def _number_of_blocks(self) -> int:
        mixed = [run.rows for run in self.runs if run.tenant is None] or [run.rows for run in self.runs]
        stays = np.concatenate([rows.e2e_ms for rows in mixed]) if mixed else np.empty(0)
        stays = stays[np.isfinite(stays)]
        if len(stays) == 0 or self.span_ms <= 0:
            return FEWEST_BLOCKS
        length = STAYS * quantiles.quantile(stays, 0.95)
        return int(np.clip(self.span_ms // max(length, 1e-9), FEWEST_BLOCKS, MOST_BLOCKS))

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

    def ratio(self, upper: Sample, lower: Sample, q: float, names: tuple[str, str]) -> Estimate:
        """Quantile of one arm over that of another."""
        why = bootstrap.too_few(upper, q, names[0]) or bootstrap.too_few(lower, q, names[1])
        of_upper, of_lower = bootstrap.quantile(upper, q), bootstrap.quantile(lower, q)

        def statistic(counts: bootstrap.Counts) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore"):
                found: Floats = of_upper(counts) / of_lower(counts)
            return found

        return bootstrap.estimate(statistic, self.drawn, log=True, confidence=self.confidence, why=why)


def _tenant(work: _Experiment, tenant: Tenant, bounds: Sequence[Rule], judged: str) -> TenantIsolation:
    name = tenant.name
    arms = work.arms_of(name)
    order = [arm for arm in dict.fromkeys(run.arm for run in work.runs) if arm in arms]
    by_arm = {
        arm: {rule.name: _effect(work, name, rule, arm) for rule in bounds}
        for arm in order
        if arm not in {ALONE, UNTAGGED} and ALONE in arms
    }
    effects = by_arm.get(judged, {})
    verdicts = [effect.verdict for effect in effects.values()]
    worst = next((v for v in WORST_FIRST if v in verdicts), None)
    sentence = next((effect.sentence for effect in effects.values() if effect.verdict == worst), None)
    if bounds and worst is None:
        worst, sentence = (
            INCONCLUSIVE,
            f"{name}: the arms {ALONE} and {judged} are needed, there are {', '.join(order)}",
        )
    return TenantIsolation(
        priority=tenant.priority,
        verdict=worst,
        sentence=sentence,
        interference_ratio={metric: effect.interference_ratio for metric, effect in effects.items()},
        recovered_share={m: e.recovered_share for m, e in effects.items() if e.recovered_share is not None},
        by_arm=by_arm,
        arms={arm: _numbers(work, tenant, arm) for arm in order},
    )


def _effect(work: _Experiment, name: str, rule: Rule, arm: str) -> Effect:
    """What an arm does for one metric of a tenant, against alone and untagged."""
    q, metric = rule.q or 0.95, rule.metric
    here, alone = work.sample(arm, name, metric), work.sample(ALONE, name, metric)
    ratio = work.ratio(here, alone, q, (arm, ALONE))
    contention = share = None
    untagged = alone
    if UNTAGGED in work.arms_of(name):
        untagged = work.sample(UNTAGGED, name, metric)
        contention = work.ratio(untagged, alone, q, (UNTAGGED, ALONE))
        share = _recovered(work, (untagged, here, alone), q, ratio.why or contention.why)
    verdict, why = decide(ratio, contention, share, rule.limit)
    settle = None
    if verdict == INCONCLUSIVE:
        settle = bootstrap.trials_to_settle(ratio, rule.limit, confidence=work.confidence)
    compared = [here, alone] if contention is None else [here, alone, untagged]
    longer = max(bootstrap.times_longer(sample, q) for sample in compared)
    missed = ratio.low is not None and ratio.low > rule.limit
    measured = _measured(ratio, len(here.values), settle)
    return Effect(
        arm=arm,
        bound=rule.limit,
        interference_ratio=measured,
        contention=None if contention is None else _measured(contention, len(alone.values)),
        recovered_share=None if share is None else _measured(share, len(here.values)),
        verdict=verdict,
        sentence=_explain(
            (name, rule.name, arm),
            rule.limit,
            (ratio, contention, share),
            (verdict, why, settle),
            (len(here.values), longer),
        ),
        bound_missed=missed,
    )


def _recovered(work: _Experiment, arms: tuple[Sample, Sample, Sample], q: float, why: str) -> Estimate:
    """(untagged − tagged) / (untagged − alone)."""
    of_untagged, of_here, of_alone = (bootstrap.quantile(arm, q) for arm in arms)

    def statistic(counts: bootstrap.Counts) -> Floats:
        untagged, here, alone = of_untagged(counts), of_here(counts), of_alone(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (untagged - here) / (untagged - alone)
        # untagged +∞: a finite tagged arm recovers all of it, an infinite one nothing
        limit = np.where(np.isinf(here), 0.0, 1.0)
        return np.where(np.isinf(untagged) & np.isfinite(alone), limit, np.where(np.isinf(here), -np.inf, found))

    return bootstrap.estimate(statistic, work.drawn, confidence=work.confidence, why=why)


def decide(ratio: Estimate, contention: Estimate | None, share: Estimate | None, bound: float) -> tuple[str, str]:
    """The verdict and why; the rules stand in the module's docstring."""
    if ratio.ci is None:
        return INCONCLUSIVE, ratio.why
    if math.isinf(ratio.value) and (contention is None or not math.isinf(contention.value)):
        return LEAKY, "more of its requests failed than the quantile leaves out"
    low, high = ratio.ci
    if contention is not None:
        if contention.low is None:
            return INCONCLUSIVE, contention.why
        if contention.low <= 1:
            return INCONCLUSIVE, "no contention: untagged is not clearly slower than alone"
    if share is not None and share.high is not None and share.high < 0:
        return INVERTED, "the tag makes it slower than no tag"
    if high <= bound:
        return ISOLATED, ""
    if share is not None and share.low is not None and share.high is not None:
        if share.low <= 0 <= share.high < SMALL_SHARE:
            return INEFFECTIVE, "the tag has no effect"
        if low > bound and share.low > 0:
            return LEAKY, ""
        if low > bound:
            return INCONCLUSIVE, "the bound is missed; whether the tag helps is open"
    elif low > bound:
        return LEAKY, ""
    return INCONCLUSIVE, "the interval holds the bound"


def _numbers(work: _Experiment, tenant: Tenant, arm: str) -> ArmNumbers:
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
        output_tokens_per_s=_measured(_throughput(work, name, arm), len(outcome)),
        inverted_share=_measured(_inverted(work, tenant, arm), len(outcome)),
        starvation_s=round(float(longest.max()) / 1e3, 3) if len(longest) else None,
        sla=tuple(
            _judged(held, rule)
            for rule in tenant.slas
            if rule.per_request and rule.metric not in {"itl", "inter_chunk"}
        ),
    )


def _judged(held: list[tuple[Rows, Mask]], rule: Rule) -> RuleResult:
    return sla.judge(rule, np.concatenate([getattr(rows, f"{rule.metric}_ms")[mine] for rows, mine in held]))


def _throughput(work: _Experiment, name: str, arm: str) -> Estimate:
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


def _inverted(work: _Experiment, tenant: Tenant, arm: str) -> Estimate:
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


def _cost(work: _Experiment, name: str, arm: str) -> Cost:
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
        output_tokens_per_s=_measured(throughput, len(now.values)),
        e2e={
            label: _measured(work.ratio(now, before, q, (arm, UNTAGGED)), len(now.values))
            for label, q in SHOWN.items()
            if len(now.values) >= quantiles.needed(q)
        },
    )


def _times(work: _Experiment, sample: Sample) -> Percentiles:
    values: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float] | None] = {}
    infinite = []
    for label, q in SHOWN.items():
        values[label] = intervals[label] = None
        if len(sample.values) < quantiles.needed(q):
            continue
        why = bootstrap.too_few(sample, q)
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


def _measured(found: Estimate, n: int, settle: int | None = None) -> Measured:
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


def _explain(
    what: tuple[str, str, str],
    bound: float,
    numbers: tuple[Estimate, Estimate | None, Estimate | None],
    outcome: tuple[str, str, int | None],
    size: tuple[int, float],
) -> str:
    """The sentence that explains a verdict."""
    name, metric, arm = what
    ratio, contention, share = numbers
    verdict, why, settle = outcome
    n, longer = size
    parts = [f"{name} is {verdict}: {metric} {arm} is {_times_text(ratio)} what it is alone (bound {bound:g}x)"]
    if contention is not None and contention.ci is not None:
        parts.append(f"untagged {_times_text(contention)}")
    if share is not None and share.ci is not None:
        parts.append(f"{_share_text(share)} of the difference recovered")
    text = ", ".join(parts)
    if why:
        text += f"; {why}"
    if ratio.rough is not None and longer > 1:
        text += (
            f"; runs about {longer:.1f} times as long ({math.ceil(longer * n / ratio.trials):,} requests each) would do"
        )
    elif settle is not None and settle > ratio.trials:
        text += f"; about {settle} trials ({settle * n // max(1, ratio.trials):,} requests an arm) would settle it"
    return text


def _times_text(found: Estimate) -> str:
    if math.isinf(found.value):
        return "∞ times"
    shown = f"{found.value:.2f} times"
    return shown if found.ci is None else f"{shown} [{found.ci[0]:.2f}, {found.ci[1]:.2f}]"


def _share_text(found: Estimate) -> str:
    low, high = found.ci or (math.nan, math.nan)
    return f"{found.value:.0%} [{low:.0%}, {high:.0%}]"


def _sentence(found: dict[str, TenantIsolation], verdict: str, reasons: Sequence[str]) -> str:
    if reasons:
        return f"INVALID: {reasons[0]}"
    return next((part.sentence for part in found.values() if part.verdict == verdict and part.sentence), verdict)
