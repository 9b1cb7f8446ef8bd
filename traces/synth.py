"""`traces synth`: fit a model to a trace, and draw new traces from it.

traces synth fit conv.parquet -o conv.toml            prints how near the model comes
traces synth draw conv.toml -o new.parquet --duration 1h --seed 7
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from traces.shell import DURATION, parsed
from traces.units import NS_PER_S, show_ns

if TYPE_CHECKING:
    from traces.columns import Columns
    from traces.goodness import Fit
    from traces.synthesis import Model, Tenant


def parse_rps(text: str) -> float:
    """A rate in requests a second: `5`, `5rps`. Raises ValueError."""
    from traces.reshape import PerSecond, parse_rate

    found = parse_rate(text if text.strip().endswith(("rps", "/s")) else f"{text}rps")
    assert isinstance(found, PerSecond)
    return found.rps


@click.group()
def synth() -> None:
    """Fit a model to a trace (fit), draw a new trace from it (draw)."""


@synth.command()
@click.argument("source", metavar="TRACE")
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The model to write (TOML)."
)
@click.option("--seed", default=0, show_default=True, help="Of subsamples and of the draw that is compared.")
@click.option("--json", "as_json", is_flag=True, help="The comparison as JSON on stdout.")
def fit(source: str, out: Path, seed: int, as_json: bool) -> None:
    """Fit a model to TRACE and print how near a draw from it comes.

    TRACE is whatever `traces stats` takes. The model is a small TOML without any row of the trace.
    """
    from traces import stats, synthesis
    from traces.burstiness import grid
    from traces.errors import BadFile
    from traces.profile import has_times

    if out.exists():
        raise click.UsageError(f"{out} exists: name a new file with -o")
    columns = stats.read(source)
    if columns is None:
        raise BadFile(f"{source}: holds no request")
    timed = has_times(columns) and columns.arrival_ns[-1] > columns.arrival_ns[0]
    model = synthesis.fit(columns, timed=timed, seed=seed)
    period_ns = grid(columns.arrival_ns).period_ns if timed else None
    if period_ns is not None:
        click.echo(f"times come in batches {show_ns(period_ns)} apart: the model spreads each over that time", err=True)
    fits = compared(columns, model, timed=timed, seed=seed)
    out.write_text(synthesis.to_toml(model), encoding="utf-8")
    if as_json:
        click.echo(msgspec.json.encode({"model": str(out), "tenants": fits}).decode())
        return
    for name, tenant in model.tenants.items():
        _show(name, tenant, fits[name])
    click.echo(f"model of {model.rows:,} requests written to {out} ({out.stat().st_size:,} bytes, no row of the trace)")


def compared(columns: Columns, model: Model, *, timed: bool, seed: int) -> dict[str, list[Fit]]:
    """Each tenant's figures beside those of a draw of the same length.

    A model of lengths alone is drawn at 10 req/s for as many requests.
    """
    from traces.columns import gather
    from traces.goodness import compare
    from traces.synthdraw import draw

    if timed:
        drawn = gather(draw(model, max(model.span_s, 1.0), seed=seed + 1).to_batches())
    else:
        drawn = gather(draw(model, max(model.rows / 10, 1.0), seed=seed + 1, rps=10.0).to_batches())
    assert drawn is not None
    found = {}
    for name in model.tenants:
        one, two = _rows_of(columns, name), _rows_of(drawn, name)
        fits = compare(one, two) if one is not None and two is not None else []
        found[name] = [row for row in fits if timed or row.what.split()[0] in {"input", "output", "input-output"}]
    return found


def _rows_of(columns: Columns, tenant: str) -> Columns | None:
    from traces.synthesis import UNTAGGED

    words = columns.words.get("tenant")
    if words is None:
        return columns if tenant == UNTAGGED else None
    return columns.take(words.codes == words.names.index(tenant)) if tenant in words.names else None


def _show(name: str, tenant: Tenant, fits: list[Fit]) -> None:
    arrivals, lengths = tenant.arrivals, tenant.lengths
    kind = {"mmpp": "Markov-modulated Poisson", "poisson": "Poisson", "none": "no"}.get(
        arrivals.kind, f"{arrivals.kind} gaps"
    )
    if arrivals.kind == "mmpp":
        kind += f", {len(arrivals.rates_rps)} states of {arrivals.window_s:g} s"
    parts = [f"arrivals: {kind}"]
    if lengths is not None:
        parts.append(f"lengths: {len(lengths.components)} components")
    if tenant.sessions is not None:
        parts.append("conversations" + (" whose prompts grow" if tenant.sessions.grows else ""))
    click.echo(f"{name}: " + "; ".join(parts))
    click.echo(f"  {'':<27}{'trace':>11}{'model':>11}{'KS D':>8}")
    for row in fits:
        figures = [_figure(value) for value in (row.trace, row.model)]
        distance = f"{row.distance:.3f}" if row.distance is not None else ""
        click.echo(f"  {row.what:<27}{figures[0]:>11}{figures[1]:>11}{distance:>8}".rstrip())


def _figure(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@synth.command()
@click.argument("source", metavar="MODEL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The Parquet trace to write."
)
@click.option("--duration", "duration_ns", type=DURATION, help="Length of the trace [default: as fitted].")
@click.option("--rps", type=parsed("rate", parse_rps), help="Mean rate, for a model of lengths alone: 5.")
@click.option("--seed", default=0, show_default=True, help="Every draw follows from it.")
def draw(source: Path, out: Path, duration_ns: int | None, rps: float | None, seed: int) -> None:
    """Draw a new trace from MODEL, of any length."""
    from traces import parquet, synthesis
    from traces.synthdraw import draw as drawn

    if out.exists():
        raise click.UsageError(f"{out} exists: name a new file with -o")
    model = synthesis.from_toml(source.read_text(encoding="utf-8"), str(source))
    timed = any(tenant.arrivals.kind != "none" for tenant in model.tenants.values())
    if timed and rps is not None:
        raise click.UsageError("--rps is for a model of lengths alone; use traces shape --rate 5rps on the drawn trace")
    duration_s = model.span_s if duration_ns is None else duration_ns / NS_PER_S
    if not duration_s > 0:
        raise click.UsageError("the model has no length of its own: say --duration 10m")
    trace = drawn(model, duration_s, seed=seed, rps=rps)
    parquet.write(trace, out)
    click.echo(f"{trace.num_rows:,} requests in {duration_s:,.6g} s written to {out}")
