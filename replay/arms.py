"""The arms of an isolation experiment: one plan, offered in several ways. Pure: plans in, plans out.

    alone      each tenant by itself, at the times it has in the mix
    untagged   the mix, no request says its priority
    tagged     the mix with priorities
    capped     tagged, and the less urgent tenants held to a number of requests in flight
    pooled     tagged, and the less urgent tenants on a second server

The rows of a tenant, their lengths and due times are the same in every arm, so that arms differ by what the server
does alone. Arms of a trial are run in an order that turns from trial to trial: a machine that warms up or fills up
over the hours is not taken for an arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from replay.options import Offered
from replay.plan import NONE, Plan
from tenants.tenant import Tenant

ALONE, UNTAGGED, TAGGED, CAPPED, POOLED = "alone", "untagged", "tagged", "capped", "pooled"
KNOWN = (ALONE, UNTAGGED, TAGGED, CAPPED, POOLED)


class Part(NamedTuple):
    """One run of a trial: an arm, or one tenant's part of the arm `alone`."""

    arm: str
    tenant: str | None = None

    @property
    def folder(self) -> str:
        """Name of its folder in the trial's."""
        return self.arm if self.tenant is None else f"{self.arm}-{self.tenant}"


def parts(arms: Sequence[str], alone: Sequence[str], trial: int) -> list[Part]:
    """The runs of a trial in their order: turned by the trial's number, backwards in every other round.

    Args:
        arms: names.
        alone: tenants of the arm `alone`.
        trial: from 0.
    """
    found: list[Part] = []
    for arm in arms:
        found += [Part(arm, tenant) for tenant in alone] if arm == ALONE else [Part(arm)]
    turn = trial % len(found)
    turned = found[turn:] + found[:turn]
    return turned[::-1] if (trial // len(found)) % 2 else turned


def offered_for(offered: Offered, part: Part) -> Offered:
    """What an arm offers of the whole."""
    if part.arm == ALONE:
        keep = offered.plan.tenants.index(part.tenant or "")
        return _without_caps(_only(offered, (keep,)))
    if part.arm == UNTAGGED:
        rank = np.broadcast_to(np.array(NONE, dtype=offered.plan.rank.dtype), offered.plan.rows)
        plan = dataclasses.replace(offered.plan, rank=rank)
        tenants = tuple(msgspec.structs.replace(tenant, priority=None) for tenant in offered.tenants)
        return _without_caps(msgspec.structs.replace(offered, plan=plan, tenants=tenants))
    return offered if part.arm == CAPPED else _without_caps(offered)


def split(offered: Offered, apart: Sequence[str]) -> tuple[Offered, Offered]:
    """The tenants that stay, and those on a second server."""
    names = offered.plan.tenants
    there = tuple(index for index, name in enumerate(names) if name in apart)
    here = tuple(index for index in range(len(names)) if index not in there)
    return _without_caps(_only(offered, here)), _without_caps(_only(offered, there))


def less_urgent(tenants: Sequence[Tenant]) -> tuple[str, ...]:
    """Every tenant but the most urgent ones."""
    ranks = [tenant.priority for tenant in tenants if tenant.priority is not None]
    first = min(ranks, default=None)
    return tuple(tenant.name for tenant in tenants if tenant.priority is None or tenant.priority != first)


def select(plan: Plan, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Plan:
    """A plan of some of its rows, due when they were due; a turn whose former turn is left out keeps its own time."""
    rows = np.flatnonzero(keep)
    place = np.full(plan.rows + 1, NONE, dtype=np.int32)  # the last one stands for "none"
    place[rows] = np.arange(len(rows), dtype=np.int32)
    sizes = np.diff(plan.block_offsets)[rows]
    starts = np.asarray(plan.block_offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(plan.block_offsets.dtype)
    hashes = np.repeat(starts - offsets[:-1], sizes) + np.arange(int(offsets[-1]))
    special = {"previous", "block_offsets", "block_hashes"}
    arrays = {
        field.name: getattr(plan, field.name)[rows]
        for field in dataclasses.fields(plan)
        if isinstance(getattr(plan, field.name), np.ndarray) and field.name not in special
    }
    taken = rows.tolist()
    return dataclasses.replace(
        plan,
        **arrays,
        previous=place[plan.previous[rows]],
        block_offsets=offsets,
        block_hashes=np.asarray(plan.block_hashes)[hashes],
        request_id=None if plan.request_id is None else plan.request_id.take(taken),
        session_id=None if plan.session_id is None else plan.session_id.take(taken),
    )


def _only(offered: Offered, keep: Sequence[int]) -> Offered:
    names = {offered.plan.tenants[index] for index in keep}
    plan = select(offered.plan, np.isin(offered.plan.tenant, list(keep)))
    tenants = tuple(tenant for tenant in offered.tenants if tenant.name in names)
    return msgspec.structs.replace(offered, plan=plan, tenants=tenants, rules=())


def _without_caps(offered: Offered) -> Offered:
    tenants = tuple(msgspec.structs.replace(tenant, cap=None) for tenant in offered.tenants)
    return msgspec.structs.replace(offered, tenants=tenants)
