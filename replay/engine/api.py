"""Requests as vLLM's OpenAI routes take them, and errors as they give them. Bytes in, values out; no I/O.

What is checked and how it is answered follows vLLM 0.33: an unknown model is 404, a body that is no JSON or has a wrong
type is 400 ("Bad Request"), a value out of range is 400 ("BadRequestError"), `max_tokens` beyond the context is cut
without a word. Unknown fields are ignored, as there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from replay.engine import words

PRIORITY_HEADER = "X-Vllm-Priority"
MAX_N = 16_384
COMPLETION_TOKENS = 16  # max_tokens of a completion that does not say

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=words.VOCABULARY)]


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The JSON that vLLM would send."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def bad_value(message: str, param: str, value: object) -> ApiError:
    """A well-formed request with a value the engine does not take."""
    return ApiError(400, "BadRequestError", f"{message} (parameter={param}, value={value})", param)


def overloaded(message: str) -> ApiError:
    """A full queue."""
    return ApiError(503, "Service Unavailable", message)


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Part(msgspec.Struct, frozen=True):
    type: str = "text"
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    priority: _Int64 | None = None


class _Chat(_Common, frozen=True, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


class _Completion(_Common, frozen=True, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    echo: bool | None = False


class _Tokenize(msgspec.Struct, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class _Detokenize(msgspec.Struct, frozen=True):
    tokens: list[_Token]
    model: str | None = None


_chat = msgspec.json.Decoder(_Chat)
_completion = msgspec.json.Decoder(_Completion)
_tokenize = msgspec.json.Decoder(_Tokenize)
_detokenize = msgspec.json.Decoder(_Detokenize)
_ids = msgspec.json.Decoder(list[_Token])
_many_ids = msgspec.json.Decoder(list[list[_Token]])
_any_ids = msgspec.json.Decoder(list[int | list[int]])
_text = msgspec.json.Decoder(str)
_many_texts = msgspec.json.Decoder(list[str])


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is checked against.

    Attributes:
        models: names served.
        max_model_len: prompt and output tokens together.
        natural_tokens: mean output length of a request that may end by itself (geometric); None: it never does.
    """

    models: tuple[str, ...]
    max_model_len: int
    natural_tokens: float | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be run: `n` sequences for each prompt.

    Attributes:
        max_tokens: for each prompt, cut to what the context leaves.
        ends_after: for each prompt, the length at which it ends by itself, or None.
    """

    chat: bool
    model: str
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    ends_after: Sequence[int | None]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    priority: int | None
    asked_max_tokens: int | None


def chat(body: bytes, headers: Mapping[str, str], limits: Limits) -> Ask:
    """A request to `/v1/chat/completions`. Raises ApiError."""
    given = _decode(_chat, body)
    _check_model(given.model, limits)
    if not given.messages:
        raise bad_value("messages must not be empty.", "messages", "[]")
    prompt = words.chat([(message.role, message.text()) for message in given.messages])
    asked = given.max_completion_tokens if given.max_completion_tokens is not None else given.max_tokens
    return _ask(given, [prompt], asked, headers, limits)


def completion(body: bytes, headers: Mapping[str, str], limits: Limits) -> Ask:
    """A request to `/v1/completions`; its prompt is a text, token ids, or a list of either. Raises ApiError."""
    given = _decode(_completion, body)
    _check_model(given.model, limits)
    prompts = _prompts(bytes(given.prompt))
    asked = given.max_tokens if given.max_tokens is not None else COMPLETION_TOKENS
    return _ask(given, prompts, asked, headers, limits)


def tokenize(body: bytes, limits: Limits) -> bytes:
    """The answer of `/tokenize`. Raises ApiError."""
    given = _decode(_tokenize, body)
    _check_model(given.model, limits)
    if given.messages is not None:
        messages = [(message.role, message.text()) for message in given.messages]
        ids = words.chat(messages, answer=given.add_generation_prompt)
    elif given.prompt is not None:
        ids = words.encode(given.prompt)
    else:
        raise ApiError(400, "Bad Request", "1 validation error:\n  Field required: prompt or messages", "body")
    strings = [words.decode([token]) for token in ids] if given.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids, "token_strs": strings}
    return msgspec.json.encode(answer)


def detokenize(body: bytes, limits: Limits) -> bytes:
    """The answer of `/detokenize`. Raises ApiError."""
    given = _decode(_detokenize, body)
    _check_model(given.model, limits)
    return msgspec.json.encode({"prompt": words.decode(given.tokens)})


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        param = "body." + where.rstrip("`") if where else "body"
        raise ApiError(400, "Bad Request", f"1 validation error:\n  {param}: {text}", param) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, "Bad Request", f"1 validation error:\n  body: JSON decode error: {error}", "body") from None
    except UnicodeDecodeError:
        raise ApiError(400, "Bad Request", "1 validation error:\n  body: not UTF-8", "body") from None


def _check_model(model: str | None, limits: Limits) -> None:
    if model and model not in limits.models:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def _prompts(raw: bytes) -> Sequence[Sequence[int]]:
    """The token ids of a completion's prompts."""
    inner = raw.lstrip(b"[ \t\r\n")
    depth = raw[: len(raw) - len(inner)].count(b"[")
    is_text = inner.startswith(b'"')
    if depth == 0 and is_text:
        prompts: list[list[int]] = [words.encode(_decode(_text, raw))]
    elif depth == 1 and is_text:
        prompts = [words.encode(text) for text in _decode(_many_texts, raw)]
    elif depth == 1:
        prompts = [_token_ids(_ids, raw)]
    elif depth == 2 and not is_text:
        prompts = _token_ids(_many_ids, raw)
    elif raw == b"null":
        prompts = []
    else:
        raise ApiError(
            400, "Bad Request", "1 validation error:\n  body.prompt: no text and no token ids", "body.prompt"
        )
    if not prompts or not all(prompts):
        raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt", "")
    return prompts


def _token_ids(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    """Ids of the vocabulary; the decoder checks them as it reads."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        ids = [token for item in _decode(_any_ids, raw) for token in (item if isinstance(item, list) else [item])]
        outside = [token for token in ids if not 0 <= token < words.VOCABULARY]
        if not outside:  # ids and lists of ids mixed
            raise ApiError(
                400, "Bad Request", "1 validation error:\n  body.prompt: ids and lists", "body.prompt"
            ) from None
        raise ApiError(400, "BadRequestError", f"Token id {outside[0]} is out of vocabulary", "prompt") from None


def _ask(
    given: _Common, prompts: Sequence[Sequence[int]], asked: int | None, headers: Mapping[str, str], limits: Limits
) -> Ask:
    n = 1 if given.n is None else given.n
    _check_values(given, n, asked)
    options = given.stream_options
    max_tokens = [_room(len(prompt), asked, limits.max_model_len) for prompt in prompts]
    ends: list[int | None] = [None] * len(prompts)
    if limits.natural_tokens is not None and not given.ignore_eos:
        ends = [max(given.min_tokens, _natural_length(prompt, limits.natural_tokens)) for prompt in prompts]
    return Ask(
        chat=isinstance(given, _Chat),
        model=given.model or limits.models[0],
        prompts=prompts,
        max_tokens=max_tokens,
        ends_after=ends,
        n=n,
        stream=bool(given.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
        echo=isinstance(given, _Completion) and bool(given.echo),
        priority=_priority(given.priority, headers),
        asked_max_tokens=asked,
    )


def _check_values(given: _Common, n: int, asked: int | None) -> None:
    if n < 1:
        raise bad_value(f"n must be at least 1, got {n}.", "n", n)
    if n > MAX_N:
        raise bad_value(f"n must be at most {MAX_N}, got {n}.", "n", n)
    if n > 1 and given.temperature == 0:
        raise bad_value(f"n must be 1 when using greedy sampling, got {n}.", "n", n)
    if asked is not None and asked < 1:
        raise bad_value(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    if given.min_tokens < 0:
        raise bad_value(
            f"min_tokens must be greater than or equal to 0, got {given.min_tokens}.", "min_tokens", given.min_tokens
        )
    if asked is not None and given.min_tokens > asked:
        message = f"min_tokens must be less than or equal to max_tokens={asked}, got {given.min_tokens}."
        raise bad_value(message, "min_tokens", given.min_tokens)
    if given.temperature is not None and not 0 <= given.temperature < math.inf:
        raise bad_value(f"temperature must be non-negative, got {given.temperature}.", "temperature", given.temperature)
    if given.stream_options is not None and not given.stream:
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options", None)


def _room(prompt_tokens: int, asked: int | None, max_model_len: int) -> int:
    """Output tokens a prompt leaves room for, at most as many as were asked for."""
    if prompt_tokens > max_model_len:
        least = "at least " if prompt_tokens == max_model_len + 1 else ""
        raise bad_value(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {least}"
            f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the"
            " length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    room = max_model_len - prompt_tokens
    if room < 1:
        raise bad_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)
    return room if asked is None else min(asked, room)


def _natural_length(prompt: Sequence[int], mean: float) -> int:
    """A geometric length that depends on the prompt alone."""
    draw = random.Random(hash((len(prompt), *prompt[-64:]))).random()
    if mean <= 1:
        return 1
    return 1 + int(math.log1p(-draw) / math.log1p(-1 / mean))


def _priority(body: int | None, headers: Mapping[str, str]) -> int | None:
    """The header wins; one that is no integer is ignored."""
    header = headers.get(PRIORITY_HEADER)
    if header is not None:
        try:
            return int(header)
        except ValueError:
            return body
    return body
