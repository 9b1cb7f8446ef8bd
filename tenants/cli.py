"""`tenants`: say who asked, and judge what each tenant got. A thin shell; every subcommand is one function call."""

from __future__ import annotations

import click

from traces.shell import LazyGroup, run


@click.group(
    cls=LazyGroup,
    lazy={
        "tag": ("tenants.tag:tag", "give every request of a trace a tenant and a priority"),
        "judge": ("tenants.judge:judge", "SLA, blocking and isolation of one run or of the arms of an experiment"),
    },
)
def tenants() -> None:
    """Tenants that share one engine: mixes, priorities, SLAs, isolation."""


def main() -> None:
    """Run as a program."""
    run(tenants, "tenants")
