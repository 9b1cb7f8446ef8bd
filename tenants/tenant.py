"""Who shares the engine: a tenant, its rank, what it was promised and how it is recognised.

A rank is a priority that means the same everywhere: 0 = most urgent, larger = less. It meets the wire in a dialect
(`tenants.dialects`). A mix (`tenants.mix`) names tenants in one word on the command line; `tenants.toml` says more:

    [tenants.risk]
    priority = 0
    sla = ["ttft_p95 < 800ms", "ttft_p95 <= 1.25x alone"]     # the second is an isolation bound
    match = { header = "x-tenant", value = "risk" }           # how to recognise it in traffic; this is the default

    [tenants.summary]
    priority = 1
    sla = ["e2e_p95 < 30s"]
    cap = 6                                                   # requests in flight at most
    model = "summary-lora"
    api_key_env = "SUMMARY_KEY"                               # the variable's name, never the key
    headers = { "x-team" = "docs" }
    trace = "traces/summary.parquet"                          # its own trace
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tenants import sla
from traces.errors import BadFile

DEFAULT = "default"  # the tenant of a trace that has none
DEFAULT_HEADER = "x-tenant"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

_EXAMPLES = {
    "priority": "priority = 0",
    "share": "share = 3",
    "sla": 'sla = ["ttft_p95 < 800ms"]',
    "cap": "cap = 6",
    "model": 'model = "llama-3-8b"',
    "api_key_env": 'api_key_env = "RISK_KEY"',
    "headers": 'headers = { "x-team" = "risk" }',
    "match": 'match = { header = "x-tenant", value = "risk" }',
    "trace": 'trace = "traces/risk.parquet"',
    "objective": 'objective = "interactive"',
}


class Match(msgspec.Struct, frozen=True):
    """The header value that marks a request as a tenant's."""

    header: str
    value: str


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant of a run.

    Attributes:
        name: as in the trace's `tenant` column.
        priority: rank, 0 = most urgent; None = leave the rank that the trace has.
        share: part of an untagged trace it gets, relative to the others' shares; None = not given (1 where needed).
        rules: its SLAs and isolation bounds.
        cap: requests in flight at most; None = no limit.
        model: model or LoRA name to ask for; None = the trace's.
        api_key_env: environment variable that holds its key.
        headers: sent with each of its requests.
        match: how traffic of it is recognised.
        trace: path of its own trace.
        objective: name of its objective at a gateway that takes names (llm-d); None = the tenant's name.
    """

    name: str
    priority: int | None = None
    share: float | None = None
    rules: tuple[sla.Rule, ...] = ()
    cap: int | None = None
    model: str | None = None
    api_key_env: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    match: Match | None = None
    trace: str | None = None
    objective: str | None = None

    @property
    def slas(self) -> tuple[sla.Rule, ...]:
        """The rules that one run can judge."""
        return tuple(rule for rule in self.rules if not rule.is_bound)

    @property
    def bounds(self) -> tuple[sla.Rule, ...]:
        """The rules that compare with another arm: ``ttft_p95 <= 1.25x alone``."""
        return tuple(rule for rule in self.rules if rule.is_bound)

    @property
    def recognised_by(self) -> Match:
        """The header and value that mark its traffic: `x-tenant: NAME` unless said otherwise."""
        return self.match or Match(DEFAULT_HEADER, self.name)


def load(path: str | os.PathLike[str]) -> tuple[Tenant, ...]:
    """The tenants of a `tenants.toml`, most urgent first.

    Raises:
        BadFile: names the file, the table and the key that is wrong, with a right example.
    """
    source = os.fspath(path)
    try:
        document = tomllib.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise BadFile(f"{source}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadFile(f"{source}: not a TOML file ({error})") from None
    return read(document, source)


def read(document: Mapping[str, Any], source: str) -> tuple[Tenant, ...]:
    """The tenants of a parsed document; `source` names it in errors. Raises BadFile."""
    for table in document:
        if table != "tenants":
            raise BadFile(f"{source}: unknown table [{table}]: tenants stand in [tenants.NAME], such as [tenants.risk]")
    tables = document.get("tenants")
    if (
        not isinstance(tables, Mapping)
        or not tables
        or not all(isinstance(table, Mapping) for table in tables.values())
    ):
        raise BadFile(f"{source}: no tenants: write a table for each, such as [tenants.risk] with priority = 0")
    found = [_tenant(name, table, source) for name, table in tables.items()]
    given = [tenant.priority is not None for tenant in found]
    if any(given) and not all(given):
        lacking = found[given.index(False)].name
        raise BadFile(f"{source}: [tenants.{lacking}] has no priority but others have: write priority = 1 there too")
    if not any(given):
        found = [msgspec.structs.replace(tenant, priority=rank) for rank, tenant in enumerate(found)]
    return tuple(sorted(found, key=lambda tenant: tenant.priority or 0))


def merge(chosen: Sequence[Tenant], described: Sequence[Tenant]) -> tuple[Tenant, ...]:
    """The tenants a mix chose and ranked, each with what `tenants.toml` says about it beyond share and rank."""
    known = {tenant.name: tenant for tenant in described}
    return tuple(
        msgspec.structs.replace(
            known.get(tenant.name, tenant),
            priority=tenant.priority,
            share=tenant.share if tenant.share is not None else known.get(tenant.name, tenant).share,
        )
        for tenant in chosen
    )


def with_rules(tenants: Sequence[Tenant], rules: Sequence[sla.Rule]) -> tuple[Tenant, ...]:
    """The same tenants with rules of the command line added to those they name; rules of `all` belong to nobody.

    Raises:
        ValueError: a rule is about a tenant that is not there.
    """
    sla.check_tenants(rules, [tenant.name for tenant in tenants])
    return tuple(
        msgspec.structs.replace(
            tenant, rules=tuple(dict.fromkeys([*tenant.rules, *(r for r in rules if r.tenant == tenant.name)]))
        )
        for tenant in tenants
    )


def _tenant(name: str, table: Mapping[str, Any], source: str) -> Tenant:
    where = f"{source}, [tenants.{name}]"
    if not NAME.fullmatch(name) or name == sla.ALL:
        raise BadFile(f"{where}: {name!r} cannot be a tenant's name: letters, digits, _ . - and not `all`")
    for key in table:
        if key not in _EXAMPLES:
            close = difflib.get_close_matches(key, _EXAMPLES, 1)
            hint = f"did you mean {_EXAMPLES[close[0]]}?" if close else f"known keys are {', '.join(_EXAMPLES)}"
            raise BadFile(f"{where}: unknown key {key!r}; {hint}")
    values: dict[str, Any] = {}
    for key in table:
        try:
            values["rules" if key == "sla" else key] = _value(name, key, table[key])
        except ValueError as error:
            raise BadFile(f"{where}, key {key}: {error}") from None
    return Tenant(name=name, **values)


def _value(name: str, key: str, value: Any) -> Any:
    """The value of one key in the type of the field. Raises ValueError."""
    example = f"write it as {_EXAMPLES[key]}"
    if key in {"priority", "cap"}:
        least = 0 if key == "priority" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{value!r} is not a whole number from {least} on; {example}")
        return value
    if key == "share":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{value!r} is not a number above 0; {example}")
        return float(value)
    if key == "sla":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError(f"not a list of rules; {example}")
        return tuple(sla.parse(text, name) for text in value)
    if key == "headers":
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
            raise ValueError(f"not a table of texts; {example}")
        return dict(value)
    if key == "match":
        if not isinstance(value, Mapping) or not set(value) <= {"header", "value"}:
            raise ValueError(f"not a header and a value; {example}")
        return Match(str(value.get("header", DEFAULT_HEADER)).lower(), str(value.get("value", name)))
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a text; {example}")
    return value
