"""What a request asked for: endpoint from its path; model, stream, limits, tools from its JSON body; never its text."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

_PATHS = (  # the longer ending first
    ("/chat/completions", "chat"),
    ("/api/chat", "chat"),
    ("/v2/chat", "chat"),
    ("/completions", "completions"),
    ("/complete", "completions"),
    ("/responses", "responses"),
    ("/messages", "messages"),
    ("/embeddings", "embeddings"),
    ("/embed", "embeddings"),
    ("/rerank", "rerank"),
    ("/generate", "generate"),
    ("/generate_stream", "generate"),
    (":generatecontent", "generate"),
    (":streamgeneratecontent", "generate"),
)
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_tokens_to_sample", "max_new_tokens")


class Asked(NamedTuple):
    """The request columns of the record that a request itself tells."""

    endpoint: str = "other"
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    n: int | None = None
    tools: int | None = None


def endpoint_of(path: str) -> str:
    """One of `traces.record.ENDPOINTS`, from a path or URL; its query does not matter."""
    clean = path.partition("?")[0].rstrip("/").lower()
    return next((endpoint for ending, endpoint in _PATHS if clean.endswith(ending)), "other")


def asked(path: str, body: bytes) -> Asked:
    """What a request asked for; a body that is no JSON object tells nothing."""
    endpoint = endpoint_of(path)
    if endpoint == "other":
        return Asked()
    try:
        fields = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    streams = path.partition("?")[0].lower().endswith((":streamgeneratecontent", "/generate_stream"))
    model, tools = fields.get("model"), fields.get("tools")
    return Asked(
        endpoint=endpoint,
        model=model if isinstance(model, str) else None,
        stream=True if streams else _stream(endpoint, fields),
        max_tokens=next((count for name in _LIMITS if (count := _count(fields.get(name))) is not None), None),
        n=_count(fields.get("n")),
        tools=len(tools) if isinstance(tools, list) else None,
    )


def _stream(endpoint: str, fields: dict[str, Any]) -> bool | None:
    value = fields.get("stream")
    if isinstance(value, bool):
        return value
    return False if fields and endpoint not in {"embeddings", "rerank"} else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None
