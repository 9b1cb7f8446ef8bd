"""The result file of `vllm bench serve --save-detailed` (and of its relatives): parallel lists in one JSON object.

`input_lens`, `output_lens`, `ttfts`, `itls`, `errors`, `start_times`. Start times are seconds of a monotonic clock, so
arrivals count from the first; a file without them imports as lengths. `ttfts` and `itls` are seconds; a gap in `itls`
is one between chunks. Texts and errors are not kept. A failed request has an error, or no first token and no output.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from traces.errors import BadFile
from traces.importers import jsonrows
from traces.importers.batching import Gather
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count, exact_ns
from traces.importers.source import Source
from traces.units import NS_PER_S

_COLUMNS = (
    "arrival_ns model input_tokens output_tokens tokens_source first_token_ns last_token_ns end_ns chunk_ns outcome "
    "error"
)


class Result(msgspec.Struct):
    """What is read of the object."""

    input_lens: list[Count]
    output_lens: list[Count]
    ttfts: list[Decimal] | None = None
    itls: list[list[Decimal]] | None = None
    errors: list[Any] | None = None
    start_times: list[Decimal] | None = None
    model_id: str | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of arrivals (relative), lengths and the response's times."""
    results = list(jsonrows.read(source, intake, Result))
    if len(results) != 1:
        raise BadFile(f"{source.name}: {len(results)} results in one file; import one run at a time")
    result = results[0][1]
    _same_lengths(source, result)
    timed = result.start_times is not None
    gather = Gather(_COLUMNS, intake.metadata("vllmbench", "relative", lengths=not timed))
    first_start = min(result.start_times or [Decimal(0)], default=Decimal(0))
    for index in range(len(result.input_lens)):
        try:
            gather.add(*_row(result, index, first_start))
        except (ValueError, ArithmeticError) as error:
            intake.bad_row(index + 1, "ttfts", str(error))
        if gather.full:
            yield gather.take()
    yield from gather.rest()
    if not timed:
        intake.note("start_times are in the result of --save-detailed of a newer vLLM")


def _same_lengths(source: Source, result: Result) -> None:
    rows = len(result.input_lens)
    for name in ("output_lens", "ttfts", "itls", "errors", "start_times"):
        values = getattr(result, name)
        if values is not None and len(values) != rows:
            raise BadFile(f"{source.name}: {name} has {len(values)} entries where input_lens has {rows}")


def _row(result: Result, index: int, first_start: Decimal) -> tuple[object, ...]:
    arrival = 0 if result.start_times is None else exact_ns(result.start_times[index] - first_start, NS_PER_S)
    failed = bool(result.errors and result.errors[index])
    tokens = result.output_lens[index]
    chunks = None if failed or not tokens else _chunks(result, index)
    first = chunks[0] if chunks else None
    return (
        arrival,
        result.model_id,
        result.input_lens[index],
        tokens,
        "tokenizer",
        first,
        chunks[-1] if chunks else None,
        chunks[-1] if chunks else None,
        chunks if result.itls is not None else None,
        "stream_error" if failed else None,
        "bench" if failed else None,
    )


def _chunks(result: Result, index: int) -> list[int] | None:
    if result.ttfts is None or result.ttfts[index] <= 0:
        return None
    moments = [result.ttfts[index]]
    for gap in result.itls[index] if result.itls is not None else ():
        if gap < 0:
            raise ValueError(f"a gap of {gap} s between chunks is below 0")
        moments.append(moments[-1] + gap)
    return [exact_ns(moment, NS_PER_S) or 0 for moment in moments]
