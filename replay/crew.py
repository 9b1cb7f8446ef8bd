"""The worker processes of a run, as processes: started, told, heard, ended.

They are started before anything heavy is imported, so that they import while the parent reads and plans the trace.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Self


class Crew:
    """The worker processes of a run. Use as a context: whatever happens, none outlives it.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self._errors: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.grow(workers)

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self._processes)

    def grow(self, workers: int) -> None:
        """Start more, until there are so many; never fewer."""
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        for _ in range(workers - len(self._processes)):
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the crew
            self._errors.append(errors)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "replay.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,  # the terminal's Ctrl-C is for the parent
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process, errors in zip(self._processes, self._errors, strict=True):
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            errors.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, by worker."""
        return [process.pid for process in self._processes]

    def order(self, worker: int, line: bytes) -> None:
        """Write one line to a worker; a dead one is noticed elsewhere."""
        with suppress(BrokenPipeError):
            pipe = _pipe(self._processes[worker].stdin)
            pipe.write(line + b"\n")
            pipe.flush()

    def alive(self, worker: int) -> bool:
        """Whether the process still runs."""
        return self._processes[worker].poll() is None

    def output(self, worker: int) -> IO[bytes]:
        """The worker's words."""
        return _pipe(self._processes[worker].stdout)

    def kill(self, worker: int | None = None) -> None:
        """End one worker or all, now."""
        for index, process in enumerate(self._processes):
            if worker in {None, index} and process.poll() is None:
                process.kill()

    def epitaph(self, worker: int) -> str:
        """How a worker ended: its signal or exit code and the last line it wrote on stderr."""
        process, errors = self._processes[worker], self._errors[worker]
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        code = process.returncode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"worker {worker} ended early ({how}{': ' + lines[-1][:200] if lines else ''})"


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
