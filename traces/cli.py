"""`traces`: import, describe, reshape, compare and mend traces. A thin shell; every subcommand is one function call."""

from __future__ import annotations

import click

from traces.shell import LazyGroup, run


@click.group(
    cls=LazyGroup,
    lazy={
        "import": ("traces.importers.command:import_", "read what others publish or record into a Parquet trace"),
        "export": ("traces.export:export", "write a trace as Mooncake JSONL or CSV, for other tools"),
        "stats": ("traces.stats:stats", "what kind of traffic this is: bursts, tails, kinds, tenants"),
        "shape": ("traces.reshape:shape", "speed, burst, rate, window: change a trace and say what was achieved"),
        "synth": ("traces.synth:synth", "fit a model to a trace and draw a new trace from it"),
        "recover": ("traces.recover:recover", "turn the spool of a crashed recorder into a part"),
        "compare": ("traces.compare:compare", "how faithful one trace is to another"),
    },
)
def traces() -> None:
    """Traces of LLM traffic: lengths and times, never a word of text."""


def main() -> None:
    """Run as a program."""
    run(traces, "traces")
