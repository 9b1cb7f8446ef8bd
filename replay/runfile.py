"""`run.json`: what was asked and found, how the run went and what it came to. No key, no header's value, no text."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import time
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from replay import plan as planning
from traces.record import ENDPOINTS
from traces.units import NS_PER_S

if TYPE_CHECKING:
    from replay.options import Offered, OfferOptions, SendOptions
    from replay.run import Result
    from replay.session import Ready
    from tenants.summary import Summary


def described(
    offered: Offered, options: tuple[OfferOptions, SendOptions], ready: Ready, result: Result, summary: Summary
) -> dict[str, Any]:
    """All that can be said of a run but its rows."""
    asked, send = options
    shown = msgspec.to_builtins(send) | {"header": [text.partition(":")[0] for text in send.header]}
    wiring = ready.wiring
    return {
        "format": 1,
        "command": {"offer": msgspec.to_builtins(asked), "send": shown},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.start_unix_ns / NS_PER_S)),
        "start_unix_ns": result.start_unix_ns,
        "wall_s": result.wall_s,
        "target": ready.target.origin + ready.target.base_path,
        "server": msgspec.to_builtins(ready.server),
        "dialect": {"name": ready.dialect.name, "why": ready.dialect_why, "note": ready.dialect.note},
        "model": ready.models.default,
        "prompts": {
            "source": ready.vocabulary.source,
            "ids": bool(ready.vocabulary.ids),
            "exact": ready.vocabulary.exact or bool(ready.vocabulary.ids),
            "tokens_added": wiring.overhead,
            "endpoints": [ENDPOINTS[index] for index in np.unique(offered.plan.endpoint).tolist()],
        },
        "tenants": msgspec.to_builtins([msgspec.structs.replace(t, headers={}) for t in offered.tenants]),
        "plan": planning.counts(offered.plan) | {"digest": summary.digest, "turns": asked.turns},
        "trace": {"rows": offered.rows_before, "span_ns": offered.span_before_ns, "source": offered.metadata.source},
        "shape": [report.line() for report in offered.reports],
        "transport": sorted({report.transport for report in result.reports}),
        "workers": msgspec.to_builtins(result.reports),
        "self_check": msgspec.to_builtins(ready.floor),
        "host": host(),
        "versions": versions(),
        "notes": ready.notes,
        "summary": msgspec.to_builtins(summary),
    }


def blocking(offered: Offered, outcomes: pa.Table) -> dict[str, Any]:
    """Who waited for whom, for `run.json`; nothing where rows cannot tell. It takes no result with it when it fails."""
    from tenants import experiment

    ranks = {tenant.name: tenant.priority for tenant in offered.tenants if tenant.priority is not None}
    try:
        if not experiment.can_tell(outcomes):
            return {}
        return {"blocking": msgspec.to_builtins(experiment.of_runs([outcomes], ranks))}
    except Exception as error:  # noqa: BLE001 - the run is measured: say it and go on
        return {"blocking": {"error": f"{type(error).__name__}: {error}"}}


def host() -> dict[str, Any]:
    """This machine, for the record."""
    return {
        "name": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Of what the sender stands on."""
    found = {"python": platform.python_version(), "implementation": sys.implementation.name}
    for name in ("convoy-replay", "aiohttp", "uvloop", "httptools", "msgspec", "numpy", "pyarrow"):
        with contextlib.suppress(packages.PackageNotFoundError):
            found[name] = packages.version(name)
    return found


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write `run.json`, complete or not at all, for its owner alone as the outcomes are."""
    temporary = folder / ".run.json.tmp"
    temporary.touch(0o600)
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    temporary.replace(folder / "run.json")
