"""The rules of a run, each judged on the rows it is about. Pure.

A rule about a time is judged on one value a request (`tenants.sla.judge`), a rule about a share on a count, a rule
about a rate as it is. The implicit rule speaks for the tenants without an error_rate rule of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from tenants import sla
from tenants.measures import ABORT, CUT, FAILED, OK, UNSENT, Floats, Gaps, Mask, Rows
from tenants.sentence import IMPLICIT, MOST_FAILED
from tenants.sla import Rule, RuleResult
from tenants.stretches import broken, stretches


class Measured(NamedTuple):
    """What every rule of a run is judged on."""

    rows: Rows
    gaps: Gaps
    rules: tuple[Rule, ...]
    window_s: float
    interrupted: bool

    def of(self, name: str) -> Mask:
        """The rows of a tenant, or of all."""
        if name == sla.ALL:
            return np.ones(len(self.rows.at), bool)
        code = self.rows.names.index(name) if name in self.rows.names else -1
        rows_of_it: Mask = self.rows.tenant == code
        return rows_of_it

    def counted(self, mine: Mask) -> Mask:
        """Those of `mine` that can fail: not cut, and not left unsent by whoever ended the run."""
        out = [CUT, UNSENT] if self.interrupted else [CUT]
        return mine & ~np.isin(self.rows.outcome, out)

    def failed(self, mine: Mask) -> Mask:
        """Those of `mine` that failed or were never sent."""
        return self.counted(mine) & np.isin(self.rows.outcome, [*FAILED, UNSENT])

    def tokens(self, mine: Mask) -> int:
        """Output tokens of the answers that ended, those that their client aborted included."""
        return int(np.nansum(self.rows.output_tokens[mine & np.isin(self.rows.outcome, [OK, ABORT])]))

    def per_s(self, count: int) -> float:
        """A count as a rate over the measured window."""
        return round(count / self.window_s, 6) if self.window_s > 0 else 0.0


def judge(run: Measured, rule: Rule) -> RuleResult:
    """One rule on the rows it is about."""
    rows, mine = run.rows, run.of(rule.tenant)
    if rule.metric in {"itl", "inter_chunk"}:
        gap_ms, one_token = run.gaps.of([int(code) for code in np.unique(rows.tenant[mine])])
        if len(gap_ms) == 0 or one_token != (rule.metric == "itl"):
            return sla.unjudged(rule)
        of_failed = np.full(int(run.failed(mine).sum()), np.inf)
        return msgspec.structs.replace(sla.judge(rule, np.concatenate([gap_ms, of_failed])), ci=None)
    if rule.q is not None:
        values: Floats = getattr(rows, f"{rule.metric}_ms")
        result = sla.judge(rule, values[mine])
        if result.verdict != sla.FAIL:
            return result
        found = stretches(rows.due_ms[mine] / 1000, values[mine], rule.q)
        return msgspec.structs.replace(result, broken_s=tuple(broken(found, rule.limit, strict=rule.op == "<")))
    n = int(run.counted(mine).sum())
    if rule.metric == "error_rate":
        return sla.judge_share(rule, int(run.failed(mine).sum()), n)
    if rule.metric == "goodput":
        good = good_answers(run, mine)
        met = 0 if good is None else int(good.sum())
        if rule.unit != "share":
            return sla.judge_rate(rule, run.per_s(met), n)
        asked = int((run.counted(mine) & (rows.outcome != ABORT)).sum())
        return sla.judge_share(rule, asked - met, asked)
    done = int((mine & (rows.outcome == OK)).sum())
    return sla.judge_rate(rule, run.per_s(done if rule.metric == "requests_per_s" else run.tokens(mine)), n)


def good_answers(run: Measured, mine: Mask) -> Mask | None:
    """Answers that met every limit of their tenant; None where those tenants have no rule at all."""
    names = {run.rows.names[code] for code in np.unique(run.rows.tenant[mine])}
    about = [rule for rule in run.rules if rule.tenant == sla.ALL or rule.tenant in names]
    if not about:
        return None
    good: Mask = mine & (run.rows.outcome == OK)
    for rule in about:
        if rule.per_request and rule.metric not in {"itl", "inter_chunk"}:
            good &= ~(run.of(rule.tenant) & rule.violated(getattr(run.rows, f"{rule.metric}_ms")))
    return good


def common(run: Measured) -> tuple[RuleResult, ...]:
    """The rules about all tenants together; the implicit one unless `all` has an error_rate rule of its own."""
    own = tuple(judge(run, rule) for rule in run.rules if rule.tenant == sla.ALL)
    with_rate = {rule.tenant for rule in run.rules if rule.metric == "error_rate"}
    return own if sla.ALL in with_rate else (*own, _implicit(run, with_rate))


def _implicit(run: Measured, judged_elsewhere: set[str]) -> RuleResult:
    """More than 1 % failed is a fail, else pass: plain, for the tenants without an error_rate rule of their own."""
    elsewhere = [code for code, name in enumerate(run.rows.names) if name in judged_elsewhere]
    mine = ~np.isin(run.rows.tenant, elsewhere)
    n, bad = int(run.counted(mine).sum()), int(run.failed(mine).sum())
    if n == 0:
        return msgspec.structs.replace(sla.unjudged(IMPLICIT), verdict=sla.PASS if elsewhere else sla.INCONCLUSIVE)
    result = sla.judge_share(IMPLICIT, bad, n)
    verdict = sla.FAIL if bad > MOST_FAILED * n else sla.PASS
    return msgspec.structs.replace(result, ci=None, samples_to_settle=None, verdict=verdict)
