"""Request bodies of exact length, built when they are needed from ready-made pieces, without randomness of their own.

A prompt is a run of stretches, each (key, tokens): one per prefix block of the trace, and one for what no block covers.
The text of a stretch is a function of its key and the run's salt alone:

    digits of mix(salt, key) in base V, most significant first, as V-valued tokens       (tells stretches apart)
    then a slice of one long random river of tokens, from a place that mix(salt, key) names

so equal block hashes become equal tokens (a real shared prefix) and different ones differ in their first tokens, while
a row costs two slices and no draw. The salt is new for every run: two runs share no prefix, and find no warm cache,
unless they are asked to (`--keep-prefix-cache`).

Ids are used where the endpoint takes them, words elsewhere (`replay.vocabulary`).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from replay.exchange import WireRequest
from replay.plan import NONE, Plan
from replay.vocabulary import Vocabulary
from tenants.dialects import length_fields, merge
from traces.record import ENDPOINTS

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/generate",
}

_TAKES_IDS = ("completions", "generate")
_ENGINES_WITH_IDS = ("vllm", "sglang", "tensorrt-llm", "dynamo", "none", "header:")
"""Families of dialects whose servers take a prompt as token ids at the endpoints above."""

_RIVER = 1 << 15
_DIGITS_BITS = 40
_MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_MASK = (1 << 64) - 1
_ROW_KEY = 1 << 63


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """How rows of a plan become requests of one server; travels to the workers through a pipe, never to disk.

    Attributes:
        dialect: name of the server's dialect.
        base_path: path of the target URL before `/v1`.
        models: the server's model name per entry of `Plan.models`; `model` for rows without one.
        model: default model name.
        tenant_models: tenant → model or LoRA name that wins.
        priority: rank → (body fields, headers) in the dialect.
        headers: header lines for everybody; tenant_headers: tenant → more of them (keys, the tenant's name).
        overhead: endpoint → tokens that the server adds around a prompt's text.
        ids: whether prompts may be ids where the endpoint takes them.
        salt: 64 bits of the run.
        connect_ns, idle_ns, total_ns: timeouts, 0 = none.
    """

    dialect: str = "vllm"
    base_path: str = ""
    models: tuple[str, ...] = ()
    model: str = ""
    tenant_models: dict[str, str] = {}
    priority: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
    headers: dict[str, str] = {}
    tenant_headers: dict[str, dict[str, str]] = {}
    overhead: dict[str, int] = {}
    ids: bool = True
    salt: int = 0
    connect_ns: int = 0
    idle_ns: int = 0
    total_ns: int = 0


def takes_ids(dialect: str, endpoint: str) -> bool:
    """Whether an endpoint takes a prompt as token ids in this dialect."""
    return endpoint in _TAKES_IDS and dialect.startswith(_ENGINES_WITH_IDS)


class River:
    """Pieces (token ids or words, already encoded) in one long random order, cut by place and length.

    Args:
        pieces: the encoded tokens.
        joint: what stands between two of them.
        seed: fixes the order.
    """

    def __init__(self, pieces: list[bytes], joint: bytes, seed: int) -> None:
        self.pieces = pieces
        self.joint = joint
        drawn = np.random.default_rng(seed).integers(0, len(pieces), _RIVER).tolist()
        chosen = [pieces[index] for index in drawn]
        self.water = joint.join(chosen) + joint
        lengths = np.fromiter((len(piece) + len(joint) for piece in chosen), dtype=np.int64, count=_RIVER)
        places = np.zeros(_RIVER + 1, dtype=np.int64)
        np.cumsum(lengths, out=places[1:])
        self.places: list[int] = places.tolist()
        self.digits = max(1, -(-_DIGITS_BITS // max(1, (len(pieces) - 1).bit_length() - 1)))

    def stretch(self, mixed: int, tokens: int) -> bytes:
        """`tokens` pieces for a mixed key, each followed by the joint."""
        pieces, joint = self.pieces, self.joint
        base = len(pieces)
        own = min(self.digits, tokens)
        head = bytearray()
        value = mixed
        for _ in range(own):
            value, digit = divmod(value, base)
            head += pieces[digit]
            head += joint
        rest = tokens - own
        start = (mixed >> 24) % _RIVER
        water, places = self.water, self.places
        while rest:
            taken = min(rest, _RIVER - start)
            head += water[places[start] : places[start + taken]]
            rest -= taken
            start = 0
        return bytes(head)


def mix(salt: int, key: int) -> int:
    """64 well-mixed bits of a key (splitmix64's finaliser)."""
    value = (key * _MIX_A + salt) & _MASK
    value ^= value >> 30
    value = (value * _MIX_B) & _MASK
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_Frame = tuple[bytes, list[bytes], str, bytes]  # before the prompt, what follows split at the length, path, header


class Bodies:
    """Requests for rows of a plan.

    Args:
        plan: what to send.
        wiring: how it becomes requests of this server.
        vocabulary: what prompts are made of.
    """

    def __init__(self, plan: Plan, wiring: Wiring, vocabulary: Vocabulary) -> None:
        self.plan = plan
        self.wiring = wiring
        self.vocabulary = vocabulary
        seed = mix(wiring.salt, 1)
        ids = [str(token).encode() for token in vocabulary.ids] if wiring.ids else []
        self._ids = River(ids, b",", seed) if len(ids) > 1 else None
        self._words = River([word.encode() for word in vocabulary.words], b" ", seed) if vocabulary.words else None
        self._frames: dict[tuple[int, ...], _Frame] = {}

    def request(self, row: int) -> WireRequest:
        """The request of a row: method, path, header lines and body."""
        plan, wiring = self.plan, self.wiring
        key = (
            int(plan.endpoint[row]),
            int(plan.stream[row]),
            int(plan.model[row]),
            int(plan.tenant[row]),
            int(plan.rank[row]),
            int(plan.n[row]),
        )
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._frame(key)
        before, after, path, header = frame
        tokens = int(plan.output_tokens[row])
        if key[5] > 1:
            tokens = -(-tokens // key[5])
        body = b"%b%b%b" % (before, self.prompt(row), (b"%d" % tokens).join(after))
        return WireRequest(
            "POST",
            path,
            b"%bX-Request-Id: %b\r\n" % (header, self.request_id(row)),
            body,
            wiring.connect_ns,
            wiring.idle_ns,
            wiring.total_ns,
        )

    def request_id(self, row: int) -> bytes:
        """An id for the server's log: the run's salt and the row."""
        return b"convoy-%08x-%d" % (self.wiring.salt & 0xFFFFFFFF, row)

    def uses_ids(self, row: int) -> bool:
        """Whether a row's prompt is made of ids."""
        return self._ids is not None and takes_ids(self.wiring.dialect, ENDPOINTS[int(self.plan.endpoint[row])])

    def prompt(self, row: int) -> bytes:
        """The JSON fragment that stands where the prompt goes: ids with commas, or text."""
        plan, wiring = self.plan, self.wiring
        total = int(plan.input_tokens[row])
        if self.uses_ids(row):
            river = self._ids
        else:
            river = self._words
            total -= wiring.overhead.get(ENDPOINTS[int(plan.endpoint[row])], 0)
            total = max(1, round(total / self.vocabulary.tokens_per_word))
        assert river is not None
        parts = [river.stretch(mix(wiring.salt, key), tokens) for key, tokens in self.stretches(row, total)]
        joined = b"".join(parts)[: -len(river.joint)]
        return joined if river is self._ids else b" " + joined

    def stretches(self, row: int, total: int) -> list[tuple[int, int]]:
        """A row's prompt as (key, tokens): its prefix blocks, then what no block covers under a key of its own."""
        plan = self.plan
        own = _ROW_KEY | row
        size = int(plan.block_size[row])
        if size <= 0:
            return [(own, total)]
        start, end = int(plan.block_offsets[row]), int(plan.block_offsets[row + 1])
        found: list[tuple[int, int]] = []
        for key in plan.block_hashes[start:end].tolist():
            if total <= 0:
                return found
            found.append((key & (_MASK >> 1), min(size, total)))
            total -= size
        if total > 0:
            found.append((own, total))
        return found

    def _frame(self, key: tuple[int, ...]) -> _Frame:
        """A body around its prompt and its output length, the path and the header lines, for one kind of row."""
        endpoint, stream, model, tenant, rank, n = key
        wiring, kind = self.wiring, ENDPOINTS[endpoint]
        name = self.plan.tenants[tenant]
        fields, headers = wiring.priority.get(rank, ({}, {})) if rank != NONE else ({}, {})
        asked = wiring.tenant_models.get(name) or (wiring.models[model] if model != NONE else wiring.model)
        ids = self._ids is not None and takes_ids(wiring.dialect, kind)
        body = shape_of(kind, dialect=wiring.dialect, model=asked, stream=bool(stream), n=n, ids=ids)
        body = merge(body, fields)
        text = json.dumps(body, separators=(",", ":"), ensure_ascii=True)
        before, rest = text.split('"@prompt"' if ids else "@prompt")
        after = [part.encode() for part in rest.split('"@tokens"')]
        lines = {"content-type": "application/json", **wiring.headers, **wiring.tenant_headers.get(name, {}), **headers}
        header = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        path = wiring.base_path + _path(kind, wiring.dialect, stream=bool(stream))
        return before.encode(), after, path, header.encode("latin-1")


def shape_of(kind: str, *, dialect: str, model: str, stream: bool, n: int = 1, ids: bool = False) -> dict[str, Any]:
    """A request body with `@prompt` and `@tokens` where prompt and output length go, the prompt first."""
    prompt: Any = ["@prompt"] if ids else "@prompt"
    lengths: dict[str, Any] = length_fields(dialect, "@tokens", chat=kind == "chat")  # type: ignore[arg-type]
    if kind == "generate":
        return _generate(dialect, prompt, stream=stream, ids=ids)
    asked: dict[str, Any] = {"model": model}
    if kind == "completions":
        asked |= {"prompt": prompt, **lengths}
    elif kind == "chat":
        asked |= {"messages": _said(prompt), **lengths}
    elif kind == "responses":
        forced = {key: value for key, value in lengths.items() if key == "ignore_eos"}
        return asked | {"input": prompt, "max_output_tokens": "@tokens", **forced, "stream": stream}
    else:
        return asked | {"messages": _said(prompt), "max_tokens": "@tokens", "stream": stream}
    if n > 1:
        asked["n"] = n
    asked["stream"] = stream
    if stream:
        asked["stream_options"] = {"include_usage": True}
    return asked


def _said(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def _generate(dialect: str, prompt: Any, *, stream: bool, ids: bool) -> dict[str, Any]:
    if dialect == "tgi":
        return {"inputs": prompt, "parameters": {"max_new_tokens": "@tokens", "details": True}}
    asked: dict[str, Any] = {"input_ids" if ids else "text": prompt}
    return merge(asked, length_fields("sglang-generate", "@tokens")) | {"stream": stream}  # type: ignore[arg-type]


def _path(kind: str, dialect: str, *, stream: bool) -> str:
    if kind == "generate" and dialect == "tgi" and stream:
        return "/generate_stream"
    return PATHS[kind]
