"""Tables that fit: columns are dropped from the least important on, nothing wraps, nothing is cut.

Headings stand in two lines: ``TTFT ms P50`` is ``TTFT ms`` over ``P50``, and neighbours of one group name it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

GAP = "  "


class Column(NamedTuple):
    """One column: heading (its unit included), cells, and how soon it goes when there is no room.

    `drop` 0 stays whatever happens; larger goes sooner.
    """

    heading: str
    cells: list[str]
    drop: int = 0
    right: bool = True


def lines(columns: Sequence[Column], width: int, styles: Sequence[str] = ()) -> list[Text]:
    """The table for a terminal of this width, headings first; the last cell of each row takes its style."""
    kept = fitting(columns, width)
    widths = [_width(column) for column in kept]
    found = []
    for level in (0, 1):
        heads = zip(_headings(kept), widths, kept, strict=True)
        line = GAP.join(_padded(head[level], room, right=column.right) for head, room, column in heads)
        if line.strip():
            found.append(Text(line.rstrip(), "dim", no_wrap=True))
    for row in range(len(columns[0].cells) if columns else 0):
        cells = [
            _padded(column.cells[row], room, right=column.right) for column, room in zip(kept, widths, strict=True)
        ]
        text = Text(GAP.join([*cells[:-1], ""]), no_wrap=True)
        text.append(cells[-1].rstrip(), styles[row] if styles else "")
        found.append(text)
    return found


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit in a line, the most droppable left out first."""
    kept = list(columns)
    while len(kept) > 1 and sum(_width(column) for column in kept) + len(GAP) * (len(kept) - 1) > width:
        droppable = max(kept, key=lambda column: column.drop)
        if droppable.drop == 0:
            break
        kept.remove(droppable)
    return kept


def _headings(columns: Sequence[Column]) -> list[tuple[str, str]]:
    heads = [_heading(column.heading) for column in columns]
    return [("" if i and heads[i - 1][0] == head[0] else head[0], head[1]) for i, head in enumerate(heads)]


def _heading(text: str) -> tuple[str, str]:
    head, _, tail = text.rpartition(" P")
    return (head, f"P{tail}") if head else ("", text)


def _width(column: Column) -> int:
    return max(cell_len(part) for part in (*_heading(column.heading), *column.cells))


def _padded(text: str, width: int, *, right: bool) -> str:
    blank = " " * max(0, width - cell_len(text))
    return blank + text if right else text + blank
