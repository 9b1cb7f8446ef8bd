"""How a rank meets the wire: one row of data for each way that servers take a priority.

Ours is one scale, rank 0 = most urgent. Servers disagree about nearly everything else: where the value goes,
whether low or high is urgent, its type and range, how far two values must lie apart before a running request gives
way, and what a missing value means (SGLang: least urgent of all; vLLM: 0). So every request carries an explicit
value.

Sources: the request schemas of vLLM 0.33, SGLang 0.5.23, LiteLLM 1.110, TensorRT-LLM and NVIDIA Dynamo of mid 2026, the
llm-d router of August 2026, and the clients of OpenAI and Anthropic; docs/tenants.md has the table with what to switch
on at each server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

VLLM_COMPATIBLE_FORCE = ("ignore_eos", "min_tokens")


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how one kind of server takes a priority, and what forces an answer's length there.

    Attributes:
        name: as written after `--dialect`.
        field: body field, dots for nesting; None = not in the body.
        header: header name; None = no header.
        scale: how a rank becomes a value:
            "rank"    the rank itself (lower is more urgent), plus `first`
            "negated" −rank · gap (higher is more urgent)
            "falling" (ranks − 1 − rank) · gap: as before, but never below 0
            "unit"    1 − rank / (ranks − 1), a float from 1 (most urgent) to 0
            "words"   one of `words`, most urgent first; the last one for all further ranks
            "name"    the tenant's objective, a name that the server knows
        gap: distance between neighbouring ranks.
        first: value of rank 0 on the scale "rank".
        words: see scale.
        tenant_header: header that carries the tenant's name for the server's fair queueing; None = none.
        force: body fields that force the exact output length: `ignore_eos` (true) and a least number of tokens.
        cap: body fields that limit the output length.
        chat_cap: the same for chat where they differ.
        note: what a user must know; printed with the choice.
    """

    name: str
    field: str | None = None
    header: str | None = None
    scale: str = "rank"
    gap: int = 1
    first: int = 0
    words: tuple[str, ...] = ()
    tenant_header: str | None = None
    force: tuple[str, ...] = ()
    cap: tuple[str, ...] = ("max_tokens",)
    chat_cap: tuple[str, ...] = ()
    note: str = ""

    @property
    def forces_length(self) -> bool:
        """Whether an answer can be made exactly as long as in the trace."""
        return bool(self.force)


class Tag(NamedTuple):
    """What a request carries. `raw` is the value as text, for the record's `priority_raw`."""

    body: dict[str, Any]
    headers: dict[str, str]
    raw: str | None


_ROWS = (
    Dialect(
        name="vllm",
        field="priority",
        force=VLLM_COMPATIBLE_FORCE,
        note="ignored in silence unless the server runs with --scheduling-policy priority",
    ),
    Dialect(
        name="vllm-header",
        header="x-vllm-priority",
        force=VLLM_COMPATIBLE_FORCE,
        note="the header wins over the body; ignored in silence unless --scheduling-policy priority",
    ),
    Dialect(
        name="sglang",
        field="priority",
        scale="negated",
        gap=100,
        force=VLLM_COMPATIBLE_FORCE,
        chat_cap=("max_tokens", "max_completion_tokens"),
        note="needs --enable-priority-scheduling; a running request gives way from a difference above 10 on",
    ),
    Dialect(
        name="sglang-low",
        field="priority",
        gap=100,
        force=VLLM_COMPATIBLE_FORCE,
        chat_cap=("max_tokens", "max_completion_tokens"),
        note="for --enable-priority-scheduling with --schedule-low-priority-values-first",
    ),
    Dialect(
        name="sglang-header",
        header="x-override-priority",
        scale="negated",
        gap=100,
        force=VLLM_COMPATIBLE_FORCE,
        chat_cap=("max_tokens", "max_completion_tokens"),
        note="needs SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES; generate and chat only",
    ),
    Dialect(
        name="sglang-generate",
        field="priority",
        scale="negated",
        gap=100,
        force=("sampling_params.ignore_eos", "sampling_params.min_new_tokens"),
        cap=("sampling_params.max_new_tokens",),
        note="the native /generate endpoint; needs --enable-priority-scheduling",
    ),
    Dialect(
        name="tensorrt-llm",
        field="priority",
        scale="unit",
        force=VLLM_COMPATIBLE_FORCE,
        note="needs waiting_queue_policy: priority; orders the waiting queue only",
    ),
    Dialect(
        name="triton",
        field="priority",
        first=1,
        note="1 is most urgent, 0 means the model's default; reported not to reach a TensorRT-LLM backend",
    ),
    Dialect(
        name="litellm",
        field="priority",
        force=VLLM_COMPATIBLE_FORCE,
        note="orders the proxy's own queue only while no deployment is healthy; the proxy does not forward it",
    ),
    Dialect(
        name="litellm-header",
        header="x-litellm-priority",
        force=VLLM_COMPATIBLE_FORCE,
        note="orders the proxy's own queue only while no deployment is healthy; the proxy does not forward it",
    ),
    Dialect(
        name="dynamo",
        field="nvext.agent_hints.priority",
        scale="falling",
        force=VLLM_COMPATIBLE_FORCE,
        note="Dynamo turns the sign for its engine; the router orders only beyond --router-queue-threshold",
    ),
    Dialect(
        name="dynamo-header",
        header="x-dynamo-request-priority",
        scale="falling",
        force=VLLM_COMPATIBLE_FORCE,
        note="the header wins over the body; the router orders only beyond --router-queue-threshold",
    ),
    Dialect(
        name="llm-d",
        header="x-llm-d-inference-objective",
        scale="name",
        tenant_header="x-llm-d-inference-fairness-id",
        force=VLLM_COMPATIBLE_FORCE,
        note="an InferenceObjective of this name must exist; strict bands need the flow control gate",
    ),
    Dialect(
        name="gateway-api",
        header="x-gateway-inference-objective",
        scale="name",
        tenant_header="x-gateway-inference-fairness-id",
        force=VLLM_COMPATIBLE_FORCE,
        note="an InferenceObjective of this name must exist; strict bands need the flow control gate",
    ),
    Dialect(
        name="openai",
        field="service_tier",
        scale="words",
        words=("priority", "default", "flex"),
        chat_cap=("max_completion_tokens",),
        note="tiers are billed differently; the answer says which one it got; no exact output length",
    ),
    Dialect(
        name="anthropic",
        field="service_tier",
        scale="words",
        words=("auto", "standard_only"),
        note="auto uses priority capacity where the account has it; no exact output length",
    ),
    Dialect(
        name="llama.cpp",
        scale="none",
        force=("ignore_eos",),
        note="no priority: first come, first served",
    ),
    Dialect(name="tgi", scale="none", note="no priority: first come, first served; no exact output length"),
    Dialect(name="none", scale="none", force=VLLM_COMPATIBLE_FORCE, note="no priority is sent"),
)

DIALECTS: Mapping[str, Dialect] = {row.name: row for row in _ROWS}
DEFAULT = "vllm"


def named(name: str) -> Dialect:
    """The dialect of a name; `header:NAME` sends the bare rank in a header of that name.

    Raises:
        ValueError: there is none; the text lists those there are.
    """
    if name.startswith("header:"):
        header = name.removeprefix("header:").strip().lower()
        if not header or not all(c.isalnum() or c in "-_" for c in header) or not header.isascii():
            raise ValueError(f"{name!r}: write the header's name after the colon, such as header:x-priority")
        return Dialect(name=name, header=header, force=VLLM_COMPATIBLE_FORCE, note="the bare rank, 0 = most urgent")
    if name in DIALECTS:
        return DIALECTS[name]
    raise ValueError(f"no dialect {name!r}: auto, {', '.join(DIALECTS)} or header:NAME")


def apply(
    dialect: Dialect | str, rank: int | None, ranks: int, *, tenant: str = "", objective: str | None = None
) -> Tag:
    """What a request of a tenant carries so that the server knows its rank.

    Args:
        dialect: a row of DIALECTS, or its name.
        rank: 0 = most urgent; None = unset: nothing is sent.
        ranks: the largest rank in the run + 1; the ends of a bounded scale are its first and last rank.
        tenant: the tenant's name.
        objective: name of its objective where the server takes names; None = the tenant's name.
    """
    row = named(dialect) if isinstance(dialect, str) else dialect
    headers = {row.tenant_header: tenant} if row.tenant_header and tenant else {}
    if rank is None or row.scale == "none":
        return Tag({}, headers, None)
    value = _value(row, rank, max(ranks, rank + 1), objective or tenant)
    raw = f"{value:g}" if isinstance(value, float) else str(value)
    if row.header is not None:
        headers[row.header] = raw
    return Tag(_nested(row.field, value) if row.field else {}, headers, raw)


def length_fields(dialect: Dialect | str, output_tokens: int, *, chat: bool = False) -> dict[str, Any]:
    """Body fields that make the answer exactly `output_tokens` long, or limit it to that where it cannot be forced."""
    row = named(dialect) if isinstance(dialect, str) else dialect
    body: dict[str, Any] = {}
    for field in (row.chat_cap or row.cap) if chat else row.cap:
        _merge(body, _nested(field, output_tokens))
    for field in row.force:
        _merge(body, _nested(field, True if field.endswith("ignore_eos") else output_tokens))
    return body


def merge(body: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the fields of `extra` added, nested tables joined; `body` is changed and returned."""
    _merge(body, extra)
    return body


class Detected(NamedTuple):
    """What `auto` chose and the evidence, for people."""

    dialect: str
    why: str


def detect(version: str | None, models: str | None, metrics: str | None) -> Detected:
    """Tell the engine by what its own endpoints say; vLLM's dialect where nothing tells.

    Args:
        version: body of GET /version, None where it did not answer 200.
        models: body of GET /v1/models.
        metrics: body of GET /metrics.
    """
    owners = {str(model.get("owned_by", "")).lower() for model in _listed(models)}
    for owner, dialect in _OWNERS.items():
        if owner in owners:
            return Detected(dialect, f"/v1/models says owned_by {owner}")
    for prefix, dialect in _METRIC_PREFIXES.items():
        if metrics is not None and any(line.startswith(prefix) for line in metrics.splitlines()):
            return Detected(dialect, f"/metrics has names that begin with {prefix}")
    if version is not None and '"version"' in version:
        return Detected("vllm", "/version answers as vLLM does")
    return Detected(DEFAULT, "nothing told the engine; vLLM's is the default (say --dialect if it is another)")


_OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "llamacpp": "llama.cpp",
}
_METRIC_PREFIXES = {
    "dynamo_": "dynamo",  # first: its frontend may show its engine's metrics, too
    "vllm:": "vllm",
    "sglang:": "sglang",
    "trtllm_": "tensorrt-llm",
    "litellm_": "litellm",
    "tgi_": "tgi",
    "llamacpp:": "llama.cpp",
    "llm_d_epp_": "llm-d",
}


def _listed(models: str | None) -> list[dict[str, Any]]:
    try:
        document = json.loads(models or "{}")
    except ValueError:
        return []
    found = document.get("data") if isinstance(document, dict) else None
    return [model for model in found if isinstance(model, dict)] if isinstance(found, list) else []


def _value(row: Dialect, rank: int, ranks: int, objective: str) -> int | float | str:
    match row.scale:
        case "rank":
            return row.first + rank * row.gap
        case "negated":
            return -rank * row.gap
        case "falling":
            return (ranks - 1 - rank) * row.gap
        case "unit":
            return 1.0 if ranks == 1 else round(1 - rank / (ranks - 1), 6)
        case "words":
            return row.words[min(rank, len(row.words) - 1)]
        case "name":
            return objective
    raise AssertionError(row.scale)


def _nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    found: dict[str, Any] = value
    return found


def _merge(body: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(body.get(key), dict):
            _merge(body[key], value)
        else:
            body[key] = dict(value) if isinstance(value, Mapping) else value
