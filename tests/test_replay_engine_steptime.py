"""The step-time model: its terms, its profiles, and its exact twin in whole picoseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.engine.steptime import DEFAULT_PROFILE, PicoClock, StepModel, load_profile, profile_names

MODEL = StepModel(
    t0_ms=1.0, w_ms=10.0, u_ms=0.5, g0_ms=2.0, g_ms=1.0, d0_ms=0.25, k_ms=0.01, a_ms=0.001, h0_ms=0.125, h_ms=0.0625
)


@pytest.mark.parametrize(
    ("load", "milliseconds", "why"),
    [
        ((0, 0, 0, 0.0, 0), 0.0, "no token, no time"),
        ((1, 1, 100, 0.0, 1), 1 + 10.5 + 0.25 + 1 + 0.125 + 0.0625, "one decode: weights bound the linear layers"),
        ((16, 0, 0, 128.0, 1), 1 + 18 + 0.128 + 0.1875, "a prompt of 16: both lines meet at 16 tokens"),
        ((40, 0, 0, 800.0, 0), 1 + 42 + 0.8, "a chunk that completes nothing: arithmetic bounds, no row sampled"),
    ],
)
def test_a_step_takes_the_sum_of_its_parts(load, milliseconds, why):
    assert MODEL.duration_ns(*load) == pytest.approx(milliseconds * 1e6), why


def test_a_step_that_also_prefills_serves_its_decodes_less_well():
    model = StepModel(g_ms=1.0, d0_ms=1.0, k_ms=0.01, dm_ms=2.0, km_ms=0.02)
    assert model.duration_ns(4, 4, 100, 0.0, 4) == pytest.approx((4 + 1 + 1) * 1e6)
    assert model.duration_ns(9, 4, 100, 0.0, 4) == pytest.approx((9 + 2 + 2) * 1e6)


def test_a_step_above_the_captured_graphs_costs_more():
    model = StepModel(t0_ms=1.0, te_ms=2.0, graph_tokens=8, g_ms=1.0)
    assert [model.duration_ns(n, n, 0, 0.0, n) / 1e6 for n in (8, 9)] == [9.0, 12.0]


def test_a_table_of_measured_points_is_interpolated_and_extended():
    model = StepModel(linear=((1, 10.0), (11, 20.0), (21, 50.0)))
    assert [model.linear_ms(n) for n in (1, 6, 11, 16, 31)] == [10.0, 15.0, 20.0, 35.0, 80.0]


@given(rows=st.integers(1, 300), context=st.integers(1, 10**6), steps=st.integers(1, 5000))
def test_many_decode_steps_at_once_take_exactly_what_they_take_one_by_one(rows, context, steps):
    clock = PicoClock(load_profile().model)
    one_by_one = sum(clock.duration_ps(rows, rows, context + rows * m, 0.0, rows) for m in range(min(steps, 200)))
    assert clock.decoding_ps(rows, context, min(steps, 200)) == one_by_one


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_says_where_it_comes_from_and_gives_plausible_times(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.provenance == "modelled, not measured" or profile.provenance.startswith("fitted from")
    assert 3e6 < profile.model.duration_ns(1, 1, 100, 0.0, 1) < 100e6


def test_the_default_profile_gives_the_times_its_sources_state():
    model = load_profile(DEFAULT_PROFILE).model
    assert model.duration_ns(1, 1, 1000, 0.0, 1) / 1e6 == pytest.approx(11.4, abs=0.05)
    assert model.duration_ns(2048, 0, 0, 2048 * 1024, 1) / 1e6 == pytest.approx(150.4, abs=0.5)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown profile 'b200'.*llama3-8b-a100-80"):
        load_profile("b200")


def test_a_profile_file_that_is_none_says_what_is_wrong(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('provenance = "measured"\n')
    with pytest.raises(ValueError, match=r"mine.toml.*model"):
        load_profile(str(path))
    with pytest.raises(ValueError, match=r"gone.toml: No such file"):
        load_profile(str(tmp_path / "gone.toml"))


def test_alone_is_the_chunks_one_after_another():
    assert MODEL.alone_ns(40, 24) == MODEL.duration_ns(24, 0, 0, 288.0, 0) + MODEL.duration_ns(16, 0, 0, 16 * 32, 1)
