"""Numbers as people read them: three digits, one unit a column, "n/a" where there is none, ∞ where requests failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenants.sla import RuleResult
    from tenants.summary import Percentiles

NONE = "n/a"
INFINITE = "∞"


def digits(value: float | None) -> str:
    """Three significant digits, thousands set apart: ``0.0123``, ``3.14``, ``31.4``, ``314``, ``3,142``.

    Between 0.1 and 1 the second decimal is the last, so that columns of times stay narrow.
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return INFINITE
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.0995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.{2 - math.floor(math.log10(size))}f}".rstrip("0")


def beside(value: float, other: float) -> str:
    """A value that stands beside another in a sentence, with digits enough to tell them apart: ``10.04``, ``10.0``."""
    text = digits(value)
    return f"{value:,.7g}" if text == digits(other) and value != other else text


def percentile(block: Percentiles | None, name: str) -> str:
    """A percentile of a block in ms."""
    if block is None:
        return NONE
    return INFINITE if name in block.infinite else digits(getattr(block, name))


def interval(block: Percentiles, name: str) -> str:
    """Its 95 % interval: ``590 to 640``; empty where there is none."""
    ends = block.ci.get(name)
    return "" if ends is None else f"{digits(ends[0])} to {digits(ends[1])}"


def measured(result: RuleResult) -> str:
    """The value of a rule with its unit."""
    if result.infinite:
        return INFINITE
    if result.value is None:
        return NONE
    return amount(result.value, result.unit)


def limit(result: RuleResult) -> str:
    """The limit of a rule with its unit."""
    return amount(result.limit, result.unit)


def amount(value: float, unit: str) -> str:
    """A value in a rule's unit: ``800 ms``, ``1 %``, ``2.5 req/s``, ``950 tok/s``, ``1.25x``."""
    if unit == "ms":
        return f"{digits(value).removesuffix('.00').removesuffix('.0')} ms"
    if unit == "share":
        return f"{value * 100:.3g} %"
    if unit == "x":
        return f"{value:.3g}x"
    return f"{digits(value)} {'req/s' if unit == 'rps' else 'tok/s'}"


def spans(stretches: Sequence[tuple[float, float]], most: int = 2) -> str:
    """``0:40-1:20, 2:00-2:10 and 3 more``."""
    shown = ", ".join(f"{clock(start)}-{clock(end)}" for start, end in stretches[:most])
    left = len(stretches) - most
    return f"{shown} and {left} more" if left > 0 else shown


def clock(seconds: float) -> str:
    """``3:00``, ``1:02:03``; rounded down."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
