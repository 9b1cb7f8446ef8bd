"""`traces shape`, and the same options on `replay`: what to do to a trace, in one documented order.

    merge → window → tenant → sample → lengths → rate → loop → poisson | gamma → speed → burst

First which requests there are (another trace beside, a window, a tenant, a sample), then how long they are, then how
many (rate, loop), then when: new times at the same rate, speed, and burst last, so that `--burst 2x@1s` speaks of a
second as the server will see it. Another order is two calls.

    @click.command
    @shape_options
    def replay(shape: ShapeOptions, seed: int, ...):
        trace, reports = apply(trace, shape, seed=seed)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from traces import units
from traces.shell import FACTOR, parsed

if TYPE_CHECKING:
    import os

    import pyarrow as pa

    from traces.draft import Draft, Report, Step
    from traces.record import Metadata

ORDER = ("merge", "window", "tenant", "sample", "lengths", "rate", "loop", "poisson", "gamma", "speed", "burst")

Command = TypeVar("Command", bound=Callable[..., Any])


class Burst(msgspec.Struct, frozen=True):
    """Factor on the index of dispersion, and the window it is measured at."""

    factor: float
    window_ns: int = units.NS_PER_S


class Window(msgspec.Struct, frozen=True):
    """Half-open, in trace time; an open end is None."""

    start_ns: int
    end_ns: int | None


class LengthFactors(msgspec.Struct, frozen=True):
    """Factors on input and output tokens, and the most tokens of both together."""

    input: float = 1.0
    output: float = 1.0
    most: int | None = None


class PerSecond(msgspec.Struct, frozen=True):
    """A rate to reach, in requests a second."""

    rps: float


class ShapeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to do to a trace; every field's default leaves it as it is."""

    merge: tuple[str, ...] = ()
    window: Window | None = None
    tenant: tuple[str, ...] = ()
    sample: float | None = None
    lengths: LengthFactors | None = None
    rate: float | PerSecond | None = None
    loop: int | None = None
    poisson: bool = False
    gamma: float | None = None
    speed: float | None = None
    burst: Burst | None = None

    def any(self) -> bool:
        """Whether anything is asked."""
        return self != ShapeOptions()


def parse_burst(text: str) -> Burst:
    """`2x@1s`, or `2x` for a window of 1 s. Raises ValueError."""
    factor, at, window = text.partition("@")
    width_ns = units.duration_ns(window) if at else units.NS_PER_S
    if width_ns <= 0:
        raise ValueError(f"{text!r}: the window must be above 0, such as 2x@1s")
    return Burst(units.factor(factor), width_ns)


def parse_window(text: str) -> Window:
    """`10m:20m`, `:60s` or `10m:`. Raises ValueError."""
    start, colon, end = text.partition(":")
    if not colon or not (start.strip() or end.strip()):
        raise ValueError(f"{text!r} is not a window: write start:end in trace time, such as 10m:20m, :60s or 10m:")
    window = Window(units.duration_ns(start) if start.strip() else 0, units.duration_ns(end) if end.strip() else None)
    if window.end_ns is not None and window.end_ns <= window.start_ns:
        raise ValueError(f"{text!r} ends before it starts: write start:end, such as 10m:20m")
    return window


_LENGTH_PART = re.compile(r"\s*(input|output|max)\s*=\s*(\S+)\s*")


def parse_lengths(text: str) -> LengthFactors:
    """`1.5x`, `input=0.5x,output=2x`, `max=1500`, or a mix such as `0.5x,max=1500`. Raises ValueError."""
    found: dict[str, float] = {}
    most: int | None = None
    for part in text.split(","):
        match = _LENGTH_PART.fullmatch(part)
        if match is None:
            found["input"] = found["output"] = units.factor(part)
        elif match[1] == "max":
            if not match[2].isdigit() or int(match[2]) < 2:
                raise ValueError(f"max={match[2]} is not a number of tokens from 2 on: write it as max=1500")
            most = int(match[2])
        else:
            found[match[1]] = units.factor(match[2])
    return LengthFactors(most=most, **found)


def parse_gamma(text: str) -> float:
    """A coefficient of variation from 0 (constant gaps) on. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise ValueError(
            f"{text!r} is not a coefficient of variation: write a number from 0 (constant gaps; 1 is Poisson) to 100"
        )
    return value


def parse_rate(text: str) -> float | PerSecond:
    """A factor such as `2x`, or a rate to reach: `5rps`. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:rps|req/s|/s)\s*", text)
    if match is None:
        try:
            return units.factor(text)
        except ValueError as error:
            raise ValueError(f"{error}, or a rate to reach as 5rps") from None
    if not float(match[1]) > 0:
        raise ValueError(f"{text!r} must be above 0: write 2x, 0.5x, or a rate to reach as 5rps")
    return PerSecond(float(match[1]))


def parse_share(text: str) -> float:
    """A share of at most 1: `10%`, `0.1`. Raises ValueError."""
    value = units.factor(text)
    if value > 1:
        raise ValueError(f"{text!r} is more than all: write a share such as 10% or 0.25 (--rate makes more requests)")
    return value


_OPTIONS = (
    click.option(
        "--merge",
        multiple=True,
        metavar="OTHER",
        help="Add another trace (same clock when both are dated and overlap, else they start together).",
    ),
    click.option(
        "--window", type=parsed("start:end", parse_window), help="Only requests that arrive then, such as 10m:20m."
    ),
    click.option("--tenant", multiple=True, metavar="NAME", help="Only this tenant; may be repeated."),
    click.option("--sample", type=parsed("share", parse_share), help="Keep a share, whole sessions, such as 10%."),
    click.option(
        "--lengths",
        type=parsed("factor", parse_lengths),
        help="Longer or shorter requests: 1.5x, or input=0.5x,output=2x,max=1500 (input + output at most).",
    ),
    click.option(
        "--rate",
        type=parsed("factor", parse_rate),
        help="More or fewer requests, same shape of the rate over time: 2x, 0.5x, or 5rps on average.",
    ),
    click.option("--loop", type=click.IntRange(1, 10_000), metavar="N", help="Play it N times, one after the other."),
    click.option("--poisson", is_flag=True, help="New times at the same rate: Poisson."),
    click.option(
        "--gamma",
        type=parsed("cv", parse_gamma),
        help="New times at the same rate: gamma gaps with this coefficient of variation.",
    ),
    click.option("--speed", type=FACTOR, help="2x halves every gap, think times too."),
    click.option(
        "--burst",
        type=parsed("factor@window", parse_burst),
        help="2x@1s doubles the index of dispersion at 1 s; count, order and mean rate stay.",
    ),
)


def shape_options(command: Command) -> Command:
    """Give a command the reshaping options; it gets them as one argument `shape: ShapeOptions`."""
    names = ShapeOptions.__struct_fields__

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in names}
        if chosen["poisson"] and chosen["gamma"] is not None:
            raise click.UsageError("--poisson and --gamma exclude each other: --gamma 1 is the Poisson process's CV")
        return command(*args, shape=ShapeOptions(**chosen), **kwargs)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def apply(trace: pa.Table, options: ShapeOptions, *, seed: int) -> tuple[pa.Table, list[Report]]:
    """Reshape a trace in memory, in the documented order.

    Args:
        trace: sorted by arrival, as `traces.parquet.read` gives it.
        options: what to do.
        seed: every draw follows from it.

    Returns:
        The reshaped trace with its history in the metadata, and a report a step. Without options the very same trace.

    Raises:
        ShapeError: a step that this trace cannot take.
        TraceError: a trace to merge cannot be read.
    """
    from traces import assemble, parquet
    from traces.draft import draft_of
    from traces.record import metadata_of
    from traces.resize import length_reports, scale_lengths

    if not options.any():
        return trace, []
    reports = []
    for path in options.merge:
        other = parquet.read(path)
        trace, report = assemble.merge(trace, other, metadata_of(trace), metadata_of(other))
        reports.append(msgspec.structs.replace(report, asked=Path(path).name))
    draft, done = redraft(draft_of(trace), options, tenant_names(trace), seed=seed)
    reports += done
    reshaped = assemble.build(trace, draft, assemble.free_mark(trace))
    if options.lengths is not None:
        factors = msgspec.structs.astuple(options.lengths)
        reshaped, tally = scale_lengths(reshaped, *factors)
        reports += length_reports(tally, *factors)
    reports = in_order(reports)
    return reshaped.replace_schema_metadata(with_history(metadata_of(trace), reports, seed).encode()), reports


def redraft(draft: Draft, options: ShapeOptions, tenants: list[str], *, seed: int) -> tuple[Draft, list[Report]]:
    """All steps that choose, add or move rows, in order."""
    from traces import shape

    reports: list[Report] = []

    def do(step: Callable[..., Step], *args: Any, **kwargs: Any) -> None:
        nonlocal draft
        draft, report = step(draft, *args, **kwargs)
        reports.append(report)

    if options.window is not None:
        do(shape.window, options.window.start_ns, options.window.end_ns)
    if options.tenant:
        do(shape.only_tenants, options.tenant, tenants)
    if options.sample is not None:
        do(shape.thin, options.sample, seed)
    if isinstance(options.rate, PerSecond) and draft.span_ns():
        do(shape.rate_to, options.rate.rps, seed)
    elif isinstance(options.rate, PerSecond):
        do(shape.spread, options.rate.rps, options.poisson or options.gamma is not None)
    elif options.rate is not None:
        do(shape.rate, options.rate, seed)
    if options.loop is not None:
        do(shape.loop, options.loop)
    if options.poisson:
        do(shape.retime, 1.0, seed, poisson=True)
    if options.gamma is not None:
        do(shape.retime, options.gamma, seed)
    if options.speed is not None:
        do(shape.speed, options.speed)
    if options.burst is not None:
        do(shape.burst, options.burst.factor, options.burst.window_ns)
    return draft, reports


def tenant_names(trace: pa.Table) -> list[str]:
    """Tenants by the code that `draft_of` gives them: in order of appearance."""
    if "tenant" not in trace.schema.names:
        return []
    import pyarrow as pa

    names: list[str] = trace.column("tenant").cast(pa.string()).drop_null().unique().to_pylist()
    return names


def in_order(reports: list[Report]) -> list[Report]:
    """Reports in the order of the steps."""
    return sorted(reports, key=lambda report: ORDER.index(report.step))


def with_history(metadata: Metadata, reports: list[Report], seed: int) -> Metadata:
    """The metadata with what was done; lengths that got times are no longer lengths alone."""
    if metadata.source == "lengths" and any(report.step in {"poisson", "gamma"} for report in reports):
        metadata = msgspec.structs.replace(metadata, source="lengths, timed")
    for report in reports:
        metadata = metadata.done(f"shape (seed {seed}): {report.line()}")
    return metadata


def apply_to_file(
    path: str | os.PathLike[str], out: str | os.PathLike[str], options: ShapeOptions, *, seed: int
) -> tuple[int, list[Report]]:
    """Reshape a trace file into another, chunk by chunk: the draft is in memory, the rows are not.

    The same as `apply` of the whole, except that a merge needs the traces in memory.

    Returns:
        How many rows were written, and a report a step.

    Raises:
        TraceError: nothing is written then.
    """
    from traces import parquet

    if options.merge:
        trace, reports = apply(parquet.read(path), options, seed=seed)
        parquet.write(trace, out)
        return trace.num_rows, reports
    from traces.streaming import reshape_file

    return reshape_file(path, out, options, seed=seed)


@click.command(short_help="change a trace and say what was achieved")
@click.argument("source", metavar="TRACE")
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The Parquet file to write."
)
@click.option("--seed", default=0, show_default=True, help="Every draw follows from it.")
@click.option("--json", "as_json", is_flag=True, help="Planned and achieved as JSON on stdout.")
@shape_options
def shape(source: str, out: Path, seed: int, as_json: bool, shape: ShapeOptions) -> None:
    """Change TRACE and say what was planned and what was achieved.

    Steps are done in this order, whatever the order of the options: merge, window, tenant, sample, lengths, rate, loop,
    poisson or gamma, speed, burst. Another order is two calls.

    \b
    traces shape conv.parquet -o busy.parquet --window 10m:20m --speed 2x
    traces shape conv.parquet -o bursty.parquet --burst 2x@1s
    """  # noqa: D301 - click's own mark: keep these lines
    if not shape.any():
        raise click.UsageError("nothing to do: give at least one of --speed 2x, --burst 2x, --rate 2x, --window 0s:60s")
    if out.exists():
        raise click.UsageError(f"{out} exists: name a new file with -o")
    rows, reports = apply_to_file(source, out, shape, seed=seed)
    if as_json:
        click.echo(msgspec.json.encode({"rows": rows, "out": str(out), "steps": reports}).decode())
        return
    for report in reports:
        click.echo(report.line())
    click.echo(f"{rows:,} requests written to {out}")
