"""What limits this machine as a sender: cores, files, ports, backlog, stolen and awaited time. Read, never changed.

`/proc` tells it on Linux; elsewhere a figure is None. Time that a process was ready to run and did not get a core
(`/proc/PID/schedstat`, second number) is the plainest sign of a starved client: it is in every stamp taken late.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from traces import descriptors

_PROC = Path("/proc")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and load.

    Attributes:
        cores: that this process may use.
        load: processes that ran or waited for a core, mean of the last minute.
        stolen: share of time that the hypervisor gave to others since boot.
        files: descriptors a process may have open once it has asked for them.
        ports: local ports for connections to one address.
        backlog: connections that may wait for a local server's accept.
    """

    cores: int
    load: float | None
    stolen: float | None
    files: int
    ports: int | None
    backlog: int | None


def look() -> Machine:
    """This machine now."""
    low_high = _numbers("sys/net/ipv4/ip_local_port_range")
    backlog = _numbers("sys/net/core/somaxconn")
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        stolen=stolen(_text("stat")),
        files=descriptors.attainable(),
        ports=low_high[1] - low_high[0] + 1 if len(low_high) == 2 else None,
        backlog=backlog[0] if backlog else None,
    )


def waited_ns(pid: int | str = "self") -> int | None:
    """Time that a process's main thread was ready to run and had no core; None where nobody tells."""
    return waited(_text(f"{pid}/schedstat"))


def waited(schedstat: str) -> int | None:
    """Second number of a schedstat line: ns on a run queue."""
    numbers = schedstat.split()
    return int(numbers[1]) if len(numbers) == 3 else None


def stolen(stat: str) -> float | None:
    """Share of steal in the first line of /proc/stat (`cpu user nice system idle iowait irq softirq steal ...`)."""
    fields = stat.partition("\n")[0].split()[1:9]
    if len(fields) < 8:
        return None
    times = [int(field) for field in fields]
    return times[7] / sum(times) if sum(times) else None


def _numbers(name: str) -> list[int]:
    return [int(word) for word in _text(name).split() if word.isdigit()]


def _text(name: str) -> str:
    try:
        return (_PROC / name).read_text()
    except OSError:
        return ""
