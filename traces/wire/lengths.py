"""Embeddings and rerank: answers that have a length and no tokens of their own.

Input tokens come from `usage` (OpenAI, vLLM, Jina), `meta` (Cohere) or `prompt_eval_count` (Ollama). An answer is one
when it holds vectors or scores.
"""

from __future__ import annotations

from typing import Any

from traces.wire import openai
from traces.wire.tally import Tally, whole

_ROWS = ("data", "embeddings", "embedding", "results", "predictions")


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer."""
    if body.get("error") is not None:
        openai.fail(tally, body["error"])
    tally.has_output = any(body.get(key) for key in _ROWS)
    usage, meta = body.get("usage"), body.get("meta")
    given = whole(body.get("prompt_eval_count"))
    if isinstance(usage, dict):
        found = [whole(usage.get(key)) for key in ("prompt_tokens", "input_tokens", "total_tokens")]
        given = next((value for value in found if value is not None), given)
    elif isinstance(meta, dict):
        held = meta.get("tokens") or meta.get("billed_units")
        given = whole(held.get("input_tokens")) if isinstance(held, dict) else given
    tally.input_tokens = given
