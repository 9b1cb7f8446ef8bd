"""Gemini `generateContent` and `streamGenerateContent` (events, or one JSON array that grows); no end marker.

Parts of a candidate: `thought: true` is reasoning; text and calls are visible. A signature alone is none.
`usageMetadata` is cumulative; thoughts are counted beside the candidates, and both are output. A prompt that was
blocked has no candidates and says why in `promptFeedback`.
"""

from __future__ import annotations

from typing import Any

from traces.wire.tally import Tally, whole

_OUTPUTS = ("text", "functionCall", "executableCode", "codeExecutionResult", "inlineData", "fileData")


def event(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of a stream."""
    del name
    before = tally.output_tokens or 0
    _usage(tally, chunk.get("usageMetadata"))
    visible, reasoning = _read(tally, chunk)
    if visible or reasoning:
        made = tally.output_tokens
        tally.token(at_ns, visible=visible, tokens=made - before if made is not None and made > before else None)


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer that was not streamed."""
    _usage(tally, body.get("usageMetadata"))
    visible, reasoning = _read(tally, body)
    tally.has_output = visible or reasoning


def _read(tally: Tally, chunk: dict[str, Any]) -> tuple[bool, bool]:
    error = chunk.get("error")
    if error is not None:
        tally.fail(*((error.get("code"), error.get("status")) if isinstance(error, dict) else ()))
    feedback = chunk.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        tally.finish(0, feedback["blockReason"])
    visible = reasoning = False
    candidates = chunk.get("candidates")
    for position, candidate in enumerate(candidates if isinstance(candidates, list) else ()):
        if not isinstance(candidate, dict):
            continue
        index = whole(candidate.get("index"))
        index = position if index is None else index
        tally.indexes.add(index)
        content = candidate.get("content")
        parts = content.get("parts") if isinstance(content, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and any(part.get(key) for key in _OUTPUTS):
                visible, reasoning = (visible, True) if part.get("thought") else (True, reasoning)
        if candidate.get("finishReason"):
            tally.finish(index, candidate["finishReason"])
    return visible, reasoning


def _usage(tally: Tally, usage: Any) -> None:
    if not isinstance(usage, dict):
        return
    made, thoughts = whole(usage.get("candidatesTokenCount")), whole(usage.get("thoughtsTokenCount"))
    if made is not None or thoughts is not None:
        tally.output_tokens = (made or 0) + (thoughts or 0)
    for field, key in (
        ("input_tokens", "promptTokenCount"),
        ("cached_tokens", "cachedContentTokenCount"),
        ("reasoning_tokens", "thoughtsTokenCount"),
    ):
        value = whole(usage.get(key))
        if value is not None:
            setattr(tally, field, value)
