"""Runs of the virtual engine as a replayer would see them, with the engine's truth of who blocked whom beside.

`run(workload, ...)` gives outcomes (as a sender's, with a little network noise on every chunk) and `Truth`; the truth
uses the estimator's own formula on what the engine recorded, so the two can be laid side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from replay.engine.config import SchedulerConfig
from replay.engine.steptime import StepModel, load_profile
from replay.engine.virtual import Workload, simulate
from traces.record import Metadata, table

BUDGET = 2048
SLOTS = 8


class Truth(NamedTuple):
    """Per request, ns: blocked time, and its split over the tenants by the work the engine did meanwhile."""

    tenants: tuple[str, ...]
    blocked_ns: npt.NDArray[np.float64]
    by_tenant_ns: npt.NDArray[np.float64]

    def matrix_s(self, tenant: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        found = np.zeros((len(self.tenants), len(self.tenants)))
        np.add.at(found, tenant, self.by_tenant_ns)
        return found / 1e9


class Kind(NamedTuple):
    """A tenant of a made workload: median lengths, and its share of the engine's slots."""

    input_tokens: int
    output_tokens: int
    share: float = 1.0


THREE = {"chat": Kind(300, 150), "rag": Kind(3500, 120), "writer": Kind(400, 900)}


def workload(seed: int, load: float, seconds: float = 150.0, kinds: dict[str, Kind] | None = None) -> Workload:
    """Poisson arrivals of several tenants whose slots add up to `load` of the engine's; lognormal lengths."""
    kinds = kinds or THREE
    rng = np.random.default_rng(seed)
    shares = sum(kind.share for kind in kinds.values())
    arrival, code, inputs, outputs = [], [], [], []
    for index, kind in enumerate(kinds.values()):
        slot_s = kind.output_tokens * 0.0125 + kind.input_tokens * 0.000105
        count = rng.poisson(load * SLOTS * kind.share / shares / slot_s * seconds)
        arrival.append(rng.uniform(0, seconds * 1e9, count).astype(np.int64))
        code.append(np.full(count, index))
        inputs.append(np.clip(rng.lognormal(np.log(kind.input_tokens), 0.5, count), 16, 7000).astype(np.int64))
        outputs.append(np.clip(rng.lognormal(np.log(kind.output_tokens), 0.5, count), 4, 3000).astype(np.int64))
    times = np.concatenate(arrival)
    order = np.argsort(times, kind="stable")
    tenant = np.concatenate(code)[order]
    return Workload(
        arrival_ns=times[order],
        input_tokens=np.concatenate(inputs)[order],
        output_tokens=np.concatenate(outputs)[order],
        tenant=tenant,
        tenants=tuple(kinds),
        priority=tenant.copy(),
    )


def run(
    work: Workload, policy: str = "fcfs", *, slots: int = SLOTS, noise_ms: float = 0.3, seed: int = 0
) -> tuple[pa.Table, Truth]:
    """Outcomes and truth of a workload on the default engine with `slots` slots."""
    model = load_profile().model
    config = SchedulerConfig(scheduling_policy=policy, max_num_seqs=slots, max_num_batched_tokens=BUDGET)
    result = simulate(work, config, model)
    rng = np.random.default_rng(seed)
    chunks = []
    for index in range(len(work)):
        times = result.chunk_ns(index) - result.sent_ns[index]
        noise = np.abs(rng.normal(0.0, noise_ms * 1e6, len(times))).astype(np.int64)
        chunks.append(np.maximum.accumulate(times + noise))
    assert work.tenant is not None
    outcomes = table(
        {
            "tenant": [work.tenants[code] for code in work.tenant.tolist()],
            "priority": work.priority if policy != "fcfs" else np.zeros(len(work), dtype=np.int64),
            "arrival_ns": result.sent_ns,
            "stream": [True] * len(work),
            "input_tokens": work.input_tokens,
            "output_tokens": result.output_tokens,
            "first_token_ns": [int(times[0]) for times in chunks],
            "last_token_ns": [int(times[-1]) for times in chunks],
            "end_ns": [int(times[-1]) for times in chunks],
            "chunk_ns": [times.tolist() for times in chunks],
            "outcome": ["ok"] * len(work),
            "due_ns": result.due_ns,
            "released_ns": result.sent_ns,
            "sent_ns": result.sent_ns,
        },
        Metadata(source="virtual engine"),
    )
    return outcomes, _truth(work, result, model)


def _truth(work: Workload, result: object, model: StepModel) -> Truth:
    served = np.array(result.served_ns, dtype=np.float64)  # type: ignore[attr-defined]
    served = served.T if served.shape[0] == len(work.tenants) and served.shape[0] != len(work) else served
    own = result.own_ns.astype(np.float64)  # type: ignore[attr-defined]
    wait = (result.first_token_ns - result.sent_ns).astype(np.float64)  # type: ignore[attr-defined]
    alone = np.array([model.alone_ns(int(tokens), BUDGET) for tokens in work.input_tokens])
    blocked = np.maximum(wait - alone, 0.0)
    rows = np.arange(len(work))
    assert work.tenant is not None
    served[rows, work.tenant] = np.maximum(served[rows, work.tenant] - own, 0.0)
    total = served.sum(axis=1)
    return Truth(work.tenants, blocked, served * np.minimum(1.0, blocked / np.maximum(total, 1.0))[:, None])
