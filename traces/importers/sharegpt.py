"""ShareGPT-style conversations: lengths only, since such files hold text and no times.

`[{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]`, or `messages` with `role` and
`content`. Each answer is one request whose prompt is everything said before it. The text is counted, 4 characters a
token rounded up (`tokens_source` estimate), and forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from traces.importers import jsonrows
from traces.importers.batching import Gather
from traces.importers.intake import Intake
from traces.importers.source import Source

CHARACTERS_PER_TOKEN = 4
_ANSWERS = {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}


class Said(msgspec.Struct):
    """One message in either spelling."""

    from_: str | None = msgspec.field(name="from", default=None)
    value: str | None = None
    role: str | None = None
    content: str | None = None


class Row(msgspec.Struct):
    """A conversation."""

    id: str | int | None = None
    conversations: list[Said] | None = None
    messages: list[Said] | None = None


def read(source: Source, intake: Intake) -> Iterator[pa.RecordBatch]:
    """Batches of `session_id`, `turn` and lengths; `arrival_ns` is 0 and the metadata says "lengths"."""
    gather = Gather(
        "session_id turn arrival_ns endpoint input_tokens output_tokens tokens_source",
        intake.metadata("sharegpt", "relative", lengths=True),
    )
    for number, row in jsonrows.read(source, intake, Row):
        said = row.conversations if row.conversations is not None else row.messages
        if said is None:
            intake.bad_row(number, "conversations", "is missing")
            continue
        session = str(number if row.id is None else row.id)
        before = turn = 0
        for message in said:
            length = len(message.value if message.value is not None else message.content or "")
            if before and (message.from_ or message.role or "").lower() in _ANSWERS:
                gather.add(session, turn, 0, "chat", _tokens(before), _tokens(length), "estimate")
                turn += 1
            before += length
        if gather.full:
            yield gather.take()
    yield from gather.rest()


def _tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)
