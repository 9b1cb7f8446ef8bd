"""One request inside the engine, and what a step gives it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["new", "resumed", "running"]
Status = Literal["waiting", "running", "preempted", "finished"]
Stop = Literal["preempted", "empty", "kv", "budget", "seqs", "chunk"]

_serial = itertools.count()


class EngineRequest:
    """One request inside the engine: what was asked, and how far it is.

    Args:
        request_id: unique among the unfinished ones; breaks ties of a priority queue as a string.
        prompt_tokens: token ids, or just how many (then nobody shares its prefix, except through `prefix_hashes`).
        max_tokens: output limit.
        priority: smaller is more urgent.
        arrival_time: seconds on any clock; orders a priority queue and chooses victims.
        tenant, tag: whose it is; anything the caller wants back.
        ends_after: output tokens after which it ends by itself (an end-of-sequence token); None: at `max_tokens`.
        output_ids: k → id of the k-th output token, for those who hit this request's blocks in a later turn.
        prefix_hashes, prefix_block_size: chained hashes of the prompt's blocks of that many tokens, as traces keep
        them.
    """

    __slots__ = (
        "_keys",
        "_prefix_block_size",
        "_prefix_hashes",
        "_token_at",
        "arrival_time",
        "blocks",
        "cached_tokens",
        "computed",
        "ends_after",
        "finish",
        "hashed_blocks",
        "in_flight",
        "max_tokens",
        "output_tokens",
        "placeholders",
        "preemptions",
        "prefilling",
        "priority",
        "prompt_tokens",
        "request_id",
        "serial",
        "stale",
        "status",
        "tag",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt_tokens: int | Sequence[int],
        max_tokens: int,
        priority: int = 0,
        arrival_time: float = 0.0,
        tenant: str = "default",
        tag: Any = None,
        ends_after: int | None = None,
        output_ids: Callable[[int], int] | None = None,
        prefix_hashes: Sequence[int] | None = None,
        prefix_block_size: int = 16,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival_time = arrival_time
        self.tenant = tenant
        self.tag = tag
        self.ends_after = ends_after
        self.serial = next(_serial)
        self._token_at: Callable[[int], int] | None = None
        if isinstance(prompt_tokens, int):
            self.prompt_tokens = prompt_tokens
        else:
            self.prompt_tokens = len(prompt_tokens)
            self._token_at = _token_reader(prompt_tokens, output_ids, self.serial)
        if self.prompt_tokens < 1 or max_tokens < 1:
            raise ValueError(f"request {request_id}: at least one prompt token and one output token are needed")
        self._prefix_hashes = prefix_hashes
        self._prefix_block_size = prefix_block_size
        self._keys: list[Hashable] = []
        self.output_tokens = 0
        self.computed = 0  # tokens whose KV is computed or scheduled to be
        self.placeholders = 0  # output tokens in flight (asynchronous)
        self.in_flight = 0  # tokens scheduled and not yet updated
        self.stale = 0  # of those, scheduled before the latest preemption
        self.prefilling = True  # its latest step left tokens it knows uncomputed
        self.status: Status = "waiting"
        self.finish: Literal["length", "stop", "abort"] | None = None
        self.preemptions = 0
        self.cached_tokens: int | None = None  # prefix hit at first admission
        self.blocks: list[int] = []
        self.hashed_blocks = 0

    def __repr__(self) -> str:
        return f"<EngineRequest {self.request_id} {self.status} {self.computed}/{self.known_tokens}>"

    @property
    def known_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return self.prompt_tokens + self.output_tokens

    def block_key(self, index: int, block_size: int) -> Hashable:
        """The prefix key of full block `index`: equal keys mean equal tokens up to the block's end."""
        keys = self._keys
        while len(keys) <= index:
            keys.append(self._next_key(len(keys), block_size))
        return keys[index]

    def _next_key(self, index: int, block_size: int) -> Hashable:
        end = (index + 1) * block_size
        if self._token_at is not None:
            parent = self._keys[index - 1] if index else None
            return hash((parent, *[self._token_at(position) for position in range(end - block_size, end)]))
        if self._prefix_hashes is not None and end <= self.prompt_tokens:
            covering = (end - 1) // self._prefix_block_size
            if covering < len(self._prefix_hashes):
                return ("prefix", self._prefix_hashes[covering], index)
        return (self.serial, index)


def _token_reader(prompt: Sequence[int], output_ids: Callable[[int], int] | None, serial: int) -> Callable[[int], int]:
    """Position → token id over prompt and output; without `output_ids` the outputs are nobody else's."""
    length = len(prompt)
    private = -2 - (serial << 32)

    def token_at(position: int) -> int:
        if position < length:
            return prompt[position]
        k = position - length
        return output_ids(k) if output_ids is not None else private - k

    return token_at


class Scheduled(NamedTuple):
    """One row of a step: `tokens` of `request` on top of `computed`; it samples when all it knows is computed."""

    request: EngineRequest
    tokens: int
    kind: Kind
    computed: int
    samples: bool


@dataclass(slots=True)
class Step:
    """What one step does. `emitted` and `finished` are filled by `update`.

    Attributes:
        scheduled: rows in the order they were granted: running ones, then admissions.
        preempted: victims in order; `refunded` of them had tokens in this step and lost them.
        cached: (request, tokens taken from the prefix cache) of each admission.
        stop: why admission ended; `head` is the request that did not get in (None when nobody waits).
        tokens, decodes, context, area, samples: the step's load for the step-time model: all tokens; decode rows and
        their context
            lengths, summed; Σ chunk · (computed before + chunk/2) of the prefill rows; rows that sample.
    """

    index: int
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    refunded: list[EngineRequest] = field(default_factory=list)
    cached: list[tuple[EngineRequest, int]] = field(default_factory=list)
    stop: Stop = "empty"
    head: EngineRequest | None = None
    tokens: int = 0
    decodes: int = 0
    context: int = 0
    area: float = 0.0
    samples: int = 0
    emitted: list[EngineRequest] = field(default_factory=list)
    finished: list[EngineRequest] = field(default_factory=list)
