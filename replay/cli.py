"""`replay`: play a trace against an engine and judge what the tenants felt.

The first word is a subcommand when it is one's name; anything else is a trace (write ./probe for a file of that name).
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import click

from traces.shell import EXIT_USAGE, LazyGroup, run

_SUBCOMMANDS = {
    "isolate": ("replay.isolate:isolate", "does priority isolate the urgent tenant? alone, untagged, tagged, capped"),
    "probe": ("replay.probe:probe", "does the server honour priority? told by behaviour, not by status code"),
    "sweep": ("replay.sweep:sweep", "one replay per speed or rate: where does the SLA break"),
    "simulate": ("replay.simulate:simulate", "the same replay on a virtual clock: a day of traffic in seconds"),
    "serve": ("replay.engine.serve:serve", "start the embedded vLLM-like engine"),
    "calibrate": ("replay.calibrate:calibrate", "fit the step-time model to a live engine"),
    "report": ("replay.report.command:report", "print and draw a run again from its folder"),
    "diagnose": ("replay.diagnose:diagnose", "what this machine can send, and what limits it"),
}


def mistyped(word: str) -> str | None:
    """The subcommand that a first word was meant for; None for an option, a trace, and what is like nothing."""
    if word.startswith("-") or word == "sample" or not word.isalpha() or Path(word).exists():
        return None
    return next(iter(difflib.get_close_matches(word.lower(), _SUBCOMMANDS, n=1, cutoff=0.75)), None)


def main() -> None:
    """Run as a program."""
    words = sys.argv[1:]
    if words and words[0] in _SUBCOMMANDS:
        group = LazyGroup("replay", lazy=_SUBCOMMANDS)
        run(group, "replay")
    meant = mistyped(words[0]) if words else None
    if meant is not None:
        click.echo(f"replay: no trace and no subcommand {words[0]}: did you mean `replay {meant}`?", err=True)
        sys.exit(EXIT_USAGE)
    from replay.command import replay

    replay.epilog = "Subcommands: " + ", ".join(_SUBCOMMANDS) + " (replay NAME --help)."
    run(replay, "replay")


if __name__ == "__main__":
    click.echo("run as: python -m replay", err=True)
