"""Every published trace and recording imports, and says what its reference statistics say; the oracle is numpy."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from traces.importers import servegen
from traces.importers.intake import Intake, Options
from traces.importers.load import import_file, table
from traces.importers.sniff import format_of
from traces.importers.source import Source

pytestmark = pytest.mark.data
_ROOT = Path(os.environ.get("CONVOY_DATA", Path(__file__).resolve().parents[2] / "shared"))
_SIDECARS = {"meta.json", "timeseries.csv"}  # about a run, no requests


@cache
def expected() -> dict[str, dict]:
    path = _ROOT / "traces" / "EXPECTED.json"
    return json.loads(path.read_text())["files"] if path.exists() else {}


def reference(part: str) -> list[str]:
    return sorted(name for name in expected() if part in name and Path(name).name not in _SIDECARS)


REQUESTS = [name for name in reference("") if "span_s" in expected()[name] or "note" in expected()[name]]
HARS = reference(".har")
CLIENTS = [name for name in reference("servegen") if name.endswith("trace.csv")]


@cache
def imported(name: str):
    path = _ROOT / "traces" / name
    form = format_of(Source(path))
    assert form is not None
    return table(form, path)


def test_there_is_something_to_check():
    assert len(REQUESTS) >= 20
    assert len(CLIENTS) >= 15


@pytest.mark.parametrize("name", REQUESTS)
def test_rows_and_times_are_those_of_the_reference(name):
    trace, want = imported(name), expected()[name]
    arrival = trace["arrival_ns"].to_numpy()
    assert trace.num_rows == want["rows"]
    if "span_s" not in want:
        assert trace.schema.metadata[b"convoy.source"] == b"lengths"
        return
    assert (arrival[0], arrival[-1]) == (want["first_ns"], want["last_ns"])
    assert (arrival[-1] - arrival[0]) / 1e9 == want["span_s"]
    gaps = np.diff(arrival)
    assert int((gaps == 0).sum()) == want["equal_timestamp_steps"]
    assert gaps.std() / gaps.mean() == pytest.approx(want["iat_cv"], rel=1e-9)
    counts = np.bincount((arrival - arrival[0]) // 10**9)
    assert counts.var() / counts.mean() == pytest.approx(want["iod_1s"], rel=1e-9)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("column", ["input_tokens", "output_tokens"])
def test_lengths_are_those_of_the_reference(name, column):
    want = expected()[name].get(column)
    if want is None:
        assert column not in expected()[name]
        return
    tokens = imported(name)[column].to_numpy()
    found = {
        "p50": np.percentile(tokens, 50),
        "p95": np.percentile(tokens, 95),
        "p99": np.percentile(tokens, 99),
        "mean": tokens.mean(),
        "min": tokens.min(),
        "max": tokens.max(),
        "zeros": (tokens == 0).sum(),
    }
    assert found == pytest.approx(want, rel=1e-12)


def test_burstgpt_failures_are_no_token_rows_and_can_be_dropped():
    (name,) = reference("burstgpt")
    want, trace = expected()[name], imported(name)
    outcomes, models = trace["outcome"].to_pylist(), trace["model"].to_pylist()
    assert outcomes.count("no_token") == want["failed_rows_response_tokens_0"]
    assert {model: models.count(model) for model in want["models"]} == want["models"]
    kept = table("burstgpt", _ROOT / "traces" / name, Options(failed="drop"))
    assert kept.num_rows == want["excluding_failed_rows"]["rows"]
    assert kept["input_tokens"].to_numpy().mean() == want["excluding_failed_rows"]["input_tokens"]["mean"]


@pytest.mark.parametrize("name", reference("mooncake"))
def test_mooncake_prefix_blocks_are_kept(name):
    want, trace = expected()[name], imported(name)
    hashes = trace["block_hashes"].to_pylist()
    assert sum(map(len, hashes)) == want["total_hash_ids"]
    assert len({block for row in hashes for block in row}) == want["unique_hash_ids"]
    seen: set[int] = set()
    hits = 0
    for row in hashes:
        hits += next((at for at, block in enumerate(row) if block not in seen), len(row))
        seen.update(row)
    assert hits == want["leading_prefix_blocks_seen_before_infinite_cache"]


@pytest.mark.parametrize("name", reference("kv-cache-tester"))
def test_conversations_keep_turns_think_times_and_kind(name):
    want, trace = expected()[name], imported(name)
    rows = trace.to_pylist()
    assert [row["turn"] for row in rows] == list(range(len(rows)))
    assert {row["session_id"] for row in rows} == {Path(name).stem}
    assert {row["model"] for row in rows} <= set(want["models"])
    assert sum(row["stream"] for row in rows) == want["types"].get("s", 0)
    assert sum(row["first_token_ns"] is not None for row in rows) == want["rows_with_ttft"]
    assert sum(row["end_ns"] is None for row in rows) == want["rows_without_api_time"]
    assert sum(row["end_ns"] or 0 for row in rows) == round(want["sum_api_time_s"] * 1e9)
    assert sum(row["think_ns"] or 0 for row in rows) == round(want["sum_think_time_s"] * 1e9)
    assert all(len(row["block_hashes"]) == row["input_tokens"] // 64 for row in rows)
    nested = table("kvcache", _ROOT / "traces" / name, Options(subagents="keep"))
    assert nested.num_rows == want["top_level_requests"] + want["nested_subagent_requests"]


def test_a_folder_of_conversations_shares_no_blocks_between_them(data, tmp_path):
    folder = data("traces", "traces", "kv-cache-tester")
    intake = import_file("kvcache", folder, tmp_path / "all.parquet", Options())
    assert intake.rows == sum(expected()[name]["rows"] for name in reference("kv-cache-tester"))
    owners: dict[int, str] = {}
    for row in table("kvcache", folder).select(["session_id", "block_hashes"]).to_pylist():
        for block in row["block_hashes"]:
            assert owners.setdefault(block, row["session_id"]) == row["session_id"]


@pytest.mark.parametrize("name", reference("llmservingsim-vllm-runs"))
def test_a_vllm_run_keeps_its_measured_times(name):
    want, trace = expected()[name], imported(name)
    first, last = trace["first_token_ns"].to_numpy() / 1e9, trace["last_token_ns"].to_numpy() / 1e9
    tpot = (last - first) / (trace["output_tokens"].to_numpy() - 1)
    for key, values in (
        ("ttft_s_first_token_minus_queued", first),
        ("e2e_s_last_token_minus_queued", last),
        ("tpot_s", tpot),
    ):
        assert np.percentile(values, 50) == pytest.approx(want[key]["p50"], abs=1e-8)
        assert np.percentile(values, 99) == pytest.approx(want[key]["p99"], abs=1e-8)
        assert values.mean() == pytest.approx(want[key]["mean"], abs=1e-8)


def test_vidur_and_azure_code_are_the_same_trace():
    (azure,) = reference("azure2023/AzureLLMInferenceTrace_code")
    (vidur,) = reference("vidur/splitwise_code")
    one, other = imported(azure), imported(vidur)
    assert one["input_tokens"].equals(other["input_tokens"])
    assert one["output_tokens"].equals(other["output_tokens"])
    times = one["arrival_ns"].to_numpy() - one["arrival_ns"][0].as_py()
    assert np.abs(times - other["arrival_ns"].to_numpy()).max() < 1000


@pytest.mark.parametrize("name", HARS)
def test_har_entries_are_rows_with_their_status(name):
    want = expected()[name]
    rows = table("har", _ROOT / "traces" / name).to_pylist()
    assert len(rows) == want["har_entries"]
    assert sorted(row["status"] or 0 for row in rows) == sorted(want["statuses"])
    for row in rows:
        assert (row["outcome"] == "connect_error") == (row["status"] is None)
        assert row["headers_ns"] is None or 0 <= row["headers_ns"] <= row["end_ns"]


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("successful_log.mitm", [200, 200]),
        ("error_log.mitm", [None, 405]),
        ("dumpfile-7.mitm", [200, 200]),
        ("dumpfile-018.mitm", [200]),
        ("dumpfile-19.mitm", [200]),
    ],
)
def test_flow_dumps_of_every_version_import(data, name, statuses):
    rows = table("mitm", data("traces", "recordings", "mitmproxy", name)).to_pylist()
    assert [row["status"] for row in rows] == statuses
    assert all(row["end_ns"] >= (row["headers_ns"] or 0) for row in rows)


@pytest.mark.parametrize("name", CLIENTS)
def test_servegen_clients_are_read_as_published(name):
    want = expected()[name]
    path = _ROOT / "traces" / name
    found = servegen.windows(path)
    assert len(found.start_s) == want["windows"]
    assert [found.step_s] == want["window_s"]
    assert (found.start_s[0], found.start_s[-1]) == (want["first_s"], want["last_s"])
    assert found.rate_rps.mean() == pytest.approx(want["mean_rate_rps"])
    assert found.rate_rps.max() == want["max_rate_rps"]
    assert {pattern: found.pattern.count(pattern) for pattern in want["patterns"]} == want["patterns"]
    assert (found.rate_rps * 600).sum() == pytest.approx(want["expected_requests_total"])
    patterned = [cv for cv, pattern in zip(found.cv, found.pattern, strict=True) if pattern]
    assert np.percentile(patterned, 50) == pytest.approx(want["cv_p50_where_pattern"])
    about = expected()[name.replace("-trace.csv", "-dataset.json")]
    assert {field for fields in servegen.dataset(path).values() for field in fields} <= set(about["fields"])


def test_a_trace_drawn_from_servegen_has_the_asked_rate_and_is_reproducible(data):
    folder = data("traces", "traces", "servegen", "multimodal", "mm-image")
    options = Options(seed=3, start_ns=3600 * 10**9, duration_ns=2 * 3600 * 10**9)
    trace = table("servegen", folder, options)
    rates = []
    for client in servegen.load(folder, "mm-image"):
        here = (client.windows.start_s >= 3600) & (client.windows.start_s < 3 * 3600)
        rates.append(client.windows.rate_rps[here].sum() * 600)
    assert trace.num_rows == pytest.approx(sum(rates), rel=0.05)
    assert trace["arrival_ns"].to_numpy().max() < 2 * 3600 * 10**9
    assert trace.equals(table("servegen", folder, options))
    assert not trace.equals(table("servegen", folder, options._replace(seed=4)))


def test_every_file_of_the_reference_is_told_by_its_content():
    forms = {name: format_of(Source(_ROOT / "traces" / name)) for name in [*REQUESTS, *HARS, *reference("servegen")]}
    assert None not in forms.values()
    for part, form in (
        ("azure", "azure"),
        ("burstgpt", "burstgpt"),
        ("mooncake", "mooncake"),
        (".har", "har"),
        ("servegen", "servegen"),
    ):
        assert {forms[name] for name in forms if part in name} == {form}


def test_the_goreplay_recording_has_its_requests():
    (name,) = reference("goreplay")
    rows = imported(name).to_pylist()
    assert len({row["request_id"] for row in rows}) == expected()[name]["unique_ids"]
    assert Intake(name).rows == 0
