"""ServeGen: parameters of a model service's clients, from which a trace is drawn (`--seed`, `--start`, `--duration`).

A folder holds `chunk-N-trace.csv` (no header: window start s, rate 1/s, CV, pattern, two parameters; 600 s windows) and
`chunk-N-dataset.json` (window start → field → probabilities by length) for every client N.

Drawing, client by client with a generator of its own (seed, N), so that leaving one out changes no other:

    gaps       of the window's pattern (Gamma or Weibull by its first parameter, its shape; exponential without one),
               scaled to mean 1 and added up; an arrival falls where the sum meets the integral of the rate, so the rate
               of each window holds and a gap may reach over its end
    lengths    input and output on their own, from the data window in force (the last that began and is not empty, else
               the first that is not); a multimodal input is the sum of its text, image, audio and video tokens
    reasoning  `reason_ratio` of the output

Each client is a tenant. A workload that ServeGen itself drew and saved as CSV is read as it is.
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.errors import BadFile, BadRow
from traces.importers import mapping, tables
from traces.importers.intake import Intake, record_batch
from traces.importers.source import Source
from traces.units import NS_PER_S

DEFAULT_DURATION_NS = 3600 * NS_PER_S
_TRACE = re.compile(r"chunk-(\d+)-trace\.csv(?:\.gz)?")
_DATASET = re.compile(r"(chunk-\d+)-dataset\.json")
_INPUTS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")
_PATTERNS = {"", "Gamma", "Weibull"}

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Lengths(NamedTuple):
    """A distribution: values and their probabilities, which add up to 1."""

    values: Floats
    shares: Floats


class Windows(NamedTuple):
    """A client's arrivals, one entry a window."""

    start_s: Ints
    rate_rps: Floats
    cv: Floats
    pattern: tuple[str, ...]
    shape: Floats

    @property
    def step_s(self) -> int:
        """Length of a window."""
        return int(self.start_s[1] - self.start_s[0]) if len(self.start_s) > 1 else 600


class Client(NamedTuple):
    """One client: how it arrives, and its lengths by data window and field."""

    number: int
    windows: Windows
    data: Mapping[int, Mapping[str, Lengths]]


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of a drawn trace, a window of time at a time; of a workload CSV that ServeGen drew, its rows."""
    if source.path.is_file() and not (_TRACE.fullmatch(source.path.name) or _DATASET.fullmatch(source.path.name)):
        yield from _workload(source, intake)
        return
    clients = load(source.path, source.name)
    silent = [client for client in clients if not client.data]
    drawing = [_Draw(client, intake.options.seed) for client in clients if client.data]
    for client in silent:
        intake.note(f"client {client.number} has no lengths and is left out")
    start_s = _start(intake, drawing)
    end_s = start_s + (intake.options.duration_ns or DEFAULT_DURATION_NS) / NS_PER_S
    if intake.options.duration_ns is None:
        intake.note("drew 1 h (another length: --duration 24h)")
    last_s = max(int(client.windows.start_s[-1]) + client.windows.step_s for client in clients)
    if end_s > last_s:
        raise BadFile(f"{source.name}: the parameters end at {last_s} s, before --start + --duration = {end_s:g} s")
    intake.note(f"drawn from {start_s} s of the parameters on, seed {intake.options.seed}")
    metadata = intake.metadata("servegen", "relative")
    for low in range(start_s, int(np.ceil(end_s)), 600):
        drawn = [draw.between(low, min(low + 600, end_s), start_s) for draw in drawing]
        if parts := [part for part in drawn if part is not None]:
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            order = np.argsort(joined["arrival_ns"], kind="stable")
            columns: dict[str, object] = {name: values[order] for name, values in joined.items()}
            columns["tenant"] = pa.array([f"client-{number}" for number in joined["tenant"][order].tolist()])
            yield record_batch(columns, metadata)


def _workload(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """`workload.csv` as ServeGen saves it: `timestamp` in seconds, and the lengths."""
    line = next((line for line in source.lines() if line.strip()), b"")
    columns, clock = mapping.resolve((("arrival_ns", "timestamp:s"),), tables.header(line), source.name)
    clock.relative = True
    for rows in tables.read(source, intake, [column.source for column in columns]):
        yield mapping.records(intake, "servegen", columns, clock, rows)


def _start(intake: Intake, drawing: list[_Draw]) -> int:
    """Where to begin: as asked, else at the first window in which a client sends."""
    if intake.options.start_ns is not None:
        return intake.options.start_ns // NS_PER_S
    active = [draw.client.windows.start_s[draw.client.windows.rate_rps > 0] for draw in drawing]
    if not any(len(starts) for starts in active):
        raise BadFile(f"{intake.source}: no client with lengths ever sends")
    return int(min(starts[0] for starts in active if len(starts)))


class _Draw:
    """Arrivals of one client as time goes on; keeps what is left of the gap that reaches into the next window."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.random = np.random.default_rng([seed, client.number])
        self.due: float | None = None  # integral of the rate up to the next arrival
        self.reasons = any("reason_ratio" in fields for fields in client.data.values())

    def between(self, low_s: float, high_s: float, origin_s: float) -> dict[str, npt.NDArray[np.generic]] | None:
        """Columns of the arrivals in [low, high), times counted from `origin_s`."""
        windows = self.client.windows
        times: list[Floats] = []
        inside = np.flatnonzero((windows.start_s < high_s) & (windows.start_s + windows.step_s > low_s))
        for window in inside.tolist():
            start, end = max(low_s, windows.start_s[window]), min(high_s, windows.start_s[window] + windows.step_s)
            times.append(self._arrivals(window, float(start), float(end)))
        at_s = np.concatenate(times) if times else np.zeros(0)
        if not len(at_s):
            return None
        fields = _in_force(self.client.data, low_s)
        output = self._lengths(fields.get("output_tokens"), len(at_s))
        columns: dict[str, npt.NDArray[np.generic]] = {
            "arrival_ns": np.round((at_s - origin_s) * NS_PER_S).astype(np.int64),
            "tenant": np.full(len(at_s), self.client.number),
            "input_tokens": sum(
                (self._lengths(fields.get(name), len(at_s)) for name in _INPUTS), np.zeros(1, np.int64)
            ),
            "output_tokens": output,
        }
        if self.reasons:
            ratio = fields.get("reason_ratio")
            share = self.random.choice(ratio.values, len(at_s), p=ratio.shares) if ratio else np.zeros(len(at_s))
            columns["reasoning_tokens"] = np.round(np.clip(share, 0, 1) * output).astype(np.int64)
        return columns

    def _arrivals(self, window: int, start_s: float, end_s: float) -> Floats:
        rate = float(self.client.windows.rate_rps[window])
        if rate <= 0:
            return np.zeros(0)
        if self.due is None:
            self.due = float(self._gaps(window, 1)[0])
        load = rate * (end_s - start_s)
        found: list[Floats] = []
        while self.due < load:
            gaps = self._gaps(window, max(16, int(load - self.due) + 1))
            sums = self.due + np.concatenate([[0.0], np.cumsum(gaps)])
            before = int(np.searchsorted(sums, load))
            found.append(sums[:before])
            self.due = float(sums[min(before, len(sums) - 1)])
            if before < len(sums):
                break
        self.due -= load
        return start_s + np.concatenate(found) / rate if found else np.zeros(0)

    def _gaps(self, window: int, count: int) -> Floats:
        """Gaps of mean 1."""
        pattern, shape = self.client.windows.pattern[window], float(self.client.windows.shape[window])
        if pattern == "Gamma" and shape > 0:
            return self.random.gamma(shape, 1 / shape, count)
        if pattern == "Weibull" and shape > 0:
            from scipy.special import gamma

            return self.random.weibull(shape, count) / float(gamma(1 + 1 / shape))
        return self.random.exponential(1, count)

    def _lengths(self, lengths: Lengths | None, count: int) -> Ints:
        if lengths is None:
            return np.zeros(count, np.int64)
        return self.random.choice(lengths.values, count, p=lengths.shares).astype(np.int64)


def _in_force(data: Mapping[int, Mapping[str, Lengths]], at_s: float) -> Mapping[str, Lengths]:
    begun = [start for start in data if start <= at_s]
    return data[max(begun)] if begun else data[min(data)]


def load(path: Path, name: str) -> list[Client]:
    """The clients of a folder, or the one of a `chunk-N-trace.csv` or its dataset, in the order of their numbers.

    Raises:
        BadFile, BadRow.
    """
    if not path.exists():
        raise BadFile(f"{name}: no such file or folder")
    if (match := _DATASET.fullmatch(path.name)) is not None:
        path = path.with_name(f"{match[1]}-trace.csv")
    files = sorted(path.glob("chunk-*-trace.csv*")) if path.is_dir() else [path]
    numbered = [(int(match[1]), file) for file in files if (match := _TRACE.fullmatch(file.name))]
    if not numbered:
        raise BadFile(f"{name}: no ServeGen client (chunk-N-trace.csv and chunk-N-dataset.json) there")
    return [Client(number, windows(file), dataset(file)) for number, file in sorted(numbered)]


def windows(path: Path) -> Windows:
    """The windows of a `chunk-N-trace.csv`. Raises BadFile, BadRow."""
    source = Source(path)
    rows: list[tuple[int, float, float, str, float]] = []
    for row, fields in enumerate(csv.reader(source.text().splitlines()), 1):
        if not fields:
            continue
        if len(fields) != 6:
            raise BadRow(source.name, row, None, f"{len(fields)} fields where ServeGen has 6")
        try:
            start, rate, cv, shape = (
                int(float(fields[0])),
                float(fields[1]),
                float(fields[2] or 0),
                float(fields[4] or 0),
            )
        except ValueError:
            raise BadRow(source.name, row, None, "a value is not a number") from None
        if not (np.isfinite([rate, cv, shape]).all() and rate >= 0 and cv >= 0):
            raise BadRow(source.name, row, "rate", f"{fields[1]!r} is below 0 or not a number")
        if fields[3] not in _PATTERNS:
            raise BadRow(source.name, row, "pattern", f"{fields[3][:40]!r} is not Gamma, Weibull or empty")
        if rows and start <= rows[-1][0]:
            raise BadRow(
                source.name, row, "start", f"{start} is not after {rows[-1][0]}: windows must follow each other"
            )
        rows.append((start, rate, cv, fields[3], shape))
    if not rows:
        raise BadFile(f"{source.name}: has no windows")
    start_s, rate_rps, cvs, pattern, shapes = zip(*rows, strict=True)
    return Windows(np.array(start_s), np.array(rate_rps), np.array(cvs), pattern, np.array(shapes))


def dataset(trace: Path) -> dict[int, dict[str, Lengths]]:
    """The lengths beside a `chunk-N-trace.csv`, data windows without any left out. Raises BadFile."""
    path = trace.with_name(re.sub(r"-trace\.csv(\.gz)?$", "-dataset.json", trace.name))
    source = Source(path)
    try:
        document = json.loads(source.text())
        found = {
            int(start): {field: _lengths(text) for field, text in fields.items() if text.strip() != "{}"}
            for start, fields in document.items()
        }
    except (ValueError, SyntaxError, AttributeError, TypeError) as error:
        raise BadFile(f"{source.name}: not a ServeGen dataset ({str(error).splitlines()[0][:80]})") from error
    return {start: fields for start, fields in found.items() if fields.get("output_tokens")}


def _lengths(text: str) -> Lengths:
    table = ast.literal_eval(text)
    values, shares = np.array(list(table), float), np.array(list(table.values()), float)
    if not (np.isfinite(values).all() and np.isfinite(shares).all() and (values >= 0).all() and (shares >= 0).all()):
        raise ValueError("a length or probability is below 0 or not a number")
    return Lengths(values, shares / shares.sum())
