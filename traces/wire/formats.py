"""Which format a response speaks, told by the shape of what came, not by the path it came from.

A gateway serves many formats on paths of its own, and an engine may answer one route in another's words; the shape is
what the reader needs. The first event that has one decides for the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from traces.wire import anthropic, cohere, gemini, generate, lengths, ollama, openai, responses
from traces.wire.tally import Tally


class Format(NamedTuple):
    """How to read one event of a stream, and a whole answer."""

    name: str
    event: Callable[[Tally, int, str | None, dict[str, Any]], None]
    answer: Callable[[Tally, dict[str, Any]], None]


OPENAI = Format("openai", openai.event, openai.answer)
RESPONSES = Format("responses", responses.event, responses.answer)
ANTHROPIC = Format("anthropic", anthropic.event, anthropic.answer)
SGLANG = Format("sglang", generate.sglang, generate.sglang_answer)
TGI = Format("tgi", generate.tgi, generate.tgi_answer)
LLAMACPP = Format("llamacpp", generate.llamacpp, generate.llamacpp_answer)
WATSONX = Format("watsonx", generate.watsonx, generate.watsonx_answer)
OLLAMA = Format("ollama", ollama.event, ollama.answer)
GEMINI = Format("gemini", gemini.event, gemini.answer)
COHERE = Format("cohere", cohere.event, cohere.answer)
LENGTHS = Format("lengths", lambda tally, _at, _name, chunk: lengths.answer(tally, chunk), lengths.answer)

_ANTHROPIC = {"message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta",
              "content_block_stop", "message"}  # fmt: skip
_COHERE = {"message-start", "content-start", "content-delta", "content-end", "message-end", "tool-plan-delta",
           "tool-call-start", "tool-call-delta", "tool-call-end", "citation-start", "citation-end"}  # fmt: skip


def of(chunk: dict[str, Any], endpoint: str) -> Format | None:
    """The format of an event or a whole answer; None while it could be any (an error, a ping)."""
    if endpoint in {"embeddings", "rerank"}:
        return LENGTHS
    if "choices" in chunk:
        return OPENAI
    kind = chunk.get("type")
    if isinstance(kind, str):
        if kind.startswith("response.") or chunk.get("object") == "response":
            return RESPONSES
        if kind in _ANTHROPIC:
            return ANTHROPIC
        if kind in _COHERE:
            return COHERE
    if chunk.get("object") == "response":
        return RESPONSES
    return _by_keys(chunk)


def _by_keys(chunk: dict[str, Any]) -> Format | None:
    if "candidates" in chunk or "usageMetadata" in chunk or "promptFeedback" in chunk:
        return GEMINI
    if "meta_info" in chunk:
        return SGLANG
    if "event_type" in chunk or ("finish_reason" in chunk and ("message" in chunk or "generation_id" in chunk)):
        return COHERE
    if "done" in chunk:
        return OLLAMA
    if "token" in chunk or "generated_text" in chunk or "error_type" in chunk:
        return TGI
    if "stop" in chunk and "content" in chunk:
        return LLAMACPP
    results = chunk.get("results")
    if isinstance(results, list) and results and isinstance(results[0], dict) and "generated_text" in results[0]:
        return WATSONX
    return None
