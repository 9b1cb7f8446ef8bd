"""What a request asked for: endpoint from its path; model, stream, limits, tools from its JSON body; never its text."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

# The last part of a path, after any prefix of a gateway → endpoint. Longer ones first.
_ENDS = (
    ("/chat/completions", "chat"),
    ("/completions", "completions"),
    ("/responses", "responses"),
    ("/messages", "messages"),
    ("/api/chat", "chat"),
    ("/v1/chat", "chat"),
    ("/v2/chat", "chat"),
    ("/api/generate", "generate"),
    ("/generate_stream", "generate"),
    ("/generate", "generate"),
    ("/completion", "generate"),
    ("/text/generation", "generate"),
    ("/text/generation_stream", "generate"),
    (":streamGenerateContent", "chat"),
    (":generateContent", "chat"),
    (":streamRawPredict", "messages"),
    (":rawPredict", "messages"),
    (":embedContent", "embeddings"),
    (":batchEmbedContents", "embeddings"),
    ("/embeddings", "embeddings"),
    ("/embed", "embeddings"),
    ("/rerank", "rerank"),
)
_STREAMED = ("/generate_stream", ":streamGenerateContent", ":streamRawPredict", "/text/generation_stream")
_STREAM_BY_DEFAULT = ("/api/chat", "/api/generate")  # Ollama
_LIMITS = (
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
    "num_predict",
    "max_tokens_to_sample",
)


class Asked(NamedTuple):
    """The request columns of the record that a request itself tells."""

    endpoint: str = "other"
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    n: int | None = None
    tools: int | None = None


def endpoint_of(path: str) -> str | None:
    """One of `traces.record.ENDPOINTS` for the path or URL of an LLM, None for any other; a query does not matter."""
    path = path.partition("?")[0].rstrip("/")
    return next((endpoint for end, endpoint in _ENDS if path.endswith(end)), None)


def streams_by_path(path: str) -> bool | None:
    """Whether the path alone says stream; None when the body does."""
    path = path.partition("?")[0].rstrip("/")
    return True if path.endswith((*_STREAMED, *_STREAM_BY_DEFAULT)) else None


def asked(path: str, body: bytes) -> Asked:
    """What a request asked for. A body that is no JSON object tells nothing, nor does one on a path of no LLM."""
    endpoint = endpoint_of(path)
    if endpoint is None:
        return Asked()
    try:
        fields = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    model, tools = fields.get("model"), fields.get("tools")
    return Asked(
        endpoint=endpoint,
        model=model[:200] if isinstance(model, str) else None,
        stream=_stream(path, endpoint, fields),
        max_tokens=next((count for name in _LIMITS if (count := _count(fields.get(name))) is not None), None),
        n=_count(fields.get("n")),
        tools=len(tools) if isinstance(tools, list) else None,
    )


def _stream(path: str, endpoint: str, fields: dict[str, Any]) -> bool | None:
    value = fields.get("stream")
    if isinstance(value, bool):
        return value
    if streams_by_path(path):
        return True
    return False if fields and endpoint not in {"embeddings", "rerank"} else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None
