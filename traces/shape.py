"""Reshape a trace and say what was achieved.

Each step is a pure function `draft → (draft, Report)` (`traces.draft`); nothing here reads a file or a clock.

What is kept: rows of a session stay together and in order, think times follow the map of time, prefix sharing inside
the original and inside every copy stays as it was. Whatever is drawn is drawn per session from the seed
(`traces.seeded`) and held against figures of the whole trace (cuts, the arrival curve, a map of time): with the same
figures a part of a trace, split by session, comes out as that part of the whole.

What cannot be met is refused with the nearest that can: `ShapeError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from traces import warp
from traces.burstiness import NS, Floats, Int64s
from traces.draft import Draft, Report, ShapeError, Step, by_arrival, joined, of_rows, plain, spelt
from traces.seeded import uniform
from traces.units import show_ns

JITTER_S = 5  # a copy moves within the distance in which as many arrive as come in this time on average
MOST_ROWS = 200_000_000

# ---- choosing rows ----------------------------------------------------------------------------------------------


def window(draft: Draft, start_ns: int, end_ns: int | None) -> Step:
    """Rows with start <= trace time < end.

    Raises:
        ShapeError: none is.
    """
    offset = draft.offset_ns()
    first = int(np.searchsorted(offset, start_ns, side="left"))
    last = len(offset) if end_ns is None else int(np.searchsorted(offset, end_ns, side="left"))
    asked = f"{spelt(start_ns)}:{'' if end_ns is None else spelt(end_ns)}"
    if first >= last:
        raise ShapeError(
            f"--window {asked}: no request arrives then; the trace lasts {show_ns(draft.span_ns())} "
            f"and is {_fullest(offset, start_ns, end_ns)}"
        )
    kept = draft.take(slice(first, last))
    return kept, of_rows("window", asked, draft, planned=last - first, achieved=last - first)


def _fullest(offset: Int64s, start_ns: int, end_ns: int | None) -> str:
    if start_ns > offset[-1]:
        return f"over before {show_ns(start_ns)}"
    after = offset[np.searchsorted(offset, start_ns)] if end_ns is not None else offset[-1]
    return f"idle from {show_ns(start_ns)} to {show_ns(int(after))}"


def only_tenants(draft: Draft, names: Sequence[str], known: Sequence[str]) -> Step:
    """Rows of some tenants.

    Args:
        draft: with tenant codes.
        names: tenants to keep.
        known: names by code.

    Raises:
        ShapeError: the trace has no such tenant.
    """
    for name in names:
        if name not in known:
            there = ", ".join(known) if known else "none: tag it first, see tenants tag --help"
            raise ShapeError(f"--tenant {name}: no such tenant in the trace (it has {there})")
    assert draft.tenant is not None
    keep = np.isin(draft.tenant, [known.index(name) for name in names])
    kept = draft.take(keep)
    return kept, of_rows("tenant", ",".join(names), draft, int(keep.sum()), int(keep.sum()))


def thin(draft: Draft, share: float, seed: int, *, step: str = "sample") -> Step:
    """A share of every tenant's requests, whole sessions drawn at random.

    Per tenant the sessions with the smallest draws are kept until the share of the requests is met as nearly as whole
    sessions can: tenants' shares stay, and what was Poisson stays Poisson.

    Raises:
        ShapeError: nothing would be left.
    """
    keep = below(draft, cuts(draft, share, seed, step), seed, step)
    planned = share * len(draft)
    if not keep.any():
        raise ShapeError(f"--{step} {share:.6g}x: of {len(draft)} requests none is left")
    kept = draft.take(keep)
    return kept, of_rows(step, f"{share:.6g}x", draft, planned, len(kept))


def cuts(draft: Draft, share: float, seed: int, purpose: str) -> dict[int, float]:
    """Per tenant code, the draw up to which sessions are taken so that they hold `share` of its requests.

    As nearly as whole sessions can: −1 takes none.
    """
    draw, found = _draws(draft, seed, purpose), {}
    for code in [0] if draft.tenant is None else np.unique(draft.tenant).tolist():
        ordered = np.sort(draw if draft.tenant is None else draw[draft.tenant == code])
        asked = share * len(ordered)
        found[code] = -1.0
        if len(ordered) and asked > 0:
            middle = ordered[min(int(asked), len(ordered) - 1)]  # the session at the asked share: take it or leave it
            without, with_it = np.searchsorted(ordered, middle, "left"), np.searchsorted(ordered, middle, "right")
            if with_it - asked < asked - without:
                found[code] = float(middle)
            elif without:
                found[code] = float(ordered[without - 1])
    return found


def below(draft: Draft, limits: dict[int, float], seed: int, purpose: str) -> npt.NDArray[np.bool_]:
    """Which rows belong to sessions that the cuts take."""
    draw = _draws(draft, seed, purpose)
    if draft.tenant is None:
        return np.asarray(draw <= limits[0])
    taken = np.zeros(len(draw), dtype=bool)
    for code, limit in limits.items():
        taken |= (draft.tenant == code) & (draw <= limit)
    return taken


def _draws(draft: Draft, seed: int, purpose: str) -> Floats:
    assert draft.session is not None, "nothing is drawn once copies are made"
    return uniform(draft.session, seed, purpose)


# ---- more or other rows -----------------------------------------------------------------------------------------


def rate(draft: Draft, factor: float, seed: int) -> Step:
    """More or fewer arrivals with the same shape of the rate over time.

    Below 1 sessions are thinned. Above 1 sessions are copied: each whole multiple copies all, the fraction a drawn
    share. A copy's first turn moves inside its neighbourhood, the distance in which as many requests arrive as come in
    5 s on average: short in a burst, so that bursts stay, and long in steady traffic, so that a copy is no twin of its
    original. Its later turns move with it. The dispersion comes near that of as many independent users whose rate
    moves in the same way, 1 + factor·(IDC − 1).

    Raises:
        ShapeError: nothing would be left.
    """
    if factor < 1:
        return thin(draft, factor, seed, step="rate")
    _no_more_than_can_be(factor * len(draft), f"--rate {factor:.6g}x")
    whole = int(factor)
    parts = [plain(draft)]
    for number in range(1, whole + 1):
        part = draft
        if number == whole:
            part = draft.take(below(draft, cuts(draft, factor - whole, seed, "more"), seed, "more"))
        if len(part):
            parts.append(plain(jittered_copy(part, draft.arrival_ns, number, seed)))
    grown = by_arrival(joined(parts))
    report = of_rows("rate", f"{factor:.6g}x", draft, factor * len(draft), len(grown))
    return grown, report


def rate_to(draft: Draft, rps: float, seed: int) -> Step:
    """As `rate`, by the factor that makes the mean rate (rows − 1) / span come to `rps`."""
    now = (len(draft) - 1) / (draft.span_ns() / NS)
    factor = (rps * draft.span_ns() / NS + 1) / len(draft)
    changed, _ = rate(draft, factor, seed)
    report = Report(
        step="rate",
        asked=f"{rps:.6g}rps",
        what="mean rate [req/s]",
        before=now,
        planned=rps,
        achieved=(len(changed) - 1) / (changed.span_ns() / NS) if changed.span_ns() else 0.0,
        note=f"{len(draft):,} → {len(changed):,} requests",
    )
    return changed, report


def spread(draft: Draft, rps: float, retimed: bool) -> Step:
    """Times for a trace of lengths alone: `rps` requests a second, to be drawn by a re-timing that follows.

    Raises:
        ShapeError: no re-timing follows.
    """
    if not retimed:
        raise ShapeError(
            f"--rate {rps:.6g}rps: the trace has no times to keep: add --poisson or --gamma 1 to draw them"
        )
    times = np.rint(np.arange(len(draft)) * (NS / rps)).astype(np.int64)
    timed = dataclasses.replace(draft, arrival_ns=draft.arrival_ns[0] + times)
    achieved = (len(timed) - 1) / (timed.span_ns() / NS) if timed.span_ns() else 0.0
    report = Report(
        step="rate", asked=f"{rps:.6g}rps", what="mean rate [req/s]", before=0.0, planned=rps, achieved=achieved
    )
    return timed, report


def jittered_copy(part: Draft, curve_ns: Int64s, number: int, seed: int) -> Draft:
    """The `number`-th copy of some sessions, each moved inside its neighbourhood in the whole trace.

    Args:
        part: rows of whole sessions.
        curve_ns: all arrivals of the trace.
        number: of the copy, from 1.
        seed: the user's.
    """
    assert part.session is not None
    purpose = f"jitter{number}"
    if part.alone:
        shift = _shifts(part.arrival_ns, part.arrival_ns, curve_ns, uniform(part.session, seed, purpose))
    else:
        sessions, first, of_row = np.unique(part.session, return_index=True, return_inverse=True)
        start = part.arrival_ns[first]
        end = start.copy()
        np.maximum.at(end, of_row, part.arrival_ns)
        shift = _shifts(start, end, curve_ns, uniform(sessions, seed, purpose))[of_row]
    shift += part.arrival_ns
    return dataclasses.replace(part, arrival_ns=shift, copy=np.full(len(part), number, dtype=np.int16))


def _shifts(start_ns: Int64s, end_ns: Int64s, curve_ns: Int64s, draw: Floats) -> Int64s:
    """How far each session moves: up to ± its neighbourhood, reflected at the ends of the trace, inside its span."""
    first, last = int(curve_ns[0]), int(curve_ns[-1])
    shift = np.empty(len(start_ns), dtype=np.int64)
    for block in warp.blocks(len(start_ns)):
        start = start_ns[block]
        moved = start + np.rint((2 * draw[block] - 1) * _neighbourhood(start, curve_ns)).astype(np.int64)
        moved = last - np.abs(last - (first + np.abs(moved - first)))
        shift[block] = np.clip(moved - start, first - start, last - end_ns[block])
    return shift


def _neighbourhood(start_ns: Int64s, curve_ns: Int64s) -> Floats:
    """Distance in which a time has as many arrivals before it, after it or around it as come in 5 s on average.

    In a burst that is short, also at its edge; in a lull it is 5 s, or the mean gap where that is longer.
    """
    rows, span = len(curve_ns), max(int(curve_ns[-1] - curve_ns[0]), 1)
    many = int(np.clip(round(rows * JITTER_S * NS / span), 2, max(rows // 50, 2)))
    place = np.searchsorted(curve_ns, start_ns)
    widest = float(max(JITTER_S * NS, span / rows))

    def away(steps: int) -> Floats:
        there = place + steps
        inside = (there >= 0) & (there < rows)
        return np.where(inside, np.abs(curve_ns[np.clip(there, 0, rows - 1)] - start_ns), widest)

    around = np.maximum(away(-(many // 2)), away(many - many // 2))
    return np.minimum(np.minimum(np.minimum(away(-many), away(many)), around), widest)


def loop(draft: Draft, passes: int) -> Step:
    """The trace `passes` times in a row, a mean gap apart; each pass has ids and prefix blocks of its own."""
    _no_more_than_can_be(passes * len(draft), f"--loop {passes}")
    span = draft.span_ns()
    period = span + round(span / max(len(draft) - 1, 1))
    copies = int(draft.copy.max()) + 1
    parts = [
        dataclasses.replace(
            plain(draft), arrival_ns=draft.arrival_ns + number * period, copy=draft.copy + np.int16(number * copies)
        )
        for number in range(passes)
    ]
    report = of_rows("loop", str(passes), draft, passes * len(draft), passes * len(draft))
    return joined(parts), report


def _no_more_than_can_be(rows: float, asked: str) -> None:
    if rows > MOST_ROWS:
        raise ShapeError(f"{asked}: that would be {rows:,.0f} requests; one trace holds at most {MOST_ROWS:,}")


# ---- moving rows in time ----------------------------------------------------------------------------------------


def speed(draft: Draft, factor: float) -> Step:
    """Every gap and every think time divided by `factor`, exact to the nanosecond (half to even)."""
    think = draft.think_ns
    if think is not None:
        think = np.where(think < 0, -1, warp.scaled(think, factor))
    faster = dataclasses.replace(
        draft,
        arrival_ns=draft.arrival_ns[0] + warp.scaled(draft.offset_ns(), factor),
        think_ns=think,
    )
    report = Report(
        step="speed",
        asked=f"{factor:.6g}x",
        what="span [s]",
        before=draft.span_ns() / NS,
        planned=draft.span_ns() / NS / factor,
        achieved=faster.span_ns() / NS,
    )
    return faster, report


def burst(draft: Draft, factor: float, width_ns: int) -> Step:
    """The index of dispersion at `width_ns` times `factor`; count, order, first and last arrival stay.

    Raises:
        ShapeError: the dispersion cannot be reached, or the trace has too few windows to speak of one.
    """
    asked = f"{factor:.6g}x@{spelt(width_ns)}"
    what = f"index of dispersion at {show_ns(width_ns)}"
    span = draft.span_ns()
    if span < 10 * width_ns:
        raise ShapeError(
            f"--burst {asked}: the trace lasts {show_ns(span)}, and a dispersion needs 10 windows: "
            f"the widest window here is {show_ns(span // 10)}"
        )
    solved = warp.solve_burst(draft.offset_ns(), width_ns, factor)
    planned = solved.before * factor
    if planned <= 0 or abs(solved.achieved / planned - 1) > warp.TOLERANCE:
        nearest = solved.achieved / solved.before if planned > 0 else 1.0
        raise ShapeError(
            f"--burst {asked}: {what} is {solved.before:.4g} and moving arrivals in time cannot make it {planned:.4g}; "
            f"the nearest is {nearest:.3g}x ({solved.achieved:.4g})"
        )
    kept = f"the rate over {warp.BLOCK_WINDOWS} windows is kept" if solved.block_windows else "slow changes grew too"
    report = Report(
        step="burst",
        asked=asked,
        what=what,
        before=solved.before,
        planned=planned,
        achieved=solved.achieved,
        note=f"exponent {solved.exponent:.3g}, {kept}",
    )
    return _warped(draft, solved.warp), report


def retime(draft: Draft, cv: float, seed: int, *, poisson: bool = False) -> Step:
    """New times at the same rate: Poisson, or gamma gaps with coefficient of variation `cv` (0: constant).

    Count, order, first and last arrival stay.
    """
    generator = np.random.default_rng([seed & 0xFFFFFFFF, 0x7E71])
    count, span = len(draft), draft.span_ns()
    if span == 0:
        raise ShapeError("the trace has no times: say how fast it should be as well, such as --rate 5rps")
    if count < 3:
        raise ShapeError(f"re-timing needs at least 3 requests; the trace has {count}")
    times = warp.poisson_times(count, span, generator) if poisson else warp.gamma_times(count, span, cv, generator)
    moved = dataclasses.replace(
        _warped(draft, warp.through(draft.offset_ns(), times)), arrival_ns=draft.arrival_ns[0] + times
    )
    report = Report(
        step="poisson" if poisson else "gamma",
        asked="" if poisson else f"{cv:.6g}",
        what="inter-arrival CV",
        before=_cv(draft.arrival_ns),
        planned=1.0 if poisson else cv,
        achieved=_cv(moved.arrival_ns),
        note=f"same {count:,} requests in the same {show_ns(span)}",
    )
    return moved, report


def _warped(draft: Draft, curve: warp.Warp) -> Draft:
    offset = draft.offset_ns()
    moved = curve.at(offset)
    think = draft.think_ns
    if think is not None:
        think = np.where(think < 0, -1, np.maximum(moved - curve.at(offset - think), 0))
    return dataclasses.replace(draft, arrival_ns=draft.arrival_ns[0] + moved, think_ns=think)


def _cv(arrival_ns: Int64s) -> float:
    gaps = np.diff(arrival_ns)
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.any() else 0.0
