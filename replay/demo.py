"""`make demo`: the sample trace against the embedded engine, two tenants, forty-five seconds of it.

It succeeds when the run is valid, whatever the verdict: the demo shows what a verdict looks like, it does not gate.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

ARGUMENTS = [
    "sample",
    "--window",
    "3m:3m45s",
    "--tenant-mix",
    "risk:summary",
    "--sla",
    "risk: ttft_p95 < 800ms",
    "--sla",
    "summary: e2e_p95 < 60s",
]


def main() -> None:
    """Run `replay` as a user would, and say where to look."""
    out = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    arguments = [*ARGUMENTS, "--out", str(out)]
    print(f"$ replay {shlex.join(arguments)}", flush=True)  # noqa: T201 - a demo is there to be read
    code = subprocess.run([sys.executable, "-m", "replay", *arguments], check=False).returncode  # noqa: S603 - ourselves
    run = out / "run.json"
    if not run.exists():
        sys.exit(code or 1)
    summary = json.loads(run.read_text())["summary"]
    sys.exit(0 if summary["valid"] else code)


if __name__ == "__main__":
    main()
