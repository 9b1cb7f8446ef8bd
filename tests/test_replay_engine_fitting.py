"""Fitting recovers a model from the readings it would give, noise and one outlier included."""

from __future__ import annotations

import numpy as np
import pytest

from replay.engine.fitting import Observation, fit, predicted_ms
from replay.engine.steptime import StepModel, load_profile, profile_names


def readings(model, api_ms=2.0, noise=0.0, seed=1):
    generator = np.random.default_rng(seed)
    seen = []
    for tokens in (16, 64, 128, 256, 512, 1024, 1536, 2048) * 2:
        time_ms = api_ms + model.duration_ns(tokens, 0, 0, tokens * tokens / 2, 1) / 1e6
        seen.append(Observation(tokens, 0, 0.0, time_ms))
    for rows in (1, 2, 4, 8, 16, 32):
        for each in (64, 512, 1536):
            time_ms = model.duration_ns(rows, rows, rows * each, 0.0, rows) / 1e6
            seen.append(Observation(0, rows, rows * each, time_ms))
            if rows > 4:
                mixed = model.duration_ns(rows + 512, rows, rows * each, 512 * 256, rows + 1) / 1e6
                seen.append(Observation(512, rows, rows * each, mixed))
    factors = np.exp(noise * generator.standard_normal(len(seen)))
    return [reading._replace(seen_ms=reading.seen_ms * factor) for reading, factor in zip(seen, factors, strict=True)]


@pytest.mark.parametrize("name", [name for name in profile_names() if "rtx" not in name])
def test_step_times_of_every_modelled_profile_come_back(name):
    model = load_profile(name).model
    fitted = fit(readings(model))
    assert fitted.error_p95 < 0.01
    for tokens, rows, context in ((1, 1, 3000), (48, 48, 48 * 800), (700, 0, 0), (2048, 0, 0)):
        samples, area = (rows, 0.0) if rows else (1, tokens * tokens / 2)
        truth = model.duration_ns(tokens, rows, context, area, samples)
        assert fitted.model.duration_ns(tokens, rows, context, area, samples) == pytest.approx(truth, rel=0.02)


def test_decodes_served_less_well_beside_a_prefill_are_told():
    model = StepModel(w_ms=10.0, u_ms=0.02, g0_ms=5.0, g_ms=0.04, k_ms=1e-4, dm_ms=2.0, km_ms=2e-4)
    fitted = fit(readings(model)).model
    assert fitted.k_ms == pytest.approx(1e-4, rel=0.05)
    assert fitted.km_ms == pytest.approx(2e-4, rel=0.1)
    for load in ((532, 20, 20_000, 512 * 256, 20), (20, 20, 20_000, 0.0, 20)):
        assert fitted.duration_ns(*load) == pytest.approx(model.duration_ns(*load), rel=0.02)


def test_without_mixed_readings_decodes_cost_the_same_in_every_step():
    fitted = fit([reading for reading in readings(load_profile().model) if reading.kind != "mixed"]).model
    assert (fitted.dm_ms, fitted.km_ms) == (0.0, fitted.k_ms)


def test_noise_and_an_outlier_hardly_bend_it():
    model = load_profile().model
    noisy = readings(model, noise=0.03)
    noisy[3] = noisy[3]._replace(seen_ms=noisy[3].seen_ms * 3)
    fitted = fit(noisy)
    assert fitted.error_p50 < 0.05
    for load in ((2048, 0, 0, 2048 * 1024, 1), (32, 32, 32 * 1536, 0.0, 32), (1, 1, 64, 0.0, 1)):
        assert fitted.model.duration_ns(*load) == pytest.approx(model.duration_ns(*load), rel=0.08)


def test_readings_of_one_kind_are_not_enough():
    with pytest.raises(ValueError, match="too few readings"):
        fit([reading for reading in readings(load_profile().model) if not reading.rows])


def test_a_prediction_is_in_the_readings_own_terms():
    fitted = fit(readings(load_profile().model, api_ms=5.0))
    reading = readings(load_profile().model, api_ms=5.0)[4]
    assert predicted_ms(fitted, reading) == pytest.approx(reading.seen_ms, rel=0.01)
    assert fitted.api_ms == pytest.approx(5.0, abs=1.5)
