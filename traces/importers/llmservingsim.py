"""LLMServingSim: `requests.jsonl` of a real vLLM run, or a workload file.

A run's `arrival_time` is epoch seconds of the client; `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`
are seconds on vLLM's monotonic clock, which starts elsewhere: only their differences mean anything, so the response's
times count from `queued_ts`. A workload has `arrival_time_ns` from 0 and perhaps token ids, which are not read. The
model's name stands in `meta.json` beside a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather, Ids
from traces.importers.intake import Intake
from traces.importers.jsonrows import Count, timed
from traces.importers.source import Source
from traces.units import NS_PER_S


class Row(msgspec.Struct):
    """A line of either kind."""

    input_toks: Count
    output_toks: Count
    request_id: str | None = None
    arrival_time: Decimal | None = None
    arrival_time_ns: Decimal | None = None
    queued_ts: Decimal | None = None
    scheduled_ts: Decimal | None = None
    first_token_ts: Decimal | None = None
    last_token_ts: Decimal | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `arrival_ns`, lengths and, of a run, `queue_ns` and the response's times."""
    model = _model(source)
    ids = Ids(intake, "request_id")
    gather: Gather | None = None
    for number, row in jsonrows.read(source, intake, Row):
        run = row.arrival_time_ns is None
        if run and row.arrival_time is None:
            intake.bad_row(number, "arrival_time", "is missing: a request needs a time")
            continue
        if gather is None:
            gather = Gather(
                "request_id arrival_ns model input_tokens output_tokens first_token_ns last_token_ns end_ns queue_ns",
                intake.metadata("llmservingsim", "unix" if run else "relative"),
            )
        unit_ns = NS_PER_S if run else 1
        times = timed(intake, number, unit_ns, arrival_time=row.arrival_time if run else row.arrival_time_ns)
        if times[0] is None:
            continue
        waits = timed(
            intake,
            number,
            NS_PER_S,
            scheduled_ts=_since(row.queued_ts, row.scheduled_ts),
            first_token_ts=_since(row.queued_ts, row.first_token_ts),
            last_token_ts=_since(row.queued_ts, row.last_token_ts),
        )
        if (row.queued_ts is not None and waits == (None, None, None)) or not ids.new(number, row.request_id):
            continue
        queue, first, last = waits
        gather.add(row.request_id, times[0], model, row.input_toks, row.output_toks, first, last, last, queue)
        if gather.full:
            yield gather.take()
    if gather is not None:
        yield from gather.rest()


def _since(start: Decimal | None, moment: Decimal | None) -> Decimal | None:
    return None if start is None or moment is None else moment - start


def _model(source: Source) -> str | None:
    beside = source.path.with_name("meta.json")
    try:
        model = json.loads(beside.read_text()).get("model")
    except (OSError, ValueError, AttributeError):
        return None
    return model if isinstance(model, str) else None
