"""What a request takes alone: time to its first token with the engine to itself, by prompt length.

    S(L) = c0 + c1·L + c2·L²        ns; L = prompt tokens not taken from a cache, all coefficients ≥ 0

c0 is a step's fixed cost, c1 the linear layers, c2 attention. Learnt from two kinds of moments of a run, which may be
the `alone` arm of an experiment or a run under load:

- idle: nothing else was in flight from when the request was sent to its first token; its TTFT is a point.
- episode: a stretch of steps that hold prefill, with one first token, at its end. What the steps took beyond
  decoding, plus a step's fixed cost for each of them, is what that prompt would have taken alone. They occur at any
  load.

The fit is by iteratively reweighted least squares (Huber's weights), so that single odd moments have no say.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tenants.steps import Emitting, Floats, Seen

HUBER = 1.345  # tuning constant in units of the scale estimate, Huber 1981: 95 % efficiency for normal errors
FEWEST = 5


class Alone(NamedTuple):
    """S(L) with where it comes from."""

    c0_ns: float
    c1_ns: float
    c2_ns: float
    idle: int  # points of each kind that it rests on
    episodes: int

    def ns(self, tokens: npt.ArrayLike) -> Floats:
        """Time to the first token of prompts of these lengths, ns."""
        length = np.asarray(tokens, dtype=np.float64)
        return self.c0_ns + self.c1_ns * length + self.c2_ns * length**2


def learn(emitting: Emitting) -> Alone | None:
    """S(L) from the idle moments and the prefill episodes of a run; None where there are too few of both."""
    idle_tokens, idle_ns = idle_points(emitting.view)
    episode_tokens, episode_ns = episode_points(emitting)
    tokens = np.concatenate([idle_tokens, episode_tokens])
    times = np.concatenate([idle_ns, episode_ns])
    if len(tokens) < FEWEST:
        return None
    c0, c1, c2 = _fit(tokens, times)
    return Alone(c0, c1, c2, idle=len(idle_tokens), episodes=len(episode_tokens))


def idle_points(view: Seen) -> tuple[Floats, Floats]:
    """(tokens, ns) of requests that had the engine to themselves until their first token."""
    sent = np.flatnonzero(view.sent_ns >= 0)
    order = sent[np.argsort(view.sent_ns[sent], kind="stable")]
    start, first, end = view.sent_ns[order], view.first_ns[order], view.end_ns[order]
    busy_until = np.concatenate([[np.int64(-1)], np.maximum.accumulate(end)[:-1]])
    following = np.append(start[1:], np.iinfo(np.int64).max)
    alone = (first >= 0) & (busy_until < start) & (following > first)
    return (
        view.input_tokens[order][alone].astype(np.float64),
        (first - start)[alone].astype(np.float64),
    )


def episode_points(found: Emitting) -> tuple[Floats, Floats]:
    """(tokens, ns) of prefills that ran beside decoding streams, one at a time.

    Each stretch of neighbouring steps that hold prefill gives at most one: from its begin to its first first token,
    which must be the only one of its step and of a request that was there when the stretch began.
    """
    view = found.view
    holds = ((found.spare_ns > 0) | (found.firsts > 0)) & (found.rows.decoding > 0)
    begins = np.flatnonzero(holds & ~np.concatenate([[True], holds[:-1]]))
    ending = np.flatnonzero(found.firsts > 0)
    at = np.searchsorted(ending, begins)
    begins, at = begins[at < len(ending)], at[at < len(ending)]
    ends = ending[at]
    unbroken = np.cumsum(~holds)
    request = found.first_request[ends]
    clean = (
        (unbroken[ends] == unbroken[begins])
        & (found.firsts[ends] == 1)
        & (view.sent_ns[request] <= found.rows.start_ns[begins])
    )
    begins, ends, request = begins[clean], ends[clean], request[clean]
    spare = np.concatenate([[0.0], np.cumsum(found.spare_ns)])
    times = spare[ends + 1] - spare[begins] + found.cost[0] * (ends + 1 - begins)
    return view.input_tokens[request].astype(np.float64), times


def _fit(tokens: Floats, times: Floats) -> tuple[float, float, float]:
    from scipy.optimize import nnls

    scale = max(float(tokens.max()), 1.0)
    design = np.stack([np.ones_like(tokens), tokens / scale, (tokens / scale) ** 2], axis=1)
    weight = np.ones_like(times)
    found = np.zeros(3)
    for _ in range(20):
        root = np.sqrt(weight)
        found, _ = nnls(design * root[:, None], times * root)
        residual = np.abs(times - design @ found)
        spread = max(float(np.median(residual)) / 0.6745, 1.0)  # 0.6745: MAD of a standard normal
        weight = np.minimum(1.0, HUBER * spread / np.maximum(residual, 1.0))
    return float(found[0]), float(found[1] / scale), float(found[2] / scale**2)
