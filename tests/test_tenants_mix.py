"""The mix grammar, and who gets which request."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import mix
from traces.errors import TraceError
from traces.record import Metadata, metadata_of, table


def trace(rows=100, **columns):
    return table({"arrival_ns": np.arange(rows) * 1_000_000, **columns}, Metadata(source="test"))


def said(text):
    return [(tenant.name, tenant.share, tenant.priority) for tenant in mix.parse(text)]


@pytest.mark.parametrize(
    ("text", "tenants"),
    [
        ("risk", [("risk", None, 0)]),
        ("risk:summary", [("risk", None, 0), ("summary", None, 1)]),
        ("risk=3:summary=1", [("risk", 3, 0), ("summary", 1, 1)]),
        ("risk=70%:summary=30%", [("risk", 70, 0), ("summary", 30, 1)]),
        ("risk@5:summary@0", [("risk", None, 5), ("summary", None, 0)]),
        ("a=0.5@1:b=2@1", [("a", 0.5, 1), ("b", 2, 1)]),
        ("team-a_1.x:b", [("team-a_1.x", None, 0), ("b", None, 1)]),
    ],
)
def test_a_mix_names_tenants_shares_and_ranks(text, tenants):
    assert said(text) == tenants


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a:",
        "a::b",
        "a:a",
        "a=0",
        "a=-1",
        "a=x",
        "a=nan",
        "a=",
        "a@x",
        "a@-1",
        "a@1.5",
        "a@0:b",
        "a b",
        "all:b",
        "a=1=2",
    ],
)
def test_a_wrong_mix_is_refused_in_one_line(text):
    with pytest.raises(ValueError) as caught:
        mix.parse(text)
    assert "\n" not in str(caught.value)


def test_an_untagged_trace_is_divided_by_share_to_within_one_request():
    tagged = mix.assign(trace(101), mix.parse("a=7:b=2:c=1"), seed=3)
    counts = {name: tagged.column("tenant").to_pylist().count(name) for name in "abc"}
    assert sum(counts.values()) == 101
    assert all(abs(counts[name] - 101 * share / 10) < 1 for name, share in zip("abc", (7, 2, 1), strict=True))
    ranks = dict(zip(tagged.column("tenant").to_pylist(), tagged.column("priority").to_pylist(), strict=True))
    assert ranks == {"a": 0, "b": 1, "c": 2}


def test_a_seed_repeats_the_draw_and_another_changes_it():
    first, again, other = (mix.assign(trace(), mix.parse("a:b"), seed=seed).column("tenant") for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_turns_of_a_session_stay_with_one_tenant():
    sessions = [f"s{i % 17}" if i % 3 else None for i in range(200)]
    tagged = mix.assign(trace(200, session_id=sessions), mix.parse("a:b"), seed=5)
    owners = {}
    for session, tenant in zip(sessions, tagged.column("tenant").to_pylist(), strict=True):
        if session is not None:
            owners.setdefault(session, set()).add(tenant)
    assert all(len(found) == 1 for found in owners.values())
    tenants_of_lone_rows = tagged.column("tenant").to_pylist()[::3]
    assert set(tenants_of_lone_rows) == {"a", "b"}


def test_by_length_the_most_urgent_tenant_gets_the_shortest_answers():
    tokens = np.random.default_rng(1).permutation(100)
    tagged = mix.assign(trace(100, output_tokens=tokens), mix.parse("summary=1@1:risk=3@0"), by="length")
    by_tenant = {"risk": [], "summary": []}
    for tenant, count in zip(tagged.column("tenant").to_pylist(), tokens.tolist(), strict=True):
        by_tenant[tenant].append(count)
    assert len(by_tenant["risk"]) == 75
    assert max(by_tenant["risk"]) < min(by_tenant["summary"])


def test_by_length_needs_lengths():
    with pytest.raises(TraceError, match="--assign share"):
        mix.assign(trace(), mix.parse("a:b"), by="length")


def tagged_trace():
    return trace(6, tenant=["risk", "summary", "batch", "risk", "summary", "risk"], priority=[9] * 6)


def test_on_a_tagged_trace_the_mix_selects_and_ranks():
    ranked = mix.assign(tagged_trace(), mix.parse("summary:risk:batch"))
    assert ranked.column("tenant").to_pylist() == ["risk", "summary", "batch", "risk", "summary", "risk"]
    assert ranked.column("priority").to_pylist() == [1, 0, 2, 1, 0, 1]


def test_shares_are_refused_on_a_tagged_trace():
    with pytest.raises(TraceError, match=r"risk=3 asks for a share.*write risk:summary:batch"):
        mix.assign(tagged_trace(), mix.parse("risk=3:summary:batch"))


def test_tenants_that_the_mix_does_not_name_are_an_error_dropped_or_lowest():
    with pytest.raises(TraceError, match="also has batch; name them, or say --others drop"):
        mix.assign(tagged_trace(), mix.parse("risk:summary"))
    dropped = mix.assign(tagged_trace(), mix.parse("risk:summary"), others="drop")
    assert dropped.column("tenant").to_pylist() == ["risk", "summary", "risk", "summary", "risk"]
    lowest = mix.assign(tagged_trace(), mix.parse("risk@0:summary@3"), others="lowest")
    assert lowest.column("priority").to_pylist() == [0, 3, 4, 0, 3, 0]


def test_a_tenant_that_the_trace_does_not_have_is_an_error_with_a_hint():
    with pytest.raises(TraceError, match=r"no tenant 'rsk'.*it has batch, risk, summary \(did you mean risk"):
        mix.assign(tagged_trace(), mix.parse("rsk:summary"), others="drop")


def test_rows_without_a_tenant_in_a_tagged_trace_are_the_default_tenants():
    rows = trace(3, tenant=["risk", None, "risk"])
    with pytest.raises(TraceError, match="also has default"):
        mix.assign(rows, mix.parse("risk"))
    assert mix.assign(rows, mix.parse("risk:default")).column("priority").to_pylist() == [0, 1, 0]


def test_without_a_mix_an_untagged_trace_is_one_default_tenant_and_a_tagged_one_stays():
    assert set(mix.assign(trace(5), None).column("tenant").to_pylist()) == {"default"}
    assert mix.assign(tagged_trace(), None) == tagged_trace()


def test_what_was_done_is_in_the_history_and_other_columns_stay():
    tagged = mix.assign(trace(4, output_tokens=[1, 2, 3, 4]), mix.parse("a=1:b=1"), seed=9)
    assert metadata_of(tagged).history == ("mix a=1@0:b=1@1 by share, seed 9",)
    assert tagged.column("output_tokens").to_pylist() == [1, 2, 3, 4]
    assert tagged.num_rows == 4


def test_an_empty_trace_is_tagged_without_fuss():
    assert mix.assign(trace(0), mix.parse("a:b")).num_rows == 0
    assert pa.types.is_dictionary(mix.assign(trace(0), mix.parse("a:b")).schema.field("tenant").type)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 5000))
def test_quotas_add_up_and_are_each_within_one_of_their_share(shares, total):
    shares = np.array(shares)
    found = mix.quotas(shares, total)
    assert found.sum() == total
    assert np.all(np.abs(found - shares / shares.sum() * total) < 1 + 1e-9)
