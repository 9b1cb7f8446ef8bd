"""The embedded engine as a child process: started, waited for, ended; it never outlives its parent.

with running("--policy", "priority", "--max-num-seqs", "8") as url:
    ...
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 30.0
STOP_S = 5.0


class EngineFailed(Exception):
    """The engine did not start; the message is its own last line."""


@contextlib.contextmanager
def running(*options: str, port: int = 0) -> Iterator[str]:
    """Run `replay serve` with these options; yields its URL.

    Its stderr is kept apart and shown only when it fails.

    Raises:
        EngineFailed: it ended or said nothing within 30 s.
    """
    root = Path(__file__).resolve().parent.parent.parent
    path = os.pathsep.join(part for part in (str(root), os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-m", "replay", "serve", "--die-with-parent", "--port", str(port), *options]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # the terminal's Ctrl-C is for the parent, which ends the engine last
        )
        try:
            yield _url(process, errors)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the child: SIGTERM, and SIGKILL when that does not help."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _url(process: subprocess.Popen[bytes], errors: object) -> str:
    """The first line of its stdout."""
    assert process.stdout is not None
    end = time.monotonic() + START_S
    line = b""
    while not line.endswith(b"\n") and (left := end - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            data = os.read(process.stdout.fileno(), 4096)
            if not data:
                break
            line += data
    if line.endswith(b"\n"):
        return line.decode().strip()
    stop(process)
    errors.seek(0)  # type: ignore[attr-defined]
    said: list[str] = errors.read().decode(errors="replace").strip().splitlines()  # type: ignore[attr-defined]
    raise EngineFailed(said[-1] if said else "the embedded engine did not start")
