"""`tenants judge`: did each tenant get what it was promised?

Of one run its SLAs, of several the worst of them, of an experiment (`replay isolate`) whether its tenants are isolated.

The rules are those of the run, or those given here: a run can be judged again by other rules because its rows are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traces.shell import EXIT_FAIL, EXIT_INTERRUPTED, EXIT_PASS, EXIT_UNJUDGED, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from tenants.experiment import Experiment
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
@click.option("--arm", metavar="NAME", help="Experiment: the arm that is held against the bounds.  [default: tagged]")
@click.option(
    "--baseline", type=click.Path(), metavar="RUN", help="Fail where a time got worse than there, beyond chance."
)
@click.option("--junit", type=click.Path(), metavar="FILE", help="Experiment: write JUnit XML.")
@click.option("--markdown", type=click.Path(), metavar="FILE", help="Experiment: write Markdown for GitHub.")
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON and nothing else.")
def judge(
    runs: tuple[str, ...],
    rules: tuple[Rule, ...],
    described: str | None,
    baseline: str | None,
    as_json: bool,
    **of_experiment: str | None,
) -> int:
    """Judge one run by its SLAs, several side by side, or an experiment by its tenants' isolation.

    Exit codes: 0 pass, 1 a rule failed, 2 wrong usage, 3 invalid or inconclusive, 130 the run was interrupted.

    \b
    tenants judge runs/today
    tenants judge runs/today --sla 'risk: ttft_p99 < 1s'
    tenants judge runs/isolate-today --markdown isolation.md --baseline runs/isolate-before
    """  # noqa: D301 - click's own mark: keep these lines
    from tenants import experiment, folder
    from tenants import tenant as nouns
    from tenants.summary import to_json_of_runs

    if any(experiment.is_experiment(run) for run in runs):
        if len(runs) > 1:
            raise click.UsageError("judge one experiment at a time; compare with another by --baseline")
        return judge_experiment(
            Path(runs[0]), as_json=as_json, baseline=baseline, rules=rules, described=described, **of_experiment
        )
    if given := [name for name, value in of_experiment.items() if value is not None]:
        raise click.UsageError(f"--{given[0]} is for an experiment of replay isolate; {runs[0]} is a run")
    loaded = folder.load_all(list(runs))
    if rules or described:
        tenants = nouns.load(described) if described else ()
        loaded = [again(run, tenants, rules) for run in loaded]
    worse = [] if baseline is None else slower([run.summary for run in loaded], _before(baseline))
    headline = f"FAIL  worse than the baseline: {'; '.join(worse)}\n" if worse else ""
    click.echo(headline, nl=False, err=as_json)
    if as_json:
        found = to_json_of_runs([(run.name, run.summary) for run in loaded])
        click.echo(with_blocking(found, loaded[0], worse) if len(loaded) == 1 else found)
    else:
        _print(loaded, runs[0])
        click.echo(headline, nl=False)
    code = worst_exit([run.summary for run in loaded])
    return EXIT_FAIL if worse and code != EXIT_INTERRUPTED else code


def _print(loaded: list[Run], where: str) -> None:
    """One run at the terminal, or several side by side."""
    from tenants import failures, terminal

    console = terminal.stdout_console()
    if len(loaded) > 1:
        terminal.print_comparison([(run.name, run.summary) for run in loaded], console)
        return
    run = loaded[0]
    causes = failures.causes(run.outcomes)
    terminal.print_result(run.summary, console, folder=where, causes=causes, more=print_blocking_of(run))


def _before(baseline: str) -> Summary:
    """The run that others are compared with. Raises BadFile, UsageError where it says nothing about its server."""
    from tenants import folder

    summary = folder.load(baseline).summary
    _check_baseline(baseline, summary.reasons if not summary.valid else ())
    return summary


def _check_baseline(baseline: str, reasons: Sequence[str]) -> None:
    if reasons:
        raise click.UsageError(f"--baseline {baseline} is not valid ({reasons[0]}): name one that is, to compare with")


def with_blocking(text: bytes, run: Run, worse: Sequence[str] = ()) -> bytes:
    """The summary's JSON with the blocking matrix in it, and what is worse than a baseline."""
    import msgspec

    from tenants import experiment

    document: dict[str, Any] = msgspec.json.decode(text)
    document |= msgspec.to_builtins(experiment.of_run(run))
    document |= {"verdict": run.summary.verdict, "regressions": list(worse)}
    return msgspec.json.encode(document)


def print_blocking_of(run: Run) -> Callable[[Console], None]:
    """What prints the blocking of a run."""
    from tenants import experiment, isolation_text

    found = experiment.of_run(run)
    return lambda console: isolation_text.print_blocking(found, console)


def judge_experiment(
    folder: Path,
    *,
    as_json: bool,
    baseline: str | None = None,
    rules: tuple[Rule, ...] = (),
    described: str | None = None,
    arm: str | None = None,
    junit: str | None = None,
    markdown: str | None = None,
) -> int:
    """Judge an experiment and print what was found; the exit code.

    Raises:
        BadFile, BadParameter
    """
    import msgspec

    from tenants import experiment, isolation_text, terminal

    loaded = experiment.load(folder)
    if rules or described:
        loaded = _by_other_rules(loaded, rules, described)
    found = experiment.judged(loaded, arm=arm)
    if baseline is not None:
        before = experiment.judged(experiment.load(baseline), arm=arm)
        _check_baseline(baseline, before.isolation.reasons)
        found = found._replace(regressions=experiment.regressions(found, before))
    for path, text in ((junit, isolation_text.junit), (markdown, isolation_text.markdown)):
        if path is not None:
            _write(Path(path), text(found))
    if as_json:
        click.echo(msgspec.json.encode(experiment.to_dict(found)).decode())
    else:
        isolation_text.print_isolation(found, terminal.stdout_console(), folder=str(folder))
    return isolation_text.exit_code(found)


def is_clear(folder: Path, confidence: float = 0.99) -> bool:
    """Whether no verdict of an experiment is open at this confidence."""
    from tenants import experiment
    from tenants.isolation import INCONCLUSIVE

    found = experiment.isolation_of(experiment.load(folder), confidence=confidence)
    return all(part.verdict != INCONCLUSIVE for part in found.tenants.values())


def _by_other_rules(loaded: Experiment, rules: tuple[Rule, ...], described: str | None) -> Experiment:
    import msgspec

    from tenants import tenant as nouns

    known = {tenant.name: tenant for tenant in (nouns.load(described) if described else ())}
    tenants = [
        msgspec.structs.replace(tenant, rules=known[tenant.name].rules if tenant.name in known else ())
        for tenant in loaded.tenants
    ]
    try:
        return loaded._replace(tenants=nouns.with_rules(tenants, rules))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sla") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot write {path} ({error.strerror}): name a file in a folder that exists") from None


def slower(now: list[Summary], before: Summary) -> list[str]:
    """Percentiles whose whole interval lies above the baseline's; a single run knows nothing of other days.

    Runs that are not valid are left out: their times are their sender's.
    """
    from tenants import figures

    found = []
    for summary in (run for run in now if run.valid):
        for name, part in summary.tenants.items():
            old = before.tenants.get(name)
            for metric in ("ttft_ms", "e2e_ms"):
                for label in ("p50", "p95", "p99"):
                    here, there = getattr(part, metric), getattr(old, metric, None)
                    ends, limits = here.ci.get(label), there.ci.get(label) if there is not None else None
                    if limits is None or (ends is None and label not in here.infinite):
                        continue
                    if ends is None or ends[0] > limits[1]:
                        was = getattr(there, label)
                        value = "∞" if ends is None else f"{figures.beside(getattr(here, label), was)} ms"
                        found.append(
                            f"{name} {metric.removesuffix('_ms')}_{label}: {value}, {figures.digits(was)} ms before"
                        )
    return found


def again(run: Run, tenants: tuple[Tenant, ...], rules: tuple[Rule, ...]) -> Run:
    """The run judged anew by other rules; what made it invalid stays.

    Raises:
        BadParameter: a rule is about a tenant that the run does not have.
    """
    from tenants import sla
    from tenants.summary import LATE, summarise
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
        invalid=[reason for reason in before.invalid_reasons if not reason.startswith(LATE)],
    )
    return run._replace(summary=summary)


def worst_exit(summaries: list[Summary]) -> int:
    """The exit code of several runs: interrupted, then failed, then not to be judged."""
    from tenants.summary import exit_code

    codes = {exit_code(summary) for summary in summaries}
    order = (EXIT_INTERRUPTED, EXIT_FAIL, EXIT_UNJUDGED, EXIT_PASS)
    return next(code for code in order if code in codes)
