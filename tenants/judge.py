"""`tenants judge`: did each tenant get what it was promised? Of one run its SLAs, of several the worst of them.

The rules are those of the run, or those given here: a run can be judged again by other rules because its rows are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from traces.shell import EXIT_FAIL, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNJUDGED, parsed

if TYPE_CHECKING:
    from tenants.folder import Run
    from tenants.sla import Rule
    from tenants.summary import Summary
    from tenants.tenant import Tenant


def _rule(text: str) -> Rule:
    from tenants import sla

    return sla.parse(text)


@click.command()
@click.argument("runs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path())
@click.option("--sla", "rules", multiple=True, type=parsed("sla", _rule), help="Judge by this rule; may be repeated.")
@click.option("--tenants", "described", type=click.Path(), metavar="FILE", help="Judge by the rules of a tenants.toml.")
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON and nothing else.")
def judge(runs: tuple[str, ...], rules: tuple[Rule, ...], described: str | None, as_json: bool) -> int:
    """Judge one run by its SLAs, or several side by side.

    Exit codes: 0 pass, 1 a rule failed, 2 wrong usage, 3 invalid or inconclusive, 130 the run was interrupted.

    \b
    tenants judge runs/today
    tenants judge runs/today --sla 'risk: ttft_p99 < 1s'
    """  # noqa: D301 - click's own mark: keep these lines
    from tenants import failures, folder, terminal
    from tenants import tenant as nouns
    from tenants.summary import to_json_of_runs

    loaded = folder.load_all(list(runs))
    if rules or described:
        tenants = nouns.load(described) if described else ()
        loaded = [again(run, tenants, rules) for run in loaded]
    if as_json:
        click.echo(to_json_of_runs([(run.name, run.summary) for run in loaded]))
    elif len(loaded) == 1:
        causes = failures.causes(loaded[0].outcomes)
        terminal.print_result(loaded[0].summary, terminal.stdout_console(), folder=runs[0], causes=causes)
    else:
        terminal.print_comparison([(run.name, run.summary) for run in loaded], terminal.stdout_console())
    return worst_exit([run.summary for run in loaded])


def again(run: Run, tenants: tuple[Tenant, ...], rules: tuple[Rule, ...]) -> Run:
    """The run judged anew by other rules; what made it invalid stays.

    Raises:
        BadParameter: a rule is about a tenant that the run does not have.
    """
    from tenants import sla
    from tenants.summary import summarise
    from tenants.tenant import Tenant, with_rules

    before = run.summary
    described = {tenant.name: tenant for tenant in tenants}
    parts = before.tenants.items()
    known = [described.get(name, Tenant(name=name, priority=part.priority)) for name, part in parts if part.planned]
    try:
        known = list(with_rules(known, rules))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sla") from None
    summary = summarise(
        run.everything(),
        tenants=known,
        rules=[rule for rule in rules if rule.tenant == sla.ALL],
        max_lateness_ms=before.lateness_ms.limit,
        interrupted=before.interrupted,
        digest=before.digest,
        warnings=before.warnings,
        invalid=[reason for reason in before.invalid_reasons if not reason.startswith("client-bound")],
    )
    return run._replace(summary=summary)


def worst_exit(summaries: list[Summary]) -> int:
    """The exit code of several runs: interrupted, then failed, then not to be judged."""
    from tenants.summary import exit_code

    codes = {exit_code(summary) for summary in summaries}
    order = (EXIT_INTERRUPTED, EXIT_FAIL, EXIT_UNJUDGED, EXIT_PASS)
    return next(code for code in order if code in codes)
