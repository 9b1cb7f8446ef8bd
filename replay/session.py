"""One run from an offer to its folder: server, preflight, workers, summary. `replay` does it once, others often.

    with server(send, engine) as target:            the embedded engine when no target is named
        ready = prepare(offered, send, target)      everything asked before the first request
        ran = perform(offered, send, ready, folder) the run itself, its outcomes, its summary

`run.json` holds everything asked, what was found and what was said at each stage; no key, no text.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay import plan as planning
from replay import preflight, remarks, runfile, selfcheck, server_tokens
from replay import run as running
from replay.options import Offered, OfferOptions, SendOptions
from replay.plan import NONE, Plan
from replay.preflight import Ask, Models, Refused, Server, Target
from replay.prompts import Wiring, mix
from replay.run import Crew, Result, Watch
from replay.selfcheck import Floor
from replay.vocabulary import Vocabulary
from replay.worker import Job
from tenants import dialects
from tenants.dialects import Dialect
from tenants.summary import Summary, summarise
from tenants.tenant import Tenant
from traces import parquet
from traces.units import NS_PER_MS, NS_PER_S

_REQUEST_US, _EVENT_US = 350, 12  # what a request and an event of it cost a sender, roughly, measuring included
METRICS_S = 2.0  # a server that does not give its counters by then does not give them
_BUSY = 0.3  # a core that is busier than this gets company


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The embedded engine, where no target is named."""

    policy: str = "priority"
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    profile: str | None = None

    def arguments(self) -> list[str]:
        """As options of `replay serve`."""
        found = ["--policy", self.policy, "--max-num-seqs", str(self.max_num_seqs)]
        if self.max_num_batched_tokens is not None:
            found += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        if self.profile is not None:
            found += ["--profile", self.profile]
        return found


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found before the first request."""

    target: Target
    server: Server
    dialect: Dialect
    dialect_why: str
    models: Models
    vocabulary: Vocabulary
    wiring: Wiring
    notes: list[str]
    floor: Floor | None = None


class ClientBound(Refused):
    """This machine cannot send the plan in time; the text says what could."""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over."""

    folder: Path
    result: Result
    summary: Summary
    document: dict[str, Any]
    outcomes: Any  # the Arrow table of outcomes.parquet


@contextlib.contextmanager
def server(send: SendOptions, engine: EngineOptions) -> Iterator[Target]:
    """The target: the one that was named, or the embedded engine for as long as the context lasts.

    Raises:
        Refused: the target is neither this machine nor allowed.
    """
    if send.target is not None:
        target = preflight.parse_target(send.target)
        preflight.allowed(target, send.allow_host)
        yield target
        return
    from replay.engine import child

    try:
        with child.running(*engine.arguments()) as url:
            yield preflight.parse_target(url)
    except child.EngineFailed as error:
        said = str(error).removeprefix("replay: ").removesuffix(" (try: replay serve --help)")
        raise Refused(f"the embedded engine did not start: {said}") from error


def prepare(offered: Offered, send: SendOptions, target: Target, *, seed: int = 0) -> Ready:
    """Ask the server what must be known before the first request.

    Raises:
        Refused: with the one line to print.
    """
    plan, notes = offered.plan, list(offered.plan.notes)
    headers = _headers(send)
    ask = Ask(target, headers, tls=tls(send))
    found = preflight.look(ask)
    dialect, why = _dialect(send, found)
    models = preflight.model_for(send.model, plan, found)
    notes += models.notes
    known = preflight.Known(ask, dialect.name, models.default)
    learnt = preflight.learn_vocabulary(known, plan, Path(send.tokenizer) if send.tokenizer else None)
    overhead, said = preflight.overheads(known, plan, learnt)
    notes += said
    notes += remarks.lengths(plan, dialect, learnt)
    notes += preflight.length_notes(plan, found)
    salt = mix(seed, 0x5EED) if send.keep_prefix_cache else secrets.randbits(64)
    wiring = Wiring(
        dialect=dialect.name,
        base_path=target.base_path,
        models=models.of_plan,
        model=models.default,
        tenant_models={tenant.name: tenant.model for tenant in offered.tenants if tenant.model and not send.model},
        priority=_priorities(plan, dialect),
        headers=headers,
        tenant_headers={tenant.name: _tenant_headers(tenant, dialect, plan) for tenant in offered.tenants},
        overhead=overhead,
        ids=bool(learnt.ids),
        salt=salt,
        connect_ns=send.timeout_connect_ns,
        idle_ns=send.timeout_idle_ns,
        total_ns=send.timeout_ns,
    )
    return Ready(
        target=target,
        server=found,
        dialect=dialect,
        dialect_why=why,
        models=models,
        vocabulary=learnt,
        wiring=wiring,
        notes=notes,
    )


def workers_for(plan: Plan, send: SendOptions) -> int:
    """How many sender processes: as asked, else as many as keep each core's own work below a third."""
    if send.workers is not None:
        return send.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if send.concurrency is not None:
        return max(1, min(cores, send.concurrency // 32))
    busy_us = _REQUEST_US * plan.rows + _EVENT_US * int(plan.output_tokens.sum(dtype=np.int64))
    busy = busy_us * 1000 / max(plan.span_ns, NS_PER_S)
    return max(1, min(cores, math.ceil(busy / _BUSY)))


def checked(offered: Offered, send: SendOptions, ready: Ready, workers: int) -> Ready:
    """The same with this machine's own floor, measured now against a server that does nothing.

    Raises:
        ClientBound: the plan needs more workers than there are.
    """
    if not send.self_check or not offered.plan.rows:
        return ready
    floor = selfcheck.measure(offered.plan, ready.wiring, ready.vocabulary, closed_loop=send.concurrency is not None)
    refusal = selfcheck.refusal(floor, workers)
    if refusal is not None:
        raise ClientBound(f"{refusal}; --no-self-check sends it all the same")
    note = (
        f"self-check: the client alone adds {floor.ttft_ms_p50:.2f} ms (P50), {floor.ttft_ms_p99:.2f} ms (P99) to a "
        f"TTFT and can send {floor.worker_rps:,.0f} requests/s of this plan per worker"
    )
    return msgspec.structs.replace(ready, floor=floor, notes=[*ready.notes, note])


def perform(
    offered: Offered,
    send: SendOptions,
    ready: Ready,
    folder: Path,
    crew: Crew,
    *,
    asked: OfferOptions,
    arm: str | None = None,
    watch: Watch = lambda *_: None,
    invalid: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Ran:
    """Send the plan, then judge what came back; leaves `outcomes.parquet` and `run.json` in the folder.

    Args:
        offered: the plan and its tenants.
        send: how.
        ready: from `prepare`.
        folder: the run's folder; it exists and is empty.
        crew: the workers, started.
        asked: what the user asked for, for `run.json`.
        arm: name of an experiment's arm.
        watch: who looks on.
        invalid: reasons found before why the run cannot speak about the server.
        warnings: said before, passed on.

    Raises:
        replay.run.Interrupted: a second Ctrl-C.
    """
    plan = offered.plan
    notes = [*ready.notes, *preflight.file_descriptors(plan, crew.workers, send.concurrency)]
    job = Job(
        folder="",
        worker=0,
        workers=crew.workers,
        target=ready.target.origin,
        transport="aiohttp" if send.transport == "aiohttp" else "protocol",
        wiring=ready.wiring,
        vocabulary=ready.vocabulary,
        concurrency=send.concurrency,
        drop_after_ns=_drop_after_ns(send),
        retry=send.retry,
        drain_ns=send.drain_ns,
        chunks=send.chunks,
        ca_file=send.ca_file,
        insecure=send.insecure,
    )
    digest = planning.digest(plan)
    ask = Ask(ready.target, ready.wiring.headers, tls=tls(send), timeout_s=METRICS_S)
    before = server_tokens.asked(ask)
    result = running.run(
        plan,
        job,
        crew,
        folder,
        capped={} if send.concurrency else offered.caps,
        models=(*ready.models.of_plan, ready.models.default),
        metadata=msgspec.structs.replace(
            offered.metadata.done(f"replayed on {ready.target.origin}, digest {digest}"), epoch="relative"
        ),
        arm=arm,
        watch=watch,
    )
    outcomes = parquet.read(folder / "outcomes.parquet")
    after = None if before is None or result.lost else server_tokens.asked(ask)  # what a lost worker counted is lost
    tokens = server_tokens.reconciled(before, after, outcomes)
    notes += tokens.notes if tokens is not None else ()
    warnings = [*warnings, *notes, *remarks.deviation(outcomes), *remarks.of_workers(result, send)]
    summary = summarise(
        outcomes,
        tenants=offered.tenants,
        rules=offered.rules,
        max_lateness_ms=None if send.max_lateness_ns is None else send.max_lateness_ns / NS_PER_MS,
        interrupted=result.interrupted,
        digest=digest,
        warnings=warnings,
        invalid=[*invalid, *result.lost, *remarks.starved(result, send)],
    )
    document = runfile.described(offered, (asked, send), ready, result, summary) | runfile.blocking(offered, outcomes)
    document["server_tokens"] = msgspec.to_builtins(tokens)
    runfile.write(folder, document)
    return Ran(folder=folder, result=result, summary=summary, document=document, outcomes=outcomes)


def one(
    offered: Offered,
    asked: OfferOptions,
    send: SendOptions,
    target: Target,
    folder: Path,
    *,
    crew: Crew | None = None,
    arm: str | None = None,
    watch: Watch = lambda *_: None,
) -> Ran:
    """A run from its offer to its folder, with prompts of its own: no other run has warmed the server for it.

    As `perform`, but the folder is made here; a crew that was started before is ended here.

    Raises:
        Refused, replay.run.Interrupted
    """
    with crew or Crew(workers_for(offered.plan, send)) as workers:
        ready = prepare(offered, send, target, seed=asked.seed)
        folder.mkdir(parents=True)
        return perform(offered, send, ready, folder, workers, asked=asked, arm=arm, watch=watch)


def _headers(send: SendOptions) -> dict[str, str]:
    """What everybody sends: the user's headers and the key, which stays in memory."""
    found = {}
    for text in send.header:
        name, _, value = text.partition(":")
        found[name.strip().lower()] = value.strip()
    key = preflight.api_key(send.api_key_env)
    if key is not None and "authorization" not in found:
        found["authorization"] = f"Bearer {key}"
    return found


def _tenant_headers(tenant: Tenant, dialect: Dialect, plan: Plan) -> dict[str, str]:
    """A tenant's own headers: its mark, its key, and where the dialect names tenants or objectives, those."""
    match = tenant.recognised_by
    found = {match.header: match.value, **{name.lower(): value for name, value in tenant.headers.items()}}
    if tenant.api_key_env is not None:
        key = preflight.api_key(tenant.api_key_env)
        if key is None:
            raise Refused(f"tenant {tenant.name}: the variable {tenant.api_key_env} holds no key")
        found["authorization"] = f"Bearer {key}"
    if dialect.tenant_header is not None or dialect.scale == "name":
        ranks = _ranks(plan)
        tag = dialects.apply(dialect, tenant.priority, ranks, tenant=tenant.name, objective=tenant.objective)
        found.update(tag.headers)
    return found


def _ranks(plan: Plan) -> int:
    """The largest rank of the plan + 1."""
    return int(plan.rank.max()) + 1 if plan.rows and plan.rank.max() != NONE else 1


def _priorities(plan: Plan, dialect: Dialect) -> dict[int, tuple[dict[str, Any], dict[str, str]]]:
    """Rank → body fields and headers. Named objectives belong to the tenant, not to the rank."""
    if dialect.scale == "name":
        return {}
    found = {}
    for rank in np.unique(plan.rank).tolist():
        if rank != NONE:
            tag = dialects.apply(dialect, rank, _ranks(plan))
            found[rank] = (tag.body, tag.headers)
    return found


def _dialect(send: SendOptions, found: Server) -> tuple[Dialect, str]:
    if send.dialect != "auto":
        return dialects.named(send.dialect), "as asked"
    return dialects.named(found.detected.dialect), found.detected.why


def _drop_after_ns(send: SendOptions) -> int | None:
    """`--catch-up drop`: what is later than the allowed lateness is not sent."""
    if send.catch_up != "drop":
        return None
    return send.max_lateness_ns or 10 * NS_PER_MS


def tls(send: SendOptions) -> Any:
    """The context for https that was asked for; None for the default. Raises Refused."""
    import ssl

    if send.insecure:
        return ssl._create_unverified_context()  # noqa: S323, SLF001 - the user asked for it
    if send.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=send.ca_file)
    except OSError as error:  # an SSLError is one: the file holds no certificate
        why = "no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise Refused(f"--ca-file {send.ca_file}: {why}") from error
