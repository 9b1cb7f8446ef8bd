"""A profile for the terminal: a sentence, a few small tables, and what is unusual. Plain text when piped."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from traces.findings import dispersion, percent, rate, seconds

_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TABLE_TENANTS = 8

Profile = dict[str, Any]


def show(name: str, profile: Profile, *, titled: bool, width: int | None = None) -> None:
    """Print a profile to stdout.

    Args:
        name: of the trace, shown when there are several.
        profile: with `headline` and `findings`.
        titled: whether to show the name.
        width: columns; None for the terminal's (80 when piped).
    """
    console = Console(highlight=False, width=width)
    with console.capture() as captured:
        _print(console, f"{name}: " if titled else "", profile)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print(console: Console, title: str, profile: Profile) -> None:
    console.print(Text(f"{title}{profile['headline']}.", style="bold"))
    sections: tuple[tuple[str, Table | None], ...] = (
        ("Arrivals", _arrivals(profile, console.width)),
        ("Index of dispersion by window (Poisson 1)", _curve(profile, console.width)),
        ("Lengths [tokens]", _lengths(profile)),
        ("As measured [s]", _latency(profile)),
        ("Kinds", _kinds(profile)),
        ("Tenants", _tenants(profile)),
        ("What is unusual, and what it means for a test", _findings(profile)),
    )
    for heading, body in sections:
        if body is not None:
            console.print(Text(f"\n{heading}", style="bold cyan"))
            console.print(Padding(body, (0, 0, 0, 2)))
    console.print()


def _findings(profile: Profile) -> Table | None:
    if not profile["findings"]:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", width=12)
    table.add_column()
    for finding in profile["findings"]:
        table.add_row(finding["topic"], Text(finding["text"]).append(f"\n→ {finding['means']}", style="dim"))
    return table


def _facts(pairs: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for pair in pairs:
        table.add_row(*pair)
    return table


def _arrivals(profile: Profile, width: int) -> Table | None:
    if not profile.get("span_s"):
        return None
    second, mean = profile["max_in_any_1s"], profile["per_second_mean"]
    pairs = [
        ("mean rate", f"{rate(profile['mean_rate_rps'])} over {seconds(profile['span_s'])}"),
        ("gaps", f"CV {profile['iat_cv']:.3g} (Poisson 1), longest {seconds(profile['iat_max_s'])}"),
    ]
    if mean >= 0.05:
        share = percent(profile["empty_seconds"] / profile["windows_1s"])
        counts = f"P99 {profile['per_second_p99']:.3g} ({profile['per_second_p99_over_mean']:.3g}x the mean), "
        pairs.append(("in a second", counts + f"most {second} ({second / mean:.3g}x), empty {share}"))
    curve = profile.get("rate_curve")
    if curve and len(curve["rps"]) > 3:
        line = sparkline(curve["rps"], max(20, min(width - 22, 100)))
        pairs.append(("rate over time", f"{line}"))
        pairs.append(("", f"0 to {max(curve['rps']):.3g} req/s in bins of {seconds(curve['bin_s'])}"))
    auto = profile.get("autocorrelation")
    if auto and auto["lags"]:
        values = ", ".join(
            f"{value:+.2f} at {seconds(lag * auto['window_s'])}"
            for lag, value in zip(auto["lags"], auto["values"], strict=True)
        )
        pairs.append(("autocorrelation", values))
    daily = profile.get("daily_rps")
    if daily:
        clock = " UTC" if profile.get("epoch") == "unix" else " of the trace's clock"
        pairs.append(("hours of a day", f"{sparkline(daily, 24)} busiest {daily.index(max(daily)):02d} h{clock}"))
    offered, flight = profile.get("offered", {}), profile.get("in_flight")
    if offered:
        tokens = "; ".join(
            f"{kind} {offered[f'{kind}_tokens_per_s']:,.0f} tokens/s, "
            f"{offered[f'{kind}_tokens_per_s_peak_10s']:,.0f} in the fullest 10 s"
            for kind in ("input", "output")
            if f"{kind}_tokens_per_s" in offered
        )
        pairs.append(("offered", tokens))
    if flight:
        line = sparkline([float(level) for level in flight["curve"]["levels"]], max(20, min(width - 22, 100)))
        pairs.append(("in flight", line))
        pairs.append(("", f"mean {flight['mean']:.3g}, P99 {flight['p99']:.3g}, most {flight['max']}"))
    return _facts(pairs)


def sparkline(values: list[float], width: int) -> str:
    """Values as one line of blocks from 0 to the largest; neighbours are averaged to fit `width`."""
    step = max(1, -(-len(values) // width))
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(means) or 1
    return "".join(" " if value <= 0 else _BLOCKS[min(int(value / top * 8), 7)] for value in means)


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` cells, to an eighth of a cell."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8].strip() if eighths % 8 else "")


def _curve(profile: Profile, width: int) -> Table | None:
    curve = profile.get("idc_curve")
    if not curve:
        return None
    table = Table.grid(padding=(0, 2))
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    top = max(point["idc"] for point in curve)
    for point in curve:
        table.add_row(
            seconds(point["window_s"]),
            f"{point['idc']:.3g}",
            bar(point["idc"] / top if top else 0, min(width - 26, 60)),
        )
    return table


def _lengths(profile: Profile) -> Table | None:
    names = [name for name in ("input_tokens", "output_tokens") if name in profile]
    if not names:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for head in ("P50", "P95", "P99", "mean", "max", "top 1 %", "tail index", "n"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in names:
        found = profile[name]
        table.add_row(
            name.split("_")[0],
            *(f"{found[key]:,.0f}" for key in ("p50", "p95", "p99", "mean", "max")),
            percent(found["top_1pct_share"]) if found["top_1pct_share"] is not None else "n/a",
            f"{found['tail_index']:.2g}" if found["tail_index"] else "n/a",
            f"{found['n']:,}",
        )
    return table


def _latency(profile: Profile) -> Table | None:
    names = [
        (key, head) for key, head in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")) if profile.get(key)
    ]
    if not names:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for head in ("P50", "P95", "P99", "mean", "max", "n"):
        table.add_column(head, justify="right", no_wrap=True)
    for key, head in names:
        found = profile[key]
        table.add_row(head, *(f"{found[k]:.4g}" for k in ("p50", "p95", "p99", "mean", "max")), f"{found['n']:,}")
    return table


def _kinds(profile: Profile) -> Table | None:
    pairs = []
    for key in ("endpoints", "models", "outcomes", "finish_reasons"):
        counts = profile.get(key)
        if counts and not (key == "outcomes" and set(counts) == {"ok"}):
            shown = ", ".join(f"{name} {rows:,}" for name, rows in list(counts.items())[:5])
            pairs.append((key.replace("_", " "), shown + (f", {len(counts) - 5} more" if len(counts) > 5 else "")))
    shares = [
        (label, profile[key])
        for key, label in (("streaming_share", "streamed"), ("tools_share", "with tools"))
        if key in profile
    ]
    if shares:
        pairs.append(("requests", ", ".join(f"{label} {percent(share)}" for label, share in shares)))
    found = profile.get("sessions")
    if found:
        think = found.get("think_s")
        pairs.append(
            (
                "sessions",
                f"{found['n']:,}; turns P50 {found['turns']['p50']:.3g}, P95 {found['turns']['p95']:.3g}, "
                f"most {found['turns']['max']:.0f}"
                + (f"; think P50 {seconds(think['p50'])}, P95 {seconds(think['p95'])}" if think else ""),
            )
        )
    shared = profile.get("prefix")
    if shared:
        pairs.append(
            ("prefix blocks", f"{percent(shared['ideal_hit_rate'], 1)} of {profile['total_hash_ids']:,} seen before")
        )
    return _facts(pairs) if pairs else None


def _tenants(profile: Profile) -> Table | None:
    tenants = profile.get("tenants")
    if not tenants:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="ellipsis", max_width=16)
    for head in ("requests", "tokens", "rate", "disp. 1 s", "in P50", "out P50", "out P99"):
        table.add_column(head, justify="right", no_wrap=True)
    total = sum(profile["tenant_tokens"].values()) or 1
    for name, part in list(tenants.items())[:_TABLE_TENANTS]:
        table.add_row(
            name,
            f"{part['rows']:,}",
            percent(profile["tenant_tokens"][name] / total),
            rate(part["mean_rate_rps"]) if part.get("mean_rate_rps") else "n/a",
            dispersion(part, 1),
            *(
                f"{part[column][key]:,.0f}" if column in part else "n/a"
                for column, key in (("input_tokens", "p50"), ("output_tokens", "p50"), ("output_tokens", "p99"))
            ),
        )
    return table
