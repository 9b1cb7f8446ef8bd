"""A profile in words: what is unusual about a trace, and what that means for a test.

Each finding is a rule over the figures of `traces.profile`: a sentence with the figure beside the one that Poisson
arrivals (or plain traffic) would have, and what follows for whoever replays the trace. Findings stand in the order
times, lengths, kinds, sessions, tenants, size of the sample. `headline` is the trace in one sentence, `comparison` is
two traces side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from traces.units import NS_PER_S, show_ns

Profile = dict[str, Any]

_TAIL_ROWS = 200  # below this the longest 1 % is one request or two


class Finding(msgspec.Struct, frozen=True):
    """One thing worth knowing."""

    topic: str
    text: str
    means: str


def findings(profile: Profile) -> list[Finding]:
    """All that the rules find."""
    rules: tuple[Callable[[Profile], Iterator[Finding]], ...] = (
        _bursts,
        _silence,
        _slow_changes,
        _timestamps,
        _balance,
        _tails,
        _failures,
        _sessions,
        _prefix,
        _tenants,
        _sample,
    )
    return [finding for rule in rules for finding in rule(profile)]


def headline(profile: Profile) -> str:
    """The trace in one sentence."""
    rows = f"{profile['rows']:,} requests"
    if not profile.get("mean_rate_rps"):
        when = "without a span of time" if "span_s" in profile else "without arrival times"
        return ", ".join([f"{rows} {when}", *_balance_word(profile)])
    parts = [f"{rows} in {seconds(profile['span_s'])} at {rate(profile['mean_rate_rps'])}"]
    point = base_point(profile)
    if point:
        parts.append(f"{burst_word(point)} at {seconds(point['window_s'])} (dispersion {point['idc']:.3g}, Poisson 1)")
    return ", ".join([*parts, *_balance_word(profile)])


def comparison(one: str, first: Profile, two: str, second: Profile) -> list[str]:
    """How two traces differ in burstiness and length, in sentences that name both figures."""
    found: list[str] = []
    curves = [{point["window_s"]: point for point in profile.get("idc_curve", [])} for profile in (first, second)]
    shared = sorted(curves[0].keys() & curves[1].keys())
    start = max(
        (profile["autocorrelation"]["window_s"] for profile in (first, second) if "autocorrelation" in profile),
        default=0,
    )
    for width in [w for w in (1, 10, 60, 600) if w in shared and w >= start] or shared[-1:]:
        a, b = curves[0][width]["idc"], curves[1][width]["idc"]
        found.append(_bursts_compared(one, a, two, b, width, first=not found))
    ratios = [profile.get("per_second_p99_over_mean") for profile in (first, second)]
    if all(ratios) and start == 1:
        found.append(
            f"The 99th percentile of requests in a second is {ratios[0]:.3g} times the mean in {one}, "
            f"{ratios[1]:.3g} times in {two}; the longest silence {seconds(first['iat_max_s'])} against "
            f"{seconds(second['iat_max_s'])}."
        )
    balances = [profile.get("prefill_decode_ratio") for profile in (first, second)]
    if all(balances):
        found.append(f"Input tokens for each output token: {balances[0]:.3g} in {one}, {balances[1]:.3g} in {two}.")
    return found


def _bursts_compared(one: str, a: float, two: str, b: float, width: float, *, first: bool) -> str:
    if a < b:
        one, a, two, b = two, b, one, a
    times = a / b if b else math.inf
    figures = f"index of dispersion {a:.3g} against {b:.3g} at {seconds(width)}"
    if times < 1.1:
        return f"{one} and {two} are equally bursty at {seconds(width)}: {figures}."
    if not first:
        return f"At {seconds(width)} {one} leads {times:.3g} times, {a:.3g} against {b:.3g}."
    word = "far burstier" if times >= 4 else "burstier" if times >= 1.5 else "slightly burstier"
    return f"{one} is {word} than {two}, {times:.3g} times: {figures} (Poisson 1)."


# ---- words ------------------------------------------------------------------------------------------------------


def seconds(value_s: float) -> str:
    """A duration for people, in days from two on."""
    return f"{value_s / 86_400:,.3g} days" if value_s >= 2 * 86_400 else show_ns(value_s * NS_PER_S)


def percent(share: float, digits: int = 0) -> str:
    """A share for people."""
    return f"{100 * share:.{digits}f} %"


def rate(value_rps: float) -> str:
    """A rate for people: per second, or per minute or hour where that is below one."""
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if value_rps * factor >= 1 or unit == "h":
            return f"{value_rps * factor:,.3g} req/{unit}"
    raise AssertionError


def base_point(profile: Profile) -> dict[str, Any] | None:
    """The dispersion at the narrowest window that holds a request on average and is wider than batched timestamps.

    None where the curve has none.
    """
    width = profile.get("autocorrelation", {}).get("window_s", 0)
    width = max(width, _blind_s(profile))
    return next((point for point in profile.get("idc_curve", []) if point["window_s"] >= width), None)


def dispersion(profile: Profile, width_s: int) -> str:
    """The index of dispersion at 1, 10 or 60 s over full windows, as the curve has it; n/a where there is none."""
    value = profile.get(f"iod_{width_s}s_full_windows_only")
    return "n/a" if value is None else f"{value:.3g}"


def _blind_s(profile: Profile) -> float:
    """Windows below this tell of the recording: on a strict grid its step, else three batches."""
    stamps = profile.get("timestamps", {})
    period, resolution = stamps.get("batch_period_s") or 0, stamps.get("resolution_s", 0)
    return float(period if period == resolution else 3 * period)


def burst_word(point: dict[str, Any]) -> str:
    """One or two words for a dispersion."""
    index, band = point["idc"], point["poisson_band"]
    if index < 1 - band:
        return "smoother than Poisson"
    if index <= 1 + band:
        return "like Poisson"
    return "slightly bursty" if index < 2 else "bursty" if index < 5 else "very bursty"


def _balance_word(profile: Profile) -> list[str]:
    ratio = profile.get("prefill_decode_ratio")
    if not ratio:
        return []
    kind = "prefill-heavy" if ratio >= 15 else "decode-heavy" if ratio <= 1.5 else "mixed"
    return [f"{kind} ({ratio:.3g} input tokens an output token)"]


# ---- rules ------------------------------------------------------------------------------------------------------


def _bursts(profile: Profile) -> Iterator[Finding]:
    point = base_point(profile)
    if point is None:
        return
    width, index, word = seconds(point["window_s"]), point["idc"], burst_word(point)
    text = (
        f"{word[0].upper()}{word[1:]} at {width}: the counts vary {index:.3g} times as much as Poisson arrivals' "
        f"(index of dispersion {index:.3g}; Poisson 1 ± {point['poisson_band']:.2g})"
    )
    if point["window_s"] == 1:
        peak, mean = profile["max_in_any_1s"], profile["per_second_mean"]
        text += (
            f"; the busiest second holds {peak} requests, {peak / mean:.3g} times the mean, where Poisson would reach "
            f"{_poisson_peak(mean, profile['windows_1s'])}"
        )
    if index > 1 + point["poisson_band"]:
        means = (
            "constant or Poisson arrivals at the same rate never build the queues that these do: replay the recorded "
            "times, and size for the peak, not the mean"
            if index >= 2
            else "Poisson arrivals come near at this scale, but not above it: replay the recorded times"
        )
    elif index < 1 - point["poisson_band"]:
        means = "something paces these arrivals (a closed loop, a limiter, a generator): real users are rougher"
    else:
        means = "bursts are what chance makes; whether they are real or were generated, see the curve at longer windows"
    yield Finding("bursts", text + ".", means + ".")


def _poisson_peak(mean: float, windows: int) -> int:
    """The count that the busiest of so many windows of Poisson arrivals reaches about once."""
    from scipy.special import pdtr

    count = int(mean)
    while pdtr(count, mean) < 1 - 1 / max(windows, 2):
        count += 1
    return count


def _silence(profile: Profile) -> Iterator[Finding]:
    width = profile.get("autocorrelation", {}).get("window_s")
    if width != 1 or profile["timestamps"]["batch_period_s"] is not None:
        return
    share, expected = profile["empty_seconds"] / profile["windows_1s"], math.exp(-profile["per_second_mean"])
    if share > 0.1 and share > 2 * expected:
        yield Finding(
            "silence",
            f"{percent(share)} of all seconds are empty (Poisson: {percent(expected, 1)}); the longest silence lasts "
            f"{seconds(profile['iat_max_s'])}.",
            "requests come in clusters: a short window may hold hardly any or hundreds, so look what a --window has.",
        )


def _slow_changes(profile: Profile) -> Iterator[Finding]:
    point = base_point(profile)
    curve = [p for p in profile.get("idc_curve", []) if point and p["window_s"] > point["window_s"]]
    wide = [p for p in curve if p["windows"] >= 15]
    if point is None or not wide:
        return
    last = wide[-1]
    growth = last["idc"] / point["idc"] if point["idc"] else 0
    if growth < 3 or last["idc"] < 1 + 2 * last["poisson_band"]:
        return
    variation = math.sqrt(last["idc"] * last["windows"] / profile["rows"])
    yield Finding(
        "slow changes",
        f"Dispersion grows from {point['idc']:.3g} at {seconds(point['window_s'])} to {last['idc']:.3g} at "
        f"{seconds(last['window_s'])}: the rate itself moves, the count in {seconds(last['window_s'])} varies by "
        f"±{percent(variation)} around its mean.",
        f"a short run sees another load than the next one: play {seconds(20 * last['window_s'])} or more, or say which "
        "window it was.",
    )


def _timestamps(profile: Profile) -> Iterator[Finding]:
    stamps = profile.get("timestamps")
    if not stamps:
        return
    period, resolution = stamps["batch_period_s"], stamps["resolution_s"]
    if period is None and resolution < 0.1 * profile["iat_mean_s"]:
        return
    different = f"{profile['distinct_timestamps']:,} different times for {profile['rows']:,} requests"
    if period is None or period == resolution:
        yield Finding(
            "timestamps",
            f"Timestamps are multiples of {seconds(resolution)}: {different}.",
            f"order and gaps within {seconds(resolution)} are lost: requests of one instant are sent together.",
        )
        return
    yield Finding(
        "timestamps",
        f"Timestamps are quantised: {different}, in batches {seconds(period)} apart.",
        f"dispersion below {seconds(3 * period)} tells of the recording, not of the users: look at longer windows, or "
        "re-time with --poisson.",
    )


def _balance(profile: Profile) -> Iterator[Finding]:
    ratio = profile.get("prefill_decode_ratio")
    if not ratio:
        return
    text = f"{ratio:.3g} input tokens for each output token"
    if ratio >= 15:
        yield Finding(
            "balance", text + ": prefill-heavy.", "TTFT rests on prefill: watch chunked prefill and prefix cache."
        )
    elif ratio <= 1.5:
        yield Finding(
            "balance", text + ": decode-heavy.", "requests stay long and hold their slots: watch batch size and TPOT."
        )
    correlation = profile.get("input_output_correlation")
    if correlation is not None and abs(correlation) >= 0.3:
        more = "longer" if correlation > 0 else "shorter"
        yield Finding(
            "balance",
            f"Longer prompts get {more} answers (rank correlation {correlation:+.2f}).",
            "drawing inputs and outputs apart would lose this; keep the pairs.",
        )


def _tails(profile: Profile) -> Iterator[Finding]:
    texts = []
    for name in ("input_tokens", "output_tokens"):
        length = profile.get(name)
        if not length or not _long_tailed(length):
            continue
        tail = length["tail_index"]
        text = (
            f"{name.replace('_tokens', '').capitalize()} lengths have a long tail: P50 {length['p50']:,.0f}, "
            f"P99 {length['p99']:,.0f}, longest {length['max']:,.0f}; the longest 1 % hold "
            f"{percent(length['top_1pct_share'])} of the tokens"
        )
        text += f" (tail index {tail:.2g}, no finite variance)" if tail and tail < 2 else ""
        parts = [part[name] for part in profile.get("tenants", {}).values() if name in part]
        alike = len(parts) > 1 and not any(_long_tailed(part) for part in parts)
        texts.append(text + (", because tenants differ: each one's own lengths vary less." if alike else "."))
    if texts:
        means = "the mean misleads and a few requests decide who waits: read percentiles, tenant by tenant."
        yield Finding("tails", " ".join(texts), means)


def _long_tailed(length: dict[str, Any]) -> bool:
    if not length["p50"] or length["n"] < _TAIL_ROWS:
        return False
    heavy = length["tail_index"] is not None and length["tail_index"] < 2
    return bool(heavy or length["p99"] >= 10 * length["p50"] or (length["top_1pct_share"] or 0) >= 0.1)


def _failures(profile: Profile) -> Iterator[Finding]:
    zeros = (profile.get("output_tokens") or {}).get("zeros", 0)
    outcomes = profile.get("outcomes", {})
    bad = sum(rows for outcome, rows in outcomes.items() if outcome not in {"ok", "client_abort"})
    count = max(zeros, bad)
    if count:
        kinds = ", ".join(f"{outcome} {rows:,}" for outcome, rows in outcomes.items() if outcome != "ok")
        yield Finding(
            "failures",
            f"{count:,} of {profile['rows']:,} requests ({percent(count / profile['rows'], 1)}) had no full answer"
            + (f" ({kinds})." if kinds else "."),
            "they load the server too: keep them in a replay, leave them out when lengths are fitted.",
        )


def _sessions(profile: Profile) -> Iterator[Finding]:
    found = profile.get("sessions")
    if not found or found["single_turn_share"] > 0.9:
        return
    turns, think = found["turns"], found.get("think_s")
    yield Finding(
        "sessions",
        f"Conversations: {found['n']:,}, of {turns['mean']:.3g} turns each (P95 {turns['p95']:.3g})"
        + (f", think time P50 {seconds(think['p50'])}, P95 {seconds(think['p95'])}." if think else "."),
        "a later turn waits for its predecessor, so a slow server delays it (--turns timed keeps the trace's times).",
    )


def _prefix(profile: Profile) -> Iterator[Finding]:
    found = profile.get("prefix")
    if not found:
        return
    hit = found["ideal_hit_rate"]
    unit = found["block_unit"]
    yield Finding(
        "prefix",
        f"An endless prefix cache would find {percent(hit, 1)} of all blocks ({found['block_size']} {unit} each).",
        f"a replay that ignores shared prefixes computes {1 / max(1 - hit, 1e-9):.3g} times the prefill."
        if hit >= 0.02
        else "prefix caching hardly matters here.",
    )


def _tenants(profile: Profile) -> Iterator[Finding]:
    tokens, fairness = profile.get("tenant_tokens", {}), profile.get("jain_tokens")
    if len(tokens) < 2 or fairness is None:
        return
    total = sum(tokens.values())
    largest = next(iter(tokens))
    if tokens[largest] > 1.5 * total / len(tokens):
        yield Finding(
            "tenants",
            f"{largest} has {percent(tokens[largest] / total)} of the tokens with "
            f"{profile['tenant_rows'][largest]:,} of {profile['rows']:,} requests (Jain {fairness:.2f}, 1 is equal).",
            f"who waits, waits behind {largest}: its length and concurrency decide isolation.",
        )
    for pair in profile.get("bursting_together", [])[:3]:
        one, two = pair["tenants"]
        how = "burst together" if pair["correlation"] > 0 else "take turns"
        yield Finding(
            "tenants",
            f"{one} and {two} {how} (correlation {pair['correlation']:+.2f} of counts in {seconds(pair['window_s'])}).",
            "measure them together: alone, each looks better than it will be."
            if pair["correlation"] > 0
            else "their peaks fill each other's gaps; shifting one in time would change the result.",
        )


def _sample(profile: Profile) -> Iterator[Finding]:
    rows, span = profile["rows"], profile.get("span_s")
    if rows < 300:
        yield Finding(
            "sample",
            f"{rows} requests" + (f" in {seconds(span)}." if span else "."),
            "P99 rests on three requests or fewer: judge by P50 and P95.",
        )
