"""Ranks on the wire: one table of what each server must see."""

from __future__ import annotations

import json

import pytest

from tenants import dialects
from tenants.dialects import DIALECTS, apply, detect, length_fields, named

URGENT_IS_LOW = {"vllm", "vllm-header", "sglang-low", "litellm", "litellm-header", "triton"}
URGENT_IS_HIGH = {"sglang", "sglang-header", "sglang-generate", "tensorrt-llm", "dynamo", "dynamo-header"}


@pytest.mark.parametrize(
    ("dialect", "rank", "ranks", "body", "headers", "raw"),
    [
        ("vllm", 0, 2, {"priority": 0}, {}, "0"),
        ("vllm", 1, 2, {"priority": 1}, {}, "1"),
        ("vllm-header", 1, 2, {}, {"x-vllm-priority": "1"}, "1"),
        ("sglang", 0, 2, {"priority": 0}, {}, "0"),
        ("sglang", 1, 2, {"priority": -100}, {}, "-100"),
        ("sglang-low", 2, 3, {"priority": 200}, {}, "200"),
        ("sglang-header", 1, 2, {}, {"x-override-priority": "-100"}, "-100"),
        ("tensorrt-llm", 0, 3, {"priority": 1.0}, {}, "1"),
        ("tensorrt-llm", 1, 3, {"priority": 0.5}, {}, "0.5"),
        ("tensorrt-llm", 2, 3, {"priority": 0.0}, {}, "0"),
        ("tensorrt-llm", 0, 1, {"priority": 1.0}, {}, "1"),
        ("triton", 0, 2, {"priority": 1}, {}, "1"),
        ("litellm", 1, 2, {"priority": 1}, {}, "1"),
        ("litellm-header", 1, 2, {}, {"x-litellm-priority": "1"}, "1"),
        ("dynamo", 0, 3, {"nvext": {"agent_hints": {"priority": 2}}}, {}, "2"),
        ("dynamo", 2, 3, {"nvext": {"agent_hints": {"priority": 0}}}, {}, "0"),
        ("dynamo-header", 0, 2, {}, {"x-dynamo-request-priority": "1"}, "1"),
        ("openai", 0, 3, {"service_tier": "priority"}, {}, "priority"),
        ("openai", 1, 3, {"service_tier": "default"}, {}, "default"),
        ("openai", 5, 6, {"service_tier": "flex"}, {}, "flex"),
        ("anthropic", 0, 2, {"service_tier": "auto"}, {}, "auto"),
        ("anthropic", 1, 2, {"service_tier": "standard_only"}, {}, "standard_only"),
        ("header:X-Priority", 1, 2, {}, {"x-priority": "1"}, "1"),
        ("none", 1, 2, {}, {}, None),
        ("tgi", 1, 2, {}, {}, None),
        ("vllm", None, 2, {}, {}, None),
    ],
)
def test_a_rank_becomes_what_the_server_takes(dialect, rank, ranks, body, headers, raw):
    assert apply(dialect, rank, ranks) == (body, headers, raw)


def test_a_gateway_takes_the_name_of_an_objective_and_the_tenant_for_fairness():
    body, headers, raw = apply("llm-d", 0, 2, tenant="risk", objective="interactive")
    assert body == {}
    assert headers == {"x-llm-d-inference-objective": "interactive", "x-llm-d-inference-fairness-id": "risk"}
    assert raw == "interactive"
    assert apply("llm-d", 1, 2, tenant="summary").headers["x-llm-d-inference-objective"] == "summary"


@pytest.mark.parametrize("name", sorted(URGENT_IS_LOW | URGENT_IS_HIGH))
def test_j05_a_more_urgent_rank_is_on_the_urgent_side_of_a_less_urgent_one(name):
    values = [float(apply(name, rank, 5).raw) for rank in range(5)]
    assert values == sorted(values, reverse=name in URGENT_IS_HIGH)
    assert len(set(values)) == 5


@pytest.mark.parametrize("name", ["sglang", "sglang-low", "sglang-header", "sglang-generate"])
def test_neighbouring_ranks_lie_far_enough_apart_for_sglang_to_preempt(name):
    assert abs(float(apply(name, 0, 2).raw) - float(apply(name, 1, 2).raw)) > 10


def test_dynamo_never_sees_a_negative_value_because_it_would_be_cut_to_0():
    assert all(int(apply("dynamo", rank, 4).raw) >= 0 for rank in range(4))


@pytest.mark.parametrize(
    ("dialect", "chat", "fields"),
    [
        ("vllm", True, {"max_tokens": 7, "ignore_eos": True, "min_tokens": 7}),
        ("sglang", True, {"max_tokens": 7, "max_completion_tokens": 7, "ignore_eos": True, "min_tokens": 7}),
        ("sglang", False, {"max_tokens": 7, "ignore_eos": True, "min_tokens": 7}),
        (
            "sglang-generate",
            False,
            {"sampling_params": {"max_new_tokens": 7, "ignore_eos": True, "min_new_tokens": 7}},
        ),
        ("llama.cpp", True, {"max_tokens": 7, "ignore_eos": True}),
        ("tgi", True, {"max_tokens": 7}),
        ("openai", True, {"max_completion_tokens": 7}),
        ("openai", False, {"max_tokens": 7}),
        ("anthropic", False, {"max_tokens": 7}),
    ],
)
def test_the_length_of_an_answer_is_forced_where_the_server_can(dialect, chat, fields):
    assert length_fields(dialect, 7, chat=chat) == fields


def test_only_these_cannot_be_forced():
    assert {row.name for row in DIALECTS.values() if not row.forces_length} == {"triton", "openai", "anthropic", "tgi"}


def test_fields_of_two_origins_join():
    body = {"nvext": {"extra": 1}, "model": "m"}
    assert dialects.merge(body, {"nvext": {"agent_hints": {"priority": 1}}}) == {
        "model": "m",
        "nvext": {"extra": 1, "agent_hints": {"priority": 1}},
    }


@pytest.mark.parametrize("name", ["vlm", "header:", "header:a b", "header:x\r\ny", ""])
def test_an_unknown_dialect_is_refused_with_the_list(name):
    with pytest.raises(ValueError, match=r"header:"):
        named(name)


def models(owner):
    return json.dumps({"data": [{"id": "m", "owned_by": owner}]})


@pytest.mark.parametrize(
    ("version", "listed", "metrics", "dialect"),
    [
        (None, models("vllm"), None, "vllm"),
        (None, models("sglang"), None, "sglang"),
        ('{"version":"0.33.0"}', models("me"), None, "vllm"),
        (None, models("me"), "# HELP x\nsglang:num_running_reqs 1\n", "sglang"),
        (None, models("nvidia"), "vllm:x 1\ndynamo_frontend_requests_total 1\n", "dynamo"),
        (None, None, "tgi_queue_size 1\n", "tgi"),
        (None, None, None, "vllm"),
        ("<html>", "<html>", "<html>", "vllm"),
        (None, "[1]", "", "vllm"),
    ],
)
def test_auto_tells_the_engine_by_what_it_says_and_says_why(version, listed, metrics, dialect):
    found = detect(version, listed, metrics)
    assert found.dialect == dialect
    assert found.why
