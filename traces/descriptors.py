"""Room for open files: each connection takes a descriptor, and the usual soft limit of 1,024 is not meant for servers.

The soft limit is every process's own to raise, up to the hard one; a child has what its parent had when it was started.
The kernel doubles its table of descriptors as they come, and in a process with threads it stands still for some
milliseconds each time (`expand_fdtable` waits for `synchronize_rcu`, Linux fs/file.c): a burst of new connections would
feel it, so the table is grown before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from pathlib import Path

SPARE_DESCRIPTORS = 100  # for everything that is no connection
SERVER_DESCRIPTORS = 65_536  # a server does not know how many will come
_UNLIMITED = 1 << 20  # what "unlimited" comes to (Linux: fs.nr_open)
_GROWN_AT_MOST = 65_536  # the table takes 8 bytes of kernel memory each


def attainable() -> int:
    """Descriptors that this process may have open once it has asked for them."""
    soft, hard = _limits()
    return max(soft, hard)


def make_room(wanted: int) -> int:
    """Raise the soft limit to `wanted` descriptors, or as far as it goes, and grow the table; the limit there is now.

    A limit that is higher already stays, and so does one that the system does not let be raised.
    """
    soft, hard = _limits()
    if soft < wanted:
        soft = _raised(min(wanted, hard), soft)
    _grow(min(wanted, soft, _GROWN_AT_MOST) - 1)
    return soft


def _limits() -> tuple[int, int]:
    """Soft and hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _finite(soft), _finite(hard)


def _finite(limit: int) -> int:
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _raised(wanted: int, soft: int) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (OSError, ValueError):  # macOS: kern.maxfilesperproc may be below the hard limit
        return soft
    return wanted


def _grow(highest: int) -> None:
    """Use a high number for a moment: the table reaches that far from then on."""
    with contextlib.suppress(OSError), Path(os.devnull).open("rb") as file:
        os.close(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, max(highest, 0)))
