"""Predicted beside measured: two runs of real vLLM published by LLMServingSim, 300 ShareGPT requests each.

Inputs are arrival times, lengths and the run's engine settings. Three predictions, kept apart:

    operator tables   the additive step model with the constants read from the published operator tables alone
    all tables        the same with what those tables say of mixed batches, and the published whole-step table
    (profiles.toml) fitted            three factors of the latter (fixed cost, linear layers, attention) fitted on the
    run's first 150
    requests;
                      judged on the other 150

    CONVOY_DATA=... python benchmarks/engine_llmservingsim.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares

from replay.engine.config import SchedulerConfig
from replay.engine.steptime import StepModel, load_profile
from replay.engine.virtual import Workload, simulate

RUNS = Path(os.environ.get("CONVOY_DATA", "../shared")) / "traces" / "traces" / "llmservingsim-vllm-runs"
HALF = 150
AIM = {50: 5.0, 95: 10.0}


class Machine(NamedTuple):
    """One published run: its folder, its profile, its slots (from its meta.json) and the plain operator constants."""

    folder: str
    profile: str
    max_num_seqs: int
    operators: StepModel


MACHINES = (
    Machine(
        "RTX4090__Llama-3.1-8B",
        "llama3.1-8b-rtx4090",
        256,
        StepModel(
            w_ms=15.49,
            u_ms=0.0315,
            g0_ms=5.61,
            g_ms=0.0878,
            d0_ms=1.27,
            k_ms=1.37e-4,
            a_ms=3.7e-6,
            h0_ms=1.1,
            h_ms=2.35e-3,
        ),
    ),
    Machine(
        "RTXPRO6000__Llama-3.1-8B",
        "llama3.1-8b-rtxpro6000",
        128,
        StepModel(
            w_ms=9.99,
            u_ms=0.015,
            g0_ms=5.46,
            g_ms=0.0352,
            d0_ms=1.13,
            k_ms=8.57e-5,
            a_ms=1.9e-6,
            h0_ms=0.7,
            h_ms=3.9e-4,
        ),
    ),
)


class Times(NamedTuple):
    """TTFT, TPOT and E2E of each request, in s."""

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray


def times(start: np.ndarray, first: np.ndarray, last: np.ndarray, outputs: np.ndarray) -> Times:
    return Times(first - start, (last - first) / np.maximum(outputs - 1, 1), last - start)


def predict(rows: list[dict[str, float]], config: SchedulerConfig, model: StepModel) -> Times:
    queued = np.array([row["queued_ts"] for row in rows])
    outputs = np.array([row["output_toks"] for row in rows])
    work = Workload(
        arrival_ns=((queued - queued.min()) * 1e9).astype(np.int64),
        input_tokens=np.array([row["input_toks"] for row in rows]),
        output_tokens=outputs,
    )
    result = simulate(work, config, model)
    return times(*(column / 1e9 for column in (result.sent_ns, result.first_token_ns, result.last_token_ns)), outputs)


def scaled(model: StepModel, fixed_ms: float, linear: float, attention: float) -> StepModel:
    def times_attention(value: float | None) -> float | None:
        return None if value is None else value * attention

    return msgspec.structs.replace(
        model,
        t0_ms=model.t0_ms + fixed_ms,
        w_ms=model.w_ms * linear,
        u_ms=model.u_ms * linear,
        g0_ms=model.g0_ms * linear,
        g_ms=model.g_ms * linear,
        k_ms=model.k_ms * attention,
        km_ms=times_attention(model.km_ms),
        a_ms=model.a_ms * attention,
    )


def fit(
    rows: list[dict[str, float]], config: SchedulerConfig, model: StepModel, measured: Times
) -> tuple[StepModel, str]:
    """Fit on TPOT and E2E of the first requests; TTFT, the difference of large numbers under overload, follows."""
    plain = dataclasses.replace(config, async_scheduling=False)  # leaps: fast enough to fit with

    def residuals(x: np.ndarray) -> np.ndarray:
        got = predict(rows, plain, scaled(model, *x))
        pairs = ((got.tpot, measured.tpot), (got.e2e, measured.e2e))
        return np.concatenate([np.log(ours[5:HALF] / theirs[5:HALF]) for ours, theirs in pairs])

    bounds = ([-1.5, 0.7, 0.7], [6.0, 1.5, 1.5])
    found = least_squares(residuals, [0.0, 1.0, 1.0], diff_step=0.02, bounds=bounds, max_nfev=12)
    note = "fixed {:+.2f} ms, linear ×{:.3f}, attention ×{:.3f}".format(*found.x)
    return scaled(model, *found.x), note


def table(title: str, measured: Times, predicted: Times) -> bool:
    print(f"\n  {title}")
    print(f"  {'':6}" + "".join(f"{f'P{q} measured':>15}{'predicted':>11}{'error':>8}" for q in (50, 95, 99)))
    met = True
    for name in Times._fields:
        unit, scale = ("ms", 1e3) if name == "tpot" else ("s", 1.0)
        line = f"  {name.upper():6}"
        for q in (50, 95, 99):
            theirs = np.percentile(getattr(measured, name), q, method="inverted_cdf") * scale
            ours = np.percentile(getattr(predicted, name), q, method="inverted_cdf") * scale
            error = 100 * (ours / theirs - 1)
            met = met and abs(error) <= AIM.get(q, np.inf)
            line += f"{theirs:12.2f} {unit:2}{ours:11.2f}{error:+7.1f}%"
        print(line)
    print(f"  aim (5 % at P50, 10 % at P95): {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    if not RUNS.is_dir():
        print(f"{RUNS}: absent; set CONVOY_DATA to the reference data folder", file=sys.stderr)
        return 2
    for machine in MACHINES:
        rows = [json.loads(line) for line in (RUNS / machine.folder / "requests.jsonl").read_text().splitlines()]
        queued, first, last, outputs = (
            np.array([row[key] for row in rows])
            for key in ("queued_ts", "first_token_ts", "last_token_ts", "output_toks")
        )
        measured = times(queued, first, last, outputs)
        profile = load_profile(machine.profile)
        config = SchedulerConfig(
            max_num_seqs=machine.max_num_seqs,
            num_gpu_blocks=profile.num_gpu_blocks,
            max_model_len=profile.max_model_len,
            async_scheduling=True,
            engine_version="0.32",
        )
        print(f"\n{machine.folder}: {len(rows)} requests, vLLM 0.19, {config.max_num_seqs} slots")
        table("operator tables", measured, predict(rows, config, machine.operators))
        table("all tables", measured, predict(rows, config, profile.model))
        model, note = fit(rows, config, profile.model, measured)
        fitted = predict(rows, config, model)
        rest = (Times(*(column[HALF:] for column in t)) for t in (measured, fitted))
        table(f"fitted on the first {HALF} ({note}), judged on the other {len(rows) - HALF}", *rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
