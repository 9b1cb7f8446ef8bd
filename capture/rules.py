"""Which request is recorded, whose it is, and how urgent: pure functions of its path, headers and body.

A request to an LLM is known by its path; one on a path of a gateway's own by its shape: a JSON object with a model and
messages, a prompt, an input or contents. Everything else passes by.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tenants.dialects import DIALECTS, Dialect
from tenants.tenant import DEFAULT_HEADER, NAME, Tenant
from traces.wire.asked import endpoint_of, streams_by_path

__all__ = [
    "TenantRules",
    "dialect_named",
    "endpoint_by_shape",
    "endpoint_of",
    "plain",
    "priority_raw",
    "rank",
    "salted",
    "streams_by_path",
]

_KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_PRIORITY_HEADERS = (
    "x-vllm-priority",
    "x-override-priority",
    "x-litellm-priority",
    "x-dynamo-request-priority",
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
    "x-priority",
)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}")
_RAW = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,9})?|[A-Za-z][A-Za-z0-9_.-]{0,62}")


# Routes of LLM servers whose bodies look like a request for an answer, and are none.
_OTHERS = (
    "tokenize",
    "count_tokens",
    ":countTokens",
    "apply-template",
    "/batches",
    "/classify",
    "/moderations",
    "/pooling",
    "/score",
    "/images/generations",
    "/images/edits",
    "/audio/speech",
    "/fine_tuning/jobs",
)


class _Shape(msgspec.Struct):
    """The fields that make a JSON object a request to an LLM, unread."""

    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    contents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_shape = msgspec.json.Decoder(_Shape).decode


def endpoint_by_shape(body: bytes, path: str = "/") -> str | None:
    """The endpoint that a JSON body on an unknown path is for; None when it is no request to an LLM."""
    if path.partition("?")[0].rstrip("/").endswith(_OTHERS):
        return None
    if b'"model"' not in body and b'"contents"' not in body:
        return None
    try:
        shape = _shape(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if shape.contents is not msgspec.UNSET:
        return "chat"
    if shape.model is msgspec.UNSET:
        return None
    if shape.messages is not msgspec.UNSET:
        return "chat"
    if shape.prompt is not msgspec.UNSET:
        return "completions"
    return "other" if shape.input is not msgspec.UNSET else None


class TenantRules:
    """Tells the tenant of a request.

    Args:
        spec: `Settings.tenant`. Raises ValueError with a right example when it is not one.
        tenants: of a `tenants.toml`; their `match` comes first.
        digest: salted hash of a text, as hexadecimal digits.
    """

    def __init__(self, spec: str, tenants: Sequence[Tenant], digest: Callable[[str], str]) -> None:
        self._named = [(tenant.recognised_by.header.lower(), tenant.recognised_by.value, tenant.name)
                       for tenant in tenants]  # fmt: skip
        self._digest = digest
        self._ways = [_way(part.strip()) for part in spec.split(",") if part.strip() not in {"", "none"}]
        headers = [argument for kind, argument in self._ways if kind == "header"]
        self.headers = frozenset([*headers, *(header for header, _, _ in self._named)])
        if any(kind == "key" for kind, _ in self._ways):
            self.headers |= frozenset(_KEY_HEADERS)

    def of(self, headers: Mapping[str, str], path: str, model: str | None) -> str | None:
        """The tenant, None when nothing tells it. `headers` has lower-case names."""
        for header, value, name in self._named:
            if headers.get(header) == value:
                return name
        for kind, argument in self._ways:
            found = self._by(kind, argument, headers, path, model)
            if found:
                return found
        return None

    def _by(self, kind: str, argument: str, headers: Mapping[str, str], path: str, model: str | None) -> str | None:
        if kind == "header":
            return self._named_or_hashed(headers.get(argument, ""))
        if kind == "model":
            return model
        if kind == "path":
            match = re.search(argument, path.partition("?")[0])
            return self._named_or_hashed((match[1] if match.re.groups else match[0]) or "") if match else None
        key = next((headers[name] for name in _KEY_HEADERS if headers.get(name)), "")
        return f"key-{self._digest(key.removeprefix('Bearer ').strip())[:10]}" if key else None

    def _named_or_hashed(self, value: str) -> str | None:
        """A tenant's name as it is; a value that cannot be one is kept as a hash."""
        if NAME.fullmatch(value) and len(value) <= 128:
            return value
        return f"tenant-{self._digest(value)[:10]}" if value else None


def _way(text: str) -> tuple[str, str]:
    kind, _, argument = text.partition(":")
    if kind == "header":
        return kind, (argument or DEFAULT_HEADER).lower()
    if kind == "path" and argument:
        try:
            re.compile(argument)
        except re.error as error:
            raise ValueError(f"{argument!r} is not a regular expression ({error}); such as path:^/t/([^/]+)/") from None
        return kind, argument
    if kind in {"key", "model"} and not argument:
        return kind, ""
    raise ValueError(f"{text!r} is no way to tell a tenant: write header:x-tenant, key, path:^/t/([^/]+)/ or model")


PRIORITY_HEADERS = frozenset(_PRIORITY_HEADERS)


def priority_raw(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The priority on the wire as text: headers win over the body, as they do at the servers that take both."""
    for name in _PRIORITY_HEADERS:
        value = headers.get(name)
        if value:
            return _word(value)
    value = body.get("priority")
    if value is None:
        hints = body.get("nvext")
        hints = hints.get("agent_hints") if isinstance(hints, dict) else None
        value = hints.get("priority") if isinstance(hints, dict) else None
    if value is None:
        value = body.get("service_tier")
    return None if value is None or isinstance(value, bool) else _word(str(value))


def rank(raw: str | None, dialect: Dialect, tenants: Sequence[Tenant] = ()) -> int | None:
    """The rank behind a priority on the wire; None where the dialect alone cannot tell it.

    A scale that depends on how many ranks there are ("falling", "unit") cannot be turned back from one value.
    """
    if raw is None:
        return None
    if dialect.scale == "words":
        return dialect.words.index(raw) if raw in dialect.words else None
    if dialect.scale == "name":
        named = [tenant.priority for tenant in tenants if (tenant.objective or tenant.name) == raw]
        return named[0] if named else None
    try:
        value = int(raw)
    except ValueError:
        return None
    if dialect.scale == "rank":
        value -= dialect.first
    elif dialect.scale == "negated":
        value = -value
    else:
        return None
    found, rest = divmod(value, dialect.gap)
    return found if rest == 0 and 0 <= found < 2**31 else None


def dialect_named(name: str) -> Dialect:
    """A row of the dialects. Raises ValueError with the names there are."""
    if name not in DIALECTS:
        raise ValueError(f"{name!r} is no dialect: one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


def plain(value: Any) -> str | None:
    """A model's name as it is; anything that does not look like a name is left out."""
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else None


def salted(salt: bytes) -> Callable[[str], str]:
    """A hash of texts that means nothing without the salt."""

    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=salt).hexdigest()

    return digest


def _word(value: str) -> str | None:
    """What a priority may look like; other text of a header or body is not kept."""
    value = value.strip()
    return value if _RAW.fullmatch(value) else None
