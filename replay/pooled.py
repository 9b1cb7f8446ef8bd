"""The arm `pooled`: the less urgent tenants on a second server, at the same time; one result of both halves.

    FOLDER/first, FOLDER/second      the halves, run folders like any other
    FOLDER/                          their rows together, judged as one run

The second half runs in a process of its own, because a run obeys signals and only a main thread may.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import pyarrow as pa

from replay import arms, preflight, runfile, session
from replay.options import Offered, OfferOptions, SendOptions
from replay.run import Watch
from tenants import folder as folders
from tenants.summary import summarise
from traces import parquet

END_S = 60.0


def pooled(
    offered: Offered, asked: OfferOptions, sends: tuple[SendOptions, SendOptions], folder: Path, watch: Watch
) -> bool:
    """Run both halves and write their common result; returns whether the user ended it.

    Args:
        offered: the whole mix.
        asked: what the user asked for.
        sends: to the first server and to the second.
        folder: of the run.
        watch: sees the first half.

    Raises:
        Refused: the second half did not run.
    """
    here, there = arms.split(offered, arms.less_urgent(offered.tenants))
    folder.mkdir(parents=True)
    other = multiprocessing.get_context("spawn").Process(target=_half, args=(there, asked, sends[1], folder / "second"))
    other.start()
    try:
        ran = _half(here, asked, sends[0], folder / "first", watch)
        other.join(sends[1].drain_ns / 1e9 + END_S)
    finally:
        if other.is_alive():
            other.terminate()
        other.join()
    if other.exitcode:
        raise preflight.Refused(f"arm pooled: the run on {sends[1].target} ended with exit code {other.exitcode}")
    join(folder, offered)
    return ran.result.interrupted


def _half(
    offered: Offered, asked: OfferOptions, send: SendOptions, folder: Path, watch: Watch = lambda *_: None
) -> session.Ran:
    target = preflight.parse_target(str(send.target))
    preflight.allowed(target, send.allow_host)
    return session.one(offered, asked, send, target, folder, arm=arms.POOLED, watch=watch)


def join(folder: Path, offered: Offered) -> None:
    """Write the rows of both halves in one file, and one summary."""
    halves = [folders.load(folder / name) for name in ("first", "second")]
    whole = pa.concat_tables([half.everything() for half in halves], promote_options="default").unify_dictionaries()
    whole = parquet.in_order(whole)
    parquet.write(whole, folder / "outcomes.parquet")
    summary = summarise(
        whole,
        tenants=offered.tenants,
        rules=offered.rules,
        max_lateness_ms=halves[0].summary.lateness_ms.limit,
        interrupted=any(half.summary.interrupted for half in halves),
        digest="+".join(half.summary.digest for half in halves),
        warnings=[warning for half in halves for warning in half.summary.warnings],
        invalid=[] if all(half.summary.valid for half in halves) else ["one half of the pool is invalid"],
    )
    document = {"format": 1, "halves": ["first", "second"], "summary": msgspec.to_builtins(summary)}
    runfile.write(folder, document)
