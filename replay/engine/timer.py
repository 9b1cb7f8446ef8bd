"""The engine's clock: CLOCK_MONOTONIC, and one alarm that is right to some tens of microseconds.

uvloop's own timers count whole milliseconds, asyncio's are late by up to one more, and a scheduler step takes ten. So
the alarm is a timerfd that the event loop polls. Where the system has none (any but Linux) the loop's timer is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000


class Clock(Protocol):
    """What the step loop needs of time; tests have their own."""

    def now_ns(self) -> int:
        """The time."""

    def soon(self, callback: Callable[[], None]) -> None:
        """Call when the current callback is over."""

    def at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Call at that time, soon when it has passed; replaces what was set before."""

    def close(self) -> None:
        """Forget the alarm and free what it holds."""


class _Spec(ctypes.Structure):
    """struct itimerspec: interval, then value."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class RealClock:
    """CLOCK_MONOTONIC and an alarm in an event loop.

    Args:
        loop: where callbacks run.
        timerfd: use a timerfd where there is one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timerfd: bool = True) -> None:
        self._loop = loop
        self._callback: Callable[[], None] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if timerfd and sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._spec = _Spec(0, 0, 0, 0)
            loop.add_reader(self._fd, self._expired)

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def soon(self, callback: Callable[[], None]) -> None:
        """Call in the loop's next turn."""
        self._loop.call_soon(callback)

    def at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Set the alarm."""
        self._callback = callback
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            delay_s = (when_ns - time.monotonic_ns()) / _NS
            self._handle = self._loop.call_later(max(0.0, delay_s), callback)
            return
        self._spec.s, self._spec.ns = divmod(max(1, when_ns), _NS)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)

    def close(self) -> None:
        """Forget the alarm and give its descriptor back."""
        self._callback = None
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew meanwhile
            os.read(self._fd, 8)
            if self._callback is not None:
                self._callback()
