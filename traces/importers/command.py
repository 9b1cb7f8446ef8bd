"""`traces import [NAME] FILE -o OUT`: what others publish or record, as a Parquet trace."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from traces.errors import BadFile
from traces.importers.formats import FORMATS
from traces.shell import DURATION

_OWN = {
    "map": "mapping",
    "block-size": "block_size",
    "subagents": "subagents",
    "seed": "seed",
    "start": "start_ns",
    "duration": "duration_ns",
}


def _epilog() -> str:
    width = max(map(len, FORMATS))
    lines = "\n".join(f"  {name:<{width}}  {form.what}" for name, form in FORMATS.items())
    return f"\b\nFormats:\n{lines}\n\n\b\nExamples:\n" + "\n".join(
        f"  {line}"
        for line in (
            "traces import AzureLLMInferenceTrace_code.csv -o code.parquet",
            "traces import burstgpt BurstGPT_1.csv -o burst.parquet --failed drop",
            "traces import csv log.csv -o log.parquet --map arrival=ts_ms,input_tokens=prompt_len",
        )
    )


@click.command(
    "import",
    short_help="read what others publish or record into a Parquet trace",
    epilog=_epilog(),
    no_args_is_help=True,
)
@click.argument("words", metavar="[NAME] FILE", nargs=-1, required=True)
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Trace to write.")
@click.option(
    "--map",
    "mapping",
    multiple=True,
    metavar="COLUMN=SOURCE[:UNIT],...",
    help="csv, jsonl, parquet: which column is which, such as arrival=ts:ms,input_tokens=prompt_len",
)
@click.option(
    "--failed",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="Requests that failed or have 0 output tokens.",
)
@click.option(
    "--bad-rows",
    type=click.Choice(["error", "skip"]),
    default="error",
    show_default=True,
    help="Rows that cannot be read.",
)
@click.option("--block-size", type=click.IntRange(1), help="mooncake: tokens in a prefix block [default: 512].")
@click.option(
    "--subagents",
    type=click.Choice(["keep", "drop"]),
    default="drop",
    show_default=True,
    help="kvcache: requests that an agent's own agents made.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="servegen: seed of the drawn trace.")
@click.option(
    "--start", "start_ns", type=DURATION, help="servegen: where to begin, such as 20h [default: first window in use]."
)
@click.option("--duration", "duration_ns", type=DURATION, help="servegen: length of the drawn trace [default: 1h].")
def import_(words: tuple[str, ...], out: Path, mapping: tuple[str, ...], **given: object) -> None:
    """Read FILE into a trace. NAME is its format; when it is left out, the file's content tells."""
    from traces.importers.intake import Options
    from traces.importers.load import import_file
    from traces.importers.mapping import parse

    name, path = _what(words)
    context = click.get_current_context()
    for option, parameter in _OWN.items():
        if option not in FORMATS[name].takes and context.get_parameter_source(parameter) is not (
            click.core.ParameterSource.DEFAULT
        ):
            takers = ", ".join(other for other, form in FORMATS.items() if option in form.takes)
            raise click.UsageError(f"--{option} is for {takers}; {name} has no use for it")
    try:
        pairs = tuple(pair for text in mapping for pair in parse(text))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--map") from error
    options = Options(mapping=pairs, **given)  # type: ignore[arg-type]
    intake = import_file(name, path, out, options)
    click.echo(f"{name}: " + "; ".join(intake.summary()), err=True)
    click.echo(str(out))


def _what(words: tuple[str, ...]) -> tuple[str, str]:
    if len(words) == 2:
        name, path = words
        if name in FORMATS:
            return name, path
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise click.UsageError(f"{name!r} is not a format; {hint}Formats: {', '.join(FORMATS)}")
    if len(words) > 2:
        raise click.UsageError("one file at a time: traces import [NAME] FILE -o OUT")
    path = words[0]
    if path in FORMATS and not Path(path).exists():
        raise click.UsageError(f"a file is missing: traces import {path} FILE -o OUT")
    from traces.importers.sniff import format_of
    from traces.importers.source import Source

    name_found = format_of(Source(path))
    if name_found is None:
        raise BadFile(f"{path}: no known format; name it: traces import NAME {path} -o OUT ({', '.join(FORMATS)})")
    click.echo(f"{path}: looks like {name_found}", err=True)
    return name_found, path
