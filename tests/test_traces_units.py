"""Words for quantities: what is taken, what is refused with an example, how it is shown."""

from __future__ import annotations

import pytest

from traces.units import duration_ns, factor, show_ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("250ms", 250_000_000),
        ("1s", 10**9),
        ("10m", 600 * 10**9),
        ("1h", 3600 * 10**9),
        ("0s", 0),
        (" 1.5 s ", 1_500_000_000),
        ("3us", 3000),
        ("3m50s", 230 * 10**9),
        ("1h 5s", 3605 * 10**9),
        ("1m500ms", 60_500_000_000),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text, ns):
    assert duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "5", "fast", "-1s", "1 day", "1e3s", "s", "1s1s", "50s3m", "nan s"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="such as 250ms"):
        duration_ns(text)


@pytest.mark.parametrize(("text", "value"), [("2x", 2.0), ("2", 2.0), ("0.5x", 0.5), ("200%", 2.0), (" 7.3x", 7.3)])
def test_a_factor_is_written_in_four_ways(text, value):
    assert factor(text) == value


@pytest.mark.parametrize("text", ["0", "0x", "-1x", "fast", "", "x", "inf", "nan", "2xx", "1e999"])
def test_what_is_no_factor_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="2x"):
        factor(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 s"),
        (1_500, "1.5 µs"),
        (340_000_000, "340 ms"),
        (1_250_000_000, "1.25 s"),
        (600 * 10**9, "10 min"),
        (90 * 10**9, "90 s"),
        (7200 * 10**9, "2 h"),
        (-5_000_000, "-5 ms"),
    ],
)
def test_durations_are_shown_with_one_unit(ns, text):
    assert show_ns(ns) == text
