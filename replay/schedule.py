"""Which request goes when, once the plan meets a server: links between turns, concurrency caps, closed loop. Pure.

Four clocks of a request, from the run's start:

    due       when it should go: its time in the plan, or its former turn's end + think time
    released  when its tenant's concurrency cap let it go; else = due
    sent      when the sender really began (stamped outside)
    lateness  = sent − released: the sender's own fault;  held = released − due: the cap's doing

Open loop: a request goes when it is due, whatever the server does. Closed loop (`concurrency`): N users, each sends its
next request when its last one has ended; nothing is due, so lateness means nothing.

The caller asks `take(now)` for what is to be sent, reports every end by `ended(row, now)`, and looks again at
`next_ns`. No clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replay.plan import NONE, Plan

NEVER = (1 << 63) - 1


class Release(NamedTuple):
    """A row to send now; due_ns is None in a closed loop."""

    row: int
    due_ns: int | None
    released_ns: int


class Schedule:
    """The order of sending for one worker's share of a plan.

    Args:
        plan: the whole plan.
        rows: this worker's rows, in plan order.
        caps: tenant index → requests in flight at most.
        concurrency: users of a closed loop; None for the open loop.
        drop_after_ns: rows later than this when their turn comes are dropped, not sent; None sends them at once.

    Attributes:
        dropped: rows given up because they were too late.
    """

    def __init__(
        self,
        plan: Plan,
        rows: npt.NDArray[np.integer],
        *,
        caps: Mapping[int, int] | None = None,
        concurrency: int | None = None,
        drop_after_ns: int | None = None,
    ) -> None:
        self.dropped: list[int] = []
        self._plan = plan
        self._caps = dict(caps or {})
        self._in_flight = dict.fromkeys(self._caps, 0)
        self._held: dict[int, deque[tuple[int, int]]] = {tenant: deque() for tenant in self._caps}
        self._concurrency = concurrency
        self._drop_after_ns = drop_after_ns
        first = rows[plan.previous[rows] == NONE]
        self._first: npt.NDArray[np.integer] = first
        self._first_ns: npt.NDArray[np.int64] = plan.at_ns[first]
        self._place = 0
        self._later: list[tuple[int, int]] = []  # heap of (due, row)
        self._ready: deque[Release] = deque()  # released by an end, to be taken next
        self._follower = _followers(plan, rows)
        self._waiting = len(rows) - len(first)  # turns whose predecessor has not ended
        self._free = concurrency or 0
        self._stopped = False

    @property
    def finished(self) -> bool:
        """Nothing is left to send, now or later."""
        return self._stopped or (
            self._place == len(self._first)
            and not self._later
            and not self._ready
            and not self._waiting
            and not any(self._held.values())
        )

    @property
    def held(self) -> int:
        """Requests that wait for their tenant's cap."""
        return sum(len(queue) for queue in self._held.values())

    def held_by_tenant(self) -> list[tuple[int, int]]:
        """(tenant, requests that wait for its cap)."""
        return [(tenant, len(queue)) for tenant, queue in self._held.items()]

    @property
    def next_ns(self) -> int:
        """When to ask again; NEVER when only an end can bring more."""
        if self._stopped:
            return NEVER
        if self._ready or (self._free and self._place < len(self._first)):
            return 0
        soonest = self._later[0][0] if self._later else NEVER
        if self._concurrency is None and self._place < len(self._first):
            return min(soonest, int(self._first_ns[self._place]))
        return soonest

    @property
    def place(self) -> int:
        """How many first turns have been taken."""
        return self._place

    @property
    def first_turns(self) -> int:
        """How many first turns there are."""
        return len(self._first)

    def first_turn(self, index: int) -> int:
        """The row of a first turn, for whoever builds ahead."""
        return int(self._first[index])

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True

    def take(self, now_ns: int) -> Release | None:
        """The next row to send at this moment, or None; ask until None."""
        while not self._stopped:
            if self._ready:
                return self._ready.popleft()
            if self._concurrency is not None:
                return self._next_of_user(now_ns)
            due_ns = self._due_by(now_ns)
            if due_ns is None:
                return None
            release = self._admit(*due_ns, now_ns)
            if release is not None:
                return release
        return None

    def ended(self, row: int, now_ns: int) -> None:
        """A row that was sent has ended: its cap's slot is free, its next turn can be due."""
        tenant = int(self._plan.tenant[row])
        if tenant in self._caps:
            queue = self._held[tenant]
            if queue:
                held, due_ns = queue.popleft()
                self._ready.append(Release(held, due_ns, now_ns))
            else:
                self._in_flight[tenant] -= 1
        self._next_turn(row, now_ns)

    def _next_turn(self, row: int, now_ns: int) -> None:
        follower = self._follower.pop(row, None)
        if follower is None:
            self._free += self._concurrency is not None
            return
        self._waiting -= 1
        think_ns = int(self._plan.think_ns[follower])
        if self._concurrency is not None:
            due_ns = now_ns + max(think_ns, 0)
        elif think_ns == NONE:
            due_ns = max(now_ns, int(self._plan.at_ns[follower]))
        else:
            due_ns = now_ns + think_ns
        heappush(self._later, (due_ns, follower))

    def _next_of_user(self, now_ns: int) -> Release | None:
        if self._later and self._later[0][0] <= now_ns:
            return Release(heappop(self._later)[1], None, now_ns)
        if self._free and self._place < len(self._first):
            self._free -= 1
            self._place += 1
            return Release(int(self._first[self._place - 1]), None, now_ns)
        return None

    def _due_by(self, now_ns: int) -> tuple[int, int] | None:
        """(row, due) of the earliest row that is due, taken out; None when there is none."""
        first_ns = int(self._first_ns[self._place]) if self._place < len(self._first) else NEVER
        later_ns = self._later[0][0] if self._later else NEVER
        if min(first_ns, later_ns) > now_ns:
            return None
        if later_ns < first_ns:
            due_ns, row = heappop(self._later)
            return row, due_ns
        self._place += 1
        return int(self._first[self._place - 1]), first_ns

    def _admit(self, row: int, due_ns: int, now_ns: int) -> Release | None:
        tenant = int(self._plan.tenant[row])
        if self._drop_after_ns is not None and now_ns - due_ns > self._drop_after_ns:
            self.dropped.append(row)
            self._next_turn(row, now_ns)
            return None
        cap = self._caps.get(tenant)
        if cap is None:
            return Release(row, due_ns, due_ns)
        if self._in_flight[tenant] >= cap:
            self._held[tenant].append((row, due_ns))
            return None
        self._in_flight[tenant] += 1
        return Release(row, due_ns, due_ns)


def _followers(plan: Plan, rows: npt.NDArray[np.integer]) -> dict[int, int]:
    """Row → the row that waits for its end."""
    previous = plan.previous[rows]
    later = previous != NONE
    return dict(zip(previous[later].tolist(), rows[later].tolist(), strict=True))
