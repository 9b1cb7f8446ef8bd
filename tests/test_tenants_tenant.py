"""tenants.toml: what it may say, and errors that name file, table and key."""

from __future__ import annotations

import pytest

from tenants import mix, sla, tenant
from traces.errors import BadFile

FULL = """
[tenants.summary]
priority = 1
sla = ["e2e_p95 < 30s"]
cap = 6
model = "summary-lora"
api_key_env = "SUMMARY_KEY"
headers = { "x-team" = "docs" }
trace = "summary.parquet"

[tenants.risk]
priority = 0
share = 3
sla = ["ttft_p95 < 800ms", "risk: ttft_p95 <= 1.25x alone"]
match = { header = "X-Team", value = "risk-desk" }
objective = "interactive"
"""


def load(tmp_path, text):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return tenant.load(path)


def test_everything_a_table_may_say_is_kept(tmp_path):
    risk, summary = load(tmp_path, FULL)
    assert (risk.name, risk.priority, risk.share, risk.objective) == ("risk", 0, 3.0, "interactive")
    assert [rule.text for rule in risk.slas] == ["risk: ttft_p95 < 800ms"]
    assert [rule.text for rule in risk.bounds] == ["risk: ttft_p95 <= 1.25x alone"]
    assert risk.recognised_by == tenant.Match("x-team", "risk-desk")
    assert (summary.cap, summary.model, summary.api_key_env) == (6, "summary-lora", "SUMMARY_KEY")
    assert (summary.headers, summary.trace) == ({"x-team": "docs"}, "summary.parquet")
    assert summary.recognised_by == tenant.Match("x-tenant", "summary")


def test_without_priorities_the_order_of_the_tables_ranks(tmp_path):
    found = load(tmp_path, "[tenants.b]\n[tenants.a]\n")
    assert [(t.name, t.priority) for t in found] == [("b", 0), ("a", 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[tenants.risk]\npriority = -1",
            "[tenants.risk], key priority: -1 is not a whole number from 0 on",
        ),
        ("[tenants.risk]\npriority = true", "priority = 0"),
        ("[tenants.risk]\ncap = 0", "key cap: 0 is not a whole number from 1 on; write it as cap = 6"),
        ("[tenants.risk]\nprio = 1", "unknown key 'prio'; did you mean priority = 0?"),
        ("[tenants.risk]\nzzz = 1", "known keys are priority, share"),
        (
            "[tenants.risk]\nsla = 'ttft_p95 < 1s'",
            'key sla: not a list of rules; write it as sla = ["ttft_p95 < 800ms"]',
        ),
        ("[tenants.risk]\nsla = ['ttft < 1s']", "key sla: 'ttft < 1s' does not say which percentile"),
        ("[tenants.risk]\nshare = 0", "share = 3"),
        ("[tenants.risk]\nheaders = 3", "headers = {"),
        ("[tenants.risk]\nmatch = {heder = 'x'}", "match = {"),
        ("[tenants.risk]\nmodel = 3", "model ="),
        ("[tenants.risk]\npriority = 0\n[tenants.b]", "[tenants.b] has no priority but others have"),
        ("[tenants.all]", "cannot be a tenant's name"),
        ("[risk]\npriority = 0", "unknown table [risk]"),
        ("", "no tenants"),
        ("tenants = 3", "no tenants"),
        ("[tenants.risk", "not a TOML file"),
    ],
)
def test_an_error_names_file_table_and_key_and_shows_how(tmp_path, text, says):
    with pytest.raises(BadFile) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "tenants.toml") in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(BadFile, match="no such file"):
        tenant.load(tmp_path / "none.toml")


def test_a_mix_chooses_and_ranks_and_the_file_says_the_rest(tmp_path):
    described = load(tmp_path, FULL)
    summary, risk, other = tenant.merge(mix.parse("summary:risk:other"), described)
    assert (summary.priority, summary.cap) == (0, 6)
    assert (risk.priority, risk.share, len(risk.rules)) == (1, 3.0, 2)
    assert (other.priority, other.rules) == (2, ())


def test_rules_of_the_command_line_join_those_of_the_file(tmp_path):
    described = load(tmp_path, FULL)
    rules = [sla.parse("risk: ttft_p95 < 800ms"), sla.parse("risk: tpot_p95 < 50ms"), sla.parse("all: error_rate < 1%")]
    risk, summary = tenant.with_rules(described, rules)
    assert [rule.text for rule in risk.slas] == ["risk: ttft_p95 < 800ms", "risk: tpot_p95 < 50ms"]
    assert len(summary.slas) == 1
    with pytest.raises(ValueError, match="no tenant 'nobody'"):
        tenant.with_rules(described, [sla.parse("nobody: ttft_p95 < 1s")])
