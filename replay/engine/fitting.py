"""Fit the step-time model to what was seen from outside: times of single prefills and of steady decoding.

    prefill of N tokens, alone:      seen = c + t(N) + a·N²/2                c: what the API adds before the first token
    decode of B rows, context S:     seen = t(B) + k·S                       t(N) = max(w + u·N, g0 + g·N)

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
    """One reading. `rows` 0: a prefill of `tokens` up to its first token; else `rows` decodes with `context` in all."""

    tokens: int
    rows: int
    context: float
    seen_ms: float


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


NAMES = ("api_ms", "w_ms", "u_ms", "k_ms", "g0_ms", "g_ms", "a_ms")


def fit(observations: Sequence[Observation]) -> Fitted:
    """The model that explains the readings best.

    Raises:
        ValueError: fewer than 8 readings, or only one kind of them.
    """
    prefills = sum(1 for seen in observations if not seen.rows)
    if len(observations) < 8 or not 3 <= prefills <= len(observations) - 3:
        raise ValueError("too few readings: at least 8 are needed, 3 of prefills and 3 of decodes among them")
    found = _solve(observations)
    errors = np.abs(_errors(found, observations))
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
    return np.array([fitted.api_ms, *(getattr(fitted.model, name) for name in NAMES[1:])])


def _columns(observations: Sequence[Observation]) -> tuple[Floats, ...]:
    rows = np.array([seen.rows for seen in observations], dtype=float)
    tokens = np.array([seen.tokens for seen in observations], dtype=float)
    context = np.array([seen.context for seen in observations], dtype=float)
    return tokens, rows, context


def _predict(x: Floats, tokens: Floats, rows: Floats, context: Floats) -> Floats:
    api, w, u, k, g0, g, a = x
    linear = np.maximum(w + u * tokens, g0 + g * tokens)
    total: Floats = linear + np.where(rows > 0, k * context, api + a * tokens * tokens / 2)
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
    tokens, rows, _ = _columns(observations)
    seen = np.array([reading.seen_ms for reading in observations])
    is_decode = rows > 0
    floor = seen[is_decode].min()
    largest = int(np.argmax(np.where(is_decode, 0, tokens)))
    slope = seen[largest] / tokens[largest]
    scale = np.array([floor, floor, slope, floor / 1e4, floor, slope, slope / tokens[largest]]) + 1e-12
    weights = np.ones(len(observations))
    found = _best(observations, scale, weights)
    spread = np.abs(_errors(found, observations))
    for kind in (is_decode, ~is_decode):
        weights[kind] = 0.01 / max(0.003, float(np.median(spread[kind])))
    return _best(observations, scale, weights)


def _best(observations: Sequence[Observation], scale: Floats, weights: Floats) -> Floats:
    """The best of the solutions found from several starts."""
    best = None
    for u, g0, g in ((0.1, 0.0, 0.9), (0.3, 0.5, 0.7), (1.0, 0.0, 1.0)):
        start = np.array([0.05, 0.9, u, 0.1, g0, g, 0.1])
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
