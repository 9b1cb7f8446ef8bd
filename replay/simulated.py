"""A plan played on the virtual clock, as the tables of a run: outcomes, ground truth, the document.

Outcomes are what a sender without a network would have measured. The ground truth says what each request waited for and
whom the engine served meanwhile; an estimator may be compared with it and must never read it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from replay import arms, pooled, runfile
from replay import plan as planning
from replay import rows as outcome_rows
from replay.engine import virtual
from replay.engine.config import SchedulerConfig
from replay.engine.steptime import Profile
from replay.engine.virtual import Result, Workload
from replay.options import Offered, OfferOptions, SendOptions
from replay.plan import NONE, Plan
from tenants import dialects
from tenants.summary import Summary, summarise
from traces import parquet

MOST_CHUNKS = 50_000_000  # token times kept by default: 400 MB


class Engine(NamedTuple):
    """What a plan is played on: settings and step times of each replica, and the options they came from."""

    config: SchedulerConfig
    profile: Profile
    options: dict[str, Any]

    @property
    def line(self) -> str:
        """In a line."""
        config, profile = self.config, self.profile
        return (
            f"engine   {self.options['replicas']} × {profile.name} ({profile.provenance}), {config.scheduling_policy}, "
            f"{config.slots} slots, {config.token_budget} tokens a step"
        )


class Simulated:
    """A plan played on the virtual clock.

    Args:
        offered: the plan and its tenants.
        engine: what it is played on.
        send: which chunk times to keep.
        arm: of the experiment that this run is part of.
    """

    def __init__(self, offered: Offered, engine: Engine, send: SendOptions, *, arm: str | None = None) -> None:
        self.arm = arm
        self.offered, self.config, self.profile, self.engine = offered, engine.config, engine.profile, engine.options
        config, profile = engine.config, engine.profile
        self.work, self.rows, self.too_long = workload_of(offered, config)
        begun = time.perf_counter()
        self.result = virtual.simulate(
            self.work,
            config,
            profile.model,
            replicas=self.engine["replicas"],
            routing=self.engine["routing"],
            stepwise=self.engine["step_by_step"],
        )
        self.wall_s = time.perf_counter() - begun
        tokens = int(self.result.output_tokens.sum())
        self.chunks = send.chunks if send.chunks != "all" or tokens <= MOST_CHUNKS else "first"

    @property
    def line(self) -> str:
        """What was played, in a line."""
        tokens, steps = int(self.result.output_tokens.sum()), sum(self.result.steps)
        return f"played   {len(self.work):,} requests, {tokens:,} tokens, {steps:,} steps in {self.wall_s:.2f} s"

    @functools.cached_property
    def outcomes(self) -> pa.Table:
        """Every row of the plan as an outcome of the run."""
        return outcomes_of(self)

    def notes(self) -> list[str]:
        """What a reader must know."""
        result, plan = self.result, self.offered.plan
        stuck = int((result.finish == 0).sum())
        found = list(plan.notes)
        if len(self.too_long):
            limit = self.config.max_model_len
            found.append(f"{len(self.too_long):,} requests are longer than max_model_len {limit}: refused with 400")
        if stuck:
            found.append(f"{stuck:,} requests never ended: the engine cannot hold them (KV blocks); they are cut")
        if result.livelocks:
            found.append(
                "livelock: requests took each other's blocks in turn; admit whole prompts, or give more blocks"
            )
        if int((plan.n > 1).sum()):
            found.append("several answers to one request (n > 1) are simulated as one")
        if self.chunks == "first" and int(result.output_tokens.sum()) > MOST_CHUNKS:
            found.append("token times are left out (too many); the first and the last are kept")
        return found


def keep(ran: Simulated, offer: OfferOptions, folder: Path) -> Summary:
    """Write the run's folder, without a page; returns its summary."""
    stuck = ["the engine stalled: some requests can never be served"] if bool((ran.result.finish == 0).any()) else []
    summary = summarise(
        ran.outcomes,
        tenants=ran.offered.tenants,
        rules=ran.offered.rules,
        digest=planning.digest(ran.offered.plan),
        warnings=ran.notes(),
        invalid=stuck,
    )
    folder.mkdir(parents=True)
    parquet.write(ran.outcomes, folder / "outcomes.parquet")
    pq.write_table(truth_of(ran, ran.outcomes.column("request_id").combine_chunks()), folder / "truth.parquet")
    runfile.write(folder, document_of(ran, offer, summary))
    return summary


def play_arm(part: tuple[Offered, str], asked: OfferOptions, engine: Engine, send: SendOptions, folder: Path) -> None:
    """Play an arm of an experiment into its folder; of a pool, both engines and then their rows together.

    Args:
        part: what the arm offers, and its name.
        asked: what the user asked for.
        engine: of each server.
        send: which chunk times to keep.
        folder: of the run.
    """
    offered, arm = part
    if arm != arms.POOLED:
        keep(Simulated(offered, engine, send, arm=arm), asked, folder)
        return
    halves = arms.split(offered, arms.less_urgent(offered.tenants))
    for half, place in zip(halves, ("first", "second"), strict=True):
        keep(Simulated(half, engine, send, arm=arm), asked, folder / place)
    pooled.join(folder, offered)


def workload_of(
    offered: Offered, config: SchedulerConfig
) -> tuple[Workload, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The plan as the virtual engine takes it: the workload, its rows in the plan, and the rows that are too long."""
    plan = offered.plan
    total = plan.input_tokens.astype(np.int64) + plan.output_tokens
    fits = total <= config.max_model_len
    gap = dialects.named("sglang").gap if config.scheduling_policy == "sglang" else 1  # as its dialect puts on the wire
    rows = np.flatnonzero(fits)
    place = np.full(plan.rows, -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    previous = plan.previous[rows].astype(np.int64)
    after = np.where(previous == NONE, -1, place[previous])
    names = plan.tenants or ("default",)
    size, prefixes = _prefixes(plan, rows)
    work = Workload(
        arrival_ns=np.array(plan.at_ns[rows]),
        input_tokens=plan.input_tokens[rows].astype(np.int64),
        output_tokens=plan.output_tokens[rows].astype(np.int64),
        tenant=np.maximum(plan.tenant[rows], 0),
        tenants=names,
        priority=np.maximum(plan.rank[rows], 0).astype(np.int64) * gap,
        session=np.array(plan.session[rows]),
        after=after if bool((after >= 0).any()) else None,
        think_ns=np.array(plan.think_ns[rows]),
        abort_ns=np.array(plan.abort_ns[rows]) if bool((plan.abort_ns[rows] >= 0).any()) else None,
        prefixes=prefixes,
        prefix_block_size=size,
        caps=offered.caps,
    )
    return work, rows, np.flatnonzero(~fits)


def _prefixes(plan: Plan, rows: npt.NDArray[np.int64]) -> tuple[int, list[list[int] | None] | None]:
    """Prefix hashes by request, where the trace has any."""
    if len(plan.block_hashes) <= 1:
        return 16, None
    sizes = plan.block_size[rows]
    size = int(sizes.max())
    found: list[list[int] | None] = []
    for row in rows.tolist():
        start, end = int(plan.block_offsets[row]), int(plan.block_offsets[row + 1])
        same = end > start and int(plan.block_size[row]) == size
        found.append(plan.block_hashes[start:end].tolist() if same else None)
    return max(1, size), found


def outcomes_of(ran: Simulated) -> pa.Table:
    """Every row of the plan as an outcome of the run."""
    plan, result = ran.offered.plan, ran.result
    metadata = ran.offered.metadata.done(f"simulated on {ran.profile.name}")
    schema = outcome_rows.outcome_schema(plan, msgspec.structs.replace(metadata, epoch="relative"), arm=ran.arm)
    models = ((*plan.models, ran.profile.served_model or ran.profile.name), ran.arm)
    batches = [outcome_rows.joined(plan, ran.rows, _measured(ran, result), schema, models)]
    if len(ran.too_long):
        count = len(ran.too_long)
        refused = {
            "outcome": pa.array(["http_error"] * count),
            "status": pa.array(np.full(count, 400, np.int16)),
            "error": pa.array(["http 400"] * count),
            "due_ns": pa.array(plan.at_ns[ran.too_long]),
            "released_ns": pa.array(plan.at_ns[ran.too_long]),
            "sent_ns": pa.array(plan.at_ns[ran.too_long]),
            "end_ns": pa.array(np.zeros(count, np.int64)),
            "attempts": pa.array(np.ones(count, np.int32)),
        }
        batches.append(outcome_rows.joined(plan, ran.too_long, refused, schema, models))
    return pa.Table.from_batches(batches, schema=schema)


_OUTCOME = ("cut", "ok", "ok", "client_abort", "http_error")  # by code of virtual.FINISHES
_REASON = (None, "length", "stop", None, None)


def _measured(ran: Simulated, result: Result) -> dict[str, pa.Array]:
    """What a sender would have measured, had it no network: offsets from the moment of sending."""
    sent = result.sent_ns
    plan = ran.offered.plan
    never_sent = sent < 0
    streamed = np.array(plan.stream[ran.rows])

    def offset(times: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_]) -> pa.Array:
        return pa.array(times - sent, mask=(times < 0) | never_sent | ~keep)

    everyone = np.ones(len(sent), dtype=np.bool_)
    finish = result.finish.tolist()
    outcome = ["unsent" if absent else _OUTCOME[code] for code, absent in zip(finish, never_sent.tolist(), strict=True)]
    refused = result.finish == 4
    status = np.where(refused, 503, 200).astype(np.int16)
    count = pa.array(result.output_tokens, mask=refused | never_sent)
    chunk_ns, chunk_tokens = _chunks(ran, result, streamed)
    waited = np.where(result.admitted_ns < 0, -1, result.admitted_ns)
    prefill = np.where(result.first_token_ns < 0, -1, result.first_token_ns - result.admitted_ns)
    measured = {
        "due_ns": pa.array(result.due_ns, mask=result.due_ns < 0),
        "released_ns": pa.array(sent, mask=never_sent),
        "sent_ns": pa.array(sent, mask=never_sent),
        "attempts": pa.array(np.ones(len(sent), np.int32), mask=never_sent),
        "status": pa.array(status, mask=never_sent | (result.finish == 0)),
        "outcome": pa.array(outcome),
        "finish_reason": pa.array([_REASON[code] for code in finish], pa.string()),
        "error": pa.array(["http 503" if code == 4 else None for code in finish], pa.string()),
        "first_token_ns": offset(result.first_token_ns, streamed),
        "first_visible_ns": offset(result.first_token_ns, streamed),
        "last_token_ns": offset(result.last_token_ns, streamed),
        "end_ns": offset(result.end_ns, everyone),
        "queue_ns": offset(waited, everyone),
        "prefill_ns": pa.array(prefill, mask=prefill < 0),
        "input_tokens": pa.array(ran.work.input_tokens, mask=refused | never_sent),
        "output_tokens": count,
        "cached_tokens": pa.array(result.cached_tokens, mask=refused | never_sent),
        "tokens_source": pa.array(["usage"] * len(sent)),
        "worker": pa.array(result.replica.astype(np.int32), mask=never_sent),
    }
    if chunk_ns is not None:
        measured |= {"chunk_ns": chunk_ns, "chunk_tokens": chunk_tokens}
    return measured


def _chunks(ran: Simulated, result: Result, streamed: npt.NDArray[np.bool_]) -> tuple[pa.Array | None, pa.Array | None]:
    """Token times of every stream as lists, one token a chunk."""
    if ran.chunks != "all":
        return None, None
    counts = np.where(streamed, result.output_tokens, 0)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    values = np.empty(int(offsets[-1]), dtype=np.int64)
    for index in np.flatnonzero(counts).tolist():
        values[offsets[index] : offsets[index + 1]] = result.chunk_ns(index) - result.sent_ns[index]
    ones = pa.array(np.ones(len(values), np.int32))
    place = pa.array(offsets)
    return pa.ListArray.from_arrays(place, pa.array(values)), pa.ListArray.from_arrays(place, ones)


def truth_of(ran: Simulated, request_id: pa.Array) -> pa.Table:
    """Ground truth by request; `served_ns` lists the tenants in the order of the metadata `convoy.tenants`.

    Args:
        ran: the simulation.
        request_id: of the outcomes, whose first rows are the requests simulated.
    """
    result = ran.result
    served = pa.FixedSizeListArray.from_arrays(pa.array(result.served_ns.T.ravel()), len(result.tenants))
    columns = {
        "request_id": request_id.slice(0, len(result.sent_ns)),
        "tenant": pa.DictionaryArray.from_arrays(
            pa.array(ran.work.tenant, pa.int32()), pa.array(result.tenants, pa.string())
        ),
        "sent_ns": pa.array(result.sent_ns, mask=result.sent_ns < 0),
        "admitted_ns": pa.array(result.admitted_ns, mask=result.admitted_ns < 0),
        "first_token_ns": pa.array(result.first_token_ns, mask=result.first_token_ns < 0),
        **{
            name: pa.array(getattr(result, name))
            for name in (
                "wait_step_ns",
                "wait_slot_ns",
                "wait_budget_ns",
                "wait_kv_ns",
                "wait_preempted_ns",
                "resume_wait_ns",
                "prefill_ns",
                "own_ns",
                "preemptions",
                "cached_tokens",
                "replica",
            )
        },
        "served_ns": served.cast(pa.list_(pa.int64())),
    }
    names = json.dumps(list(result.tenants)).encode()
    return pa.table(columns).replace_schema_metadata({b"convoy.tenants": names})


def document_of(ran: Simulated, offer: OfferOptions, summary: Any) -> dict[str, Any]:
    """What `run.json` holds."""
    result = ran.result
    span_ns = int(result.end_ns.max(initial=0))
    return {
        "format": 1,
        "command": {
            "offer": msgspec.to_builtins(offer),
            "engine": {k: v for k, v in ran.engine.items() if v is not None},
        },
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": f"simulated: {ran.engine['replicas']} × {ran.profile.name}",
        "model": ran.profile.served_model,
        "simulation": {
            "wall_s": ran.wall_s,
            "simulated_s": span_ns / 1e9,
            "steps": result.steps,
            "busy": [busy / span_ns if span_ns else 0.0 for busy in result.busy_ns],
            "stepwise_stretches": result.handovers,
            "preemptions": int(result.preemptions.sum()),
            "profile": {"name": ran.profile.name, "provenance": ran.profile.provenance, "error": ran.profile.error},
            "config": dataclasses.asdict(ran.config),
        },
        "tenants": msgspec.to_builtins([msgspec.structs.replace(t, headers={}) for t in ran.offered.tenants]),
        "plan": planning.counts(ran.offered.plan) | {"digest": summary.digest, "turns": offer.turns},
        "trace": {
            "rows": ran.offered.rows_before,
            "span_ns": ran.offered.span_before_ns,
            "source": ran.offered.metadata.source,
        },
        "shape": [report.line() for report in ran.offered.reports],
        "host": runfile.host(),
        "versions": runfile.versions(),
        "notes": ran.notes(),
        "summary": msgspec.to_builtins(summary),
    }
