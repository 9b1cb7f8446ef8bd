"""The words of an answer that told no usage, for a tokenizer to count. They live as long as the count takes.

The meter reads an answer and keeps no word of it. Where its lengths are wanted and the server told none, the bytes of
the answer are read once more, by `Said`: the same content codings, framing and formats as the meter's, each event
looked at for its text. Texts of one choice and one kind (visible, reasoning, a call) belong together and are counted
together; cumulative texts replace what they repeat.

    said = Said(endpoint="chat")
    said.head(0, status, headers);  said.feed(0, data) ...;  said.close(0, "eof")
    tokens = said.count(encode)      # None: no words, or more than LIMIT characters of them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from traces.meter import Meter
from traces.wire import formats
from traces.wire.documents import Body

LIMIT = 32 << 20  # characters of one answer

Encode = Callable[[str], Sequence[int]]
Words = Iterator[tuple[Any, str]]  # (which text of the answer, what is new of it)

_REASONINGS = ("reasoning", "reasoning_content", "thinking")


class Said(Meter):
    """A meter that collects the words instead of the times; one answer."""

    __slots__ = ("_size", "_texts")

    def __init__(self, *, endpoint: str, stream: bool = True) -> None:
        super().__init__(endpoint=endpoint, stream=stream, start_ns=0, chunks="none")
        self._everyday = 0  # every event is decoded, none is known by the one before
        self._texts: dict[Any, list[str]] = {}
        self._size = 0

    def count(self, encode: Encode) -> int | None:
        """Tokens of all texts, after `close`."""
        if not self._texts or self._size > LIMIT:
            return None
        return sum(len(encode("".join(pieces))) for pieces in self._texts.values())

    def _event(self, at_ns: int, name: str | None, data: bytes) -> None:
        chunk = super()._event(at_ns, name, data)
        if chunk is not None:
            self._take(chunk, name)

    def _read_document(self, body: Body) -> None:
        super()._read_document(body)
        try:
            whole = msgspec.json.decode(bytes(body.data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            documents = [document for _, document in body.documents()]
        else:
            documents = whole if isinstance(whole, list) else [whole]
        for document in documents:
            if isinstance(document, dict):
                self._take(document, None)

    def _take(self, chunk: dict[str, Any], name: str | None) -> None:
        found = self._format or formats.of(chunk, self._endpoint)
        words = _WORDS.get(found.name) if found else None
        for key, text in words(chunk, name) if words else ():
            held = self._texts.setdefault(key, [])
            if found is formats.SGLANG and text.startswith("".join(held)):
                self._size -= sum(map(len, held))  # cumulative
                held.clear()
            held.append(text)
            self._size += len(text)
            if self._size > LIMIT:
                self._texts.clear()
                return


def _openai(chunk: dict[str, Any], _name: str | None) -> Words:
    for position, choice in enumerate(_list(chunk.get("choices"))):
        if not isinstance(choice, dict):
            continue
        index = choice.get("index", position)
        held = choice.get("delta", choice.get("message"))
        yield from _texts((index, "visible"), choice.get("text"))
        if isinstance(held, dict):
            yield from _texts((index, "visible"), held.get("content"))
            yield from _texts((index, "visible"), held.get("refusal"))
            # some servers say the same under two names
            yield from _texts((index, "reasoning"), next((held[key] for key in _REASONINGS if held.get(key)), None))
            for place, call in enumerate([*_list(held.get("tool_calls")), held.get("function_call")]):
                if isinstance(call, dict):
                    called = call.get("function", call)
                    yield from _call((index, "call", call.get("index", place)), called)


def _anthropic(chunk: dict[str, Any], _name: str | None) -> Words:
    index = chunk.get("index", 0)
    delta, block = chunk.get("delta"), chunk.get("content_block")
    if isinstance(delta, dict):
        for key in ("text", "thinking", "partial_json"):
            yield from _texts(index, delta.get(key))
    for place, part in enumerate([block] if isinstance(block, dict) else _list(chunk.get("content"))):
        if isinstance(part, dict):
            at = index if part is block else place
            for key in ("text", "thinking", "name"):
                yield from _texts(at, part.get(key))
            if part.get("input"):
                yield at, json.dumps(part["input"], ensure_ascii=False)


def _responses(chunk: dict[str, Any], name: str | None) -> Words:
    kind = str(chunk.get("type") or name or "")
    if kind.endswith(".delta"):
        yield from _texts((chunk.get("output_index"), chunk.get("content_index")), chunk.get("delta"))
    for place, item in enumerate(_list(chunk.get("output"))):
        if isinstance(item, dict):
            for key in ("content", "summary"):
                yield from _texts((place, key), item.get(key))
            yield from _call((place, "call"), item)


def _gemini(chunk: dict[str, Any], _name: str | None) -> Words:
    for position, candidate in enumerate(_list(chunk.get("candidates"))):
        content = candidate.get("content") if isinstance(candidate, dict) else None
        for part in _list(content.get("parts")) if isinstance(content, dict) else ():
            if isinstance(part, dict):
                yield from _texts((candidate.get("index", position), bool(part.get("thought"))), part.get("text"))
                if part.get("functionCall"):
                    yield (position, "call"), json.dumps(part["functionCall"], ensure_ascii=False)


def _cohere(chunk: dict[str, Any], name: str | None) -> Words:
    kind = str(chunk.get("type") or chunk.get("event_type") or name or "")
    if kind in {"message-end", "stream-end"}:
        return  # says it all once more
    delta = chunk.get("delta")
    message = delta.get("message") if isinstance(delta, dict) else chunk.get("message")
    yield from _texts("visible", chunk.get("text"))
    if isinstance(message, dict):
        yield from _texts("plan", message.get("tool_plan"))
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, dict):
                yield from _texts("visible", part.get("text"))
                yield from _texts("reasoning", part.get("thinking"))
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else [calls]:
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                yield from _call("call", call["function"])


def _ollama(chunk: dict[str, Any], _name: str | None) -> Words:
    message = chunk.get("message")
    held = message if isinstance(message, dict) else chunk
    yield from _texts("visible", held.get("content", held.get("response")))
    yield from _texts("reasoning", held.get("thinking"))
    for call in _list(held.get("tool_calls")):
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            yield from _call("call", call["function"])


def _tgi(chunk: dict[str, Any], _name: str | None) -> Words:
    token = chunk.get("token")
    yield from _texts(0, token.get("text") if isinstance(token, dict) else chunk.get("generated_text"))


def _watsonx(chunk: dict[str, Any], _name: str | None) -> Words:
    for result in _list(chunk.get("results")):
        if isinstance(result, dict):
            yield from _texts(0, result.get("generated_text"))


_WORDS: dict[str, Callable[[dict[str, Any], str | None], Words]] = {
    "openai": _openai,
    "responses": _responses,
    "anthropic": _anthropic,
    "sglang": lambda chunk, _name: _texts(chunk.get("index", 0), chunk.get("text")),
    "tgi": _tgi,
    "llamacpp": lambda chunk, _name: _texts(0, chunk.get("content")),
    "watsonx": _watsonx,
    "ollama": _ollama,
    "gemini": _gemini,
    "cohere": _cohere,
}  # what has lengths alone (embeddings, rerank) says nothing


def _texts(key: Any, value: Any) -> Words:
    """A text, or the texts of a list of parts."""
    if isinstance(value, str):
        if value:
            yield key, value
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, str) and part:
                yield key, part
            elif isinstance(part, dict):
                for name in ("text", "thinking", "refusal"):
                    yield from _texts(key, part.get(name))


def _call(key: Any, called: dict[str, Any]) -> Words:
    """A call of a tool: its name and its arguments."""
    yield from _texts(key, called.get("name"))
    arguments = called.get("arguments")
    if isinstance(arguments, dict):
        yield key, json.dumps(arguments, ensure_ascii=False)
    else:
        yield from _texts(key, arguments)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
