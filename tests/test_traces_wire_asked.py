"""What a request asked for is told by its path and body, and its words are not."""

from __future__ import annotations

import json

import pytest

from traces.record import ENDPOINTS
from traces.wire.asked import Asked, asked, endpoint_of, streams_by_path


@pytest.mark.parametrize(
    ("path", "endpoint", "streams"),
    [
        ("/v1/chat/completions", "chat", None),
        ("https://gw.example/openai/v1/chat/completions/?api-version=1", "chat", None),
        ("/v1/completions", "completions", None),
        ("/completion", "generate", None),
        ("/v1/responses", "responses", None),
        ("/v1/messages?beta=true", "messages", None),
        ("/generate_stream", "generate", True),
        ("/api/chat", "chat", True),
        ("/v1beta/models/gemini:streamGenerateContent?alt=sse", "chat", True),
        ("/v1/embeddings", "embeddings", None),
        ("/rerank", "rerank", None),
        ("/v1/models", None, None),
        ("/", None, None),
        ("", None, None),
    ],
)
def test_a_path_tells_the_endpoint_and_perhaps_the_stream(path, endpoint, streams):
    assert endpoint_of(path) == endpoint
    assert endpoint is None or endpoint in ENDPOINTS
    assert streams_by_path(path) is streams


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "m", "stream": True}, Asked("chat", "m", stream=True)),
        ({"model": "m", "max_tokens": 5, "max_completion_tokens": 7}, Asked("chat", "m", stream=False, max_tokens=7)),
        ({"n": 2, "tools": [{}, {}]}, Asked("chat", None, stream=False, n=2, tools=2)),
        ({"n": "2", "max_tokens": -1, "model": 5, "tools": "x", "stream": "yes"}, Asked("chat", stream=False)),
        ({"max_tokens": True, "n": 2**31}, Asked("chat", stream=False)),
        ({}, Asked("chat")),
    ],
)
def test_a_body_tells_model_limits_and_counts(fields, expected):
    assert asked("/v1/chat/completions", json.dumps(fields).encode()) == expected


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"null"])
def test_a_body_that_is_no_object_tells_nothing(body):
    assert asked("/v1/chat/completions", body) == Asked("chat")
    assert asked("/shop", b'{"model": "m"}') == Asked()
