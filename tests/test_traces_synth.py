"""A model is small, holds no row of the trace, and what is drawn from it is like the trace it was fitted to."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import mixture, modulated, parquet, synthesis
from traces.burstiness import counts
from traces.cli import traces as group
from traces.columns import gather
from traces.errors import TraceError
from traces.goodness import compare
from traces.profile import profile
from traces.record import Metadata, metadata_of, table
from traces.synthdraw import draw

S = 1_000_000_000


def run(*args):
    return CliRunner().invoke(group, ["synth", *map(str, args)], standalone_mode=False)


def ns(times_s) -> np.ndarray:
    return (np.asarray(times_s) * S).astype(np.int64)


@pytest.fixture
def two_states(monkeypatch):
    """Fits try two states only: quick, and enough for what the tests draw."""
    monkeypatch.setattr(modulated, "_STATES", (2,))


# ---- arrivals ---------------------------------------------------------------------------------------------------


def test_the_hidden_chain_is_found_again(two_states):
    true = modulated.Chain(1.0, np.array([0.5, 20.0]), np.array([[0.95, 0.05], [0.1, 0.9]]))
    found = modulated.fit(ns(modulated.draw(true, 1500, np.random.default_rng(1))))
    order = np.argsort(found.rates_rps)
    assert found.rates_rps[order] == pytest.approx([0.5, 20], rel=0.1)
    assert np.diag(found.transitions)[order] == pytest.approx([0.95, 0.9], abs=0.03)


def test_a_chain_draws_its_stationary_rate_and_its_dispersion():
    chain = modulated.Chain(1.0, np.array([0.0, 30.0]), np.array([[0.9, 0.1], [0.3, 0.7]]))
    assert chain.stationary() == pytest.approx([0.75, 0.25])
    times = modulated.draw(chain, 20_000, np.random.default_rng(3))
    assert len(times) / 20_000 == pytest.approx(7.5, rel=0.05)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < 20_000
    # in one window Var N = E[r] + Var r, so IDC = 1 + Var r / E r = 1 + 30²·0.25·0.75 / 7.5 = 23.5; windows that are
    # not aligned to the states see a little less
    assert {point.window_s: point.idc for point in counts(ns(times)).curve}[1] == pytest.approx(23.5, rel=0.15)


@pytest.mark.parametrize("kind", ["gamma", "weibull", "lognormal"])
def test_renewal_gaps_have_the_rate_and_the_variation_of_their_shape(kind):
    arrivals = synthesis.Arrivals(kind=kind, rate_rps=4.0, shape=0.6)
    times = synthesis.draw_arrivals(arrivals, 20_000, np.random.default_rng(2))
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(4, rel=0.05)
    from math import exp, gamma, sqrt

    cv = {
        "gamma": 1 / sqrt(0.6),
        "weibull": sqrt(gamma(1 + 2 / 0.6) / gamma(1 + 1 / 0.6) ** 2 - 1),
        "lognormal": sqrt(exp(0.36) - 1),
    }[kind]
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(
    ("true", "kinds"),
    [
        (synthesis.Arrivals(kind="poisson", rate_rps=5.0), {"poisson", "gamma", "weibull", "mmpp"}),
        (synthesis.Arrivals(kind="gamma", rate_rps=5.0, shape=0.2), {"gamma", "weibull", "lognormal", "mmpp"}),
        (
            synthesis.Arrivals(
                kind="mmpp",
                rate_rps=5.0,
                window_s=1.0,
                rates_rps=[0.5, 25.0],
                transitions=[[0.97, 0.03], [0.1, 0.9]],
            ),
            {"mmpp"},
        ),
    ],
)
def test_the_fitted_process_has_the_dispersion_curve_of_the_trace(true, kinds, two_states):
    generator = np.random.default_rng(4)
    arrival = ns(synthesis.draw_arrivals(true, 1500, generator))
    found = synthesis.fit_arrivals(arrival, 1500.0, generator)
    assert found.kind in kinds
    drawn = {p.window_s: p.idc for p in counts(ns(synthesis.draw_arrivals(found, 1500, generator))).curve}
    for point in counts(arrival).curve:
        if point.window_s <= 10:
            assert 0.5 < drawn[point.window_s] / point.idc < 2


# ---- lengths ----------------------------------------------------------------------------------------------------


def test_a_mixture_of_two_kinds_of_request_is_found_again():
    generator = np.random.default_rng(6)
    short = np.exp(generator.multivariate_normal([4, 3], [[0.04, 0.03], [0.03, 0.04]], size=3000))
    long = np.exp(generator.multivariate_normal([8, 6], [[0.25, 0], [0, 0.09]], size=1000))
    found = mixture.fit(np.concatenate([short, long]), generator)
    order = np.argsort(found.means[:, 0])
    assert len(order) == 2
    assert found.weights[order] == pytest.approx([0.75, 0.25], abs=0.02)
    assert found.means[order] == pytest.approx(np.array([[4, 3], [8, 6]]), abs=0.05)
    together = found.covariances[order[0]]
    assert together[0, 1] / np.sqrt(together[0, 0] * together[1, 1]) == pytest.approx(0.75, abs=0.05)


def test_a_length_that_all_requests_share_is_a_spike_and_no_singularity():
    drawn = mixture.draw(mixture.fit(np.full((500, 1), 512.0), np.random.default_rng(0)), 100, np.random.default_rng(1))
    assert np.median(drawn) == pytest.approx(512, rel=0.02)


# ---- models -----------------------------------------------------------------------------------------------------

figures = st.floats(0.001, 1000, allow_nan=False).map(lambda value: float(f"{value:.5g}"))
names = st.text(min_size=1, max_size=8)


@given(
    tenants=st.dictionaries(
        names,
        st.builds(
            synthesis.Tenant,
            arrivals=st.builds(
                synthesis.Arrivals,
                kind=st.sampled_from(["gamma", "mmpp"]),
                rate_rps=figures,
                rates_rps=st.lists(figures, max_size=3),
                transitions=st.lists(st.lists(figures, min_size=1, max_size=2), max_size=2),
            ),
            lengths=st.none()
            | st.builds(
                synthesis.Lengths,
                of=st.just(["input"]),
                most=st.just([1000]),
                components=st.lists(
                    st.builds(synthesis.Component, weight=figures, mean=st.lists(figures), sd=st.lists(figures)),
                    min_size=1,
                ),
            ),
            priority=st.none() | st.integers(0, 5),
            endpoint=st.none() | names,
            models=st.dictionaries(names, figures, max_size=2),
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=60)
def test_toml_is_read_back_as_it_was_written(tenants):
    model = synthesis.Model(version=1, rows=10, span_s=3.5, tenants=tenants)
    assert synthesis.from_toml(synthesis.to_toml(model), "model.toml") == model


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rows = ", "not a model"),
        ("rows = 3", "version"),
        ("version=9\nrows=1\nspan_s=1.0\n[tenants]", "model version 9"),
    ],
)
def test_a_file_that_is_no_model_is_named_with_what_is_wrong(text, says):
    with pytest.raises(TraceError, match=says) as caught:
        synthesis.from_toml(text, "model.toml")
    assert str(caught.value).startswith("model.toml: ")


def mixed_trace(rows=3000) -> object:
    """Two tenants: `risk` short and bursty, `agent` in conversations whose prompts grow, with prefix blocks."""
    generator = np.random.default_rng(12)
    columns: dict[str, list] = {name: [] for name in ("arrival_ns", "tenant", "session_id", "turn", "think_ns",
                                                      "input_tokens", "output_tokens", "block_hashes")}  # fmt: skip
    chain = modulated.Chain(1.0, np.array([0.5, 12.0]), np.array([[0.95, 0.05], [0.15, 0.85]]))
    for time in ns(modulated.draw(chain, rows / 5, generator)).tolist():
        row = (time, "risk", None, None, None, int(generator.lognormal(4, 0.3)) + 1, 80, None)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    fresh = 1000
    for number in range(rows // 30):
        gap, time, prompt, blocks = 0.0, float(generator.random() * rows / 5), 200, list(range(1, 9))
        for turn in range(1 + int(generator.geometric(0.4))):
            answer = int(generator.lognormal(5, 0.4)) + 1
            blocks = blocks + list(range(fresh, fresh + prompt // 16 - len(blocks)))
            fresh += 1000
            think = None if turn == 0 else int(0.8 * gap * S)
            row = (int(time * S), "agent", f"c{number}", turn, think, prompt, answer, blocks)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            gap = float(generator.lognormal(1.5, 0.5))
            time, prompt = time + gap, prompt + answer + int(generator.lognormal(4, 0.3))
    columns |= {"block_size": [None if blocks is None else 16 for blocks in columns["block_hashes"]]}
    columns |= {"priority": [0 if tenant == "risk" else 1 for tenant in columns["tenant"]]}
    columns |= {"stream": [tenant == "risk" for tenant in columns["tenant"]], "model": ["m"] * len(columns["tenant"])}
    return parquet.in_order(table(columns, Metadata()))


def test_tenants_conversations_and_prefixes_come_back_in_a_draw(two_states):
    trace = gather(mixed_trace().to_batches())
    model = synthesis.fit(trace, timed=True)
    again = synthesis.from_toml(synthesis.to_toml(model), "model.toml")
    drawn = draw(again, 2 * model.span_s, seed=5)
    old, new = profile(trace), profile(gather(drawn.to_batches()))
    assert new["span_s"] == pytest.approx(2 * old["span_s"], rel=0.05)
    for name in ("risk", "agent"):
        one, two = old["tenants"][name], new["tenants"][name]
        assert two["rows"] == pytest.approx(2 * one["rows"], rel=0.2)
        assert two["input_tokens"]["p50"] == pytest.approx(one["input_tokens"]["p50"], rel=0.15)
        assert two["output_tokens"]["p50"] == pytest.approx(one["output_tokens"]["p50"], rel=0.1)
    one, two = old["tenants"]["agent"], new["tenants"]["agent"]
    assert two["sessions"]["turns"]["mean"] == pytest.approx(one["sessions"]["turns"]["mean"], rel=0.15)
    assert two["sessions"]["think_s"]["p50"] == pytest.approx(one["sessions"]["think_s"]["p50"], rel=0.15)
    assert two["prefix"]["ideal_hit_rate"] == pytest.approx(one["prefix"]["ideal_hit_rate"], abs=0.1)
    rows = drawn.to_pylist()
    assert {(row["tenant"], row["priority"], row["stream"], row["model"]) for row in rows} == {
        ("risk", 0, True, "m"),
        ("agent", 1, False, "m"),
    }
    assert len({row["request_id"] for row in rows}) == len(rows)
    turns = {}
    for row in rows:  # a later turn holds the former prompt, block by block
        if row["session_id"] in turns:
            former = turns[row["session_id"]]
            assert row["block_hashes"][: len(former["block_hashes"])] == former["block_hashes"]
            assert row["input_tokens"] > former["input_tokens"]
            assert row["turn"] == former["turn"] + 1
        turns[row["session_id"] or row["request_id"]] = row


def test_a_draw_follows_from_its_seed_alone(two_states):
    model = synthesis.fit(gather(mixed_trace(600).to_batches()), timed=True)
    one, two, other = (draw(model, 60, seed=seed) for seed in (1, 1, 2))
    assert one.equals(two)
    assert not one.equals(other)
    assert metadata_of(one).history == ("synth draw (seed 1)",)


def test_no_row_of_the_trace_is_in_the_model(two_states):
    secret = 54_321
    trace = table({"arrival_ns": np.arange(100) * S, "input_tokens": [secret] + [100] * 99}, Metadata())
    text = synthesis.to_toml(synthesis.fit(gather(trace.to_batches()), timed=True))
    assert str(secret) not in text
    assert "most = [55000]" in text


def test_goodness_sees_a_shift_that_a_mean_would_hide():
    generator = np.random.default_rng(1)
    arrival = np.sort(generator.integers(0, 500 * S, size=2000))

    def with_inputs(values):
        return gather(table({"arrival_ns": arrival, "input_tokens": values}, Metadata()).to_batches())

    constant, spread = with_inputs(np.full(2000, 100)), with_inputs(generator.integers(1, 200, size=2000))
    rows = {row.what: row for row in compare(constant, spread)}
    assert rows["input tokens P50"].distance == pytest.approx(0.5, abs=0.05)
    assert rows["inter-arrival CV"].distance == 0
    assert {row.distance for row in compare(spread, spread) if row.distance is not None} == {0}


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.data
def test_the_azure_code_trace_keeps_its_bursts_through_a_model(data, tmp_path):
    path = data("traces", "traces", "azure2023", "AzureLLMInferenceTrace_code.rows1-5000.csv")
    done = run("fit", path, "-o", tmp_path / "code.toml", "--json")
    rows = {row["what"]: row for row in json.loads(done.stdout)["tenants"]["untagged"]}
    for width in ("0.1", "1", "10"):
        row = rows[f"dispersion at {width} s"]
        assert row["model"] == pytest.approx(row["trace"], rel=0.5)
    assert rows["input tokens P50"]["distance"] < 0.08
    assert rows["output tokens P50"]["distance"] < 0.08
    assert (tmp_path / "code.toml").stat().st_size < 5000
    done = run("draw", tmp_path / "code.toml", "-o", tmp_path / "new.parquet", "--duration", "10m", "--seed", "3")
    assert done.exception is None
    assert parquet.read(tmp_path / "new.parquet").column("arrival_ns")[-1].as_py() < 600 * S


def test_lengths_alone_are_fitted_and_timed_by_a_rate(tmp_path):
    parquet.write(table({"arrival_ns": [0] * 400, "input_tokens": range(1, 401)}, Metadata(source="lengths")),
                  tmp_path / "lengths.parquet")  # fmt: skip
    done = run("fit", tmp_path / "lengths.parquet", "-o", tmp_path / "m.toml")
    assert done.output.startswith("untagged: arrivals: no; lengths: ")
    assert "mean rate" not in done.output
    out = tmp_path / "new.parquet"
    done = run("draw", tmp_path / "m.toml", "-o", out, "--duration", "100s")
    assert "--rps 5" in str(done.exception)
    assert run("draw", tmp_path / "m.toml", "-o", out, "--duration", "100s", "--rps", "5").exception is None
    assert parquet.read(out).num_rows == pytest.approx(500, rel=0.2)


def test_nothing_is_overwritten(tmp_path):
    for name in ("m.toml", "t.parquet"):
        (tmp_path / name).write_text("mine")
    assert "exists" in run("fit", "whatever", "-o", tmp_path / "m.toml").exception.format_message()
    assert "exists" in run("draw", tmp_path / "m.toml", "-o", tmp_path / "t.parquet").exception.format_message()
