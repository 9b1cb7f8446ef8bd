"""OpenAI responses: events `response.*`, each with its `type`; no `[DONE]`.

Deltas of text, refusal, function-call arguments and the like are visible tokens; `reasoning_text` and
`reasoning_summary_text` are reasoning. What only announces (`response.created`, `.in_progress`, `.queued`, items and
parts added) or repeats (`.done`) is none. Ended by `response.completed`, `.incomplete`, `.failed` or `error`; vLLM says
an answer cut by its length inside `response.completed`, with status `incomplete`.
"""

from __future__ import annotations

from typing import Any

from traces.wire.tally import Tally, whole, word

_ENDS = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}


def event(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of a stream."""
    kind = word(chunk.get("type"), name)
    if kind in _ENDS:
        tally.done = True
        answer = chunk.get("response")
        if isinstance(answer, dict):
            _end(tally, answer)
        if kind in {"response.failed", "response.cancelled"}:
            _fail(tally, answer if isinstance(answer, dict) else chunk)
    elif kind == "error":
        tally.done = True
        _fail(tally, chunk)
    elif kind.endswith(".delta") and chunk.get("delta"):
        tally.token(at_ns, visible=not kind.startswith("response.reasoning"))
    elif kind.startswith("response.image_generation_call.partial"):
        tally.token(at_ns)


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer that was not streamed."""
    _end(tally, body)
    if word(body.get("status")) in {"failed", "cancelled"}:
        _fail(tally, body)
    output = body.get("output")
    tally.has_output = any(_said(item) for item in output) if isinstance(output, list) else False


def _end(tally: Tally, answer: dict[str, Any]) -> None:
    details = answer.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    if reason or answer.get("status"):
        tally.finish(0, reason or answer.get("status"))
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return
    tally.input_tokens = whole(usage.get("input_tokens"))
    tally.output_tokens = whole(usage.get("output_tokens"))
    given, made = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    tally.cached_tokens = whole(given.get("cached_tokens")) if isinstance(given, dict) else None
    tally.reasoning_tokens = whole(made.get("reasoning_tokens")) if isinstance(made, dict) else None


def _fail(tally: Tally, held: dict[str, Any]) -> None:
    error = held.get("error")
    error = error if isinstance(error, dict) else held
    tally.fail(error.get("code"), error.get("type") if error.get("type") != "error" else None)


def _said(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    if item.get("type") == "message":
        parts = item.get("content")
        return isinstance(parts, list) and any(
            isinstance(part, dict) and bool(part.get("text") or part.get("refusal")) for part in parts
        )
    return True  # calls of tools and functions, reasoning
