"""Timestamps as sources write them become exact integer nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.importers.clock import Clock, decimal_ns, iso_ns, one_iso_ns

ISO = [
    ("2023-11-16 18:17:03.9799600", 1_700_158_623_979_960_000),  # Azure 2023: 7 digits, no offset
    ("2024-05-10 00:00:00.009930+00:00", 1_715_299_200_009_930_000),  # Azure 2024
    ("2024-05-10T02:00:00.00993+02:00", 1_715_299_200_009_930_000),
    ("2024-05-09T16:30:00.009930-0730", 1_715_299_200_009_930_000),
    ("2024-05-10T00:00:00Z", 1_715_299_200_000_000_000),
    ("2024-05-10t00:00:00Z", None),
    ("2024-05-10T00:00:00,123456789Z", 1_715_299_200_123_456_789),  # a comma before the fraction
    ("2024-05-10T00:00:00.1234567899Z", 1_715_299_200_123_456_789),  # finer than 1 ns
    ("10/May/2024:02:00:00 +0200", 1_715_299_200_000_000_000),  # web server logs
    ("2024-02-30T00:00:00Z", None),
    ("2024-05-10T25:00:00Z", None),
    ("2324-05-10T00:00:00Z", None),
    ("yesterday", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected_ns"), ISO)
def test_an_iso_time_is_exact_or_named_as_bad_whatever_stands_beside_it(text, expected_ns):
    values, bad = iso_ns(pa.array([text, "2024-05-10T00:00:00Z", "1970-01-01 00:00:01"]))
    assert (None if 0 in bad else values[0]) == expected_ns
    assert values[1:].tolist() == [1_715_299_200_000_000_000, 1_000_000_000]
    assert set(bad) <= {0}


@given(
    st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1)),  # noqa: DTZ001
    st.integers(0, 9),
    st.sampled_from(["", "Z", "+00:00", "-07:30", "+1400"]),
)
def test_the_bulk_way_and_the_single_way_agree_with_datetime(moment, digits, zone):
    fraction = f".{moment.microsecond:06d}000"[: digits + 1] if digits else ""
    text = moment.strftime(f"{moment.year:04d}-%m-%d %H:%M:%S") + fraction + zone
    kept = int(fraction[1:].ljust(9, "0")) if digits else 0
    offset_s = {"-07:30": 27_000, "+1400": -50_400}.get(zone, 0)
    whole = moment.replace(microsecond=0, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    expected = (whole.days * 86_400 + whole.seconds + offset_s) * 10**9 + kept
    assert iso_ns(pa.array([text])).values.tolist() == [expected]
    assert one_iso_ns(text) == expected


@given(
    st.lists(st.decimals(-(10**9), 10**9, places=9, allow_nan=False), min_size=1), st.sampled_from(["s", "ms", "us"])
)
def test_decimal_numbers_are_exact_in_every_unit(numbers, unit):
    scale = {"s": 10**9, "ms": 10**6, "us": 10**3}[unit]
    expected = [int((number * scale).to_integral_value()) for number in numbers]
    assert decimal_ns(pa.array([str(number) for number in numbers]), unit).values.tolist() == expected


@pytest.mark.parametrize(
    ("text", "unit", "expected_ns"),
    [
        ("1787267980.0827403", "s", 1_787_267_980_082_740_300),  # a float would be 100 ns off
        ("1.5e3", "ms", 1_500_000_000),
        (" 7 ", "s", 7_000_000_000),
        ("+7", "ns", 7),
        ("0.0000000005", "s", 0),  # half to even
        ("0.00000000051", "s", 1),
        ("0.1234567890123456789", "s", 123_456_789),
        ("nan", "s", None),
        ("inf", "s", None),
        ("1e400", "s", None),
        ("99999999999999999999", "ns", None),
        ("9999999999999", "s", None),
        ("7s", "s", None),
        ("", "s", None),
    ],
)
def test_a_number_is_a_time_or_bad_never_zero_by_accident(text, unit, expected_ns):
    values, bad = decimal_ns(pa.array([text]), unit)
    assert (None if bad else values[0]) == expected_ns


@pytest.mark.parametrize(
    ("first", "unit", "epoch", "expected_ns"),
    [
        ("1700158623", "s", "unix", 1_700_158_623 * 10**9),
        ("1700158623979.96", "ms", "unix", 1_700_158_623_979_960_000),
        ("1700158623979960", "us", "unix", 1_700_158_623_979_960_000),
        ("1700158623979960000", "ns", "unix", 1_700_158_623_979_960_000),
        ("12.5", "s", "relative", 12_500_000_000),
        ("0", "s", "relative", 0),
    ],
)
def test_magnitude_tells_the_unit_and_it_is_said(first, unit, epoch, expected_ns):
    clock = Clock()
    assert clock.ns(pa.array([first])).values.tolist() == [expected_ns]
    assert (clock.unit, clock.epoch) == (unit, epoch)
    assert unit in clock.told()


def test_a_later_time_of_another_magnitude_is_refused_not_guessed_again():
    clock = Clock()
    clock.ns(pa.array(["1700158623"]))
    assert list(clock.ns(pa.array(["1700158624", "1700158624000"])).bad) == [1]
    assert list(clock.ns(pa.array(["7"])).bad) == [0]


def test_a_unit_that_is_known_is_not_guessed():
    clock = Clock("ms", relative=True)
    assert clock.ns(pa.array(["1700158623"])).values.tolist() == [1_700_158_623 * 10**6]
    assert not clock.told()


@given(st.integers(-(2**62), 2**62))
def test_nanoseconds_pass_through(value):
    assert decimal_ns(pa.array([str(value)]), "ns").values.tolist() == [value]
    assert int(Decimal(value)) == value
