"""`tenants tag`: give every request of a trace a tenant and a rank, and say who got how much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traces.shell import parsed

if TYPE_CHECKING:
    import pyarrow as pa

    from tenants.tenant import Tenant


def _mix(text: str) -> tuple[Tenant, ...]:
    from tenants import mix

    return mix.parse(text)


@click.command()
@click.argument("trace")
@click.option(
    "--mix", "--tenant-mix", type=parsed("mix", _mix), help="NAME[=SHARE][@PRIORITY] joined by ':', most urgent first."
)
@click.option("--tenants", "described", type=click.Path(), metavar="FILE", help="tenants.toml, instead of --mix.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The Parquet file to write.")
@click.option(
    "--assign",
    "by",
    type=click.Choice(["share", "length"]),
    default="share",
    show_default=True,
    help="On an untagged trace: a seeded draw, or the shortest answers to the most urgent.",
)
@click.option("--others", type=click.Choice(["drop", "lowest"]), help="Tenants that the mix does not name.")
@click.option("--seed", default=0, show_default=True, help="Of the draw.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON and nothing else.")
def tag(
    *,
    trace: str,
    mix: tuple[Tenant, ...] | None,
    described: str | None,
    output: Path,
    by: str,
    others: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Give every request of TRACE a tenant and a priority.

    \b
    tenants tag conv.parquet --mix risk=3:summary=1 -o tagged.parquet
    tenants tag staging/ --mix risk:summary --others lowest -o ranked.parquet
    """  # noqa: D301 - click's own mark: keep these lines
    import json

    from tenants import mix as mixes
    from tenants import tenant as nouns
    from traces import parquet

    if (mix is None) == (described is None):
        raise click.UsageError("say who the tenants are, by --mix risk=3:summary=1 or by --tenants FILE")
    if output.exists():
        raise click.UsageError(f"{output} exists: name a new file with -o")
    tenants = mix if mix is not None else nouns.load(described or "")
    tagged = mixes.assign(parquet.read(trace), tenants, seed=seed, by=by, others=others)
    parquet.write(tagged, output)
    found = counts(tagged)
    if as_json:
        click.echo(json.dumps({"requests": tagged.num_rows, "tenants": found}))
        return
    click.echo(f"tagged {tagged.num_rows:,} requests for {len(found)} tenants in {output}")
    for name, part in found.items():
        tokens = "" if part["output_tokens"] is None else f", {part['output_tokens']:,} output tokens"
        click.echo(f"{name:<12} rank {part['priority']}  {part['requests']:>9,} requests ({part['share']:.1%}){tokens}")


def counts(trace: pa.Table) -> dict[str, dict[str, Any]]:
    """Requests, their share, rank and output tokens of each tenant, most urgent first."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    column = trace.column("tenant").cast(pa.string()).combine_chunks().dictionary_encode()
    code = column.indices.to_numpy()
    rank = trace.column("priority").to_numpy(zero_copy_only=False)
    known = "output_tokens" in trace.schema.names and trace.column("output_tokens").null_count == 0
    tokens = pc.fill_null(trace.column("output_tokens"), 0).to_numpy() if known else None
    found = {}
    for number, name in enumerate(column.dictionary.to_pylist()):
        mine = code == number
        found[name] = {
            "priority": int(rank[np.argmax(mine)]),
            "requests": int(mine.sum()),
            "share": float(mine.mean()),
            "output_tokens": None if tokens is None else int(tokens[mine].sum()),
        }
    return dict(sorted(found.items(), key=lambda item: (item[1]["priority"], item[0])))
