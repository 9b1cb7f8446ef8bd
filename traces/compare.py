"""`traces compare A B`: how faithful B is to A, in words and figures.

A is what was recorded or imported, B what came of it: the outcomes of a replay, or any other trace. Rows are paired by
request id where both have the same ids, else by their order. B may have been played faster: its times are multiplied by
the speed (the ratio of the spans, unless it is given) before they are compared.

    displacement     |speed · (b_i − b_0) − (a_i − a_0)|, for each pair of rows
    inter-arrival CV std / mean of the gaps
    dispersion       Var N / E N of the arrivals in windows of 1 s of A's time
    KS distance      D = max |F_A(x) − F_B(x)|: the largest share of requests by which the two distributions differ at
                     any value; p is the chance of a D as large if both came from one distribution

TTFT counts from when the request was at the recorder (A) and from when it was sent (B): that it differs is a statement
about the servers, not about the replay, so it is not part of the verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np
import numpy.typing as npt

from traces.burstiness import NS, idc
from traces.errors import BadFile
from traces.shell import FACTOR

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = ("request_id", "arrival_ns", "input_tokens", "output_tokens", "first_token_ns", "outcome")
_LENGTHS = ("input_tokens", "output_tokens")
CV_WITHIN = 0.05
IDC_WITHIN = 0.10
LENGTHS_SAME = 0.99

Floats = npt.NDArray[np.float64]


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--speed", type=FACTOR, help="B was played this much faster than A.  [default: the ratio of their spans]")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on stdout, and nothing else.")
def compare(first: str, second: str, *, speed: float | None, as_json: bool) -> None:
    """Say how faithful the trace B is to the trace A: counts, order, bursts, lengths, first tokens.

    \b
    traces compare traces/staging runs/today
    """  # noqa: D301 - click's own mark: keep these lines
    found = fidelity(_read(first), _read(second), speed)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    verdict = sentence(found, first, second)
    click.echo(verdict)
    for line in lines(found):
        click.echo(f"  {line}")
    click.echo(verdict)


def fidelity(one: pa.Table, other: pa.Table, speed: float | None = None) -> dict[str, Any]:
    """The figures of the module's head; both traces sorted by arrival, with the columns they have."""
    a, b, paired_by = _paired(one, other)
    a_ns, b_ns = _from_start(a), _from_start(b)
    if speed is None:
        speed = float(a_ns[-1] / b_ns[-1]) if len(b_ns) > 1 and b_ns[-1] > 0 and a_ns[-1] > 0 else 1.0
    found: dict[str, Any] = {
        "rows": [one.num_rows, other.num_rows],
        "paired": len(a_ns),
        "paired_by": paired_by,
        "speed": speed,
        "outcomes": [_outcomes(one), _outcomes(other)],
        "out_of_order": int(np.count_nonzero(np.diff(b_ns) < 0)),
        "displacement_ms": _displacement(a_ns, b_ns, speed),
        "inter_arrival_cv": [_cv(np.sort(a_ns)), _cv(np.sort(b_ns))],
        "dispersion_1s": [_dispersion(np.sort(a_ns), NS), _dispersion(np.sort(b_ns), round(NS / speed))],
        "lengths": {name: _lengths(a, b, name) for name in _LENGTHS},
        "ttft": _ttft(one, other),
    }
    found["differences"] = _differences(found)
    return found


def sentence(found: dict[str, Any], first: str, second: str) -> str:
    """The verdict."""
    speed = found["speed"]
    played = "" if abs(speed - 1) < 0.005 else f" at {speed:.3g}x speed"
    if not found["differences"]:
        return f"{second} is faithful to {first}{played}: {found['paired']:,} requests, same order, bursts and lengths."
    return f"{second} differs from {first}{played} in {'; in '.join(found['differences'])}."


def lines(found: dict[str, Any]) -> list[str]:
    """The figures in words."""
    shown = [
        f"requests: {found['rows'][0]:,} and {found['rows'][1]:,}, {found['paired']:,} paired by {found['paired_by']}",
        f"outcomes: {_counted(found['outcomes'][0])} | {_counted(found['outcomes'][1])}",
        f"order: {found['out_of_order']:,} of {max(found['paired'] - 1, 0):,} steps go back in time",
    ]
    moved = found["displacement_ms"]
    if moved:
        shown.append(
            f"arrivals: moved by {moved['p50']:.3g} ms in the middle, {moved['p99']:.3g} ms at P99, "
            f"{moved['max']:.3g} ms at most"
        )
    shown.append(f"inter-arrival CV: {_both(found['inter_arrival_cv'])} (1 = Poisson)")
    shown.append(f"dispersion in windows of 1 s: {_both(found['dispersion_1s'])} (1 = Poisson)")
    for name, length in found["lengths"].items():
        if length:
            shown.append(
                f"{name.replace('_', ' ')}: {length['same']:.1%} of {length['n']:,} the same, "
                f"mean {length['mean'][0]:.1f} and {length['mean'][1]:.1f}"
            )
    shown.append(_ttft_words(found["ttft"]))
    return shown


def _ttft_words(ttft: dict[str, Any] | None) -> str:
    if ttft is None:
        return "first tokens: not in both traces"
    told = (
        f"first tokens: median {ttft['median_ms'][0]:.3g} ms (n={ttft['n'][0]:,}) and {ttft['median_ms'][1]:.3g} ms "
        f"(n={ttft['n'][1]:,}); KS distance {ttft['ks']:.3f}: "
    )
    if ttft["p"] >= 0.05:
        return told + f"the two distributions cannot be told apart (p = {ttft['p']:.2g})"
    return (
        told + f"at the value where they differ most, {ttft['ks']:.0%} more of the {ttft['slower']} are still waiting"
    )


def _differences(found: dict[str, Any]) -> list[str]:
    told = []
    if found["rows"][0] != found["rows"][1] or found["paired"] < found["rows"][0]:
        told.append(f"count ({found['rows'][0]:,} and {found['rows'][1]:,} requests, {found['paired']:,} paired)")
    if found["out_of_order"]:
        told.append(f"order ({found['out_of_order']:,} steps back)")
    for name, key, within in (
        ("inter-arrival CV", "inter_arrival_cv", CV_WITHIN),
        ("dispersion", "dispersion_1s", IDC_WITHIN),
    ):
        one, other = found[key]
        if one is not None and other is not None and abs(other - one) > within * max(one, 1e-9):
            told.append(f"{name} ({one:.3g} and {other:.3g})")
    for name, length in found["lengths"].items():
        if length and length["same"] < LENGTHS_SAME:
            told.append(f"{name.replace('_', ' ')} ({length['same']:.0%} the same)")
    return told


def _read(path: str) -> pa.Table:
    """A trace, a folder of parts, or a run folder; rows that were never sent are left out."""
    from pathlib import Path

    import pyarrow.compute as pc

    from traces import parquet

    outcomes = Path(path) / "outcomes.parquet"
    trace = parquet.read(outcomes if outcomes.is_file() else path, _COLUMNS)
    if "outcome" in trace.schema.names:
        trace = trace.filter(pc.fill_null(pc.not_equal(trace.column("outcome").cast("string"), "unsent"), True))
    if trace.num_rows == 0:
        raise BadFile(f"{path}: no request in it to compare")
    return trace


def _paired(one: pa.Table, other: pa.Table) -> tuple[pa.Table, pa.Table, str]:
    """Rows of both that belong together, in the order of the first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if all("request_id" in table.schema.names and not table.column("request_id").null_count for table in (one, other)):
        at = pc.index_in(one.column("request_id"), pc.unique(other.column("request_id")))
        known = pc.is_valid(at)
        same = pc.sum(known).as_py() or 0
        unique = len(pc.unique(other.column("request_id"))) == other.num_rows
        if same and unique:
            return one.filter(known), other.take(pc.drop_null(at)), "request id"
    rows = min(one.num_rows, other.num_rows)
    return one.take(pa.array(range(rows))), other.take(pa.array(range(rows))), "order"


def _from_start(trace: pa.Table) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = trace.column("arrival_ns").to_numpy()
    from_start: npt.NDArray[np.int64] = times - times.min()
    return from_start


def _cv(times_ns: npt.NDArray[np.int64]) -> float | None:
    gaps = np.diff(times_ns)
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None


def _dispersion(times_ns: npt.NDArray[np.int64], width_ns: int) -> float | None:
    return float(idc(times_ns, width_ns)) if len(times_ns) > 1 and times_ns[-1] >= 2 * width_ns else None


def _displacement(
    a_ns: npt.NDArray[np.int64], b_ns: npt.NDArray[np.int64], speed: float
) -> dict[str, float | int] | None:
    if len(a_ns) == 0:
        return None
    moved = np.sort(np.abs(b_ns * speed - a_ns)) / 1e6
    at = {q: float(moved[max(int(np.ceil(q * len(moved))) - 1, 0)]) for q in (0.5, 0.99)}
    return {"n": len(moved), "p50": at[0.5], "p99": at[0.99], "max": float(moved[-1])}


def _lengths(a: pa.Table, b: pa.Table, name: str) -> dict[str, Any] | None:
    if name not in a.schema.names or name not in b.schema.names:
        return None
    one = a.column(name).cast("float64").to_numpy()
    other = b.column(name).cast("float64").to_numpy()
    both = ~(np.isnan(one) | np.isnan(other))
    if not both.any():
        return None
    one, other = one[both], other[both]
    return {
        "n": len(one),
        "same": float(np.mean(one == other)),
        "mean": [float(one.mean()), float(other.mean())],
        "ks": _ks(one, other)[0],
    }


def _ttft(one: pa.Table, other: pa.Table) -> dict[str, Any] | None:
    values = []
    for table in (one, other):
        if "first_token_ns" not in table.schema.names:
            return None
        times = table.column("first_token_ns").drop_null().to_numpy() / 1e6
        if len(times) == 0:
            return None
        values.append(times)
    distance, p = _ks(values[0], values[1])
    medians = [float(np.sort(times)[(len(times) - 1) // 2]) for times in values]
    return {
        "n": [len(times) for times in values],
        "median_ms": medians,
        "ks": distance,
        "p": p,
        "slower": "first" if medians[0] > medians[1] else "second",
    }


def _ks(one: Floats, other: Floats) -> tuple[float, float]:
    from scipy import stats

    result = stats.ks_2samp(one, other)
    return float(result.statistic), float(result.pvalue)


def _outcomes(trace: pa.Table) -> dict[str, int]:
    import pyarrow.compute as pc

    if "outcome" not in trace.schema.names:
        return {}
    counted = pc.value_counts(trace.column("outcome").cast("string")).to_pylist()
    return {str(each["values"]): each["counts"] for each in sorted(counted, key=lambda each: -each["counts"])}


def _counted(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in outcomes.items()) or "none told"


def _both(values: list[float | None]) -> str:
    return " and ".join("n/a" if value is None else f"{value:.3g}" for value in values)
