"""Lines for people on stderr, from a thread of their own.

Whoever reads stderr may stop: a terminal after Ctrl-S, a pager, a log collector that is stuck. A write to it then
waits, and whoever writes. So a line is only left for the thread, which waits alone: no traffic and no row is held up.
Beyond `MOST` lines the newest are dropped, and their number is said when somebody reads again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

MOST = 200
LAST_S = 1.0  # how long the end of the process waits for what is not said yet


class Voice:
    """Says lines in order, soon."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._lines: queue.Queue[str] = queue.Queue(MOST)
        self._unsaid = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __call__(self, line: str) -> None:
        """Say a line; never waits."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._speak, name="voice", daemon=True)
                self._thread.start()
                atexit.register(self.rest, LAST_S)
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._unsaid += 1

    def rest(self, timeout_s: float) -> bool:
        """Wait until everything is said, but no longer than this; whether it was."""
        end_s = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.002)
        return not self._lines.unfinished_tasks

    def _speak(self) -> None:
        while True:
            line = self._lines.get()
            with self._lock:
                unsaid, self._unsaid = self._unsaid, 0
            if unsaid:
                line = f"capture: {unsaid} lines were left out, for nobody read them\n{line}"
            with contextlib.suppress(OSError):
                self._write(f"{line}\n".encode(errors="replace"))
            self._lines.task_done()


def _to_stderr(data: bytes) -> None:
    """All of it, around Python's own stream: its lock, held by a thread that waits, would crash the process's end."""
    while data:
        data = data[os.write(2, data) :]


speak = Voice(_to_stderr)


def say(text: str) -> None:
    """A line of the recorder's own."""
    speak(f"capture: {text}")
