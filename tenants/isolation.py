"""Is a tenant isolated from the others, what does that cost them, and how sure are we. Pure: arms in, verdicts out.

An experiment offers the same plan in several arms (alone, untagged, tagged, capped ...) in several trials. For a
metric m (P95 of TTFT, say) of a tenant, with Q(arm) its quantile over the raw rows of all trials:

    interference ratio   R = Q(tagged) / Q(alone)
    contention           C = Q(untagged) / Q(alone)
    recovered share      s = (Q(untagged) − Q(tagged)) / (Q(untagged) − Q(alone))

each with a 95 % interval of `tenants.bootstrap`, over trials. In order:

    INCONCLUSIVE   a number has no interval, or C's holds 1: there was no contention to be isolated from
    INVERTED       s below 0: the tag harms
    ISOLATED       R's upper end within the tenant's bound (1.25 unless it says otherwise)
    INEFFECTIVE    s includes 0 and stays below 0.2
    LEAKY          R's lower end above the bound, s above 0: it helps and is not enough
    INCONCLUSIVE   else, with the number of trials that would settle it

A failed request is +∞ in every time, so no number improves by failing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from tenants import bootstrap, sla
from tenants.arms import ALONE, TAGGED, UNTAGGED, ArmNumbers, ArmRun, Arms, Cost, Measured, measured, numbers
from tenants.arms import cost as cost_of
from tenants.bootstrap import Estimate, Sample
from tenants.measures import Floats
from tenants.sla import Rule
from tenants.tenant import Tenant

ISOLATED, LEAKY, INEFFECTIVE, INVERTED = "ISOLATED", "LEAKY", "INEFFECTIVE", "INVERTED"
INCONCLUSIVE, INVALID = "INCONCLUSIVE", "INVALID"
WORST_FIRST = (INVALID, INVERTED, INEFFECTIVE, LEAKY, INCONCLUSIVE, ISOLATED)
FAILING = (INVERTED, INEFFECTIVE, LEAKY)

DEFAULT_BOUND = 1.25
SMALL_SHARE = 0.2


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
    work = Arms(runs, confidence, seed)
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
        tenant.name: cost_of(work, tenant.name, arm)
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


def _tenant(work: Arms, tenant: Tenant, bounds: Sequence[Rule], judged: str) -> TenantIsolation:
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
            f"{name} is {INCONCLUSIVE}: the arms {ALONE} and {judged} are needed, there are {', '.join(order)}",
        )
    return TenantIsolation(
        priority=tenant.priority,
        verdict=worst,
        sentence=sentence,
        interference_ratio={metric: effect.interference_ratio for metric, effect in effects.items()},
        recovered_share={m: e.recovered_share for m, e in effects.items() if e.recovered_share is not None},
        by_arm=by_arm,
        arms={arm: numbers(work, tenant, arm) for arm in order},
    )


def _effect(work: Arms, name: str, rule: Rule, arm: str) -> Effect:
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
    longer = max(bootstrap.times_longer(sample, q, same_plan=work.same_plan) for sample in compared)
    missed = ratio.low is not None and ratio.low > rule.limit
    shown = measured(ratio, len(here.values), settle)
    return Effect(
        arm=arm,
        bound=rule.limit,
        interference_ratio=shown,
        contention=None if contention is None else measured(contention, len(alone.values)),
        recovered_share=None if share is None else measured(share, len(here.values)),
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


def _recovered(work: Arms, arms: tuple[Sample, Sample, Sample], q: float, why: str) -> Estimate:
    """(untagged − tagged) / (untagged − alone)."""
    of_untagged, of_here, of_alone = (bootstrap.quantile(arm, q) for arm in arms)

    def statistic(counts: bootstrap.Counts) -> Floats:
        untagged, here, alone = of_untagged(counts), of_here(counts), of_alone(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (untagged - here) / (untagged - alone)
        # untagged +∞: a finite tagged arm recovers all of it, an infinite one nothing
        limit = np.where(np.isinf(here), 0.0, 1.0)
        return np.where(np.isinf(untagged) & np.isfinite(alone), limit, np.where(np.isinf(here), -np.inf, found))

    def minus(lower: bootstrap.Statistic) -> bootstrap.Statistic:
        def difference(counts: bootstrap.Counts) -> Floats:
            with np.errstate(invalid="ignore"):
                found: Floats = of_untagged(counts) - lower(counts)
            return found

        return difference

    of_one = bootstrap.linearised(minus(of_here), minus(of_alone), work.drawn)
    return bootstrap.estimate(statistic, work.drawn, confidence=work.confidence, why=why, of_one=of_one)


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
    if contention is not None and (contention.ci or contention.rough):
        parts.append(f"untagged {_times_text(contention)}")
    if share is not None and (share.ci or share.rough):
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
    return f"{found.value:.2f} times" + _ends(found, "{:.2f}")


def _share_text(found: Estimate) -> str:
    return f"{found.value:.0%}" + _ends(found, "{:.0%}")


def _ends(found: Estimate, form: str) -> str:
    """The interval, or the rough one of runs too short, which is said to be that."""
    ends = found.ci or found.rough
    if ends is None:
        return ""
    low, high = (form.format(end) for end in ends)
    return f" [{low}, {high}]" if found.ci else f" (roughly {low} to {high})"


def _sentence(found: dict[str, TenantIsolation], verdict: str, reasons: Sequence[str]) -> str:
    if reasons:
        return f"INVALID: {reasons[0]}"
    return next((part.sentence for part in found.values() if part.verdict == verdict and part.sentence), verdict)
