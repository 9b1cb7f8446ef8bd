"""Timestamps as sources write them, to exact integer nanoseconds; never through a float.

Three ways of telling time, one per column and file:

    iso        2023-11-16 18:17:03.9799600, 2024-05-10T00:00:00.009930+02:00, ...Z: any fraction, any offset,
               offsets may differ from row to row, none means UTC
    epoch      a decimal number of s, ms, µs or ns since 1970
    relative   a decimal number since the trace's start

A number's unit comes from whoever knows it (the format, `--map arrival=ts:ms`, a column named `..._ms`), else from the
magnitude of the first value: 1e8 .. 1e11 are epoch seconds (1973 .. 5138), each further factor of 1000 the next unit,
and less than 1e8 are seconds from the start. A later value of another magnitude is an error: no second guess.

Whole batches are parsed by Arrow's kernels; a batch they refuse is parsed value by value, which finds the bad one.
A decimal number x in a unit of 10^k ns is parsed as a decimal with k digits after the point, whose unscaled integer is
the time in ns.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

UNIT_DIGITS = {"s": 9, "ms": 6, "us": 3, "µs": 3, "ns": 0}
_EPOCH_FROM = 10**8  # in seconds; smaller numbers are no epoch
_EPOCH_BELOW = (("s", 10**11), ("ms", 10**14), ("us", 10**17), ("ns", 2**63))
_MAX_NS = 2**63 - 1

_ZONE = r"(?:[Zz]|[+-]\d{2}(?::?\d{2})?)$"
_ISO = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d+))?)?)?"
    r"\s*(Z|z|UTC|[+-]\d{2}(?::?\d{2})?)?"
)
_LOG = re.compile(r"(\d{1,2})/([A-Z][a-z]{2})/(\d{4}):(\d{2}):(\d{2}):(\d{2}) ([+-]\d{4})")  # nginx $time_local
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+))?", re.ASCII)
_LOOKS_ISO = re.compile(r"\s*\d{1,4}[-/]")
_MONTHS = {name: month for month, name in enumerate(calendar.month_abbr) if name}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Parsed(NamedTuple):
    """Values of a batch; what could not be read is 0 there and named in `bad` (index → problem)."""

    values: npt.NDArray[np.int64]
    bad: dict[int, str]


class Clock:
    """How one column tells time; settled at the first value and the same for the whole file.

    Args:
        unit: "iso", "s", "ms", "us" or "ns"; None when only the values can tell.
        relative: True when numbers count from the trace's start, False when from 1970, None when the magnitude tells.
    """

    def __init__(self, unit: str | None = None, *, relative: bool | None = None) -> None:
        self.unit, self.relative = unit, relative
        self.guessed = False

    @property
    def epoch(self) -> str:
        """As the record's metadata has it: "unix" or "relative"."""
        return "relative" if self.relative else "unix"

    def told(self) -> str:
        """One line for the user when something was guessed, else empty."""
        if not self.guessed:
            return ""
        what = "from the trace's start" if self.relative else "since 1970"
        return f"times read as {self.unit} {what}, told by their size"

    def ns(self, text: pa.Array) -> Parsed:
        """Nanoseconds of a string array; nulls and empty strings are bad."""
        if len(text) == 0:
            return Parsed(np.zeros(0, np.int64), {})
        if self.unit is None or (self.relative is None and self.unit != "iso"):
            self._settle(text)
        if self.unit is None:  # nothing readable yet: say why, value by value
            return each(text, lambda word: _number(word, 9))
        if self.unit == "iso":
            return iso_ns(text)
        parsed = decimal_ns(text, self.unit)
        return self._same_magnitude(parsed) if self.guessed else parsed

    def _settle(self, text: pa.Array) -> None:
        for word in text.to_pylist():
            if word and _LOOKS_ISO.match(word):
                self.unit, self.relative = "iso", False
                return
            try:
                value = abs(decimal_of(word or ""))
            except ValueError:
                continue
            if self.unit is None:
                self.guessed = True
                self.unit = _magnitude(value)
            self.relative = value < Decimal(_EPOCH_FROM).scaleb(9 - UNIT_DIGITS[self.unit])
            return

    def _same_magnitude(self, parsed: Parsed) -> Parsed:
        assert self.unit is not None
        low, high = _bounds_ns(self.unit, relative=bool(self.relative))
        size = np.abs(parsed.values)
        odd = np.flatnonzero((size < low) | (size >= high))
        for index in odd.tolist():
            if index not in parsed.bad:
                parsed.bad[index] = (
                    f"is of another size than the first time, which was read as {self.unit}: say the unit"
                )
        return parsed


def _magnitude(value: Decimal) -> str:
    if value < _EPOCH_FROM:
        return "s"
    return next((unit for unit, below in _EPOCH_BELOW if value < below), "ns")


def _bounds_ns(unit: str, *, relative: bool) -> tuple[int, int]:
    if relative:
        return 0, _EPOCH_FROM * 10**9
    lower = {"s": _EPOCH_FROM, "ms": 10**11, "us": 10**14, "ns": 10**17}[unit]
    upper = dict(_EPOCH_BELOW)[unit]
    return lower * 10 ** UNIT_DIGITS[unit], min(upper * 10 ** UNIT_DIGITS[unit], _MAX_NS)


def decimal_ns(text: pa.Array, unit: str) -> Parsed:
    """Decimal numbers of a unit to ns, exact; digits below 1 ns are rounded half to even."""
    digits = UNIT_DIGITS[unit]
    try:
        if digits == 0:
            whole = pc.fill_null(pc.cast(text, pa.int64()), 0)
            return Parsed(whole.to_numpy(zero_copy_only=False), _nulls(text))
        fine = pc.cast(text, pa.decimal128(38, 18))
        rounded = pc.round(fine, digits, round_mode="half_to_even").cast(pa.decimal128(38, digits))
        return Parsed(_unscaled(rounded), _nulls(text))
    except (pa.ArrowInvalid, OverflowError):
        return each(text, lambda word: _number(word, digits))


def iso_ns(text: pa.Array) -> Parsed:
    """ISO 8601 times to ns since 1970; without an offset they are UTC."""
    try:
        if not _years_fit(text):
            return each(text, one_iso_ns)
        zoned = pc.fill_null(pc.match_substring_regex(text, _ZONE_AFTER_TIME), fill_value=False)
        if not pc.any(zoned).as_py():
            stamps = pc.cast(text, pa.timestamp("ns"))
        elif pc.all(zoned).as_py():
            stamps = pc.cast(text, pa.timestamp("ns", "UTC"))
        else:
            suffix = pc.if_else(zoned, "", "Z")
            stamps = pc.cast(pc.binary_join_element_wise(text, suffix, ""), pa.timestamp("ns", "UTC"))
        return Parsed(pc.fill_null(stamps.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), _nulls(text))
    except pa.ArrowInvalid:
        return each(text, one_iso_ns)


def _years_fit(text: pa.Array) -> bool:
    """Whether all times lie where 64 bits of ns reach; older Arrows turn others over without a word."""
    years = pc.min_max(pc.utf8_slice_codeunits(text, 0, 4)).as_py()
    return years["min"] is not None and years["min"] >= "1678" and years["max"] <= "2261"


_ZONE_AFTER_TIME = r":\d{2}(?:\.\d+)?" + _ZONE


def one_iso_ns(text: str) -> int:
    """One ISO 8601 (or web server log) time to ns since 1970. Raises ValueError."""
    word = text.strip()
    match = _ISO.fullmatch(word)
    if match is None:
        return _one_log_ns(word)
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC) - _offset(match[8])
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{_short(word)} is not a time ({error})") from error
    fraction_ns = int((match[7] or "")[:9].ljust(9, "0"))
    return _in_range(_whole_s(moment) * 10**9 + fraction_ns, word)


def _one_log_ns(word: str) -> int:
    match = _LOG.fullmatch(word)
    if match is None or match[2] not in _MONTHS:
        raise ValueError(f"{_short(word)} is not a time")
    parts = (int(match[3]), _MONTHS[match[2]], *(int(match[group]) for group in (1, 4, 5, 6)))
    return _whole_s(datetime(*parts, tzinfo=UTC) - _offset(match[7])) * 10**9  # type: ignore[misc,arg-type]


def _whole_s(moment: datetime) -> int:
    gap = moment - _EPOCH
    return gap.days * 86_400 + gap.seconds


def _offset(zone: str | None) -> timedelta:
    if zone is None or zone in {"Z", "z", "UTC"}:
        return timedelta()
    minutes = int(zone[1:3]) * 60 + int(zone[3:].lstrip(":") or 0)
    return timedelta(minutes=-minutes if zone[0] == "-" else minutes)


def decimal_of(word: str) -> Decimal:
    """A decimal number, `1e3` too. Raises ValueError for anything else, such as `nan`, `1_000` or `0x10`."""
    match = _DECIMAL.fullmatch(word.strip())
    if match is None:
        raise ValueError(f"{_short(word)} is not a number")
    if match[1] is not None and len(match[1]) > 4:
        raise ValueError(f"{_short(word)} has an exponent beyond all bounds")
    return Decimal(match[0])


def _number(word: str, digits: int) -> int:
    value = decimal_of(word)
    if value.adjusted() > 30 and value:
        raise ValueError(f"{_short(word)} is too large a time")
    return _in_range(int((value * 10**digits).to_integral_value()), word)


def _in_range(value_ns: int, word: str) -> int:
    if abs(value_ns) > _MAX_NS:
        raise ValueError(f"{_short(word)} is too large a time: 64 bits of nanoseconds reach from 1677 to 2262")
    return value_ns


def each(text: pa.Array, parse: Callable[[str], int]) -> Parsed:
    """Value by value with a function that raises ValueError; empty ones are bad."""
    values = np.zeros(len(text), np.int64)
    bad: dict[int, str] = {}
    for index, word in enumerate(text.to_pylist()):
        if word is None or not word.strip():
            bad[index] = "is empty"
            continue
        try:
            values[index] = parse(word)
        except (ValueError, OverflowError) as error:
            bad[index] = str(error)
    return Parsed(values, bad)


def _nulls(text: pa.Array) -> dict[int, str]:
    if not text.null_count:
        return {}
    return dict.fromkeys(np.flatnonzero(pc.is_null(text).to_numpy(zero_copy_only=False)).tolist(), "is empty")


def _unscaled(values: pa.Array) -> npt.NDArray[np.int64]:
    """The unscaled integers of a decimal128 array. Raises OverflowError where 64 bits do not hold one."""
    words = np.frombuffer(values.buffers()[1], dtype="<i8")[2 * values.offset : 2 * (values.offset + len(values))]
    low, high = words[0::2], words[1::2]
    if values.null_count:
        null = pc.is_null(values).to_numpy(zero_copy_only=False)
        low, high = np.where(null, 0, low), np.where(null, 0, high)
    if not np.array_equal(high, low >> 63):
        raise OverflowError("more than 64 bits of nanoseconds")
    return low


def _short(word: str) -> str:
    word = word.strip()
    return repr(word if len(word) <= 40 else word[:37] + "...")
