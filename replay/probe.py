"""`replay probe`: does the server honour priority? Told by behaviour: no policy, version or metric is read.

`quick` is the part that `replay` runs before a run: two little bursts of a few seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
import msgspec

from replay.options import OfferOptions, SendOptions, parse_dialect, parse_header
from traces.shell import EXIT_FAIL, EXIT_PASS, EXIT_UNJUDGED, parsed
from traces.units import NS_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from replay.bursts import Idle
    from replay.preflight import Target

HONOURED, IGNORED, INVERTED, REJECTED, INCONCLUSIVE = "honoured", "ignored", "inverted", "rejected", "inconclusive"
ROUNDS = 3
WORTH_S = 30.0  # a run shorter than this is not kept waiting for a probe


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found. `None` = could not tell, `False` = seen not to.

    Attributes:
        priority: honoured, ignored, inverted, rejected or inconclusive.
        preempts_for_slot: an urgent request takes the slot of a running one.
        long_prefill_blocks: an urgent request waits until a long prompt of a less urgent one is read.
        slots: requests that run at once.
        token_budget: tokens in a step, roughly.
        evidence: one sentence a burst.
    """

    priority: str
    preempts_for_slot: bool | None = None
    long_prefill_blocks: bool | None = None
    slots: int | None = None
    token_budget: int | None = None
    evidence: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 honoured, 1 ignored, inverted or rejected, 3 inconclusive."""
        if self.priority == HONOURED:
            return EXIT_PASS
        return EXIT_UNJUDGED if self.priority == INCONCLUSIVE else EXIT_FAIL


@click.command()
@click.argument("url")
@click.option(
    "--dialect", type=parsed("dialect", parse_dialect), default="auto", help="How the server takes a priority."
)
@click.option("--endpoint", type=click.Choice(("completions", "chat", "generate")), default="completions")
@click.option("--model", metavar="NAME", help="Ask for this model.  [default: the server's only one]")
@click.option("--allow-host", multiple=True, metavar="HOST", help="A host other than this machine that may be sent to.")
@click.option("--allow-busy", is_flag=True, help="Probe a server that others use; its answers are less sure.")
@click.option("--api-key-env", default="OPENAI_API_KEY", metavar="VAR", show_default=True)
@click.option("--header", multiple=True, type=parsed("header", parse_header), help="'NAME: VALUE', sent along.")
@click.option("--quick", is_flag=True, help="Only whether priority is honoured.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON and nothing else.")
def probe(url: str, endpoint: str, as_json: bool, quick: bool, allow_busy: bool, **rest: Any) -> int:
    r"""Ask the server at URL by behaviour whether it honours priority, and how.

    A few short bursts, about twenty seconds in all, with prompts that fill a queue: keep it off production.

    \b
    replay probe http://127.0.0.1:8000
    replay probe http://127.0.0.1:30000 --dialect sglang --json

    Exit: 0 honoured, 1 ignored, inverted or rejected, 2 usage, 3 inconclusive.
    """
    from replay import preflight

    send = SendOptions(target=url, probe=False, self_check=False, **rest)
    try:
        target = preflight.parse_target(url)
        preflight.allowed(target, send.allow_host)
        answer = look(target, send, endpoint=endpoint, allow_busy=allow_busy, quick=quick)
    except (ValueError, Busy, preflight.Refused) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
    else:
        click.echo("\n".join(lines(answer)))
    return answer.exit_code


class Busy(Exception):
    """The server does not look idle."""


def quick(target: Target, send: SendOptions, *, endpoint: str = "completions") -> Answer:
    """Whether priority is honoured, in a few seconds; a busy or silent server is inconclusive here."""
    from replay.preflight import Refused

    try:
        return look(target, send, endpoint=endpoint, quick=True)
    except Busy as error:
        return Answer(priority=INCONCLUSIVE, evidence=(str(error),))
    except Refused as error:
        return Answer(priority=INCONCLUSIVE, evidence=(f"the probe could not run: {error}",))


def warning(answer: Answer) -> list[str]:
    """What a report must say of the tags of its run: nothing where they are honoured or nothing is known."""
    said = {  # each begins as `tenants.cautions.LOUD` does
        IGNORED: "PRIORITY HAS NO EFFECT on this server: it takes the tag and ignores it (replay probe)",
        INVERTED: "PRIORITY IS INVERTED on this server: the least urgent go first; see --dialect (replay probe)",
        REJECTED: "PRIORITY IS REJECTED by this server: see --dialect (replay probe)",
    }
    return [said[answer.priority]] if answer.priority in said else []


def look(
    target: Target, send: SendOptions, *, endpoint: str = "completions", allow_busy: bool = False, quick: bool = False
) -> Answer:
    """Send the bursts and read them.

    Raises:
        Busy: it does not look idle.
        replay.preflight.Refused: the server does not answer.
    """
    from replay import bursts

    with tempfile.TemporaryDirectory(prefix="probe-") as folder, _Lab(target, send, endpoint, Path(folder)) as lab:
        outcomes = lab.burst(bursts.idle_rows(), tagged=False)
        idle = bursts.read_idle(outcomes)
        if idle is None:
            return Answer(priority=INCONCLUSIVE, evidence=("short requests without a priority were not answered",))
        if idle.busy and not allow_busy:
            raise Busy(f"{target.origin} looks busy: {idle.busy}; probe it when it is idle, or say --allow-busy")
        words, evidence = [], [_idle_text(idle)]
        for _ in range(1 if quick else ROUNDS):
            found = bursts.read_backlog(lab.burst(bursts.backlog_rows(idle, lab.longest)), idle)
            words.append(found.word)
            evidence.append(f"backlog: {found.word}: {found.evidence}")
            if found.word == REJECTED or words.count(found.word) * 2 > ROUNDS:
                break
        word = max(set(words), key=words.count)
        priority = word if words.count(word) * 2 > len(words) else INCONCLUSIVE
        if quick or priority == REJECTED:
            return Answer(priority=priority, evidence=tuple(evidence))
        return _further(lab, idle, priority, evidence)


def _further(lab: _Lab, idle: Idle, priority: str, evidence: list[str]) -> Answer:
    """Slots, displacement, long prompts and the budget."""
    from replay import bursts

    slots, displaced, told = bursts.read_slots(lab.burst(bursts.slot_rows(idle), drain_s=bursts.SLOTS_DRAIN_S))
    blocks, budget, said = bursts.read_long(lab.burst(bursts.long_rows(idle, lab.longest)))
    return Answer(
        priority=priority,
        preempts_for_slot=displaced if priority == HONOURED else None,
        long_prefill_blocks=blocks,
        slots=slots,
        token_budget=budget,
        evidence=(*evidence, told, said),
    )


class _Lab:
    """Sends little traces to one server, each with prompts that no cache has seen."""

    def __init__(self, target: Target, send: SendOptions, endpoint: str, folder: Path) -> None:
        from replay.run import Crew

        self.target, self.endpoint, self.folder = target, endpoint, folder
        self.send = msgspec.structs.replace(send, workers=1, concurrency=None, retry=0, chunks="all", catch_up="burst")
        self.longest: int | None = None
        self._runs = 0
        self._next = Crew(1)  # imports while the burst before it runs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._next.__exit__(None, None, None)

    def burst(self, rows: list[tuple[float, str, int, int]], *, tagged: bool = True, drain_s: float = 60.0) -> pa.Table:
        """Send one burst; its outcomes. Raises replay.preflight.Refused."""
        from replay import bursts, session
        from replay import plan as planning
        from replay.options import Offered
        from replay.run import Crew
        from tenants.tenant import Tenant
        from traces.record import Metadata

        trace = bursts.trace(rows, self.endpoint)
        if not tagged:
            trace = trace.drop_columns(["priority"])
        plan = planning.build(trace, turns="timed")
        tenants = tuple(Tenant(name=name, priority=bursts.RANKS[name] if tagged else None) for name in plan.tenants)
        offered = Offered(plan, tenants, (), Metadata(source="probe"), plan.rows, plan.span_ns, [])
        self._runs += 1
        folder = self.folder / str(self._runs)
        send = msgspec.structs.replace(self.send, drain_ns=int(drain_s * NS_PER_S))
        crew, self._next = self._next, Crew(1)
        ran = session.one(offered, OfferOptions(), send, self.target, folder, crew=crew)
        if self.longest is None:
            self.longest = ran.document["server"].get("max_model_len")
        return ran.outcomes


def _idle_text(idle: Idle) -> str:
    return (
        f"idle: first token of a short prompt after {idle.short_ms:,.1f} ms, then one every {idle.gap_ms:,.1f} ms; "
        f"{1000 / idle.token_ms:,.0f} prompt tokens a second"
    )


def lines(answer: Answer) -> list[str]:
    """The answer for people; the verdict first and last."""

    def told(value: int | None) -> str:
        if value is None:
            return "could not tell"
        return ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}"

    verdict = f"priority is {answer.priority}" if answer.priority != INCONCLUSIVE else "priority: could not tell"
    return [
        verdict,
        f"  takes a running request's slot   {told(answer.preempts_for_slot)}",
        f"  a long prompt still blocks       {told(answer.long_prefill_blocks)}",
        f"  slots                            {told(answer.slots)}",
        f"  tokens in a step, about          {told(answer.token_budget)}",
        *(f"  {sentence}" for sentence in answer.evidence),
        verdict,
    ]
