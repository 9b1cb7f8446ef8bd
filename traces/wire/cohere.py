"""Cohere chat: v2 as server-sent events (`content-delta`, `tool-plan-delta`, `message-end`), v1 as lines of JSON.

A citation is no token. `usage.tokens` is what the model saw and made; `billed_units` leaves the template out, so it
counts only where nothing better is there.
"""

from __future__ import annotations

from typing import Any

from traces.wire.tally import Tally, whole, word

_CALLS = {"tool-plan-delta", "tool-call-start", "tool-call-delta", "text-generation", "tool-calls-chunk"}


def event(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of a stream."""
    kind = word(chunk.get("type"), chunk.get("event_type"), name)
    delta = chunk.get("delta")
    message = delta.get("message") if isinstance(delta, dict) else None
    if kind in {"content-delta", "content-start"} and isinstance(message, dict):
        content = message.get("content")
        if isinstance(content, dict) and content.get("thinking"):
            tally.token(at_ns, visible=False)
        elif isinstance(content, dict) and content.get("text"):
            tally.token(at_ns)
    elif kind in _CALLS and (message or chunk.get("text") or chunk.get("tool_call_delta")):
        tally.token(at_ns)
    elif kind == "message-end" and isinstance(delta, dict):
        _end(tally, delta.get("finish_reason"), delta.get("usage"), delta.get("error"))
    elif kind == "stream-end":
        answer = chunk.get("response")
        meta = answer.get("meta") if isinstance(answer, dict) else None
        _end(tally, chunk.get("finish_reason"), meta, chunk.get("error"))


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer that was not streamed."""
    message = body.get("message")
    held = message if isinstance(message, dict) else body
    parts = held.get("content")
    tally.has_output = bool(held.get("text") or held.get("tool_calls")) or (
        isinstance(parts, list)
        and any(isinstance(part, dict) and bool(part.get("text") or part.get("thinking")) for part in parts)
    )
    _end(tally, body.get("finish_reason"), body.get("usage") or body.get("meta"), None)


def _end(tally: Tally, finish: Any, usage: Any, error: Any) -> None:
    tally.done = True
    if finish:
        tally.finish(0, finish)
    if error is not None:
        tally.fail()
    if not isinstance(usage, dict):
        return
    counts = usage.get("tokens")
    counts = counts if isinstance(counts, dict) else usage.get("billed_units")
    if isinstance(counts, dict):
        tally.input_tokens, tally.output_tokens = whole(counts.get("input_tokens")), whole(counts.get("output_tokens"))
        tally.reasoning_tokens = whole(counts.get("reasoning_tokens"))
    tally.cached_tokens = whole(usage.get("cached_tokens"))
