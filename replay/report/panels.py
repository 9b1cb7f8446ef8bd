"""Panels of one plotly figure: stacked, each with its own y axis from 0, limits dashed, broken stretches shaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

BAD = "#d64545"


class Panels:
    """Stacks panels into one figure; each has its own y axis, and one x axis for all unless told otherwise."""

    def __init__(self, *, shared_x: bool = True) -> None:
        self.shared_x = shared_x
        self.count = 0
        self.data: list[dict[str, Any]] = []
        self.shapes: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self._axes: dict[str, dict[str, Any]] = {}
        self._titles: list[str] = []
        self._groups: set[str] = set()

    def add(self, title: str, y_axis: dict[str, Any]) -> None:
        """Begin a panel below the last one."""
        self.count += 1
        self._titles.append(title)
        self._axes[f"yaxis{self._number}"] = {"zeroline": False, "tickformat": ",", **y_axis}
        self._axes[f"xaxis{self._number}"] = {"zeroline": False, "tickformat": ","}

    def x_range(self, end: float) -> None:
        """The panel's x axis runs from 0 to here."""
        self._axes[f"xaxis{self._number}"] |= {"range": [0, end]}

    def named(self, group: str) -> None:
        """The legend has this group already."""
        self._groups.add(group)

    def trace(self, **values: Any) -> dict[str, Any]:
        """A trace on the current panel's axes."""
        return {"xaxis": f"x{self._number}", "yaxis": f"y{self._number}", **values}

    def line(
        self,
        x: Sequence[float],
        y: Sequence[float | None],
        name: str,
        colour: str,
        *,
        dash: str = "solid",
        group: str = "",
        fill: bool = False,
        legend: bool = True,
        step: bool = False,
    ) -> None:
        """A line; of one group the legend shows the first."""
        trace = self.trace(
            type="scatter", mode="lines", x=x, y=y, name=name, line={"color": colour, "width": 2, "dash": dash}
        )
        if step:
            trace["line"]["shape"] = "hv"
        if fill:
            trace |= {"fill": "tozeroy", "fillcolor": _clear(colour, 0.18)}
        if group:
            trace |= {"legendgroup": group}
        if not legend or group in self._groups:
            trace |= {"showlegend": False}
        self._groups.add(group)
        self.data.append(trace)

    def bars(self, x: Sequence[str], y: Sequence[float | None], colour: str, **more: Any) -> None:
        """One bar for each x, without a legend."""
        self.data.append(self.trace(type="bar", x=x, y=y, showlegend=False, marker={"color": colour}, **more))

    def horizontal(self, y: float, text: str) -> None:
        """A limit across the panel."""
        axes = {"xref": f"x{self._number} domain", "yref": f"y{self._number}"}
        self._limit(
            {**axes, "x0": 0, "x1": 1, "y0": y, "y1": y}, {**axes, "text": text, "x": 1, "y": y, "xanchor": "right"}
        )

    def vertical(self, x: float, text: str) -> None:
        """A limit on a time."""
        axes = {"xref": f"x{self._number}", "yref": f"y{self._number} domain"}
        self._limit(
            {**axes, "x0": x, "x1": x, "y0": 0, "y1": 1}, {**axes, "text": text, "x": x, "y": 0.04, "xanchor": "left"}
        )

    def shade(self, x0: float, x1: float) -> None:
        """A stretch of time in which a limit was broken."""
        self.shapes.append(
            {
                "type": "rect",
                "xref": f"x{self._number}",
                "yref": f"y{self._number} domain",
                "x0": round(x0, 3),
                "x1": round(x1, 3),
                "y0": 0,
                "y1": 1,
                "fillcolor": _clear(BAD, 0.13),
                "line": {"width": 0},
                "layer": "below",
            }
        )

    def layout(self, columns: int = 1) -> dict[str, Any]:
        """The layout of the whole figure: panels in rows, their titles above them."""
        rows = math.ceil(self.count / columns)
        gap = (0.3 if not self.shared_x else 0.2) / max(1, rows)
        room = (1 - gap * (rows - 1)) / max(1, rows)
        notes = list(self.notes)
        for number in range(self.count):
            row, column = divmod(number, columns)
            top = 1 - row * (room + gap)
            left, right = (
                column / columns + (0.04 if column else 0),
                (column + 1) / columns - (0.04 if column + 1 < columns else 0),
            )
            key = "" if number == 0 else str(number + 1)
            self._axes[f"yaxis{key}"] |= {"domain": [max(0, round(top - room, 4)), round(top, 4)], "anchor": f"x{key}"}
            self._axes[f"xaxis{key}"] |= {"domain": [round(left, 4), round(right, 4)], "anchor": f"y{key}"}
            if self.shared_x:
                last = number == self.count - 1
                self._axes[f"xaxis{key}"] |= {"matches": "x"} if number else {}
                self._axes[f"xaxis{key}"] |= {"showticklabels": last, "rangemode": "tozero"}
                if last:
                    self._axes[f"xaxis{key}"]["title"] = {"text": "seconds from the start of the run"}
            notes.append(_title_note(self._titles[number], left, top))
        return {
            **self._axes,
            "shapes": self.shapes,
            "annotations": notes,
        }

    @property
    def _number(self) -> str:
        return "" if self.count == 1 else str(self.count)

    def _limit(self, line: dict[str, Any], note: dict[str, Any]) -> None:
        self.shapes.append({"type": "line", "line": {"color": BAD, "dash": "dash", "width": 1.3}, **line})
        self.notes.append({"showarrow": False, "yanchor": "bottom", "font": {"color": BAD, "size": 11}, **note})


def _title_note(text: str, left: float, top: float) -> dict[str, Any]:
    return {
        "text": f"<b>{text}</b>",
        "xref": "paper",
        "yref": "paper",
        "x": round(left, 4),
        "y": round(top, 4),
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12},
    }


def _clear(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
