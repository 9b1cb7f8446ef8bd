"""Folders as `replay isolate` leaves them, made of numbers: times to the first token drawn, not served."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tenants import sla
from tenants.summary import summarise, to_json
from tenants.tenant import Tenant, with_rules
from traces import parquet
from traces.record import Metadata, table

MS = 1_000_000


class Made(NamedTuple):
    """Median TTFT in ms of risk by arm, and what else is odd."""

    risk_ms: dict[str, float]
    trials: int = 4
    rows: int = 600
    between: float = 0.03  # deviation of the logarithm between runs
    failed: tuple[tuple[str, int], ...] = ()
    late_ms: float = 0.1
    bounds: tuple[str, ...] = ("risk: ttft_p95 <= 1.25x alone",)
    rules: tuple[str, ...] = ()


ISOLATED = {"alone": 100.0, "untagged": 900.0, "tagged": 104.0}
LEAKY = {"alone": 100.0, "untagged": 900.0, "tagged": 300.0}
INEFFECTIVE = {"alone": 100.0, "untagged": 900.0, "tagged": 900.0}
INVERTED = {"alone": 100.0, "untagged": 500.0, "tagged": 900.0}
CALM = {"alone": 100.0, "untagged": 100.0, "tagged": 100.0}


def outcomes(made: Made, arm: str, trial: int, only: str | None = None):
    rng = np.random.default_rng([trial, sorted(made.risk_ms).index(arm)])
    plan = np.random.default_rng(trial)  # the same arrivals in every arm
    due = np.sort(plan.uniform(0, 60_000, made.rows))
    tenant = np.where(np.arange(made.rows) % 3 == 2, "summary", "risk")
    spread = plan.lognormal(0, 0.2, made.rows)
    factor = np.exp(rng.normal(0, made.between))
    ttft = np.where(tenant == "risk", made.risk_ms[arm], 400.0) * spread * rng.lognormal(0, 0.05, made.rows) * factor
    broken = np.zeros(made.rows, dtype=bool)
    broken[np.flatnonzero(tenant == "risk")[: dict(made.failed).get(arm, 0)]] = True
    columns: dict[str, Any] = {
        "arrival_ns": due,
        "due_ns": due,
        "released_ns": due,
        "sent_ns": due + made.late_ms,
        "first_token_ns": ttft,
        "last_token_ns": ttft + 90,
        "end_ns": ttft + 91,
    }
    keep = np.flatnonzero((tenant == only) | (only is None))
    rows = {name: (values[keep] * MS).astype(np.int64).tolist() for name, values in columns.items()}
    for i in np.flatnonzero(broken[keep]).tolist():
        rows["first_token_ns"][i] = rows["last_token_ns"][i] = None
    rows |= {
        "tenant": tenant[keep].tolist(),
        "priority": [None if arm == "untagged" else int(name == "summary") for name in tenant[keep]],
        "outcome": ["truncated" if bad else "ok" for bad in broken[keep]],
        "input_tokens": [100] * len(keep),
        "output_tokens": [None if bad else 10 for bad in broken[keep]],
    }
    return table(rows, Metadata())


def tenants(made: Made) -> tuple[Tenant, ...]:
    named = (Tenant(name="risk", priority=0), Tenant(name="summary", priority=1))
    return with_rules(named, [sla.parse(text) for text in (*made.bounds, *made.rules)])


def write(path, made: Made):
    """An experiment folder."""
    path.mkdir(parents=True)
    entries = []
    for trial in range(1, made.trials + 1):
        for arm in made.risk_ms:
            for only in ("risk", "summary") if arm == "alone" else (None,):
                name = f"trial-{trial}/{arm}" + (f"-{only}" if only else "")
                (path / name).mkdir(parents=True)
                rows = outcomes(made, arm, trial, only)
                parquet.write(rows, path / name / "outcomes.parquet")
                summary = summarise(rows, tenants=tenants(made), digest=f"plan {trial}")
                (path / name / "run.json").write_text(json.dumps({"summary": json.loads(to_json(summary))}))
                entries.append({"trial": trial, "arm": arm, "tenant": only, "folder": name})
    document = {"format": 1, "setup": {}, "tenants": msgspec.to_builtins(tenants(made)), "runs": entries}
    (path / "experiment.json").write_bytes(msgspec.json.encode(document))
    return path
