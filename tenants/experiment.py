"""An experiment read back from its folder, and judged: isolation over all arms, blocking in each.

OUT/experiment.json      setup, tenants, and which runs there are:
                         {"trial": 1, "arm": "alone", "tenant": "risk", "folder": "trial-1/alone-risk"}
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tenants import figures
from tenants import folder as folders
from tenants.arms import ALONE, ArmRun
from tenants.blocking import Blocker, blockers, blocking
from tenants.folder import Run
from tenants.isolation import INCONCLUSIVE, Isolation, judge
from tenants.stalls import Staller, stalls
from tenants.steps import Floats
from tenants.tenant import Tenant
from traces.errors import BadFile

FILE = "experiment.json"
MOST_UNEXPLAINED = 0.3
WORST = 5
MOST_CHUNKS = 3_000_000  # beyond, `tenants judge` divides; what follows every run leaves it out


class BlockingOfArm(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, summed over the trials of an arm."""

    requests: dict[str, int]  # of each tenant
    blocking_s: dict[str, dict[str, float]]  # victim → culprit
    per_request_s: dict[str, dict[str, float]]
    inversion_s: dict[str, float]
    waited_s: dict[str, float]  # blocked in all: the victim's row of the matrix, and what nobody explains
    unexplained_share: float
    source: str
    verdict: str | None  # INCONCLUSIVE where too much is unexplained
    worst: tuple[dict[str, Any], ...]
    stalls_s: dict[str, dict[str, float]] = {}  # victim → whose prefill; empty where no chunk times were kept
    stalls_per_request_s: dict[str, dict[str, float]] = {}
    worst_stalls: tuple[dict[str, Any], ...] = ()


class Experiment(NamedTuple):
    """What a folder holds."""

    path: Path
    tenants: tuple[Tenant, ...]
    setup: dict[str, Any]
    runs: list[tuple[dict[str, Any], Run]]


class Judged(NamedTuple):
    """The judgement of an experiment."""

    experiment: Experiment
    isolation: Isolation
    blocking: dict[str, BlockingOfArm]
    regressions: tuple[str, ...] = ()


def is_experiment(path: str | Path) -> bool:
    """Whether `replay isolate` wrote this folder."""
    return (Path(path) / FILE).is_file()


def load(path: str | Path) -> Experiment:
    """All runs of an experiment.

    Raises:
        BadFile: names what is missing or broken.
    """
    where = Path(path) / FILE
    try:
        document = msgspec.json.decode(where.read_bytes())
        tenants = msgspec.convert(document["tenants"], tuple[Tenant, ...])
        runs = [(entry, folders.load(Path(path) / entry["folder"], entry["folder"])) for entry in document["runs"]]
        return Experiment(Path(path), tenants, document["setup"], runs)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise BadFile(f"{where}: not an experiment of `replay isolate` ({error})") from None


def judged(experiment: Experiment, *, arm: str | None = None, confidence: float = 0.95) -> Judged:
    """Judge an experiment.

    Args:
        experiment: from `load`.
        arm: which arm is held against the bounds; None = `tagged`, else the first with priorities.
        confidence: of the intervals.

    Raises:
        BadFile: the arm is not there.
    """
    arms = dict.fromkeys(entry["arm"] for entry, _ in experiment.runs)
    isolation = isolation_of(experiment, arm=arm, confidence=confidence)
    return Judged(experiment, isolation, _blocking(experiment, [name for name in arms if name != ALONE]))


def isolation_of(experiment: Experiment, *, arm: str | None = None, confidence: float = 0.95) -> Isolation:
    """As `judged`, without who blocked whom: the verdicts alone, in a fraction of the time."""
    arms = list(dict.fromkeys(entry["arm"] for entry, _ in experiment.runs))
    if arm is None:
        mixed = [name for name in arms if name not in {ALONE, "untagged"}]
        arm = "tagged" if "tagged" in mixed or not mixed else mixed[0]
    elif arm not in arms:
        raise BadFile(f"{experiment.path}: has no arm {arm}; it has {', '.join(arms)}")
    runs = [
        ArmRun(
            arm=entry["arm"],
            trial=entry["trial"],
            tenant=entry["tenant"],
            rows=run.rows,
            digest=run.summary.digest,
            invalid=_reasons(run),
        )
        for entry, run in experiment.runs
    ]
    return judge(runs, experiment.tenants, arm=arm, confidence=confidence)


def _reasons(run: Run) -> tuple[str, ...]:
    """Why a run says nothing about the server; none for a valid one."""
    if run.summary.valid:
        return ()
    return (*run.summary.invalid_reasons, *(["interrupted"] if run.summary.interrupted else []))


def _blocking(experiment: Experiment, arms: list[str]) -> dict[str, BlockingOfArm]:
    ranks = {tenant.name: tenant.priority for tenant in experiment.tenants if tenant.priority is not None}
    return {
        arm: of_runs([run.everything() for entry, run in experiment.runs if entry["arm"] == arm], ranks) for arm in arms
    }


def can_tell(outcomes: pa.Table) -> bool:
    """Whether a run has chunk times, and not so many that the division would take longer than people wait."""
    if "chunk_ns" not in outcomes.schema.names:
        return False
    chunks = pc.sum(pc.list_value_length(outcomes.column("chunk_ns"))).as_py() or 0
    return 1 < chunks <= MOST_CHUNKS


def of_run(run: Run) -> BlockingOfArm:
    """Who blocked whom in one run: as its `run.json` says, else estimated from its rows."""
    with contextlib.suppress(msgspec.ValidationError):  # left out there for its size, or written by another version
        return msgspec.convert(run.document.get("blocking"), BlockingOfArm)
    ranks = {name: part.priority for name, part in run.summary.tenants.items() if part.priority is not None}
    return of_runs([run.everything()], ranks)


def of_runs(tables: list[pa.Table], ranks: dict[str, int] | None = None) -> BlockingOfArm:
    """Who blocked whom, over runs of one kind."""
    seconds: dict[str, dict[str, float]] = {}
    stalled: dict[str, dict[str, float]] = {}
    inversion: dict[str, float] = {}
    waited: dict[str, float] = {}
    requests: dict[str, int] = {}
    explained = 0.0
    worst: list[tuple[float, dict[str, Any]]] = []
    worst_stalls: list[tuple[float, dict[str, Any]]] = []
    sources = set()
    for outcomes in tables:
        found = blocking(outcomes, ranks=ranks, engine_times=True)
        sources.add(found.source)
        matrix = found.matrix_s
        _add(seconds, found.tenants, matrix)
        for i, victim in enumerate(found.tenants):
            mine = found.tenant == i
            inversion[victim] = inversion.get(victim, 0.0) + float(found.inversion_ns[mine].sum()) / 1e9
            waited[victim] = waited.get(victim, 0.0) + float(found.blocked_ns[mine].sum()) / 1e9
            requests[victim] = requests.get(victim, 0) + int(mine.sum())
        explained += float(matrix.sum())
        worst += [(one.blocked_ns, named(outcomes, one)) for one in blockers(found, WORST)]
        held = stalls(outcomes, found, WORST)
        if held is not None:
            _add(stalled, held.tenants, held.matrix_s)
            worst_stalls += [(one.stalled_ns, named_staller(outcomes, one)) for one in held.worst]
    blocked = sum(waited.values())
    share = 1 - explained / blocked if blocked > 0 else 0.0
    worst.sort(key=lambda pair: -pair[0])
    worst_stalls.sort(key=lambda pair: -pair[0])
    return BlockingOfArm(
        requests=requests,
        blocking_s=_rounded(seconds),
        per_request_s=_each(seconds, requests),
        inversion_s={v: round(s, 3) for v, s in inversion.items()},
        waited_s={v: round(s, 3) for v, s in waited.items()},
        unexplained_share=round(max(0.0, share), 4),
        source=" and ".join(sorted(sources)),
        verdict=INCONCLUSIVE if share > MOST_UNEXPLAINED else None,
        worst=tuple(entry for _, entry in worst[:WORST]),
        stalls_s=_rounded(stalled),
        stalls_per_request_s=_each(stalled, requests),
        worst_stalls=tuple(entry for _, entry in worst_stalls[:WORST]),
    )


def _add(seconds: dict[str, dict[str, float]], names: tuple[str, ...], matrix: Floats) -> None:
    """Add a run's matrix, victim × culprit, to what other runs brought."""
    for victim, cells in zip(names, matrix.tolist(), strict=True):
        row = seconds.setdefault(victim, {})
        for culprit, cell in zip(names, cells, strict=True):
            row[culprit] = row.get(culprit, 0.0) + cell


def _rounded(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {v: {c: round(s, 3) for c, s in row.items()} for v, row in seconds.items()}


def _each(seconds: dict[str, dict[str, float]], requests: dict[str, int]) -> dict[str, dict[str, float]]:
    return {v: {c: round(s / max(1, requests[v]), 4) for c, s in row.items()} for v, row in seconds.items()}


def named(outcomes: pa.Table, blocker: Blocker) -> dict[str, Any]:
    """A blocker as people read it: who it was, its lengths, whom it held up and how long."""
    return _row(outcomes, blocker.request) | {
        "blocked_s": round(blocker.blocked_ns / 1e9, 3),
        "victims": blocker.victims,
        "of": {name: round(float(ns) / 1e9, 3) for name, ns in blocker.by_victim},
    }


def named_staller(outcomes: pa.Table, staller: Staller) -> dict[str, Any]:
    """The same of a request whose prefill held up streams; its victims are streams."""
    return _row(outcomes, staller.request) | {
        "stalled_s": round(staller.stalled_ns / 1e9, 3),
        "victims": staller.victims,
        "of": {name: round(float(ns) / 1e9, 3) for name, ns in staller.by_victim},
    }


def _row(outcomes: pa.Table, request: int) -> dict[str, Any]:
    columns = [c for c in ("request_id", "tenant", "input_tokens", "output_tokens") if c in outcomes.schema.names]
    row: dict[str, Any] = outcomes.select(columns).slice(request, 1).to_pylist()[0]
    sent_ns = outcomes.column("sent_ns")[request].as_py() or 0
    return row | {"sent_s": round(sent_ns / 1e9, 3)}


def to_dict(found: Judged) -> dict[str, Any]:
    """The JSON of a judgement; `blocking_s` is the judged arm's, all arms' stand under `blocking`."""
    isolation: dict[str, Any] = msgspec.to_builtins(found.isolation)
    arm = found.blocking.get(found.isolation.arm)
    return isolation | {
        "blocking_s": {} if arm is None else arm.blocking_s,
        "inversion_s": {} if arm is None else arm.inversion_s,
        "stalls_s": {} if arm is None else arm.stalls_s,
        "blocking": msgspec.to_builtins(found.blocking),
        "regressions": list(found.regressions),
    }


def regressions(now: Judged, before: Judged) -> tuple[str, ...]:
    """Quantiles of the judged arm that got worse than the baseline by more than both intervals allow.

    The logarithms differ by ln(now / before); standard error from both intervals, degrees of freedom after Welch 1947.
    """
    found = []
    for name, part in now.isolation.tenants.items():
        old = before.isolation.tenants.get(name)
        here, there = part.arms.get(now.isolation.arm), None if old is None else old.arms.get(before.isolation.arm)
        if here is None or there is None:
            continue
        for metric in ("ttft_ms", "e2e_ms"):
            for label in ("p50", "p95", "p99"):
                a, b = getattr(here, metric), getattr(there, metric)
                text = _worse(a, b, label, (here.trials, there.trials))
                if text:
                    found.append(f"{name} {metric.removesuffix('_ms')}_{label}: {text}")
    return tuple(found)


def _worse(now: Any, before: Any, label: str, trials: tuple[int, int]) -> str:
    if label in now.infinite and label not in before.infinite and getattr(before, label) is not None:
        return "∞ now, finite in the baseline"
    value, old = getattr(now, label), getattr(before, label)
    if value is None or old is None or now.ci[label] is None or before.ci[label] is None:
        return ""
    from scipy import special

    errors = []
    for block, count in ((now, trials[0]), (before, trials[1])):
        low, high = block.ci[label]
        errors.append(np.log(high / low) / 2 / special.stdtrit(max(1, count - 1), 0.975))
    variances = np.square(errors)
    dof = variances.sum() ** 2 / np.sum(variances**2 / np.maximum(1, np.array(trials) - 1))
    lower = np.log(value / old) - special.stdtrit(dof, 0.975) * np.sqrt(variances.sum())
    if lower <= 0:
        return ""
    return f"{figures.beside(value, old)} ms, {figures.digits(old)} ms in the baseline, beyond the interval"
