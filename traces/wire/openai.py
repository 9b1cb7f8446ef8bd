"""OpenAI chat and completions, as vLLM, SGLang, TGI, llama.cpp, LiteLLM, Ollama's /v1 and many services speak them.

Rules, per chunk of a stream:
- a delta with text, a refusal, audio, reasoning (`reasoning` or `reasoning_content`), a tool call or a function call is
  a token chunk; all but reasoning is visible;
- a role alone, a usage chunk (`choices: []`) and filter results are not;
- an empty string is a candidate (see tally.py), except with a role on the first chunk of its choice (some servers
  repeat the role on every chunk);
- `usage` is cumulative: the last one counts. Usage on every chunk counts its tokens by difference, per choice.

Ended by `data: [DONE]`. Some servers leave it out; then the finish reasons of all choices are the end.
"""

from __future__ import annotations

from typing import Any

from traces.wire.tally import Tally, span_ns, whole

_TEXTS = ("content", "refusal")
_REASONINGS = ("reasoning", "reasoning_content", "thinking")
_CALLS = ("tool_calls", "function_call", "audio")


def event(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One chunk of a stream."""
    usage = chunk.get("usage")
    if chunk.get("error") is not None or name == "error":
        fail(tally, chunk.get("error"))
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        choices = ()
    for choice in choices:
        if isinstance(choice, dict):
            if choice.get("error") is not None:
                fail(tally, choice["error"])
            _choice(tally, at_ns, choice, usage)
    if isinstance(usage, dict):
        _usage(tally, usage, choices[0] if len(choices) == 1 else None)
    _extras(tally, chunk)


def answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer that was not streamed."""
    if body.get("error") is not None:
        fail(tally, body["error"])
    choices = body.get("choices")
    output = False
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if not isinstance(choice, dict):
            continue
        message = choice.get("message")
        held = message if isinstance(message, dict) else choice
        output = output or _kind(held) in {"visible", "reasoning"} or bool(choice.get("text"))
        index = choice.get("index")
        index = index if isinstance(index, int) else position
        tally.indexes.add(index)
        if choice.get("finish_reason") is not None:
            tally.finish(index, choice["finish_reason"])
    usage = body.get("usage")
    if isinstance(usage, dict):
        _usage(tally, usage, None)
    _extras(tally, body)
    tally.has_output = output or _cut_short(tally)


def fail(tally: Tally, error: Any) -> None:
    """An error object, in any of the shapes that servers send."""
    if isinstance(error, dict):
        codes = [error.get(key) for key in ("code", "http_status_code", "status", "type", "error_type")]
        tally.fail(*codes)
    else:
        tally.fail(error)


def _choice(tally: Tally, at_ns: int, choice: dict[str, Any], usage: Any) -> None:
    index = choice.get("index")
    index = index if isinstance(index, int) else 0
    begins = index not in tally.indexes
    tally.indexes.add(index)
    finish = choice.get("finish_reason")
    delta = choice.get("delta")
    kind = _kind(delta) if isinstance(delta, dict) else _text_kind(choice)
    if kind.startswith("empty") and begins and isinstance(delta, dict) and "role" in delta:
        kind = "none"
    tokens = _new_tokens(tally, index, usage)
    if kind in {"visible", "reasoning"} or (kind.startswith("empty") and tokens):
        tally.token(at_ns, visible="reasoning" not in kind, tokens=tokens)
    elif kind != "none":
        tally.empty(at_ns, visible="reasoning" not in kind, length=finish == "length")
    if kind != "none" and tokens is None:
        tally.uncounted.add(index)
    if finish is not None:
        tally.finish(index, finish)


def _text_kind(choice: dict[str, Any]) -> str:
    """Completions: `text`; a chat message given whole inside a stream: `message`."""
    text = choice.get("text")
    if isinstance(text, str):
        return "visible" if text else "empty"
    message = choice.get("message")
    return _kind(message) if isinstance(message, dict) else "none"


def _kind(delta: dict[str, Any]) -> str:
    """What a delta carries: "visible", "reasoning", "none"; "empty", "empty reasoning": there, but ""."""
    if any(delta.get(key) for key in _CALLS):
        return "visible"
    empty = "none"
    for key in _TEXTS:
        value = delta.get(key)
        if isinstance(value, list):
            kind = _parts_kind(value)
            if kind != "none":
                return kind
        elif value:
            return "visible"
        elif value == "":
            empty = "empty"
    for key in _REASONINGS:
        value = delta.get(key)
        if value:
            return "reasoning"
        if value == "" and empty == "none":
            empty = "empty reasoning"
    return empty


def _parts_kind(parts: list[Any]) -> str:
    """Content given as a list of parts (Mistral): text is visible, thinking is reasoning."""
    found = "none"
    for part in parts:
        if isinstance(part, dict):
            if part.get("type") == "thinking":
                found = "reasoning" if part.get("thinking") and found == "none" else found
            elif part.get("text") or part.get("image_url"):
                return "visible"
        elif part:
            return "visible"
    return found


def _new_tokens(tally: Tally, index: int, usage: Any) -> int | None:
    """Tokens that this chunk added to its choice, where every chunk so far carried usage."""
    if not isinstance(usage, dict) or index in tally.uncounted:
        return None
    total = whole(usage.get("completion_tokens"))
    if total is None:
        return None
    new = total - tally.output_by_index.get(index, 0)
    return new if new >= 0 else None


def _usage(tally: Tally, usage: dict[str, Any], choice: Any) -> None:
    output = whole(usage.get("completion_tokens"))
    if output is not None:
        tally.output_tokens = output
        if isinstance(choice, dict):
            index = choice.get("index")
            tally.output_by_index[index if isinstance(index, int) else 0] = output
        else:
            tally.output_by_index.clear()  # a total over all choices
    input_tokens = whole(usage.get("prompt_tokens"))
    if input_tokens is not None:
        tally.input_tokens = input_tokens
    for details, key, field in (
        ("prompt_tokens_details", "cached_tokens", "cached_tokens"),
        ("completion_tokens_details", "reasoning_tokens", "reasoning_tokens"),
    ):
        held = usage.get(details)
        value = whole(held.get(key)) if isinstance(held, dict) else whole(usage.get(key))
        if value is not None:
            setattr(tally, field, value)
    if tally.cached_tokens is None:
        tally.cached_tokens = whole(usage.get("prompt_cache_hit_tokens"))  # DeepSeek
    _durations(tally, usage, "queue_time", "prompt_time", 1e9)  # Groq: seconds


def _extras(tally: Tally, chunk: dict[str, Any]) -> None:
    """What some servers add: Groq's own usage, vLLM's and llama.cpp's times."""
    groq = chunk.get("x_groq")
    if isinstance(groq, dict):
        if groq.get("error") is not None:
            fail(tally, groq["error"])
        if isinstance(groq.get("usage"), dict):
            _usage(tally, groq["usage"], None)
    metrics = chunk.get("metrics")
    if isinstance(metrics, dict):
        # vLLM's time_to_first_token_ms begins when the request was scheduled: prefill alone.
        _durations(tally, metrics, "queue_time_ms", "time_to_first_token_ms", 1e6)
    timings = chunk.get("timings")
    if isinstance(timings, dict):
        _durations(tally, timings, "queue_ms", "prompt_ms", 1e6)


def _durations(tally: Tally, held: dict[str, Any], queue: str, prefill: str, unit_ns: float) -> None:
    queue_ns, prefill_ns = span_ns(held.get(queue), unit_ns), span_ns(held.get(prefill), unit_ns)
    tally.queue_ns = tally.queue_ns if queue_ns is None else queue_ns
    tally.prefill_ns = tally.prefill_ns if prefill_ns is None else prefill_ns


def _cut_short(tally: Tally) -> bool:
    """A whole answer with no text, ended by its length, whose tokens were not all hidden reasoning."""
    spent = (tally.output_tokens or 0) - (tally.reasoning_tokens or 0)
    return spent > 0 and "length" in tally.finishes.values()
