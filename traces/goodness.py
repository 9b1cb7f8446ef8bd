"""How near a drawn trace comes to the one it was fitted to: Kolmogorov-Smirnov distances and dispersion curves.

The KS distance D is the largest gap between two distribution functions: 0 = the same, 1 = nothing in common. It sees
one distribution at a time and no order in time; the dispersion curve sees the order. Both are shown, and so are the
figures that a model can lose: turns, prefix hits, how input and output go together.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from traces.burstiness import NS, counts
from traces.columns import Columns
from traces.lengths import rank_correlation

_SHOWN_S = (0.1, 1, 10, 60, 600)


class Fit(msgspec.Struct, frozen=True):
    """One figure of the trace beside the model's; `distance` is KS's D where two distributions are compared."""

    what: str
    trace: float | None
    model: float | None
    distance: float | None = None


def compare(trace: Columns, drawn: Columns) -> list[Fit]:
    """Figures of a trace (or of one tenant's rows) beside those of a draw."""
    found = []
    if len(trace) > 2 and len(drawn) > 2 and trace.arrival_ns[-1] > trace.arrival_ns[0]:
        found += _times(trace, drawn)
    for name in ("input_tokens", "output_tokens"):
        if name in trace.numbers and name in drawn.numbers:
            one, two = trace.numbers[name], drawn.numbers[name]
            one, two = one[one > 0], two[two > 0]
            label = f"{name.split('_')[0]} tokens P50"
            found.append(Fit(label, float(np.median(one)), float(np.median(two)), _distance(one, two)))
            found.append(Fit(f"{label[:-3]}P99", *(float(np.percentile(values, 99)) for values in (one, two))))
    if {"input_tokens", "output_tokens"} <= trace.numbers.keys() & drawn.numbers.keys():
        found.append(Fit("input-output correlation", *(_together(columns) for columns in (trace, drawn))))
    return found + _conversations(trace, drawn)


def _together(columns: Columns) -> float | None:
    """Rank correlation of input and output among requests that have both."""
    inputs, outputs = columns.numbers["input_tokens"], columns.numbers["output_tokens"]
    both = (inputs > 0) & (outputs > 0)
    return rank_correlation(inputs[both], outputs[both])


def _times(trace: Columns, drawn: Columns) -> list[Fit]:
    gaps = [np.diff(columns.arrival_ns) / NS for columns in (trace, drawn)]
    rates = [1 / float(values.mean()) if values.any() else None for values in gaps]
    found = [Fit("mean rate [req/s]", *rates)]
    spreads = [float(values.std() / values.mean()) if values.any() else None for values in gaps]
    found.append(Fit("inter-arrival CV", spreads[0], spreads[1], _distance(*gaps)))
    curves = [{p.window_s: p.idc for p in counts(columns.arrival_ns).curve} for columns in (trace, drawn)]
    widths = [width for width in _SHOWN_S if width in curves[0] and width in curves[1]]
    return found + [Fit(f"dispersion at {width:g} s", curves[0][width], curves[1][width]) for width in widths]


def _conversations(trace: Columns, drawn: Columns) -> list[Fit]:
    from traces.profile import prefix, sessions

    found = []
    one, two = sessions(trace), sessions(drawn)
    if one and one["single_turn_share"] < 1:
        found.append(Fit("turns a conversation", one["turns"]["mean"], two["turns"]["mean"] if two else None))
    hits = [prefix(columns).get("prefix", {}).get("ideal_hit_rate") for columns in (trace, drawn)]
    if hits[0] is not None:
        found.append(Fit("prefix blocks seen before", *hits))
    return found


def _distance(one: np.typing.NDArray[Any], two: np.typing.NDArray[Any]) -> float | None:
    from scipy.stats import ks_2samp

    if not len(one) or not len(two):
        return None
    return float(ks_2samp(one, two, method="asymp").statistic)
