"""What a request asked for: its body turned into lengths, counts and salted hashes. The text goes no further than here.

The prompt is taken as a run of pieces in the order in which servers put them together: tools, system text, then message
after message, each with its role. Prefix blocks are cut from that run; block i's hash covers everything up to its end:

    h_0 = H(salt, block_0)        h_i = H(salt, h_{i-1} + block_i)        H: BLAKE2b, 64 bits

so equal hashes mean an equal prefix, within one recording. A last block that is not full has no hash.

The session of a request without a session header is told from its messages: a request whose messages begin with all the
messages of an earlier one is that one's next turn (the server's reply and the new question come after).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from capture.rules import plain
from traces.wire.tally import whole

KNOWN_PREFIXES = 100_000  # ends of earlier requests that are remembered, to tell their next turns

Encode = Callable[[str], Sequence[int]]


class Asked(msgspec.Struct):
    """What the body says, without its words."""

    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    n: int | None = None
    tools: int | None = None
    pieces: list[str] = []
    token_ids: list[int] | None = None
    messages: list[str] = []
    answers: int = 1  # n times the number of prompts


def read(body: dict[str, Any], endpoint: str, path: str, *, streams: bool | None) -> Asked:
    """Read a body. `streams` is what the path says about streaming, if anything; the body's own word wins."""
    parameters = _table(body, "sampling_params") | _table(body, "parameters") | _table(body, "options")
    config = _table(body, "generationConfig") | _table(body, "generation_config")
    stream = body.get("stream")
    n = whole(_first(body, parameters, "n")) or whole(config.get("candidateCount"))
    asked = Asked(
        model=plain(body.get("model")) or _model_in(path),
        stream=stream if isinstance(stream, bool) else bool(streams),
        max_tokens=_limit(body, parameters, config),
        n=n,
        tools=_count(body.get("tools")) or _count(body.get("functions")),
    )
    if endpoint in {"embeddings", "rerank"}:
        asked.answers = 0
        return asked
    asked.token_ids, prompts = _prompts(body)
    asked.answers = max(n or 1, 1) * max(prompts, 1)
    asked.messages = list(_messages(body))
    asked.pieces = [*_before(body), *asked.messages] if asked.messages else [*_before(body), *_texts(body)]
    return asked


class Prefixes:
    """Cuts prompts into hashed blocks.

    Args:
        salt: of the recording.
        size: characters in a block; tokens where `encode` is given.
        encode: text → token ids.
    """

    def __init__(self, salt: bytes, size: int, encode: Encode | None = None) -> None:
        self._salt, self._size, self._encode = salt, size, encode

    def of(self, asked: Asked) -> tuple[list[int], int | None]:
        """The hashes of a prompt's full blocks, and its tokens where a tokenizer counted them."""
        if asked.token_ids is not None:
            return (self._chain(_id_blocks(asked.token_ids, self._size)) if self._encode else []), len(asked.token_ids)
        text = "\n".join(asked.pieces)
        if self._encode is not None:
            ids = self._encode(text)
            return self._chain(_id_blocks(ids, self._size)), len(ids)
        return self._chain(_text_blocks(text, self._size)), None

    def _chain(self, blocks: Iterator[bytes]) -> list[int]:
        hashes, before = [], b""
        for block in blocks:
            before = hashlib.blake2b(before + block, digest_size=8, key=self._salt).digest()
            hashes.append(int.from_bytes(before, "big", signed=True))
        return hashes


class Session(msgspec.Struct):
    """One conversation: how many turns it had and when the last one ended."""

    name: str
    turns: int
    ended_ns: int


class Sessions:
    """Tells which conversation a request belongs to, and which turn of it it is.

    Args:
        digest: salted hash of a text.
        sole: whether all requests are seen here. Where other workers see some of them, a session's turns cannot be
            counted, nor can a conversation be told from its messages: both stay null; a session's own name holds.
    """

    def __init__(self, digest: Callable[[str], str], *, sole: bool = True) -> None:
        self._digest, self._sole = digest, sole
        self._by_header: OrderedDict[str, Session] = OrderedDict()
        self._by_prefix: OrderedDict[bytes, Session] = OrderedDict()

    def of(
        self, header: str | None, messages: Sequence[str], name: str, arrival_ns: int, ended_ns: int
    ) -> tuple[str | None, int | None, int | None]:
        """(session, turn, think_ns) of a request that is over.

        Args:
            header: the session's own name on the wire; only its hash is kept.
            messages: of the request, in order, each as one text.
            name: a name for the session if this is its first turn.
            arrival_ns: of the request.
            ended_ns: of its answer, on the same clock.
        """
        if not self._sole:
            return (self._digest(header) if header else None), None, None
        if header:
            key = self._digest(header)
            session = self._by_header.pop(key, None) or Session(key, 0, 0)
            self._by_header[key] = session
            _forget(self._by_header)
        elif messages:
            ends = _ends(messages)
            found = next((end for end in reversed(ends[:-1]) if end in self._by_prefix), None)
            session = self._by_prefix.pop(found) if found else Session(self._digest(name), 0, 0)
            self._by_prefix[ends[-1]] = session
            _forget(self._by_prefix)
        else:
            return None, None, None
        turn = session.turns
        think_ns = max(arrival_ns - session.ended_ns, 0) if turn else None
        session.turns, session.ended_ns = turn + 1, ended_ns
        return session.name, turn, think_ns


def _forget(known: OrderedDict[Any, Session]) -> None:
    if len(known) > KNOWN_PREFIXES:
        known.popitem(last=False)


def _ends(messages: Sequence[str]) -> list[bytes]:
    """One digest for each run of messages from the first on."""
    state = hashlib.blake2b(digest_size=16)
    ends = []
    for message in messages:
        state.update(message.encode("utf-8", "surrogatepass") + b"\0")
        ends.append(state.digest())
    return ends


def _text_blocks(text: str, size: int) -> Iterator[bytes]:
    for start in range(0, len(text) - size + 1, size):
        yield text[start : start + size].encode("utf-8", "surrogatepass")


def _id_blocks(ids: Sequence[int], size: int) -> Iterator[bytes]:
    for start in range(0, len(ids) - size + 1, size):
        yield b"".join(token.to_bytes(8, "little", signed=True) for token in ids[start : start + size])


def _table(body: dict[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    return value if isinstance(value, dict) else {}


def _first(body: dict[str, Any], parameters: dict[str, Any], *keys: str) -> Any:
    for key in keys:
        for held in (body, parameters):
            if held.get(key) is not None:
                return held[key]
    return None


def _limit(body: dict[str, Any], parameters: dict[str, Any], config: dict[str, Any]) -> int | None:
    value = _first(
        body, parameters, "max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict",
        "num_predict", "max_tokens_to_sample",
    )  # fmt: skip
    return whole(value if value is not None else config.get("maxOutputTokens"))


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, list) and value else None


def _model_in(path: str) -> str | None:
    """The model that some paths name: `/models/NAME:generate...`, `/deployments/NAME/...`."""
    parts = path.partition("?")[0].split("/")
    for before, name in itertools.pairwise(parts):
        if before in {"models", "deployments"}:
            return plain(name.partition(":")[0])
    return None


def _before(body: dict[str, Any]) -> Iterator[str]:
    """What stands before the messages: tools, then system text."""
    for key in ("tools", "functions"):
        if body.get(key):
            yield json.dumps(body[key], ensure_ascii=False)
    for key in ("system", "instructions", "preamble", "systemInstruction", "system_instruction"):
        if body.get(key):
            yield f"system\n{_text(body[key])}"


def _messages(body: dict[str, Any]) -> Iterator[str]:
    """The messages, each as role and text."""
    for key in ("messages", "input", "contents", "chat_history"):
        value = body.get(key)
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for item in value:
                if isinstance(item, dict):
                    yield f"{item.get('role', item.get('type', ''))}\n{_text(item)}"
    if isinstance(body.get("message"), str):  # Cohere v1: the newest message stands apart
        yield f"user\n{body['message']}"


def _texts(body: dict[str, Any]) -> Iterator[str]:
    """Plain prompts."""
    for key in ("prompt", "inputs", "text", "input"):
        value = body.get(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                yield item


def _prompts(body: dict[str, Any]) -> tuple[list[int] | None, int]:
    """(token ids of a single prompt given as ids, number of prompts)."""
    for key in ("prompt", "input_ids"):
        value = body.get(key)
        if isinstance(value, list) and value:
            if all(isinstance(item, int) for item in value):
                return value, 1
            if len(value) == 1 and isinstance(value[0], list):
                return value[0], 1
            return None, len(value)
    return None, 1


def _text(value: Any) -> str:
    """The text of a message or a part, in order; what is no text (an image) counts by its JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_text(item) for item in value)
    if not isinstance(value, dict):
        return ""
    parts = [_text(value[key]) for key in ("content", "text", "parts", "thinking", "output") if value.get(key)]
    parts += [
        json.dumps(value[key], ensure_ascii=False)
        for key in ("tool_calls", "function_call", "functionCall", "image_url", "source", "inlineData", "arguments")
        if value.get(key)
    ]
    return "\n".join(parts)
