"""An isolation judgement for people and for build servers: a table at the terminal, GitHub's Markdown, JUnit XML."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.text import Text

from tenants import figures, sla
from tenants.arms import ArmNumbers, Cost, Measured
from tenants.columns import Column, lines
from tenants.experiment import BlockingOfArm, Judged
from tenants.isolation import (
    FAILING,
    INCONCLUSIVE,
    INEFFECTIVE,
    INVALID,
    INVERTED,
    ISOLATED,
    LEAKY,
)
from tenants.summary import Percentiles
from traces.shell import EXIT_FAIL, EXIT_PASS, EXIT_UNJUDGED

STYLES = {
    ISOLATED: "bold green",
    LEAKY: "bold red",
    INEFFECTIVE: "bold red",
    INVERTED: "bold red",
    INVALID: "bold magenta",
    INCONCLUSIVE: "bold yellow",
}


def exit_code(found: Judged) -> int:
    """0 isolated, 1 a bound, an SLA of the judged arm or the baseline missed, 3 invalid or inconclusive."""
    if found.isolation.verdict == INVALID:
        return EXIT_UNJUDGED
    rules = [result.verdict for _, result in rules_of(found)]
    if found.isolation.verdict in FAILING or sla.FAIL in rules or found.regressions or bound_missed(found):
        return EXIT_FAIL
    return EXIT_UNJUDGED if found.isolation.verdict == INCONCLUSIVE or sla.INCONCLUSIVE in rules else EXIT_PASS


def bound_missed(found: Judged) -> bool:
    """Whether a bound is certainly missed, whatever else is open."""
    arm = found.isolation.arm
    return any(e.bound_missed for part in found.isolation.tenants.values() for e in part.by_arm.get(arm, {}).values())


def rules_of(found: Judged) -> list[tuple[str, Any]]:
    """(tenant, result) of every SLA in the judged arm."""
    arm = found.isolation.arm
    return [
        (name, result)
        for name, part in found.isolation.tenants.items()
        if arm in part.arms
        for result in part.arms[arm].sla
    ]


def sentences(found: Judged) -> list[str]:
    """What to say of each tenant that has a verdict, of broken SLAs and of the baseline."""
    said = [part.sentence for part in found.isolation.tenants.values() if part.sentence]
    said += [
        f"{result.rule}: {figures.measured(result)} in {found.isolation.arm} ({result.verdict})"
        for _, result in rules_of(found)
        if result.verdict != sla.PASS
    ]
    return said + [f"worse than the baseline: {text}" for text in found.regressions]


def print_isolation(found: Judged, console: Console, *, folder: str | None = None) -> None:
    """The judgement at the terminal: the verdict first and last."""
    isolation = found.isolation
    verdict = Text(isolation.sentence, STYLES[isolation.verdict])
    console.print(verdict, soft_wrap=True)
    for heading, table in tables(found):
        console.print()
        console.print(Text(heading, "bold"), soft_wrap=True)
        for line in lines(table, console.width):
            console.print(line, no_wrap=True, soft_wrap=True)
    console.print()
    for text in [*notes(found), *([f"files in {folder}"] if folder else [])]:
        console.print(Text(text, "dim"), soft_wrap=True)
    for text in sentences(found):
        if text != isolation.sentence:
            console.print(Text(text), soft_wrap=True)
    console.print(verdict, soft_wrap=True)


def print_blocking(held: BlockingOfArm, console: Console) -> None:
    """Who waited for whom in one run, and the worst single blockers."""
    made = [(f"Who waited for whom, seconds ({held.source}; {held.unexplained_share:.0%} unexplained)", matrix(held))]
    if held.worst:
        made.append(("Worst single blockers", _worst(held)))
    made += _stalls(held, "")
    for heading, table in made:
        console.print(Text(heading, "bold"), soft_wrap=True)
        for line in lines(table, console.width):
            console.print(line, no_wrap=True, soft_wrap=True)
        console.print()


def tables(found: Judged) -> list[tuple[str, list[Column]]]:
    """Every table with its heading; both the terminal's and Markdown's."""
    made = [("Each tenant in each arm (95 % intervals over trials)", _arms(found))]
    effects = _effects(found)
    if effects[0].cells:
        made.append(("Isolation", effects))
    if found.isolation.cost:
        made.append((f"What {found.isolation.arm} costs the others, against untagged", _cost(found.isolation.cost)))
    blocking = found.blocking.get(found.isolation.arm)
    for arm in dict.fromkeys(["untagged", found.isolation.arm]):
        if arm in found.blocking:
            shown = found.blocking[arm]
            more = f"; {shown.unexplained_share:.0%} unexplained"
            made.append((f"Who waited for whom in {arm}, seconds ({shown.source}{more})", matrix(shown)))
    if blocking is not None and blocking.worst:
        made.append((f"Worst single blockers in {found.isolation.arm}", _worst(blocking)))
    if blocking is not None:
        made += _stalls(blocking, f" in {found.isolation.arm}")
    return made


def _stalls(held: BlockingOfArm, where: str) -> list[tuple[str, list[Column]]]:
    """Whose streams stood still for whose prefill; nothing where none did."""
    if not held.worst_stalls:
        return []
    names = list(held.stalls_s)
    cells = [[_stalled(held, victim, culprit) for victim in names] for culprit in names]
    across = [Column(f"for {culprit}", column) for culprit, column in zip(names, cells, strict=True)]
    heading = f"Whose streams stalled for whose prefill{where}, seconds (ms a request)"
    return [
        (heading, [Column("stalled", names, right=False), *across]),
        (f"Worst single prefills beside streams{where}", _worst_table(held.worst_stalls, "stalled_s", "streams")),
    ]


def _stalled(held: BlockingOfArm, victim: str, culprit: str) -> str:
    each_ms = held.stalls_per_request_s[victim].get(culprit, 0.0) * 1000
    return f"{figures.digits(held.stalls_s[victim].get(culprit, 0.0))} ({figures.digits(each_ms)})"


def notes(found: Judged) -> list[str]:
    """How the intervals were made, and what to hold against the numbers."""
    isolation = found.isolation
    trials = f"{isolation.trials} trial{'' if isolation.trials == 1 else 's'}"
    if isolation.same_plan:
        how = (
            f"{trials}, all of one plan: intervals from how they differ and, for what other arrivals would have done, "
            f"from {isolation.blocks} blocks of {isolation.block_s:g} s of due time, the same ones in every arm"
        )
    else:
        how = f"{trials}, each of its own arrivals: intervals from how they differ"
    said = [how]
    measured = [
        number
        for part in isolation.tenants.values()
        for effects in part.by_arm.values()
        for effect in effects.values()
        for number in (effect.interference_ratio, effect.contention, effect.recovered_share)
        if number is not None
    ]
    if any(number.ci is None and number.rough is not None for number in measured):
        said.append("~ how runs this short differ: no interval, they are too short to say what longer ones would show")
    said += [
        f"blocking in {arm} is {INCONCLUSIVE}: {held.unexplained_share:.0%} of the wait is unexplained"
        for arm, held in found.blocking.items()
        if held.verdict
    ]
    return [*said, *(f"invalid: {reason}" for reason in isolation.reasons)]


def _arms(found: Judged) -> list[Column]:
    rows = [(name, arm, held) for name, part in found.isolation.tenants.items() for arm, held in part.arms.items()]
    numbers = [held for _, _, held in rows]
    return [
        Column("tenant", [name for name, _, _ in rows], right=False),
        Column("arm", [arm for _, arm, _ in rows], right=False),
        Column("n", [f"{held.ttft_ms.n:,}" for held in numbers]),  # failed ones too: they are +∞ in every time
        Column("failed", [f"{held.failed:,}" for held in numbers], 0 if any(h.failed for h in numbers) else 5),
        *[
            Column(f"TTFT ms {label.upper()}", [_quantile(h.ttft_ms, label) for h in numbers])
            for label in ("p50", "p95")
        ],
        Column("interval", [_interval(held.ttft_ms, "p95") for held in numbers], 1),
        Column("TTFT ms P99", [_quantile(held.ttft_ms, "p99") for held in numbers], 4),
        Column("E2E ms P95", [_quantile(held.e2e_ms, "p95") for held in numbers], 2),
        Column("TPOT ms P50", [_quantile(held.tpot_ms, "p50") for held in numbers], 6),
        Column("tok/s", [figures.digits(held.output_tokens_per_s.value) for held in numbers], 1),
        Column("overtaken", [_share(held.inverted_share) for held in numbers], 3),
        Column("max wait s", [figures.digits(held.starvation_s) for held in numbers], 3),
        Column("SLA", [_rules(held) for held in numbers], 1, right=False),
    ]


def _effects(found: Judged) -> list[Column]:
    rows = [
        (name, arm, metric, effect)
        for name, part in found.isolation.tenants.items()
        for arm, effects in part.by_arm.items()
        for metric, effect in effects.items()
    ]
    effects = [effect for *_, effect in rows]
    return [
        Column("tenant", [name for name, *_ in rows], right=False),
        Column("arm", [arm for _, arm, *_ in rows], right=False),
        Column("metric", [metric for *_, metric, _ in rows], right=False),
        Column("× alone", [_with_interval(effect.interference_ratio) for effect in effects]),
        Column("bound", [f"{effect.bound:g}" for effect in effects], 2),
        Column("untagged × alone", [_with_interval(effect.contention) for effect in effects], 1),
        Column("recovered", [_with_interval(effect.recovered_share, percent=True) for effect in effects]),
        Column("verdict", [effect.verdict for effect in effects], right=False),
    ]


def _cost(cost: dict[str, Cost]) -> list[Column]:
    return [
        Column("tenant", list(cost), right=False),
        Column("tok/s ×", [_with_interval(part.output_tokens_per_s) for part in cost.values()]),
        *[
            Column(f"E2E × {label.upper()}", [_with_interval(part.e2e.get(label)) for part in cost.values()])
            for label in ("p50", "p95")
        ],
    ]


def matrix(held: BlockingOfArm) -> list[Column]:
    """Victims down, culprits across, seconds."""
    names = list(held.blocking_s)
    return [
        Column("waiting", names, right=False),
        *[
            Column(f"for {culprit}", [figures.digits(held.blocking_s[name].get(culprit, 0.0)) for name in names])
            for culprit in names
        ],
        Column("for less urgent", [figures.digits(held.inversion_s.get(name, 0.0)) for name in names]),
    ]


def _worst(held: BlockingOfArm) -> list[Column]:
    return _worst_table(held.worst, "blocked_s", "held up")


def _worst_table(rows: tuple[dict[str, Any], ...], seconds: str, victims: str) -> list[Column]:
    return [
        Column("sent s", [figures.digits(row["sent_s"]) for row in rows]),
        Column("tenant", [str(row.get("tenant")) for row in rows], right=False),
        Column("tokens in", [f"{row.get('input_tokens') or 0:,}" for row in rows]),
        Column("out", [f"{row.get('output_tokens') or 0:,}" for row in rows]),
        Column(victims, [f"{row['victims']:,}" for row in rows]),
        Column("for s", [figures.digits(row[seconds]) for row in rows]),
        Column(
            "whom", [", ".join(f"{n} {figures.digits(s)} s" for n, s in row["of"].items()) for row in rows], right=False
        ),
    ]


def markdown(found: Judged) -> str:
    """GitHub's Markdown: the verdict's sentence first, and nowhere else."""
    verdict, sentence = found.isolation.verdict, found.isolation.sentence
    parts = [sentence.replace(verdict, f"**{verdict}**", 1), ""]
    for heading, table in tables(found):
        parts += [f"#### {heading}", "", *_markdown_table(table), ""]
    parts += [f"- {text}" for text in [*notes(found), *sentences(found)] if text != sentence]
    return "\n".join(parts) + "\n"


def _markdown_table(columns: list[Column]) -> list[str]:
    def row(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    head = row([column.heading for column in columns])
    rule = "|" + "|".join("---:" if column.right else "---" for column in columns) + "|"
    return [head, rule, *(row([column.cells[i] for column in columns]) for i in range(len(columns[0].cells)))]


def junit(found: Judged) -> str:
    """JUnit XML: a test case a bound and a rule; what cannot be judged is an error, so that no build is green by it."""
    cases: list[tuple[str, str, str, str]] = []
    for name, part in found.isolation.tenants.items():
        if part.verdict is not None:
            cases.append((name, "isolation", part.verdict, part.sentence or ""))
    cases += [(name, result.rule, result.verdict, figures.measured(result)) for name, result in rules_of(found)]
    cases += [("baseline", text, sla.FAIL, text) for text in found.regressions]
    if found.isolation.reasons:
        cases.append(("experiment", "valid", INVALID, "; ".join(found.isolation.reasons)))
    kinds = [_kind(verdict) for _, _, verdict, _ in cases]
    suite = ET.Element(
        "testsuite",
        name="isolation",
        tests=str(len(cases)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
    )
    for (owner, name, verdict, text), kind in zip(cases, kinds, strict=True):
        case = ET.SubElement(suite, "testcase", classname=owner, name=name)
        if kind:
            ET.SubElement(case, kind, message=text, type=verdict).text = text
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _kind(verdict: str) -> str:
    if verdict in {*FAILING, sla.FAIL}:
        return "failure"
    return "error" if verdict in {INCONCLUSIVE, INVALID, sla.INCONCLUSIVE, sla.INVALID} else ""


def _quantile(block: Percentiles, label: str) -> str:
    return figures.INFINITE if label in block.infinite else figures.digits(getattr(block, label))


def _interval(block: Percentiles, label: str) -> str:
    ends = block.ci[label]
    return "" if ends is None else f"{figures.digits(ends[0])} to {figures.digits(ends[1])}"


def _share(found: Measured) -> str:
    return figures.NONE if found.value is None else f"{found.value:.0%}"


def _rules(held: ArmNumbers) -> str:
    return ", ".join(f"{result.rule.partition(': ')[2]} {result.verdict}" for result in held.sla)


def _with_interval(found: Measured | None, *, percent: bool = False) -> str:
    if found is None or (found.value is None and not found.infinite):
        return figures.NONE
    if found.infinite:
        return figures.INFINITE

    def text(value: float | None) -> str:
        if value is None:
            return figures.INFINITE
        return f"{value:.0%}" if percent else figures.digits(value)

    if found.ci is None and found.rough is not None:
        return f"{text(found.value)} (~{text(found.rough[0])} to {text(found.rough[1])})"
    return text(found.value) + (f" ({text(found.ci[0])} to {text(found.ci[1])})" if found.ci else "")
