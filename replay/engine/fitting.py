"""Fit the step-time model to what was seen from outside: prefills, steady decoding, and a prefill among decodes.

    prefill of P tokens, alone:      seen = c + t(P, 1) + a·P²/2
    decode of B rows, context S:     seen = t(B, B) + k·S
    both in one step:                seen = t(B + P, B + 1) + dm + km·S + a·P²/2

with t(N, B) = max(w + u·N, g0 + g·N) + h·B for N tokens of which B rows are sampled, and c for what the API adds before
a first token. Without readings of both in one step dm = 0 and km = k.

From outside a step's fixed costs cannot be told apart: w holds them all (t0, the bases of attention and sampling). The
fit minimises relative errors, softly (one slow reading does not bend it); every coefficient is at least 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from replay.engine.steptime import StepModel

Floats = npt.NDArray[np.float64]


class Observation(NamedTuple):
    """One reading: `prefill` tokens alone up to the first token (`rows` 0), or one step of `rows` decodes.

    Decodes have `context` tokens in all; `prefill` counts the prompt tokens in the same step.
    """

    prefill: int
    rows: int
    context: float
    seen_ms: float

    @property
    def tokens(self) -> int:
        """All tokens of the step."""
        return self.prefill + self.rows

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`."""
        return "prefill" if not self.rows else "mixed" if self.prefill else "decode"


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model and how well it explains the readings it was fitted on, and those that were kept out.

    Attributes:
        api_ms: what the server adds to a first token outside its steps.
        error_p50, error_p95: relative, of the readings fitted; kept_out_p50: of every fourth, kept out of a fit of its
        own.
    """

    model: StepModel
    api_ms: float
    observations: int
    error_p50: float
    error_p95: float
    kept_out_p50: float


NAMES = ("api_ms", "w_ms", "u_ms", "k_ms", "g0_ms", "g_ms", "a_ms", "dm_ms", "km_ms", "h_ms")


def fit(observations: Sequence[Observation]) -> Fitted:
    """The model that explains the readings best.

    Raises:
        ValueError: fewer than 8 readings, or only one kind of them.
    """
    kinds = [seen.kind for seen in observations]
    if len(observations) < 8 or min(kinds.count("prefill"), kinds.count("decode")) < 3:
        raise ValueError("too few readings: at least 8 are needed, 3 of prefills and 3 of decodes among them")
    found = _solve(observations)
    errors = np.abs(_errors(found, observations))
    if "mixed" not in kinds:
        found[NAMES.index("dm_ms")], found[NAMES.index("km_ms")] = 0.0, found[NAMES.index("k_ms")]
    kept_out = [seen for index, seen in enumerate(observations) if index % 4 == 2]
    others = [seen for index, seen in enumerate(observations) if index % 4 != 2]
    apart = np.abs(_errors(_solve(others), kept_out))
    values = dict(zip(NAMES, (float(value) for value in found), strict=True))
    api_ms = values.pop("api_ms")
    return Fitted(
        model=msgspec.structs.replace(StepModel(), **values),
        api_ms=api_ms,
        observations=len(observations),
        error_p50=float(np.median(errors)),
        error_p95=float(np.quantile(errors, 0.95)),
        kept_out_p50=float(np.median(apart)),
    )


def predicted_ms(fitted: Fitted, seen: Observation) -> float:
    """What the model says of a reading."""
    return float(_predict(_vector(fitted), *_columns([seen]))[0])


def _vector(fitted: Fitted) -> Floats:
    return np.array([fitted.api_ms, *(getattr(fitted.model, name) or 0.0 for name in NAMES[1:])])


def _columns(observations: Sequence[Observation]) -> tuple[Floats, Floats, Floats]:
    columns = np.array([seen[:3] for seen in observations], dtype=float).T
    prefill, rows, context = columns
    return prefill, rows, context


def _predict(x: Floats, prefill: Floats, rows: Floats, context: Floats) -> Floats:
    api, w, u, k, g0, g, a, dm, km, h = x
    tokens = prefill + rows
    linear = np.maximum(w + u * tokens, g0 + g * tokens) + h * (rows + (prefill > 0))
    decoding = np.where(rows == 0, api, np.where(prefill == 0, k * context, dm + km * context))
    total: Floats = linear + decoding + a * prefill * prefill / 2
    return total


def _errors(x: Floats, observations: Sequence[Observation]) -> Floats:
    seen = np.array([reading.seen_ms for reading in observations])
    relative: Floats = _predict(x, *_columns(observations)) / seen - 1
    return relative


def _solve(observations: Sequence[Observation]) -> Floats:
    """Least squares from several starts (the max makes the surface kinked), twice.

    Steady decoding is read to within a percent, a first token with all that a network adds: the second time each kind
    of reading weighs by how well the first solution explains it.
    """
    prefill, rows, _ = _columns(observations)
    seen = np.array([reading.seen_ms for reading in observations])
    floor = seen[(rows > 0) & (prefill == 0)].min()
    largest = int(np.argmax(np.where(rows > 0, 0, prefill)))
    slope = seen[largest] / prefill[largest]
    per_context = floor / 1e4
    per_area = slope / prefill[largest]
    scale = np.array([floor, floor, slope, per_context, floor, slope, per_area, floor, per_context, slope])
    weights = np.ones(len(observations))
    found = _best(observations, scale, weights)
    spread = np.abs(_errors(found, observations))
    for kind in ("prefill", "decode", "mixed"):
        of_kind = np.array([reading.kind == kind for reading in observations])
        if of_kind.any():
            weights[of_kind] = 0.01 / max(0.003, float(np.median(spread[of_kind])))
    return _best(observations, scale, weights)


def _best(observations: Sequence[Observation], scale: Floats, weights: Floats) -> Floats:
    """The best of the solutions found from several starts."""
    best = None
    for u, g0, g in ((0.1, 0.0, 0.9), (0.3, 0.5, 0.7), (1.0, 0.0, 1.0)):
        start = np.array([0.05, 0.9, u, 0.1, g0, g, 0.1, 0.02, 0.1, 0.1])
        solved = least_squares(
            lambda x: weights * _errors(x * scale, observations),
            start,
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=0.05,
        )
        if best is None or solved.cost < best.cost:
            best = solved
    assert best is not None
    found: Floats = best.x * scale
    return found
