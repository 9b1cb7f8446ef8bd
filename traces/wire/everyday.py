"""The everyday chunk of OpenAI chat and completions: decoded into a struct, read in a few lines.

Nearly every chunk that is not known from the one before (`template.py`) is one of four: a role alone, a text, a text or
nothing with a finish reason, a usage without choices. They are decoded strictly: a field that is not listed here, or a
value of another type, is refused, and the general reader (`openai.py`) has it. What is accepted is read exactly as the
general reader would, at a quarter of the cost; a test holds the two against each other.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from traces.wire.tally import Tally

_Count = Annotated[int, Meta(ge=0, lt=2**31)]


class _Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: str | UnsetType | None = UNSET
    content: str | None = None
    reasoning: None = None
    reasoning_content: None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None


class _Choice(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    index: int
    delta: _Delta | None = None
    text: str | None = None
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: None = None
    prompt_token_ids: None = None
    prompt_logprobs: None = None


class _Details(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    cached_tokens: _Count | None = None
    audio_tokens: _Count | None = None


class _Usage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    choices: list[_Choice]
    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_token_ids: None = None
    kv_transfer_params: None = None
    error: None = None


class Usage(NamedTuple):
    """What a usage chunk counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


_decode = msgspec.json.Decoder(_Chunk).decode

OTHER, READ, PLAIN = 0, 1, 2


def read(tally: Tally, at_ns: int, data: bytes) -> int:
    """Read a chunk into the tally if it is an everyday one.

    Returns:
        OTHER: it is not, and nothing was done; READ; PLAIN: it was a text of a single choice and nothing else.
    """
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return OTHER
    choices, usage = chunk.choices, chunk.usage
    if not choices:
        return OTHER if usage is None else _count(tally, usage)
    if len(choices) > 1 or usage is not None:
        return OTHER
    choice = choices[0]
    delta = choice.delta
    if delta is None:
        text, role = choice.text, False
    elif choice.text is not None:
        return OTHER
    else:
        text, role = delta.content, delta.role is not UNSET
    index, finish = choice.index, choice.finish_reason
    if text == "" and not (role and index not in tally.indexes):
        return OTHER  # perhaps a token, perhaps not
    tally.indexes.add(index)
    if text:
        tally.token(at_ns)
        tally.uncounted.add(index)
    if finish is not None:
        tally.finish(index, finish)
        return READ
    return PLAIN if text else READ


def usage(event: bytes) -> Usage | None:
    """The counts of an event that is an everyday usage chunk and nothing else; None when it is not."""
    if not event.startswith(b"data: ") or b"\n" in event or b"\r" in event:  # a field of several lines
        return None
    try:
        chunk = _decode(event[6:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    found = chunk.usage
    if chunk.choices or found is None:
        return None
    details = found.prompt_tokens_details
    return Usage(found.prompt_tokens, found.completion_tokens, details.cached_tokens if details else None)


def _count(tally: Tally, usage: _Usage) -> int:
    tally.output_tokens = usage.completion_tokens
    tally.output_by_index.clear()  # a total over all choices
    tally.input_tokens = usage.prompt_tokens
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        tally.cached_tokens = details.cached_tokens
    return READ
