"""When an exchange is given up."""

from __future__ import annotations

import pytest

from replay.deadlines import deadline
from replay.exchange import Exchange, WireRequest

S = 1_000_000_000


def exchange(*, started: int, written: int | None, last: int, **limits: int) -> Exchange:
    found = Exchange(WireRequest("POST", "/", b"", b"", **limits), lambda _: None, started)
    found.written_ns, found.last_ns = written, last
    return found


@pytest.mark.parametrize(
    ("state", "limits", "expected"),
    [
        ({"started": 0, "written": None, "last": 0}, {}, None),
        ({"started": 0, "written": None, "last": 0}, {"connect_ns": 5 * S, "idle_ns": S}, (5 * S, "connect")),
        ({"started": 0, "written": None, "last": 2 * S}, {"connect_ns": 5 * S}, (7 * S, "connect")),  # second attempt
        ({"started": 0, "written": S, "last": S}, {"connect_ns": 5 * S, "idle_ns": 3 * S}, (4 * S, "idle")),
        ({"started": 0, "written": S, "last": S}, {"connect_ns": 5 * S}, None),
        ({"started": 0, "written": S, "last": 8 * S}, {"idle_ns": 3 * S, "total_ns": 10 * S}, (10 * S, "total")),
        ({"started": 0, "written": S, "last": 8 * S}, {"idle_ns": S, "total_ns": 10 * S}, (9 * S, "idle")),
        ({"started": 0, "written": None, "last": 0}, {"connect_ns": 5 * S, "total_ns": S}, (S, "total")),
    ],
)
def test_the_limit_that_is_reached_first_counts(state, limits, expected):
    assert deadline(exchange(**state, **limits)) == expected


def test_c08_a_stream_of_five_minutes_lives_as_long_as_data_flows():
    found = exchange(started=0, written=0, last=301 * S, idle_ns=60 * S)
    assert deadline(found) == (361 * S, "idle")
