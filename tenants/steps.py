"""The engine's steps, seen from outside.

An engine that batches continuously gives every decoding stream one token at the end of each step. So the chunks of all
streams, laid on one time axis, fall into clusters, and each cluster is the end of a step: who emitted in it was
decoding, who emitted its first chunk had just finished its prefill. A step that takes longer than decoding alone
explains holds prefill work, of requests that were sent and had no token yet.

    step k:   from e(k-1), or, after an idle engine, from when a request was sent, to e(k), the cluster's first chunk
    decoding: dur ≈ a + b·n + κ·C    n rows, C = their context lengths summed; least squares over steps without prefill
    prefill:  x(k) = dur(k) - (a + b·n + κ·C), what is left of a step for prefill. A request whose first chunk ends
              step k needs the time S(its length) of prefill; it takes that from x(k), then from the steps before, back
              to when it was sent. Prefills end in the order of their first tokens, so earlier ones take first.

Assumed: one engine; a chunk reaches us within a fraction of a step after its step; all traffic of the engine is ours.
Where a server merges tokens into fewer chunks, or chunk times were not kept, chunks are spread evenly between a
request's first and last token, and steps are as wide as that allows. No function here sees what an engine reports.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SPLIT_SHARE = 0.25  # a gap of this share of the typical gap between a stream's chunks separates two steps
NOISE_SHARE = 0.1  # a step without a first chunk that is longer by less than this holds no prefill
PURE_SHARE = 1.15  # a step this much longer than its neighbours of the same size is not taken for pure decoding


class Seen(NamedTuple):
    """What a replayer sees of each request; times in ns from the run's start, int64, -1 where it did not happen."""

    sent_ns: Ints
    first_ns: Ints
    end_ns: Ints
    input_tokens: Ints
    chunk_ns: Ints  # chunks of all requests, one after another
    chunk_of: Ints  # the request each belongs to

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Requests with a first token."""
        return self.first_ns >= 0


class Steps(NamedTuple):
    """Steps in order of time, and who was served in them (rows: one for each request served in a step)."""

    start_ns: Ints
    end_ns: Ints
    row_step: Ints
    row_request: Ints
    row_work: Floats  # ns of the step that this request's work took
    row_prefill: npt.NDArray[np.bool_]
    spare_ns: Floats  # (steps,) time beyond what its decoding rows explain
    decode_ns: Floats  # (steps,) time that they do explain


def seen(outcomes: pa.Table) -> Seen:
    """The columns of outcomes that the estimator may look at, as arrays; rows never sent have `sent_ns` -1."""
    rows = outcomes.num_rows

    def column(name: str) -> Ints:
        if name not in outcomes.schema.names:
            return np.full(rows, -1, dtype=np.int64)
        values: Ints = outcomes.column(name).cast(pa.int64()).fill_null(-1).to_numpy()
        return values

    sent = column("sent_ns")
    first, last, end = column("first_token_ns"), column("last_token_ns"), column("end_ns")
    output = np.maximum(column("output_tokens"), 1)
    chunk_ns, chunk_of = _chunks(outcomes, first, last, output)
    return Seen(
        sent_ns=sent,
        first_ns=np.where(first >= 0, sent + first, -1),
        end_ns=np.where(end >= 0, sent + end, sent),
        input_tokens=np.maximum(column("input_tokens") - np.maximum(column("cached_tokens"), 0), 0),
        chunk_ns=sent[chunk_of] + chunk_ns,
        chunk_of=chunk_of,
    )


def _chunks(outcomes: pa.Table, first: Ints, last: Ints, output: Ints) -> tuple[Ints, Ints]:
    """Offsets of all chunks and their requests; spread evenly where they were not kept or hold several tokens."""
    rows = outcomes.num_rows
    counts = np.zeros(rows, dtype=np.int64)
    flat = np.zeros(0, dtype=np.int64)
    if "chunk_ns" in outcomes.schema.names:
        lists = outcomes.column("chunk_ns").combine_chunks()
        counts = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        flat = lists.flatten().to_numpy().astype(np.int64)
    owners = np.repeat(np.arange(rows), counts)
    spread = np.flatnonzero((first >= 0) & (counts * 2 < output))  # far fewer chunks than tokens
    if len(spread) == 0:
        return flat, owners
    keep = ~np.isin(owners, spread)
    made = [np.linspace(first[row], max(first[row], last[row]), output[row]).astype(np.int64) for row in spread]
    offsets = np.concatenate([flat[keep], *made])
    return offsets, np.concatenate([owners[keep], np.repeat(spread, output[spread])])


def cluster(chunk_ns: Ints, chunk_of: Ints) -> tuple[Ints, Ints]:
    """Which step each chunk ends: chunks in order of time, and their step's number.

    A new step begins where the gap to the chunk before is wide, or where a stream would emit twice in one step.

    Returns:
        order: int64, the chunks by time; step: int64, for each of them in that order, from 0.
    """
    order = np.lexsort((chunk_of, chunk_ns))
    times, owners = chunk_ns[order], chunk_of[order]
    if len(times) == 0:
        return order, np.zeros(0, dtype=np.int64)
    by_stream = np.argsort(owners, kind="stable")
    same = np.diff(owners[by_stream]) == 0
    before, after = by_stream[:-1][same], by_stream[1:][same]  # neighbours of one stream
    gaps = times[after] - times[before]
    gaps = gaps[gaps > 0]
    limit = SPLIT_SHARE * float(np.median(gaps)) if len(gaps) else 1e6
    following = _following(times, before, after, limit)
    begins = np.zeros(len(times), dtype=np.int64)
    position = int(following[0])
    while position < len(times):
        begins[position] = 1
        position = int(following[position])
    return order, np.cumsum(begins)


def _following(times: Ints, before: Ints, after: Ints, limit: float) -> Ints:
    """(chunks,) for a step that begins with this chunk, where the next one begins.

    A stream emits again at the first p whose latest repeated chunk, max over q <= p of previous(q), is not before the
    begin; that maximum never falls, so it is found by bisection.
    """
    places = np.arange(len(times))
    previous = np.full(len(times), -1, dtype=np.int64)
    previous[after] = before
    again = np.searchsorted(np.maximum.accumulate(previous), places)
    wide = np.append(np.flatnonzero(np.diff(times) > limit) + 1, len(times))
    found: Ints = np.minimum(again, wide[np.searchsorted(wide, places, side="right").clip(max=len(wide) - 1)])
    return found


class _Rows(NamedTuple):
    """Emitting rows of the steps before prefill is placed."""

    start_ns: Ints
    end_ns: Ints
    step: Ints
    request: Ints
    is_first: npt.NDArray[np.bool_]
    context: Floats
    decoding: Ints  # decoding rows of each step
    context_sum: Floats


def _emitting(view: Seen) -> _Rows:
    order, step = cluster(view.chunk_ns, view.chunk_of)
    times, owners = view.chunk_ns[order], view.chunk_of[order]
    number = int(step[-1]) + 1 if len(step) else 0
    end = np.full(number, np.iinfo(np.int64).max)
    np.minimum.at(end, step, times)
    position = np.zeros(len(order), dtype=np.int64)
    by_stream = np.lexsort((times, owners))
    starts = np.flatnonzero(np.diff(owners[by_stream], prepend=-1) != 0)
    lengths = np.diff(np.append(starts, len(by_stream)))
    position[by_stream] = np.arange(len(by_stream)) - np.repeat(starts, lengths)
    is_first = position == 0
    context = (view.input_tokens[owners] + position).astype(np.float64)
    decoding = ~is_first
    return _Rows(
        start_ns=_starts(view, end),
        end_ns=end,
        step=step,
        request=owners,
        is_first=is_first,
        context=context,
        decoding=np.bincount(step[decoding], minlength=number),
        context_sum=np.bincount(step[decoding], weights=context[decoding], minlength=number).astype(np.float64),
    )


def _starts(view: Seen, end: Ints) -> Ints:
    """A step starts where the one before ended, or, if the engine had nothing then, when something was sent."""
    start = np.empty_like(end)
    if len(end) == 0:
        return start
    start[0] = -1
    start[1:] = end[:-1]
    sent = np.sort(view.sent_ns[view.sent_ns >= 0])
    done = np.sort(view.end_ns[view.sent_ns >= 0])
    in_flight = np.searchsorted(sent, start, side="right") - np.searchsorted(done, start, side="right")
    following = np.minimum(np.searchsorted(sent, start, side="right"), len(sent) - 1)
    idle = in_flight <= 0
    start[idle] = np.minimum(np.maximum(start[idle], sent[following[idle]]), end[idle])
    return start


class Emitting(NamedTuple):
    """Steps before anything is known of prefill costs; arrays are (steps,)."""

    view: Seen
    rows: _Rows
    firsts: Ints  # first chunks that end it
    first_request: Ints  # one of the requests whose first chunk ends it, -1 for none
    duration_ns: Floats
    spare_ns: Floats  # time beyond what its decoding rows explain
    cost: tuple[float, float, float]  # a, b and κ of decoding, ns


def emitting_steps(view: Seen) -> Emitting:
    """What the chunks alone tell of the steps."""
    rows = _emitting(view)
    duration, spare, cost = _spare(rows)
    number = len(duration)
    first_request = np.full(number, -1, dtype=np.int64)
    first_request[rows.step[rows.is_first]] = rows.request[rows.is_first]
    firsts = np.bincount(rows.step[rows.is_first], minlength=number)
    return Emitting(view, rows, firsts, first_request, duration, spare, cost)


def _spare(rows: _Rows) -> tuple[Floats, Floats, tuple[float, float, float]]:
    """Duration of each step, what of it decoding does not explain, and the cost of decoding."""
    number = len(rows.end_ns)
    duration = (rows.end_ns - rows.start_ns).astype(np.float64)
    has_first = np.bincount(rows.step[rows.is_first], minlength=number) > 0
    cost = _decode_cost(duration, rows, has_first)
    base, per_row, per_context = cost
    decode = np.where(rows.decoding > 0, base + per_row * rows.decoding + per_context * rows.context_sum, 0.0)
    spare = np.maximum(duration - np.minimum(decode, duration), 0.0)
    spare[(rows.decoding > 0) & ~has_first & (spare < NOISE_SHARE * decode)] = 0.0
    return duration, spare, cost


def steps(emitting: Emitting, alone_ns: Floats) -> Steps:
    """The steps of a run and each request's work in them.

    Args:
        emitting: what the chunks tell.
        alone_ns: (requests,) time to the first token of each request with the engine to itself.
    """
    return _shared_out(emitting, _place_prefill(emitting, alone_ns))


def _decode_cost(duration: Floats, rows: _Rows, has_first: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
    """`a + b·n + κ·C` of a step without prefill, in ns: least squares over steps that look like it, none below 0."""
    usable = (rows.decoding > 0) & ~has_first & (duration > 0)
    usable[:1] = False
    if not usable.any():
        usable = rows.decoding > 0
    if not usable.any():
        return 0.0, 0.0, 0.0
    for count in np.unique(rows.decoding[usable]):
        same = usable & (rows.decoding == count)
        low = float(np.quantile(duration[same], 0.25))
        usable &= ~(same & (duration > PURE_SHARE * low))
    design = np.stack([np.ones(int(usable.sum())), rows.decoding[usable], rows.context_sum[usable]], axis=1)
    from scipy.optimize import nnls

    scale = np.maximum(design.max(axis=0), 1.0)
    found, _ = nnls(design / scale, duration[usable])
    base, per_row, per_context = found / scale
    return float(base), float(per_row), float(per_context)


def _place_prefill(emitting: Emitting, alone_ns: Floats) -> tuple[Ints, Ints, Floats]:
    """Where each request's prefill ran: from its first chunk's step back, through what steps have to spare."""
    view, rows = emitting.view, emitting.rows
    finished = np.flatnonzero(rows.is_first)
    finished = finished[np.argsort(rows.step[finished], kind="stable")]
    left = emitting.spare_ns.tolist()
    before = _Before(left)
    starts, ends = rows.start_ns.tolist(), rows.end_ns.tolist()
    sent = view.sent_ns.tolist()
    earliest = np.searchsorted(rows.end_ns, view.sent_ns, side="right").tolist()
    found: list[tuple[int, int, float]] = []
    for position in finished.tolist():
        request = int(rows.request[position])
        need = float(alone_ns[request])
        at = before.find(int(rows.step[position]))
        while need > 0 and at >= earliest[request]:
            taken = min(need, left[at], float(ends[at] - max(starts[at], sent[request])))
            if taken > 0:
                found.append((at, request, taken))
                left[at] -= taken
                need -= taken
            at = before.find(at if left[at] <= 0 else at - 1)
    if not found:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    step, owner, work = zip(*found, strict=True)
    return np.array(step, dtype=np.int64), np.array(owner, dtype=np.int64), np.array(work)


class _Before:
    """Finds the last step, at or before one, that has time to spare; steps used up are skipped from then on.

    A disjoint-set forest with path halving (Tarjan and van Leeuwen 1984), so a whole run costs about one look a step.
    """

    def __init__(self, left: list[float]) -> None:
        self._left = left
        self._link = list(range(len(left)))

    def find(self, step: int) -> int:
        """The step's number, -1 for none."""
        link, left = self._link, self._left
        while step >= 0 and left[step] <= 0:
            beyond = link[step]
            if beyond == step:
                beyond = step - 1
            if beyond >= 0 and left[beyond] <= 0 and link[beyond] != beyond:
                beyond = link[beyond]
            link[step] = beyond
            step = beyond
        return step


def _shared_out(emitting: Emitting, prefill: tuple[Ints, Ints, Floats]) -> Steps:
    """Each step's time over its rows: decode rows by their cost, prefill by what was placed, scaled to the duration."""
    rows, duration, spare = emitting.rows, emitting.duration_ns, emitting.spare_ns
    base, per_row, per_context = emitting.cost
    number = len(duration)
    step, request, work = prefill
    placed = np.bincount(step, weights=work, minlength=number)
    decoding = ~rows.is_first
    row_step = rows.step[decoding]
    # with prefill in the step its fixed cost belongs to the tokens, nearly all of them the prefill's
    fixed = np.where(placed > 0, 0.0, base)[row_step] / np.maximum(rows.decoding[row_step], 1)
    weight = fixed + per_row + per_context * rows.context[decoding]
    all_step = np.concatenate([row_step, step])
    all_weight = np.concatenate([weight, work])
    total = np.bincount(all_step, weights=all_weight, minlength=number)
    scaled = all_weight * (duration / np.maximum(total, 1e-9))[all_step]
    return Steps(
        start_ns=rows.start_ns,
        end_ns=rows.end_ns,
        row_step=all_step,
        row_request=np.concatenate([rows.request[decoding], request]),
        row_work=scaled,
        row_prefill=np.concatenate([np.zeros(len(row_step), dtype=bool), np.ones(len(step), dtype=bool)]),
        spare_ns=spare,
        decode_ns=duration - spare,
    )
