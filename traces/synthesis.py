"""A trace as a handful of parameters, and new traces drawn from them.

A `Model` holds for each tenant how requests (or first turns of conversations) arrive, how long they are, how a
conversation goes on, and how prompts share prefixes. It is small, readable TOML, and no row of the trace is in it: even
the longest length is rounded up. Tenants are drawn independently, so what they do together is lost; `traces.synth`
prints what was kept.

Arrivals are whichever of these comes nearest to the trace's dispersion curve when drawn: a renewal process with
exponential, gamma, Weibull or lognormal gaps (fitted by scipy), or the Markov-modulated process of `traces.modulated`.
Lengths are the mixture of `traces.mixture`. A conversation has one turn, or goes on after each with one probability;
the time to the next turn is lognormal, and where prompts grow by what was said, they grow here too.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from traces import mixture, modulated
from traces.burstiness import NS, Floats, Int64s, counts, grid
from traces.columns import Columns
from traces.errors import BadFile

VERSION = 1
UNTAGGED = "untagged"
_RENEWALS = ("gamma", "weibull", "lognormal")
_MOST_GAPS = 50_000
_DRAWS = 3  # of each candidate, to see its dispersion curve
_HIT_BINS = 10


class Arrivals(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How requests, or first turns, arrive. `kind`: none, poisson, gamma, weibull, lognormal, or mmpp."""

    kind: str
    rate_rps: float = 0.0
    shape: float = 0.0  # gamma, Weibull: shape; lognormal: sigma
    window_s: float = 0.0  # mmpp: a state lasts whole windows
    rates_rps: list[float] = []
    transitions: list[list[float]] = []


class Component(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A kind of request: mean and standard deviation of ln tokens, and how input and output go together."""

    weight: float
    mean: list[float]
    sd: list[float]
    correlation: float = 0.0


class Lengths(msgspec.Struct, kw_only=True):
    """Token counts: which (input, output), their upper bounds, and the mixture."""

    of: list[str]
    most: list[int]
    components: list[Component]


class Sessions(msgspec.Struct, kw_only=True):
    """How a conversation goes on."""

    single_share: float  # conversations of one turn
    go_on: float  # after the second turn and each later one: probability of another
    gap_ln_s: tuple[float, float]  # mean and standard deviation of ln seconds between arrivals of turns
    think_share: float  # of that gap, the part after the answer's end
    grows: bool  # a turn's prompt is the former one, its answer, and something new
    new_ln_tokens: tuple[float, float]  # that something


class Prefix(msgspec.Struct, kw_only=True):
    """How much of a first prompt was seen before."""

    block_size: int
    unit: str
    hit_shares: list[float]  # share of prompts without a hit, then by tenth of the prompt that hits


class Tenant(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All of one tenant's traffic."""

    arrivals: Arrivals
    lengths: Lengths | None = None
    sessions: Sessions | None = None
    prefix: Prefix | None = None
    priority: int | None = None
    endpoint: str | None = None
    stream_share: float | None = None
    models: dict[str, float] = {}


class Model(msgspec.Struct, kw_only=True):
    """A fitted trace."""

    version: int
    rows: int  # of the trace it was fitted to
    span_s: float
    tenants: dict[str, Tenant]


# ---- fit --------------------------------------------------------------------------------------------------------


def fit(columns: Columns, *, timed: bool, seed: int = 0) -> Model:
    """Fit a model to a trace.

    Args:
        columns: the trace.
        timed: False for lengths without arrivals.
        seed: of subsamples and of the draws that candidates are compared by.
    """
    words = columns.words.get("tenant")
    parts = {UNTAGGED: columns}
    if words is not None:
        parts = {name: columns.take(words.codes == words.names.index(name)) for name in words.counts()}
    span_s = int(columns.arrival_ns[-1] - columns.arrival_ns[0]) / NS
    generator = np.random.default_rng(seed)
    tenants = {name: _fit_part(part, timed, span_s, generator) for name, part in parts.items()}
    return Model(version=VERSION, rows=len(columns), span_s=_short(span_s), tenants=tenants)


def _fit_part(part: Columns, timed: bool, span_s: float, generator: np.random.Generator) -> Tenant:
    first, follows = _turns(part)
    sessions = _fit_sessions(part, follows) if timed and follows is not None else None
    grown = sessions is not None and sessions.grows
    starts = part.arrival_ns[first] if sessions is not None else part.arrival_ns
    models, endpoints = (part.words[name].counts() if name in part.words else {} for name in ("model", "endpoint"))
    known = part.numbers.get("priority")
    return Tenant(
        arrivals=fit_arrivals(starts, span_s, generator) if timed else Arrivals(kind="none"),
        lengths=_fit_lengths(part.take(first) if grown else part, part, generator),
        sessions=sessions,
        prefix=_fit_prefix(part, first if sessions is not None else np.arange(len(part))),
        priority=int(np.median(known[known >= 0])) if known is not None and (known >= 0).any() else None,
        endpoint=next(iter(endpoints), None),
        stream_share=None
        if part.stream is None
        else _short(float((part.stream == 1).sum() / (part.stream >= 0).sum())),
        models={name: _short(rows / sum(models.values())) for name, rows in models.items()},
    )


def _turns(part: Columns) -> tuple[Int64s, tuple[Int64s, Int64s] | None]:
    """Rows that open a session (or have none), and pairs (row, next turn's row); None where no session goes on."""
    everything = np.arange(len(part))
    if part.session is None:
        return everything, None
    order = np.argsort(part.session, kind="stable")
    keys = part.session[order]
    same = (keys[1:] == keys[:-1]) & (keys[1:] != 0)
    if not same.any():
        return everything, None
    return np.sort(np.delete(order, np.flatnonzero(same) + 1)), (order[:-1][same], order[1:][same])


def fit_arrivals(arrival_ns: Int64s, span_s: float, generator: np.random.Generator) -> Arrivals:
    """The process whose drawn dispersion curve is nearest to the trace's (mean distance of logarithms).

    Times that were collected in batches are first spread over the time to the next batch.
    """
    rows = len(arrival_ns)
    period_ns = grid(arrival_ns).period_ns
    if period_ns is not None:
        arrival_ns = np.sort(arrival_ns + generator.integers(0, period_ns, size=rows))
    rate = (rows - 1) / max(int(arrival_ns[-1] - arrival_ns[0]) / NS, 1e-9) if rows > 1 else rows / max(span_s, 1e-9)
    poisson = Arrivals(kind="poisson", rate_rps=_short(rate))
    if rows < 30:
        return poisson
    candidates = [poisson, *_renewals(arrival_ns, rate, generator)]
    chain = modulated.fit(arrival_ns)
    if chain is not None:
        candidates.append(
            Arrivals(
                kind="mmpp",
                rate_rps=_short(rate),
                window_s=chain.window_s,
                rates_rps=[_short(value) for value in chain.rates_rps.tolist()],
                transitions=[[_short(value) for value in row] for row in chain.transitions.tolist()],
            )
        )
    wanted = {point.window_s: point.idc for point in counts(arrival_ns).curve}
    duration_s = int(arrival_ns[-1] - arrival_ns[0]) / NS
    return min(candidates, key=lambda candidate: _distance(candidate, wanted, duration_s, generator))


def _distance(
    candidate: Arrivals, wanted: dict[float, float], duration_s: float, generator: np.random.Generator
) -> float:
    off = []
    for _ in range(_DRAWS):
        times = (draw_arrivals(candidate, duration_s, generator) * NS).astype(np.int64)
        if len(times) < 2:
            return math.inf
        curve = {point.window_s: point.idc for point in counts(times).curve}
        shared = curve.keys() & wanted.keys()
        off += [abs(math.log(max(curve[width], 1e-3) / max(wanted[width], 1e-3))) for width in shared]
    return sum(off) / len(off) if off else math.inf


def _renewals(arrival_ns: Int64s, rate: float, generator: np.random.Generator) -> list[Arrivals]:
    from scipy import stats

    gaps = np.diff(arrival_ns) / NS
    step = gaps[gaps > 0].min() if (gaps > 0).any() else 1e-6
    gaps = np.where(gaps > 0, gaps, step * generator.random(len(gaps)) * 0.999 + step * 1e-3)  # ties: below the step
    if len(gaps) > _MOST_GAPS:
        gaps = gaps[generator.choice(len(gaps), _MOST_GAPS, replace=False)]
    spread = float(gaps.std() / gaps.mean())
    if spread < 0.05:  # paced: as good as constant
        return [Arrivals(kind="gamma", rate_rps=_short(rate), shape=_short(min(1 / max(spread, 0.01) ** 2, 1e4)))]
    found = []
    for kind, family in zip(_RENEWALS, (stats.gamma, stats.weibull_min, stats.lognorm), strict=True):
        shape, _, _ = family.fit(gaps, floc=0)
        if math.isfinite(shape) and 1e-3 < shape < 100:
            found.append(Arrivals(kind=kind, rate_rps=_short(rate), shape=_short(float(shape))))
    return found


def _fit_lengths(fitted: Columns, whole: Columns, generator: np.random.Generator) -> Lengths | None:
    of = [name for name in ("input", "output") if f"{name}_tokens" in fitted.numbers]
    if not of:
        return None
    tokens = np.stack([fitted.numbers[f"{name}_tokens"] for name in of], axis=1).astype(np.float64)
    tokens = tokens[(tokens > 0).all(axis=1)]
    if not len(tokens):
        return None
    found = mixture.fit(tokens, generator)
    return Lengths(
        of=of,
        most=[_rounded_up(int(whole.numbers[f"{name}_tokens"].max())) for name in of],
        components=[_component(*parts) for parts in zip(*found, strict=True)],
    )


def _component(weight: float, mean: Floats, covariance: Floats) -> Component:
    sd = np.sqrt(np.diag(covariance))
    correlation = float(covariance[0, 1] / (sd[0] * sd[1])) if len(sd) == 2 else 0.0
    return Component(
        weight=_short(float(weight)),
        mean=[_short(value) for value in mean.tolist()],
        sd=[_short(value) for value in sd.tolist()],
        correlation=_short(correlation),
    )


def _fit_sessions(part: Columns, follows: tuple[Int64s, Int64s]) -> Sessions:
    before, after = follows
    assert part.session is not None
    turns = np.unique(part.session[part.session != 0], return_counts=True)[1]
    many = turns[turns > 1]
    gaps = np.maximum((part.arrival_ns[after] - part.arrival_ns[before]) / NS, 1e-3)
    think = part.numbers.get("think_ns")
    shares = np.array([1.0])
    if think is not None and (think[after] >= 0).any():
        known = think[after] >= 0
        shares = np.minimum(think[after][known] / NS / gaps[known], 1.0)
    new = np.array([0])
    if {"input_tokens", "output_tokens"} <= part.numbers.keys():
        inputs, outputs = part.numbers["input_tokens"].astype(np.int64), part.numbers["output_tokens"]
        new = inputs[after] - inputs[before] - np.maximum(outputs[before], 0)
    grows = float((new > 0).mean()) >= 0.6
    return Sessions(
        single_share=_short(float((turns == 1).mean())),
        go_on=_short(1 - 1 / float((many - 1).mean())),
        gap_ln_s=_ln_normal(gaps),
        think_share=_short(float(np.median(shares))),
        grows=grows,
        new_ln_tokens=_ln_normal(new[new > 0]) if grows else (0.0, 0.0),
    )


def _ln_normal(values: Floats | Int64s) -> tuple[float, float]:
    logs = np.log(values)
    return _short(float(logs.mean())), _short(float(logs.std()))


def _fit_prefix(part: Columns, opening: Int64s) -> Prefix | None:
    from traces.profile import seen_before

    if part.blocks is None or part.block_count is None or not len(part.blocks):
        return None
    leading = seen_before(part)[opening]
    count = part.block_count[opening]
    share = leading[count > 0] / count[count > 0]
    bins = np.where(share == 0, 0, np.ceil(share * _HIT_BINS)).astype(np.int64)
    found = np.bincount(bins, minlength=_HIT_BINS + 1) / max(len(bins), 1)
    return Prefix(
        block_size=part.block_size,
        unit=part.metadata.block_unit,
        hit_shares=[_short(value) for value in found.tolist()],
    )


def _short(value: float) -> float:
    """Five significant digits: enough for a draw, too few to be a row."""
    return float(f"{value:.5g}")


def _rounded_up(value: int) -> int:
    """Up to two significant digits, so that the longest request is not given away."""
    step = int(10 ** max(len(str(value)) - 2, 0))
    return -(-value // step) * step


# ---- draw arrivals ----------------------------------------------------------------------------------------------


def draw_arrivals(arrivals: Arrivals, duration_s: float, generator: np.random.Generator) -> Floats:
    """Arrivals in [0, duration) seconds."""
    if arrivals.kind == "mmpp":
        chain = modulated.Chain(arrivals.window_s, np.array(arrivals.rates_rps), _stochastic(arrivals.transitions))
        return modulated.draw(chain, duration_s, generator)
    mean_s = 1 / arrivals.rate_rps
    pieces: list[Floats] = []
    now = 0.0
    while now < duration_s:
        gaps = _draw_gaps(arrivals, max(64, int((duration_s - now) / mean_s * 1.1)), generator) * mean_s
        if not pieces:
            gaps[0] *= generator.random()  # the window starts anywhere in a gap
        times = now + np.cumsum(gaps)
        now = float(times[-1])
        pieces.append(times)
    times = np.concatenate(pieces)
    return times[times < duration_s]


def _stochastic(rows: list[list[float]]) -> Floats:
    matrix = np.array(rows)
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


def _draw_gaps(arrivals: Arrivals, count: int, generator: np.random.Generator) -> Floats:
    """Gaps of mean 1."""
    shape = arrivals.shape
    if arrivals.kind == "gamma":
        return generator.gamma(shape, 1 / shape, size=count)
    if arrivals.kind == "weibull":
        return np.asarray(generator.weibull(shape, size=count) / math.gamma(1 + 1 / shape))
    if arrivals.kind == "lognormal":
        return generator.lognormal(-shape * shape / 2, shape, size=count)
    return generator.exponential(size=count)


# ---- as TOML ----------------------------------------------------------------------------------------------------


def to_toml(model: Model) -> str:
    """The model as TOML that a person can read and change."""
    lines: list[str] = ["# A model of LLM traffic; draw from it with: traces synth draw"]
    _write_table(msgspec.to_builtins(model), (), lines)
    return "\n".join(lines) + "\n"


def _write_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    below = {key: value for key, value in table.items() if isinstance(value, dict) or _is_tables(value)}
    plain = {key: value for key, value in table.items() if key not in below and value is not None}
    if path and (plain or not below):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in below.items():
        if isinstance(value, dict):
            _write_table(value, (*path, key), lines)
            continue
        for item in value:
            lines += ["", f"[[{'.'.join(_key(part) for part in (*path, key))}]]"]
            lines += [f"{_key(inner)} = {_value(figure)}" for inner, figure in item.items()]


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _value(key)


def _value(value: Any) -> str:
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")  # all of JSON is TOML but this one


def from_toml(text: str, source: str) -> Model:
    """Read a model back.

    Raises:
        BadFile: it is no TOML, or no model; the text names the field.
    """
    try:
        model = msgspec.toml.decode(text, type=Model)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadFile(f"{source}: not a model of traces synth fit ({error})") from error
    if model.version != VERSION:
        raise BadFile(f"{source}: model version {model.version} (this program reads version {VERSION})")
    return model
