"""A profile as one HTML page that needs no network: the findings in words, then the charts behind them.

Every linear axis starts at 0. Several traces share the charts, so they can be compared by eye.
"""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from traces.findings import dispersion, rate, seconds

Profile = dict[str, Any]

COLOURS = ("#2563eb", "#dc7f16", "#0f9d76", "#9b4dca", "#d1435b", "#637083")
_CONFIG = {"displayModeBar": False, "responsive": True}
_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;color:#1c2430;background:#fff;max-width:1080px;margin:2.5rem auto;
padding:0 1.2rem}
h1{font-size:1.5rem;line-height:1.3;margin:0 0 .4rem}
h2{font-size:1.05rem;margin:2.2rem 0 .5rem;color:#334}
p.sub{color:#637083;margin:0 0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.93rem;margin:1.2rem 0}
td,th{padding:.28rem 1.1rem .28rem 0;text-align:right}
td:first-child,th:first-child{text-align:left}
th{color:#637083;font-weight:500;border-bottom:1px solid #dde2ea}
dl{display:grid;grid-template-columns:8.5rem 1fr;gap:.7rem 1rem}
dt{font-weight:600}
dd{margin:0}
dd span{display:block;color:#637083}
.charts{display:grid;grid-template-columns:1fr 1fr;gap:1rem;margin-top:2rem}
.charts>div{min-width:0}
.wide{grid-column:1/-1}
@media(max-width:800px){.charts{grid-template-columns:1fr}}
"""


def page(profiles: dict[str, Profile], compared: list[str]) -> str:
    """The page of one trace or of several side by side.

    Args:
        profiles: name → profile with `headline` and `findings`.
        compared: sentences that set them against each other.
    """
    title = ", ".join(profiles)
    parts = [f"<h1>{_text(sentence)}</h1>" for sentence in (compared[:1] or [_headline(profiles)])]
    if compared:
        parts += [
            f"<p class=sub>{_text(name)}: {_text(profile['headline'])}.</p>" for name, profile in profiles.items()
        ]
    parts += [f"<p>{_text(sentence)}</p>" for sentence in compared[1:]]
    parts.append(_table(profiles))
    for name, profile in profiles.items():
        parts.append(_findings(name, profile, alone=len(profiles) == 1))
    timelines, others = (_rate(profiles), _in_flight(profiles)), (_dispersion(profiles), _lengths(profiles))
    charts = [(chart, True) for chart in timelines] + [(chart, False) for chart in others]
    drawn = [_embedded(chart, number, wide=wide) for number, (chart, wide) in enumerate(charts) if chart is not None]
    parts.append(f'<div class="charts">{"".join(drawn)}</div>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}: traffic profile</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(parts)}</body></html>\n"
    )


def _headline(profiles: dict[str, Profile]) -> str:
    headline: str = next(iter(profiles.values()))["headline"]
    return headline


def _text(value: str) -> str:
    return html.escape(value)


def _table(profiles: dict[str, Profile]) -> str:
    rows: list[tuple[str, list[str]]] = []
    parts = dict(profiles)
    if len(profiles) == 1:
        parts |= next(iter(profiles.values())).get("tenants", {})
    for name, part in parts.items():
        timed = bool(part.get("mean_rate_rps"))
        cells = [
            f"{part['rows']:,}",
            rate(part["mean_rate_rps"]) if timed else "n/a",
            dispersion(part, 1),
            dispersion(part, 60),
            f"{part['per_second_p99_over_mean']:.3g}x" if "per_second_p99_over_mean" in part else "n/a",
            *(
                f"{part[column][key]:,.0f}" if column in part else "n/a"
                for column in ("input_tokens", "output_tokens")
                for key in ("p50", "p99")
            ),
        ]
        rows.append((name, cells))
    heads = ("", "requests", "rate", "disp. 1 s", "disp. 60 s", "P99 of 1 s", "in P50", "in P99", "out P50", "out P99")
    body = "".join(
        f"<tr><td>{_text(name)}</td>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"
        for name, cells in rows
    )
    return "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + f"</tr>{body}</table>"


def _findings(name: str, profile: Profile, *, alone: bool) -> str:
    if not profile["findings"]:
        return ""
    title = "What is unusual, and what it means for a test"
    items = "".join(
        f"<dt>{_text(f['topic'])}</dt><dd>{_text(f['text'])}<span>→ {_text(f['means'])}</span></dd>"
        for f in profile["findings"]
    )
    return f"<h2>{_text(title if alone else f'{name}: {title[0].lower()}{title[1:]}')}</h2><dl>{items}</dl>"


def _figure(title: str, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    axis = {"showgrid": True, "gridcolor": "#eef1f5", "zeroline": False, "linecolor": "#c6ccd6", "ticks": "outside"}
    figure.update_layout(
        title={"text": title, "font": {"size": 15}, "x": 0, "xref": "paper"},
        xaxis={"title": x, **axis},
        yaxis={"title": y, **axis},
        template="none",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#1c2430"},
        margin={"l": 62, "r": 16, "t": 46, "b": 96},
        height=390,
        legend={"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0, "xanchor": "left"},
        hovermode="x unified",
    )
    return figure


def _rate(profiles: dict[str, Profile]) -> go.Figure | None:
    curves = {name: profile["rate_curve"] for name, profile in profiles.items() if "rate_curve" in profile}
    if not curves:
        return None
    longest = max(len(curve["rps"]) * curve["bin_s"] for curve in curves.values())
    scale, unit = next(
        (s, u) for s, u in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")) if longest >= 2 * s or s == 1
    )
    figure = _figure("Arrivals over time", f"trace time [{unit}]", "rate [req/s]")
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        figure.add_scatter(
            x=[round(number * curve["bin_s"] / scale, 4) for number in range(len(curve["rps"]))],
            y=[round(value, 4) for value in curve["rps"]],
            name=f"{name} (bins of {seconds(curve['bin_s'])})",
            mode="lines",
            line={"shape": "hv", "width": 1.4, "color": colour},
            fill="tozeroy" if len(curves) == 1 else None,
            fillcolor="rgba(37,99,235,.12)",
        )
    figure.update_layout(showlegend=True)
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(rangemode="tozero")
    return figure


def _in_flight(profiles: dict[str, Profile]) -> go.Figure | None:
    curves = {name: profile["in_flight"]["curve"] for name, profile in profiles.items() if profile.get("in_flight")}
    if not curves:
        return None
    figure = _figure("Requests in flight", "trace time [s]", "requests")
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        figure.add_scatter(
            x=[round(number * curve["step_s"], 3) for number in range(len(curve["levels"]))],
            y=curve["levels"],
            name=name,
            mode="lines",
            line={"width": 1.4, "color": colour},
        )
    figure.update_layout(showlegend=True)
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(rangemode="tozero")
    return figure


def _dispersion(profiles: dict[str, Profile]) -> go.Figure | None:
    lines = {name: profile.get("idc_curve") for name, profile in profiles.items()}
    if len(profiles) == 1:
        tenants = next(iter(profiles.values())).get("tenants", {})
        lines |= {name: part.get("idc_curve") for name, part in list(tenants.items())[:5]}
    drawn = {name: curve for name, curve in lines.items() if curve}
    if not drawn:
        return None
    figure = _figure("Burstiness by time scale (both axes logarithmic)", "window [s]", "index of dispersion")
    for colour, (name, curve) in zip(COLOURS, drawn.items(), strict=False):
        figure.add_scatter(
            x=[point["window_s"] for point in curve],
            y=[point["idc"] for point in curve],
            name=name,
            mode="lines+markers",
            line={"width": 1.8, "color": colour},
        )
    widths = [point["window_s"] for curve in drawn.values() for point in curve]
    figure.add_scatter(
        x=[min(widths), max(widths)], y=[1, 1], name="Poisson", mode="lines", line={"dash": "dot", "color": "#637083"}
    )
    figure.update_xaxes(type="log")
    seen = [point["idc"] for curve in drawn.values() for point in curve if point["idc"] > 0]
    low, high = min([0.5, *seen]), max([2.0, *seen])  # a flat curve is shown flat
    figure.update_yaxes(type="log", range=[math.log10(low / 1.1), math.log10(high * 1.1)])
    figure.update_layout(showlegend=True)
    return figure


def _lengths(profiles: dict[str, Profile]) -> go.Figure | None:
    figure = _figure("Lengths: share of requests up to", "tokens (logarithmic)", "share of requests")
    drawn = profiles
    if len(profiles) == 1:
        drawn = dict(list(next(iter(profiles.values())).get("tenants", {}).items())[:5]) or profiles
    for colour, (name, profile) in zip(COLOURS, drawn.items(), strict=False):
        for column, dash in (("input_tokens", "solid"), ("output_tokens", "dot")):
            if column in profile:
                figure.add_scatter(
                    x=[max(value, 0.5) for value in profile[column]["percentiles"]],
                    y=[number / 100 for number in range(101)],
                    name=f"{name} {column.split('_')[0]}" if len(drawn) > 1 else column.split("_")[0],
                    mode="lines",
                    line={"width": 1.8, "color": colour, "dash": dash},
                )
    if not figure.data:
        return None
    figure.update_xaxes(type="log")
    figure.update_yaxes(range=[0, 1.01], tickformat=".0%")
    figure.update_layout(hovermode="closest", showlegend=True)
    return figure


def _embedded(figure: go.Figure, number: int, *, wide: bool) -> str:
    chart = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=f"chart{number}")
    return f"<div{' class=wide' if wide else ''}>{chart}</div>"
