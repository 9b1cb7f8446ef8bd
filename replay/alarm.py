"""Wake the event loop at an absolute time of the monotonic clock, to the microsecond.

An event loop's own timers count milliseconds (libuv's are rounded to them, `epoll_wait` takes them), which is seen in
the lateness from some hundred requests per second on. On Linux a timerfd wakes the loop instead: armed with an
absolute time of CLOCK_MONOTONIC, the clock of all our stamps, so nothing drifts and nothing is computed twice.
Elsewhere it is the loop's timer, and `kind` says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from traces.units import NS_PER_S

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """One alarm on a running loop.

    Args:
        callback: called in the loop when it rings.
        precise: False takes the loop's own timer even where there is a timerfd.

    Attributes:
        kind: `timerfd` or `loop`.
    """

    def __init__(self, callback: Callable[[], None], *, precise: bool = True) -> None:
        self.callback = callback
        self._loop = asyncio.get_running_loop()
        self._when_ns: int | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._descriptor = -1
        if precise:
            with suppress(OSError, AttributeError):
                self._settime, self._descriptor = _timerfd()
        self.kind = "loop" if self._descriptor < 0 else "timerfd"
        if self._descriptor >= 0:
            self._spec = _Itimerspec()
            self._pointer = ctypes.byref(self._spec)
            self._loop.add_reader(self._descriptor, self._expired)

    def at(self, when_ns: int) -> None:
        """Ring at that moment, at once when it has passed; replaces what was asked before."""
        if when_ns == self._when_ns:
            return
        self._when_ns = when_ns
        if self._descriptor < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0, when_ns - time.monotonic_ns()) / NS_PER_S, self._ring)
            return
        value = self._spec.value
        value.seconds, value.nanoseconds = divmod(max(1, when_ns), NS_PER_S)  # 0 would mean never
        self._settime(self._descriptor, _ABSOLUTE, self._pointer, None)

    def close(self) -> None:
        """Ring no more."""
        if self._handle is not None:
            self._handle.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1

    def _expired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # set anew since the loop woke
        self._ring()

    def _ring(self) -> None:
        self._when_ns = None
        self.callback()


def _timerfd() -> tuple[Any, int]:
    """`timerfd_settime` and a new descriptor. Raises OSError or AttributeError where there is none."""
    library = ctypes.CDLL(None, use_errno=True)
    settime = library.timerfd_settime
    settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    descriptor = library.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    return settime, descriptor
