"""How long one step of the engine takes: an additive model.

GEMM and attention kernels run one after another, so their times add up (all in ms):

    t_step = t0                                fixed (+ te above graph_tokens: larger steps than the captured CUDA
    graphs)
           + max(w + u·N, g0 + g·N)            linear layers; N = all tokens of the step
           + (d0 + k·S)  when rows decode       decode attention; S = context lengths of the decode rows, summed
             (dm + km·S in a step that also prefills: one kernel serves both kinds of row, the decodes less well)
           + a · Σ c·(x + c/2)                  prefill attention; a chunk of c tokens on top of x computed ones
           + h0 + h·B  when rows sample         lm_head and sampler; B = rows that sample

With few tokens the weights' way from memory bounds the linear layers (w), with many the arithmetic (g·N). Where a
profile carries a table of measured points (tokens → ms), it stands in for the max, interpolated, and extended by its
last slope.

Profiles live in profiles.toml, each with its provenance: "measured", "fitted from ...", or "modelled, not measured".
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec

DEFAULT_PROFILE = "llama3-8b-a100-80"
PROFILES = Path(__file__).with_name("profiles.toml")
NS_PER_MS = 1_000_000
PS_PER_MS = 1_000_000_000


class Load(Protocol):
    """What of a step its time depends on; `scheduler.Step` is one."""

    tokens: int
    context: int
    area: float
    samples: int
    decodes: int


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of the step time, in ms (per token, per token² where it says attention).

    Attributes:
        t0_ms: fixed cost of a step; te_ms comes on top when it has more than graph_tokens tokens (0: never).
        w_ms, u_ms: linear layers bound by memory: w + u·N.
        g0_ms, g_ms: linear layers bound by arithmetic: g0 + g·N.
        linear: measured points (tokens, ms) in place of the two lines above, tokens ascending.
        d0_ms, k_ms: decode attention: base, and per token of context.
        dm_ms, km_ms: the same in a step that also prefills; None: no difference.
        a_ms: prefill attention, per token × context token.
        h0_ms, h_ms: lm_head and sampler: base, and per sampled row.
    """

    t0_ms: float = 0.0
    te_ms: float = 0.0
    graph_tokens: int = 0
    w_ms: float = 0.0
    u_ms: float = 0.0
    g0_ms: float = 0.0
    g_ms: float = 0.0
    linear: tuple[tuple[int, float], ...] = ()
    d0_ms: float = 0.0
    k_ms: float = 0.0
    dm_ms: float | None = None
    km_ms: float | None = None
    a_ms: float = 0.0
    h0_ms: float = 0.0
    h_ms: float = 0.0

    def linear_ms(self, tokens: float) -> float:
        """Linear layers for that many tokens."""
        if self.linear:
            return _interpolate(self.linear, tokens)
        return max(self.w_ms + self.u_ms * tokens, self.g0_ms + self.g_ms * tokens)

    def fixed_ms(self, tokens: int) -> float:
        """What a step of that many tokens costs whatever is in it."""
        return self.t0_ms + (self.te_ms if 0 < self.graph_tokens < tokens else 0.0)

    def step_ns(self, load: Load) -> float:
        """Duration of a step, in ns; 0 for a step without tokens."""
        return self.duration_ns(load.tokens, load.decodes, load.context, load.area, load.samples)

    def duration_ns(self, tokens: int, decodes: int, context: float, area: float, samples: int) -> float:
        """Duration of a step with this load, in ns; 0 without tokens."""
        if not tokens:
            return 0.0
        total = self.fixed_ms(tokens) + self.linear_ms(tokens) + self.a_ms * area
        if decodes:
            base, per_token = self.decode_attention_ms(mixed=tokens > decodes)
            total += base + per_token * context
        if samples:
            total += self.h0_ms + self.h_ms * samples
        return total * NS_PER_MS

    def decode_attention_ms(self, *, mixed: bool) -> tuple[float, float]:
        """Base and time per token of context; `mixed`: in a step that also prefills."""
        if not mixed:
            return self.d0_ms, self.k_ms
        return (
            self.d0_ms if self.dm_ms is None else self.dm_ms,
            self.k_ms if self.km_ms is None else self.km_ms,
        )

    def split_ms(self, tokens: int, decodes: int, samples: int) -> tuple[float, float, float, float]:
        """How a step's time falls on its rows: per token, per decode row and its context token, per sampling row (ms).

        Prefill attention (a·area) comes on top. The parts that belong to the step as a whole (fixed cost, linear
        layers, bases) are split evenly over the rows that cause them, so that the parts of all rows add up to the
        step's time.
        """
        per_token = (self.fixed_ms(tokens) + self.linear_ms(tokens)) / tokens
        base, per_context = self.decode_attention_ms(mixed=tokens > decodes)
        per_decode = base / decodes if decodes else 0.0
        per_sample = self.h_ms + self.h0_ms / samples if samples else 0.0
        return per_token, per_decode, per_context, per_sample

    def alone_ns(self, prompt_tokens: int, budget: int, cached_tokens: int = 0) -> float:
        """Time to the first token of a request that has the engine to itself, in ns."""
        total, computed = 0.0, cached_tokens
        while computed < prompt_tokens:
            chunk = min(budget, prompt_tokens - computed)
            total += self.duration_ns(
                chunk, 0, 0, chunk * (computed + chunk / 2), int(computed + chunk == prompt_tokens)
            )
            computed += chunk
        return total


class PicoClock:
    """The same step times in whole picoseconds.

    Whole numbers add up exactly, in any grouping: `steps` steps at once take what they take one by one.

    Args:
        model: coefficients; each is rounded to 1 ps.
    """

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.context_ps = round(model.k_ms * PS_PER_MS)  # of a step that only decodes
        self._mixed_context_ps = round(model.decode_attention_ms(mixed=True)[1] * PS_PER_MS)
        self._area_ps = model.a_ms * PS_PER_MS
        self._mixed_base_ms = model.decode_attention_ms(mixed=True)[0]
        self._decoding: list[int] = []
        self._tokens_ms: dict[int, float] = {}

    def decode_ps(self, rows: int) -> int:
        """A step of that many decode rows and nothing else, their context left out."""
        known = self._decoding
        while len(known) <= rows:
            known.append(self._fixed_ps(len(known), len(known), len(known)))
        return known[rows]

    def duration_ps(self, tokens: int, decodes: int, context: int, area: float, samples: int) -> int:
        """A step with this load; 0 without tokens."""
        if tokens == decodes:
            return self.decode_ps(decodes) + self.context_ps * context
        attention = self._mixed_context_ps * context + round(self._area_ps * area)
        return self._fixed_ps(tokens, decodes, samples) + attention

    def decoding_ps(self, rows: int, context: int, steps: int) -> int:
        """`steps` steps of `rows` decodes with `context` tokens of context in the first; each row grows by one."""
        return steps * self.decode_ps(rows) + self.context_ps * (context * steps + rows * (steps * (steps - 1) // 2))

    def tokens_ms(self, tokens: int) -> float:
        """Fixed cost and linear layers of a step of that many tokens, in ms."""
        known = self._tokens_ms.get(tokens)
        if known is None:
            known = self._tokens_ms[tokens] = self.model.fixed_ms(tokens) + self.model.linear_ms(tokens)
        return known

    def _fixed_ps(self, tokens: int, decodes: int, samples: int) -> int:
        """All of a step but attention by context and area."""
        if not tokens:
            return 0
        total = self.tokens_ms(tokens)
        if decodes:
            total += self._mixed_base_ms if tokens > decodes else self.model.d0_ms
        if samples:
            total += self.model.h0_ms + self.model.h_ms * samples
        return round(total * PS_PER_MS)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A step model with where it comes from and the engine defaults that belong to the machine.

    Attributes:
        provenance: "measured", "fitted from ..." or "modelled, not measured"; shown wherever the profile is used.
        error: what a fit said of itself, such as its median absolute error; empty for a modelled one.
        num_gpu_blocks, max_num_batched_tokens, max_num_seqs: what the engine would start with on that machine.
    """

    name: str
    provenance: str
    model: StepModel
    source: str = ""
    error: str = ""
    served_model: str = ""
    num_gpu_blocks: int = 28_000
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 131_072


def load_profile(name: str = DEFAULT_PROFILE) -> Profile:
    """The profile of that name, or of a TOML file when `name` is a path ending in .toml.

    Raises:
        ValueError: unknown name, or a file that is no profile; the message says what is wrong.
    """
    if name.endswith(".toml"):
        return read_profile(Path(name))
    profiles = _shipped()
    if name not in profiles:
        raise ValueError(
            f"unknown profile {name!r}: one of {', '.join(profiles)}, or a .toml file from `replay calibrate`"
        )
    return profiles[name]


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship with Convoy."""
    return tuple(_shipped())


def read_profile(path: Path) -> Profile:
    """A profile file. Raises ValueError naming the file and what is wrong with it."""
    try:
        values = tomllib.loads(path.read_text())
        return msgspec.convert({"name": path.stem, **values}, Profile)
    except OSError as error:
        raise ValueError(f"profile {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"profile {path}: {error}") from None


@cache
def _shipped() -> dict[str, Profile]:
    values = tomllib.loads(PROFILES.read_text())
    return {name: msgspec.convert({"name": name, **fields}, Profile) for name, fields in values.items()}


def _interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """Piecewise linear through the points, extended at both ends by the nearest slope."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
