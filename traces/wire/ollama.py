"""Ollama's own routes, `/api/generate` and `/api/chat`: a line of JSON per chunk, `done: true` on the last.

Counts and durations (nanoseconds) are on the last line. An error is a line too, under status 200.
"""

from __future__ import annotations

from typing import Any

from traces.wire.tally import Tally, span_ns, whole


def event(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One line of a stream."""
    del name
    visible, reasoning, empty = _said(chunk)
    if visible or reasoning:
        tally.token(at_ns, visible=visible)
    elif empty:
        tally.empty(at_ns, length=chunk.get("done_reason") == "length")
    _end(tally, chunk)


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer that was not streamed."""
    visible, reasoning, _ = _said(body)
    tally.has_output = visible or reasoning
    _end(tally, body)


def _said(chunk: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether there is visible output, reasoning, an empty string."""
    message = chunk.get("message")
    held = message if isinstance(message, dict) else chunk
    text = held.get("content", held.get("response"))
    return bool(text or held.get("tool_calls")), bool(held.get("thinking")), text == ""


def _end(tally: Tally, chunk: dict[str, Any]) -> None:
    if chunk.get("error") is not None:
        tally.fail(chunk.get("status"), chunk["error"])
    if chunk.get("done") is not True:
        return
    tally.done = True
    tally.finish(0, chunk.get("done_reason") or "stop")
    tally.input_tokens = whole(chunk.get("prompt_eval_count"))
    tally.output_tokens = whole(chunk.get("eval_count"))
    tally.prefill_ns = span_ns(chunk.get("prompt_eval_duration"), 1)
