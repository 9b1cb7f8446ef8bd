"""Scheduling policies: who is admitted next, and who gives way. Pure functions over the same queue.

A policy answers four questions:

- `order(request, config)`: a key; of the waiting requests the smallest is tried first. None: order of addition (a
preempted one in front).
- `victim(running, config)`: whose blocks go when a *running* request needs one.
- `unseat(head, running, blocks_missing, config)`: whom a *waiting* head may preempt (nobody in vLLM's V1).
- `lanes`: one queue for all, or one for each tenant (fair queueing).

| policy | waiting order | victim on KV shortage | a waiting head preempts |
|---|---|---|---|
| `fcfs` | order of addition | latest admitted | never |
| `priority` (vLLM V1) | (priority, arrival, id) | largest (priority, arrival) | never |
| `priority-preemptive` (vLLM V0) | same | same | strictly less urgent ones, for a slot, blocks or tokens |
| `sglang` | (priority, arrival, id) | fewest output tokens, then longest prompt | for a slot, see below |
| `fair` | tenant with the least weighted service, then arrival | latest admitted | never |
| `ageing` | priority − time waited / ageing_s | largest aged priority | never |

Linear ageing needs no clock: p_i − (now − a_i)/A < p_j − (now − a_j)/A exactly when p_i + a_i/A < p_j + a_j/A.

Fair queueing counts service as virtual tokens (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
input tokens count 1, output tokens 2, divided by the tenant's weight; a tenant that comes back after a pause starts at
the smallest counter of those that
wait, so idling saves up no credit.

SGLang preempts for a slot only, never for tokens: those less urgent than the head by more than the threshold (10,
strictly), least urgent first, and only if enough blocks come free. Its queue and victim rules are modelled here on the
V1 core, not its batching.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from replay.engine.config import SchedulerConfig
    from replay.engine.request import EngineRequest

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2

Key = tuple[float, ...] | tuple[float, float, str]


def _by_priority(request: EngineRequest, _config: SchedulerConfig) -> Key:
    return (request.priority, request.arrival_time, request.request_id)


def _by_aged_priority(request: EngineRequest, config: SchedulerConfig) -> Key:
    return (request.priority + request.arrival_time / config.ageing_s, request.arrival_time, request.request_id)


def _by_arrival(request: EngineRequest, _config: SchedulerConfig) -> Key:
    return (request.arrival_time, 0.0, request.request_id)


def _latest_admitted(running: Sequence[EngineRequest], _config: SchedulerConfig) -> EngineRequest:
    return running[-1]


def _least_urgent(running: Sequence[EngineRequest], _config: SchedulerConfig) -> EngineRequest:
    """Largest (priority, arrival time); on a full tie the first of them in running order, as `max` does."""
    return max(running, key=lambda request: (request.priority, request.arrival_time))


def _least_urgent_aged(running: Sequence[EngineRequest], config: SchedulerConfig) -> EngineRequest:
    return max(running, key=lambda request: _by_aged_priority(request, config)[:2])


def _least_done(running: Sequence[EngineRequest], _config: SchedulerConfig) -> EngineRequest:
    """SGLang's default retraction order: fewest output tokens, of those the longest prompt, of those the latest."""
    return min(reversed(running), key=lambda request: (request.output_tokens, -request.prompt_tokens))


def _nobody(
    _head: EngineRequest, _running: Sequence[EngineRequest], _why: str, _missing: int, _config: SchedulerConfig
) -> list[EngineRequest]:
    return []


def _unseat_less_urgent(
    head: EngineRequest, running: Sequence[EngineRequest], _why: str, _missing: int, config: SchedulerConfig
) -> list[EngineRequest]:
    """V0: whatever the head lacks, the least urgent running request goes, one at a time, while strictly less urgent."""
    if not running:
        return []
    victim = _least_urgent(running, config)
    return [victim] if victim.priority > head.priority else []


def _unseat_by_threshold(
    head: EngineRequest, running: Sequence[EngineRequest], why: str, missing: int, config: SchedulerConfig
) -> list[EngineRequest]:
    """SGLang: only for a slot; least urgent first, then latest queued; all or nothing."""
    if why != "seqs":
        return []
    victims: list[EngineRequest] = []
    for request in sorted(running, key=lambda r: (r.priority, r.arrival_time), reverse=True):
        if request.priority - head.priority <= config.preemption_threshold:
            break
        victims.append(request)
        missing -= len(request.blocks)
        if missing <= 0:
            return victims
    return []


class Policy(NamedTuple):
    """How one policy answers. `refunds`: a victim that already got tokens in this step gives them back."""

    order: Callable[[EngineRequest, SchedulerConfig], Key] | None
    victim: Callable[[Sequence[EngineRequest], SchedulerConfig], EngineRequest]
    unseat: Callable[[EngineRequest, Sequence[EngineRequest], str, int, SchedulerConfig], list[EngineRequest]] = _nobody
    refunds: bool = True
    lanes: bool = False


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(None, _latest_admitted, refunds=False),
    "priority": Policy(_by_priority, _least_urgent),
    "priority-preemptive": Policy(_by_priority, _least_urgent, _unseat_less_urgent),
    "sglang": Policy(_by_priority, _least_done, _unseat_by_threshold),
    "fair": Policy(_by_arrival, _latest_admitted, refunds=False, lanes=True),
    "ageing": Policy(_by_aged_priority, _least_urgent_aged),
}


class WaitingQueue:
    """The requests not running yet, in the order a policy would try them.

    A heap by key for each lane (one lane, or one a tenant); removal is lazy. Fair queueing chooses the lane with the
    least service; `served` holds the counters.
    """

    def __init__(self, policy: Policy, config: SchedulerConfig) -> None:
        self.policy = policy
        self.config = config
        self.served: dict[str, int] = {}  # in units of which a token of weight w costs _unit / w, to add up exactly
        weights = {tenant: Fraction(weight).limit_denominator(1000) for tenant, weight in config.tenant_weights.items()}
        unit = lcm(*(weight.numerator for weight in weights.values()))
        self._unit = unit
        self._cost = {tenant: unit * weight.denominator // weight.numerator for tenant, weight in weights.items()}
        self._lanes: dict[str, list[tuple[Key, int, EngineRequest]]] = {}
        self._entry: dict[EngineRequest, int] = {}
        self._entries = 0
        self._first = 0
        self._waiting_of: dict[str, int] = {}
        self._last_left = ""
        self.prompt_tokens = 0  # of all that wait: the backlog a server limits

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, request: EngineRequest) -> bool:
        return request in self._entry

    def __iter__(self) -> Iterator[EngineRequest]:
        """In the order they would be tried now."""
        live = [entry for lane in self._lanes.values() for entry in lane if self._is_live(entry)]
        if self.policy.lanes:
            live.sort(key=lambda entry: (self.served.get(entry[2].tenant, 0), entry[2].tenant, entry[:2]))
        else:
            live.sort(key=lambda entry: entry[:2])
        return (entry[2] for entry in live)

    def add(self, request: EngineRequest) -> None:
        """Queue a new request."""
        self._entries += 1
        self._push(request, (self._entries,) if self.policy.order is None else self.policy.order(request, self.config))

    def put_back(self, request: EngineRequest) -> None:
        """Queue a preempted request: in front of all under fcfs, by its key elsewhere."""
        self._first -= 1
        self._push(request, (self._first,) if self.policy.order is None else self.policy.order(request, self.config))

    def peek(self) -> EngineRequest:
        """The next to be tried. Raises IndexError when nobody waits."""
        return self._lane()[0][2]

    def pop(self) -> EngineRequest:
        """Take the next."""
        request = heapq.heappop(self._lane())[2]
        self._leave(request)
        return request

    def remove(self, request: EngineRequest) -> None:
        """Take out a request wherever it stands."""
        self._leave(request)

    def serve(self, tenant: str, input_tokens: int, output_tokens: int) -> None:
        """Count what a tenant got (fair queueing only)."""
        tokens = INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
        self.served[tenant] = self.served.get(tenant, 0) + tokens * self._cost.get(tenant, self._unit)

    def _push(self, request: EngineRequest, key: Key) -> None:
        lane = request.tenant if self.policy.lanes else ""
        if self.policy.lanes:
            if not self._waiting_of.get(lane):
                self._lift(lane)
            self._waiting_of[lane] = self._waiting_of.get(lane, 0) + 1
        self._entries += 1
        self._entry[request] = self._entries
        self.prompt_tokens += request.prompt_tokens
        heapq.heappush(self._lanes.setdefault(lane, []), (key, self._entries, request))

    def _lift(self, tenant: str) -> None:
        """A tenant that comes back starts no lower than those that wait (nobody waits: than the last that waited)."""
        waiting = [other for other, count in self._waiting_of.items() if count] or [self._last_left]
        least = min(self.served.get(other, 0) for other in waiting)
        self.served[tenant] = max(self.served.get(tenant, 0), least)

    def _leave(self, request: EngineRequest) -> None:
        del self._entry[request]
        if self.policy.lanes:
            self._waiting_of[request.tenant] -= 1
            self._last_left = request.tenant
        self.prompt_tokens -= request.prompt_tokens

    def _is_live(self, entry: tuple[Key, int, EngineRequest]) -> bool:
        return self._entry.get(entry[2]) == entry[1]

    def _lane(self) -> list[tuple[Key, int, EngineRequest]]:
        """The lane whose head is next, its stale entries dropped."""
        best: list[tuple[Key, int, EngineRequest]] | None = None
        best_key: tuple[int, str] = (0, "")
        for tenant, lane in self._lanes.items():
            while lane and not self._is_live(lane[0]):
                heapq.heappop(lane)
            if not lane:
                continue
            key = (self.served.get(tenant, 0), tenant)
            if best is None or key < best_key:
                best, best_key = lane, key
        if best is None:
            raise IndexError("nobody waits")
        return best
