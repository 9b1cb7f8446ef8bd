"""The runs of an isolation experiment, wherever they are made: which arms, how often, kept in which folder.

    OUT/experiment.json                  what was asked, tenants and bounds, and which runs there are
    OUT/trial-1/untagged/                a run's folder like any other; `alone-risk` is risk's part of the arm `alone`

`replay isolate` makes them on a server, `replay simulate` on the virtual clock; `tenants judge OUT` judges either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from replay.options import OfferOptions, make_offer, span_text
from traces.shell import parsed
from traces.units import NS_PER_S

if TYPE_CHECKING:
    from replay.arms import Part
    from replay.options import Offered

    One = Callable[[Offered, OfferOptions, Part, Path], bool]
    """Makes one run: its offer, what was asked in this trial, the part, the folder; whether the user ended it."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What an experiment asks for beyond a replay.

    Attributes:
        own: of arms that have an engine of their own, what it is: a command, or options of the simulated engine.
    """

    arms: tuple[str, ...]
    alone: tuple[str, ...]
    trials: int
    cool_ns: int = 0
    own: dict[str, str] = {}
    pool_target: str | None = None
    stop_early: bool = False


def parse_bound(text: str) -> str:
    """An isolation bound, checked and passed on as text. Raises ValueError."""
    from tenants import sla

    if not sla.parse(text).is_bound:
        raise ValueError(
            f"{text!r} compares with no arm: write it as 'risk: ttft_p95 <= 1.25x alone', or give it to --sla"
        )
    return text


def parse_own(text: str, what: str, example: str) -> tuple[str, str]:
    """An arm with an engine of its own, `NAME=WORDS`. Raises ValueError with `what` it should have been."""
    name, equals, words = text.partition("=")
    if not equals or not name.strip().replace("-", "").replace("_", "").isalnum() or not words.strip():
        raise ValueError(f"{text!r} is not {what}: write it as {example!r}")
    return name.strip(), words.strip()


EXPERIMENT = (
    click.Option(
        ["--arm", "arms"],
        multiple=True,
        metavar="NAME",
        help="alone, untagged, tagged, capped, pooled, or an arm with an engine of its own.",
    ),
    click.Option(["--alone"], multiple=True, metavar="TENANT", help="Tenants that are run alone.  [default: all]"),
    click.Option(
        ["--trials"], type=click.IntRange(1, 100), default=3, show_default=True, help="How often every arm is run."
    ),
    click.Option(
        ["--bound", "bounds"],
        multiple=True,
        type=parsed("bound", parse_bound),
        help="'risk: ttft_p95 <= 1.25x alone'.",
    ),
    click.Option(["--stop-early"], is_flag=True, help="No further trial once every verdict is clear at 99 %."),
)


def experiment_options(command: click.Command) -> click.Command:
    """Give a command the options of an experiment: arms, alone, trials, bounds, stop_early."""
    command.params += EXPERIMENT
    return command


def prepared(offer: OfferOptions, bounds: Sequence[str]) -> OfferOptions:
    """The offer of an experiment: with its bounds, and timed turns unless others were asked for."""
    if click.get_current_context().get_parameter_source("turns") is not click.core.ParameterSource.COMMANDLINE:
        offer = msgspec.structs.replace(offer, turns="timed")  # linked turns would offer each arm another load
    return msgspec.structs.replace(offer, sla=(*offer.sla, *bounds))


def chosen_arms(
    offered: Offered, asked: Sequence[str], alone: Sequence[str], own: Collection[str], *, pool: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arms that make sense here and the tenants run alone, or a clear refusal of what does not make sense.

    Args:
        offered: the mix.
        asked: arms by name; none: all that are possible.
        alone: tenants; none: all.
        own: arms that have an engine of their own.
        pool: whether there is a second engine.
    """
    from replay import arms as known

    names = [tenant.name for tenant in offered.tenants]
    if len(names) < 2:
        raise click.UsageError("one tenant has nobody to be isolated from: name two, --tenant-mix risk=3:summary=1")
    if all(tenant.priority is None for tenant in offered.tenants):
        raise click.UsageError("no tenant has a priority: --tenant-mix risk@0:summary@1, or priority in tenants.toml")
    for name in alone:
        if name not in names:
            raise click.BadParameter(f"no tenant {name}; there are {', '.join(names)}", param_hint="--alone")
    default = [known.ALONE, known.UNTAGGED, known.TAGGED]
    default += [known.CAPPED] if offered.caps else []
    default += [known.POOLED] if pool else []
    found = list(asked) or [*default, *(name for name in own if name not in known.KNOWN)]
    for arm in found:
        if arm not in known.KNOWN and arm not in own:
            raise click.BadParameter(
                f"{arm} is neither one of {', '.join(known.KNOWN)} nor an arm with an engine of its own",
                param_hint="--arm",
            )
    if known.CAPPED in found and not offered.caps:
        raise click.UsageError("arm capped needs a cap: --cap summary=6")
    return tuple(found), tuple(alone or names)


def announce(offered: Offered, setup: Setup) -> None:
    """Say which runs there will be, and about how long they take on a server."""
    names = _folders(setup)
    click.echo(
        f"{setup.trials} trial{'s' * (setup.trials != 1)} of {len(names)} runs ({', '.join(names)}), "
        f"{offered.plan.rows:,} requests in {span_text(offered.plan.span_ns)} each",
        err=True,
    )


def span_ns(offered: Offered, setup: Setup) -> int:
    """What the experiment takes on a real clock, without what its servers take to finish."""
    return setup.trials * len(_folders(setup)) * (offered.plan.span_ns + setup.cool_ns)


def _folders(setup: Setup) -> list[str]:
    from replay import arms

    return [part.folder for part in arms.parts(setup.arms, setup.alone, 0)]


def play(offer: OfferOptions, setup: Setup, folder: Path, one: One) -> bool:
    """Make all runs, each trial with a seed of its own; returns whether the user ended it."""
    from replay import arms

    folder.mkdir(parents=True)
    done: list[dict[str, Any]] = []
    for trial in range(setup.trials):
        trial_offer = msgspec.structs.replace(offer, seed=offer.seed + trial)
        offered = make_offer(trial_offer)
        for part in arms.parts(setup.arms, setup.alone, trial):
            place = f"trial-{trial + 1}/{part.folder}"
            click.echo(f"trial {trial + 1} of {setup.trials}: {part.folder}", err=True)
            interrupted = one(arms.offered_for(offered, part), trial_offer, part, folder / place)
            done.append({"trial": trial + 1, "arm": part.arm, "tenant": part.tenant, "folder": place})
            _note(folder, offered, setup, done)
            if interrupted:
                return True
            time.sleep(setup.cool_ns / NS_PER_S)
        if setup.stop_early and trial > 0 and _is_clear(folder):
            click.echo(f"every verdict is clear after {trial + 1} trials", err=True)
            break
    return False


def _note(folder: Path, offered: Offered, setup: Setup, done: list[dict[str, Any]]) -> None:
    """Write `experiment.json`, complete or not at all, after every run: what there is can be judged at any time."""
    document = {
        "format": 1,
        "setup": msgspec.to_builtins(setup),
        "tenants": msgspec.to_builtins([msgspec.structs.replace(tenant, headers={}) for tenant in offered.tenants]),
        "plan": {"rows": offered.plan.rows, "span_s": offered.plan.span_ns / NS_PER_S},
        "runs": done,
    }
    temporary = folder / ".experiment.json.tmp"
    temporary.touch(0o600)
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    temporary.replace(folder / "experiment.json")


def _is_clear(folder: Path) -> bool:
    from tenants import judge

    return judge.is_clear(folder)
