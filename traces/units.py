"""Words people write for quantities, and back: one table for all commands.

Durations: ``250ms``, ``1s``, ``10m``, ``1h``, ``3m50s``. Factors: ``2x``, ``2``, ``0.5x``, ``200%``.
Both raise `ValueError` with an example in the message; commands turn it into a usage error that names the option.
"""

from __future__ import annotations

import math
import re

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_UNIT_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": NS_PER_MS, "s": NS_PER_S, "m": 60 * NS_PER_S, "h": 3600 * NS_PER_S}
_LARGEST_FIRST = ("h", "m", "s", "ms", "us", "µs", "ns")
_DURATION = re.compile("".join(rf"\s*(?:(\d+(?:\.\d+)?)\s*{unit}(?![a-zµ]))?" for unit in _LARGEST_FIRST) + r"\s*")
_FACTOR = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([x%]?)\s*")


def duration_ns(text: str) -> int:
    """Nanoseconds of a duration such as ``250ms``, ``10m`` or ``3m50s``. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, such as 250ms, 1s, 10m or 1h")
    parts = zip(_LARGEST_FIRST, match.groups(), strict=True)
    return sum(round(float(number) * _UNIT_NS[unit]) for unit, number in parts if number)


def factor(text: str) -> float:
    """A positive factor such as ``2x``, ``0.5`` or ``200%``. Raises ValueError."""
    match = _FACTOR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a factor: write it as 2x, 2, 0.5x or 200%")
    value = float(match[1]) / (100 if match[2] == "%" else 1)
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{text!r} must be above 0: write it as 2x, 2, 0.5x or 200%")
    return value


def show_ns(value_ns: float) -> str:
    """A duration for people, three significant digits and one unit: ``1.25 s``, ``340 ms``, ``12 min``."""
    if value_ns < 0:
        return "-" + show_ns(-value_ns)
    for unit_ns, unit in ((3600 * NS_PER_S, "h"), (60 * NS_PER_S, "min"), (NS_PER_S, "s"), (NS_PER_MS, "ms")):
        if value_ns >= unit_ns * (2 if unit in {"h", "min"} else 1):
            value = value_ns / unit_ns
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{value_ns / 1000:.3g} µs" if value_ns else "0 s"
