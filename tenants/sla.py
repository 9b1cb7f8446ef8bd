"""What was promised to a tenant, and whether a run proves it kept or broken.

Grammar, one rule a text:

    [TENANT:] METRIC OP LIMIT            risk: ttft_p95 < 800ms     summary: goodput > 95%     all: error_rate < 1%
    [TENANT:] METRIC OP FACTORx alone    risk: ttft_p95 <= 1.25x alone              (an isolation bound: needs arms)

    METRIC   ttft_pNN ttft_sent_pNN tpot_pNN itl_pNN inter_chunk_pNN e2e_pNN held_pNN     a time: ms or s
             error_rate                                                                   a share: %
             goodput                                                                      a share (%) or a rate (rps)
             requests_per_s, output_tokens_per_s                                          rps, tok/s
    OP       < <= for times, ratios and error_rate; > >= for goodput and rates
    TENANT   a name, or `all` for every tenant's requests together

**Verdict.** "P95 < 800 ms" says that at most 5 % of the requests may take 800 ms or longer. So the rule is judged
on the number of violations k of n: *pass* where the exact one-sided 95 % upper bound of their share is within 5 %,
*fail* where the lower bound is above it, else *inconclusive* (`tenants.quantiles`). Without samples it is
inconclusive, never pass. A failed request violates every limit on a time. Rates have no sample size; they are
compared as they are.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tenants import quantiles
from traces import units

ALL = "all"
PASS, FAIL, INCONCLUSIVE, INVALID = "pass", "fail", "inconclusive", "invalid"
WORST_FIRST = (INVALID, FAIL, INCONCLUSIVE, PASS)

TIMES = ("ttft", "ttft_sent", "tpot", "itl", "inter_chunk", "e2e", "held")
SHARES = ("error_rate", "goodput")
RATES = {"goodput": "rps", "requests_per_s": "rps", "output_tokens_per_s": "tokens_per_s"}
TWO_SIDED = (1 + quantiles.CONFIDENCE) / 2  # both one-sided bounds at 97.5 % are the two-sided 95 % interval
EXAMPLE = "'risk: ttft_p95 < 800ms'"

_RULE = re.compile(
    r"(?:(?P<tenant>[^:\s]+)\s*:\s*)?(?P<metric>[A-Za-z0-9_.]+)\s*(?P<op><=|>=|<|>)\s*(?P<limit>\S+(?:\s\S+)?)"
)
_TIME = re.compile(r"([a-z0-9_]+?)_p(\d{1,2}(?:\.\d+)?)")
_RATIO = re.compile(r"(\d+(?:\.\d+)?)x\s+(alone)")
_NUMBER_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ%/]*)")
_SAME_AS = {
    "goodput_rps": "goodput",
    "failed": "error_rate",
    "errors": "error_rate",
    "tokens_per_s": "output_tokens_per_s",
}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One promise. `limit` is in `unit`: ms, share (0 to 1), rps, tokens_per_s, or x (times what it is alone)."""

    tenant: str
    metric: str
    q: float | None  # the quantile of a time, 0.95 for P95; None for shares and rates
    op: str
    limit: float
    unit: str
    against: str | None = None  # "alone": an isolation bound, judged over the arms of an experiment

    @property
    def text(self) -> str:
        """The rule as a person writes it; parses back to the same rule."""
        return f"{self.tenant}: {self.name} {self.op} {self.limit_text}"

    @property
    def name(self) -> str:
        """The metric with its quantile: ``ttft_p95``."""
        return self.metric if self.q is None else f"{self.metric}_p{_plain(self.q * 100)}"

    @property
    def limit_text(self) -> str:
        """The limit with its unit: ``800ms``, ``30s``, ``1%``, ``1.25x alone``."""
        if self.unit == "ms":
            whole_s = self.limit >= 1000 and self.limit % 1000 == 0
            return f"{_plain(self.limit / 1000)}s" if whole_s else f"{_plain(self.limit)}ms"
        if self.unit == "share":
            return f"{_plain(self.limit * 100)}%"
        if self.unit == "x":
            return f"{_plain(self.limit)}x {self.against}"
        return f"{_plain(self.limit)}{'rps' if self.unit == 'rps' else 'tok/s'}"

    @property
    def is_bound(self) -> bool:
        """Whether it compares with another arm, so that one run cannot judge it."""
        return self.against is not None

    @property
    def per_request(self) -> bool:
        """Whether a single request can meet or miss it (goodput counts those)."""
        return self.q is not None and not self.is_bound

    @property
    def allowed_share(self) -> float | None:
        """The share of requests that may violate it; None for rates and bounds."""
        if self.unit == "share":
            return self.limit if self.metric == "error_rate" else 1 - self.limit
        return None if self.q is None or self.is_bound else 1 - self.q

    def violated(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which values break the limit; a value that did not happen (NaN) breaks nothing."""
        broken = values >= self.limit if self.op == "<" else values > self.limit
        return broken & ~np.isnan(values)


class RuleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says about a rule; `value` and `ci` in the rule's unit."""

    rule: str
    tenant: str
    metric: str
    limit: float
    unit: str
    value: float | None
    ci: tuple[float, float] | None
    infinite: bool
    n: int
    violations: int | None
    samples_to_settle: int | None
    verdict: str
    broken_s: tuple[tuple[float, float], ...] = ()  # stretches of the run in which it was broken, where it failed


def parse(text: str, tenant: str | None = None) -> Rule:
    """The rule that a text states.

    Args:
        text: see the module's head.
        tenant: whose it is where the text does not say (a `[tenants.risk]` table).

    Raises:
        ValueError: with the part that is wrong and a right example.
    """
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rule: write it as {EXAMPLE}")
    who = match["tenant"] or tenant
    if who is None:
        raise ValueError(f"{text!r} does not say whose rule it is: write it as {EXAMPLE}, or all: for everyone")
    if tenant is not None and who != tenant:
        raise ValueError(f"{text!r} is a rule of {who!r}, not of {tenant!r}: move it to [tenants.{who}]")
    metric, q = _metric(match["metric"], text)
    limit, unit, against = _limit(metric, q, match["limit"].strip(), text)
    upper = match["op"] in {"<", "<="}
    if upper == (metric in RATES):
        right = ">" if upper else "<"
        raise ValueError(
            f"{text!r} limits the wrong side: write it as '{who}: {match['metric']} {right} {match['limit']}'"
        )
    return Rule(tenant=who, metric=metric, q=q, op=match["op"], limit=limit, unit=unit, against=against)


def check_tenants(rules: Iterable[Rule], names: Iterable[str]) -> None:
    """Every rule is about a tenant that exists. Raises ValueError that names the rule and the tenants there are."""
    known = list(names)
    for rule in rules:
        if rule.tenant != ALL and rule.tenant not in known:
            close = difflib.get_close_matches(rule.tenant, known, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{rule.text!r}: no tenant {rule.tenant!r}; there are {', '.join(known) or 'none'}{hint}")


def judge(rule: Rule, values: NDArray[np.float64]) -> RuleResult:
    """Judge a rule about a time on one value a request.

    Args:
        rule: with a quantile.
        values: in ms, one a request; +∞ for a failed one, NaN for one that is left out (censored, or has no such time).
    """
    assert rule.q is not None
    seen = quantiles.ordered(values)
    n, violations = len(seen), int(np.count_nonzero(rule.violated(seen)))
    shown = n >= quantiles.needed(rule.q)
    value = float(seen[quantiles.rank(n, rule.q)]) if shown else None
    return _result(
        rule,
        value=value,
        ci=quantiles.interval(seen, rule.q) if shown else None,
        n=n,
        violations=violations,
        verdict=judge_count(violations, n, 1 - rule.q),
    )


def judge_share(rule: Rule, violations: int, n: int) -> RuleResult:
    """Judge a rule about a share of requests: error_rate, or goodput in percent."""
    allowed = rule.allowed_share
    assert allowed is not None
    bounds = quantiles.clopper_pearson(violations, n, TWO_SIDED) if n else None
    share = violations / n if n else None
    if rule.metric != "error_rate":
        share = None if share is None else 1 - share
        bounds = None if bounds is None else quantiles.Interval(1 - bounds.high, 1 - bounds.low)
    return _result(
        rule, value=share, ci=bounds, n=n, violations=violations, verdict=judge_count(violations, n, allowed)
    )


def judge_rate(rule: Rule, value: float | None, n: int) -> RuleResult:
    """Judge a rule about a rate of the whole run: one number, compared as it is; inconclusive without requests."""
    if value is None or n == 0:
        return unjudged(rule)
    kept = value > rule.limit if rule.op == ">" else value >= rule.limit
    return _result(rule, value=value, ci=None, n=n, violations=None, verdict=PASS if kept else FAIL)


def unjudged(rule: Rule) -> RuleResult:
    """A rule without a single sample: inconclusive."""
    return _result(rule, value=None, ci=None, n=0, violations=None, verdict=INCONCLUSIVE)


def judge_count(violations: int, n: int, allowed: float) -> str:
    """Pass, fail or inconclusive by the exact one-sided 95 % bounds of the share of violations."""
    if n == 0:
        return INCONCLUSIVE
    if quantiles.share_upper(violations, n) <= allowed:
        return PASS
    return FAIL if quantiles.share_lower(violations, n) > allowed else INCONCLUSIVE


def worst(verdicts: Iterable[str]) -> str:
    """The verdict of the whole: invalid > fail > inconclusive > pass; pass when there is nothing to judge."""
    found = set(verdicts)
    return next((verdict for verdict in WORST_FIRST if verdict in found), PASS)


def tightest_ttft_ms(rules: Sequence[Rule]) -> float | None:
    """The smallest limit on a TTFT among the rules, in ms: what lateness is measured against."""
    limits = [rule.limit for rule in rules if rule.metric in {"ttft", "ttft_sent"} and rule.unit == "ms"]
    return min(limits, default=None)


def _result(
    rule: Rule,
    *,
    value: float | None,
    ci: quantiles.Interval | None,
    n: int,
    violations: int | None,
    verdict: str,
) -> RuleResult:
    infinite = value is not None and math.isinf(value)
    finite_ci = ci if ci is not None and math.isfinite(ci.low) and math.isfinite(ci.high) else None
    allowed = rule.allowed_share
    undecided = verdict == INCONCLUSIVE and allowed is not None
    return RuleResult(
        rule=rule.text,
        tenant=rule.tenant,
        metric=rule.name,
        limit=rule.limit,
        unit=rule.unit,
        value=None if infinite else value,
        ci=None if finite_ci is None or infinite else (finite_ci.low, finite_ci.high),
        infinite=infinite,
        n=n,
        violations=violations,
        samples_to_settle=quantiles.samples_to_settle(violations or 0, n, allowed)
        if undecided and allowed is not None
        else None,
        verdict=verdict,
    )


def _metric(word: str, text: str) -> tuple[str, float | None]:
    lower = word.lower()
    plain = _SAME_AS.get(lower, lower)
    if plain in SHARES or plain in RATES:
        return plain, None
    match = _TIME.fullmatch(plain)
    if match is not None and match[1] in TIMES and 0 < float(match[2]) < 100:
        return match[1], round(float(match[2]) / 100, 6)
    if plain in TIMES:
        raise ValueError(f"{text!r} does not say which percentile: write {plain}_p95, as in {EXAMPLE}")
    known = [f"{time}_p95" for time in TIMES] + [*SHARES, *RATES]
    close = difflib.get_close_matches(plain, known, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(f"{text!r}: no metric {word!r}{hint}; a rule is written as {EXAMPLE}")


def _limit(metric: str, q: float | None, limit: str, text: str) -> tuple[float, str, str | None]:
    """Limit, unit and the arm it is compared with."""
    ratio = _RATIO.fullmatch(limit)
    if ratio is not None and q is not None:
        if float(ratio[1]) <= 0:
            raise ValueError(f"{text!r}: a ratio is above 0, as in 'risk: ttft_p95 <= 1.25x alone'")
        return float(ratio[1]), "x", ratio[2]
    if q is not None:
        try:
            limit_ns = units.duration_ns(limit)
        except ValueError:
            raise ValueError(f"{text!r}: {limit!r} is not a time with a unit: write it as {EXAMPLE}") from None
        if limit_ns <= 0:
            raise ValueError(f"{text!r}: the limit must be above 0, as in {EXAMPLE}")
        return limit_ns / units.NS_PER_MS, "ms", None
    number = _NUMBER_UNIT.fullmatch(limit)
    if number is not None:
        value, unit = float(number[1]), number[2]
        if metric in SHARES and unit == "%":
            if not 0 <= value <= 100:
                raise ValueError(f"{text!r}: a share lies between 0% and 100%")
            return value / 100, "share", None
        if metric in RATES and unit in _RATE_UNITS[RATES[metric]]:
            return value, RATES[metric], None
    right = {"error_rate": "error_rate < 1%", "goodput": "goodput > 95% or goodput > 2rps"}
    example = right.get(metric, f"{metric} > {'100tok/s' if metric == 'output_tokens_per_s' else '2rps'}")
    raise ValueError(f"{text!r}: {limit!r} is not a limit of {metric}: write {example}")


_RATE_UNITS = {
    "rps": ("rps", "r/s", "req/s", "/s"),
    "tokens_per_s": ("tok/s", "tokens/s", "tps", "/s", "tokens_per_s"),
}


def _plain(number: float) -> str:
    return f"{number:.9g}"
