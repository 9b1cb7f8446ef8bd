"""Anthropic messages: `message_start`, blocks with their deltas, `message_delta`, `message_stop`; no `[DONE]`.

The first token is the first delta of a block, never `message_start`. `thinking_delta` is reasoning; text and tool input
(`input_json_delta`) are visible; a signature and a citation are none: they are made beside the output. The first
`input_json_delta` is empty and counts: the tool's name was made before it, and a tool without input has no other. A
`redacted_thinking` block comes whole: reasoning.

Usage: input in `message_start` (and again in `message_delta`), output cumulative in `message_delta`. What was read from
or written to the prompt cache is counted beside `input_tokens`; the prompt is the sum.
"""

from __future__ import annotations

from typing import Any

from traces.wire.tally import Tally, whole, word

_DELTAS = {"text_delta": "text", "thinking_delta": "thinking"}


def event(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of a stream."""
    kind = word(chunk.get("type"), name)
    if kind == "content_block_delta":
        _delta(tally, at_ns, chunk.get("delta"))
    elif kind == "content_block_start":
        block = chunk.get("content_block")
        if isinstance(block, dict):
            _block(tally, at_ns, block)
    elif kind == "message_start":
        message = chunk.get("message")
        if isinstance(message, dict):
            _usage(tally, message.get("usage"), final=False)
    elif kind == "message_delta":
        delta = chunk.get("delta")
        if isinstance(delta, dict) and delta.get("stop_reason"):
            tally.finish(0, delta["stop_reason"])
        _usage(tally, chunk.get("usage"), final=True)
    elif kind == "message_stop":
        tally.done = True
    elif kind == "error":
        error = chunk.get("error")
        tally.fail(*((error.get("code"), error.get("type")) if isinstance(error, dict) else ()))


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer that was not streamed."""
    blocks = body.get("content")
    tally.has_output = isinstance(blocks, list) and any(
        isinstance(block, dict) and (bool(block.get("text")) or block.get("type") != "text") for block in blocks
    )
    if body.get("stop_reason"):
        tally.finish(0, body["stop_reason"])
    _usage(tally, body.get("usage"), final=True)


def _delta(tally: Tally, at_ns: int, delta: Any) -> None:
    if not isinstance(delta, dict):
        return
    kind = word(delta.get("type"))
    if kind == "input_json_delta" or (kind in _DELTAS and delta.get(_DELTAS[kind])):
        tally.token(at_ns, visible=kind != "thinking_delta")
    elif kind == "text_delta":
        tally.empty(at_ns)


def _block(tally: Tally, at_ns: int, block: dict[str, Any]) -> None:
    """A block that brings its output along at once."""
    kind = block.get("type")
    if kind == "redacted_thinking" or (kind == "thinking" and block.get("thinking")):
        tally.token(at_ns, visible=False)
    elif kind == "text" and block.get("text"):
        tally.token(at_ns)


def _usage(tally: Tally, usage: Any, *, final: bool) -> None:
    if not isinstance(usage, dict):
        return
    given = whole(usage.get("input_tokens"))
    if given is not None:
        read = whole(usage.get("cache_read_input_tokens"))
        tally.input_tokens = given + (read or 0) + (whole(usage.get("cache_creation_input_tokens")) or 0)
        tally.cached_tokens = read if read is not None else tally.cached_tokens
    made = whole(usage.get("output_tokens"))
    if final and made is not None:  # message_start says a first guess, not what was made
        tally.output_tokens = made
        details = usage.get("output_tokens_details")
        if isinstance(details, dict):
            tally.reasoning_tokens = whole(details.get("thinking_tokens", details.get("reasoning_tokens")))
