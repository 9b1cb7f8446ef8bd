"""Which request is recorded, whose it is, and how urgent."""

from __future__ import annotations

import json

import pytest

from capture import rules
from tenants.dialects import DIALECTS
from tenants.tenant import read

PATHS = [
    ("/v1/chat/completions", "chat"),
    ("/v1/chat/completions?api-version=2024", "chat"),
    ("/openai/deployments/gpt/chat/completions", "chat"),
    ("/proxy/a/v1/completions/", "completions"),
    ("/v1/responses", "responses"),
    ("/v1/messages", "messages"),
    ("/v1/messages/count_tokens", None),
    ("/v1/messages/batches", None),
    ("/generate", "generate"),
    ("/generate_stream", "generate"),
    ("/api/chat", "chat"),
    ("/api/generate", "generate"),
    ("/completion", "generate"),
    ("/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse&key=AIza", "chat"),
    ("/v1/projects/p/locations/l/publishers/google/models/m:generateContent", "chat"),
    ("/v2/chat", "chat"),
    ("/v1/embeddings", "embeddings"),
    ("/v1/rerank", "rerank"),
    ("/tokenize", None),
    ("/v1/models", None),
    ("/metrics", None),
]


@pytest.mark.parametrize(("path", "endpoint"), PATHS)
def test_the_endpoint_is_told_by_the_path(path, endpoint):
    assert rules.endpoint_of(path) == endpoint


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"model": "m", "messages": []}, "chat"),
        ({"model": "m", "prompt": "x"}, "completions"),
        ({"model": "m", "input": "x"}, "other"),
        ({"contents": []}, "chat"),
        ({"model": "m"}, None),
        ({"messages": []}, None),
        ({"model_name": "m", "text": "x"}, None),
    ],
)
def test_an_unknown_path_is_told_by_the_shape_of_the_body(body, endpoint):
    assert rules.endpoint_by_shape(json.dumps(body).encode()) == endpoint


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize", "/v1/messages/count_tokens", "/v1/moderations?x=1"])
def test_a_route_beside_the_answers_is_none_whatever_its_body_looks_like(path):
    assert rules.endpoint_by_shape(b'{"model": "m", "prompt": "x"}', path) is None


def test_a_body_that_is_no_json_has_no_endpoint():
    assert rules.endpoint_by_shape(b'{"model": ') is None
    assert rules.endpoint_by_shape(b"\xff\xfe model contents") is None


DIGEST = rules.salted(b"salt")
TENANTS = read(
    {"tenants": {"risk": {"match": {"header": "X-Team", "value": "fraud"}}, "summary": {"objective": "batch"}}},
    "t.toml",
)


@pytest.mark.parametrize(
    ("spec", "headers", "path", "model", "tenant"),
    [
        ("header:x-tenant", {"x-tenant": "risk"}, "/", None, "risk"),
        ("header:X-Team", {"x-team": "docs"}, "/", None, "docs"),
        ("header:x-tenant", {}, "/", None, None),
        ("header:x-tenant", {"x-tenant": "two words"}, "/", None, f"tenant-{DIGEST('two words')[:10]}"),
        ("key", {"authorization": "Bearer sk-1"}, "/", None, f"key-{DIGEST('sk-1')[:10]}"),
        ("key", {"x-api-key": "sk-1"}, "/", None, f"key-{DIGEST('sk-1')[:10]}"),
        ("path:^/t/([^/]+)/", {}, "/t/risk/v1/chat/completions", None, "risk"),
        ("path:^/t/([^/]+)/", {}, "/t/two%20words/v1/x", None, f"tenant-{DIGEST('two%20words')[:10]}"),
        ("path:^/u/(\\w+)?", {}, "/u/", None, None),
        ("model", {}, "/", "llama", "llama"),
        ("header:x-tenant,model", {}, "/", "llama", "llama"),
        ("none", {"x-tenant": "risk"}, "/", "llama", None),
    ],
)
def test_whose_a_request_is(spec, headers, path, model, tenant):
    assert rules.TenantRules(spec, (), DIGEST).of(headers, path, model) == tenant


def test_the_rules_of_tenants_toml_come_first():
    named = rules.TenantRules("header:x-tenant", TENANTS, DIGEST)
    assert named.of({"x-team": "fraud", "x-tenant": "other"}, "/", None) == "risk"
    assert named.of({"x-tenant": "summary"}, "/", None) == "summary"
    assert named.headers >= {"x-team", "x-tenant"}


@pytest.mark.parametrize("spec", ["cookie", "path:", "path:(", "header:x,who"])
def test_a_wrong_way_to_tell_a_tenant_is_refused_with_a_right_one(spec):
    with pytest.raises(ValueError, match=r"such as path:|write header:x-tenant"):
        rules.TenantRules(spec, (), DIGEST)


@pytest.mark.parametrize(
    ("headers", "body", "raw"),
    [
        ({}, {"priority": 3}, "3"),
        ({"x-vllm-priority": "-2"}, {"priority": 3}, "-2"),
        ({}, {"priority": 0.5}, "0.5"),
        ({}, {"nvext": {"agent_hints": {"priority": 7}}}, "7"),
        ({}, {"service_tier": "flex"}, "flex"),
        ({"x-llm-d-inference-objective": "interactive"}, {}, "interactive"),
        ({"x-priority": "high please, my key is sk-1"}, {}, None),
        ({}, {"priority": {"a": 1}}, None),
        ({}, {"priority": True}, None),
        ({}, {}, None),
    ],
)
def test_the_priority_on_the_wire_is_kept_as_text_that_can_be_one(headers, body, raw):
    assert rules.priority_raw(headers, body) == raw


@pytest.mark.parametrize(
    ("dialect", "raw", "rank"),
    [
        ("vllm", "0", 0),
        ("vllm", "3", 3),
        ("vllm", "-1", None),
        ("sglang", "-200", 2),
        ("sglang", "0", 0),
        ("sglang", "-50", None),
        ("triton", "1", 0),
        ("openai", "flex", 2),
        ("openai", "fast", None),
        ("tensorrt-llm", "0.5", None),
        ("llm-d", "batch", 1),
        ("llm-d", "unknown", None),
        ("vllm", None, None),
    ],
)
def test_the_rank_behind_a_value_is_told_only_where_the_dialect_tells_it(dialect, raw, rank):
    assert rules.rank(raw, DIALECTS[dialect], TENANTS) == rank


def test_hashes_mean_nothing_without_the_salt():
    assert rules.salted(b"a")("x") == rules.salted(b"a")("x") != rules.salted(b"b")("x")


def test_only_what_looks_like_a_models_name_is_kept():
    assert rules.plain("meta-llama/Llama-3-8B") == "meta-llama/Llama-3-8B"
    assert rules.plain("tell me a story") is None
    assert rules.plain({"x": 1}) is None
