"""The engines' own `generate` routes: SGLang, TGI, llama.cpp, and watsonx, which speaks like TGI's elder.

SGLang     `text` is cumulative, or only what is new; `meta_info` counts tokens, so each event tells how many it brings
TGI        one token per event; the last one has `generated_text` and `details`; no end marker
llama.cpp  `content` per event, `stop: true` on the last, which may carry `timings`
watsonx    `results[]` with a cumulative `generated_token_count`; `stop_reason` "not_finished" until the last
"""

from __future__ import annotations

from typing import Any

from traces.wire import openai
from traces.wire.tally import Tally, span_ns, whole, word


def sglang(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of SGLang's /generate."""
    del name
    index = whole(chunk.get("index")) or 0
    tally.indexes.add(index)
    meta = chunk.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    total = whole(meta.get("completion_tokens"))
    before = tally.output_by_index.get(index, 0)
    new = None if total is None else total - before
    grown = _grown(tally, index, chunk.get("text"))
    if (grown or chunk.get("output_ids")) if new is None else new > 0:
        tally.token(at_ns, tokens=new)
    _sglang_meta(tally, index, meta, total)


def sglang_answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer of SGLang's /generate; several of them when several were asked for."""
    meta = body.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    index = len(tally.indexes)
    tally.indexes.add(index)
    total = whole(meta.get("completion_tokens"))
    tally.has_output = tally.has_output or bool(body.get("text") or body.get("output_ids") or total)
    _sglang_meta(tally, index, meta, total)


def tgi(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of TGI's /generate_stream."""
    if chunk.get("error") is not None or name == "error":
        openai.fail(tally, {"type": chunk.get("error_type"), "code": chunk.get("http_status_code")})
        return
    token = chunk.get("token")
    if isinstance(token, dict) and (token.get("text") or token.get("special") is False):
        tally.token(at_ns, tokens=1)
    details = chunk.get("details")
    if isinstance(details, dict):
        _tgi_details(tally, details)
    elif isinstance(chunk.get("generated_text"), str):
        tally.finish(0, "stop")


def tgi_answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer of TGI's /generate."""
    if body.get("error") is not None:
        openai.fail(tally, {"type": body.get("error_type")})
    tally.has_output = bool(body.get("generated_text"))
    details = body.get("details")
    if isinstance(details, dict):
        _tgi_details(tally, details)


def llamacpp(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of llama.cpp's /completion."""
    del name
    made = chunk.get("tokens")
    if chunk.get("content"):
        tally.token(at_ns, tokens=len(made) if isinstance(made, list) and made else None)
    elif made:
        tally.empty(at_ns)
    _llamacpp_end(tally, chunk)


def llamacpp_answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer of llama.cpp's /completion."""
    tally.has_output = bool(body.get("content"))
    _llamacpp_end(tally, body)


def watsonx(tally: Tally, at_ns: int, name: str | None, chunk: dict[str, Any]) -> None:
    """One event of a text generation stream of watsonx."""
    del name
    results = chunk.get("results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict):
            total = whole(result.get("generated_token_count"))
            new = None if total is None else total - tally.output_by_index.get(0, 0)
            if result.get("generated_text") if new is None else new > 0:
                tally.token(at_ns, tokens=new)
            _watsonx_result(tally, result, total)


def watsonx_answer(tally: Tally, body: dict[str, Any]) -> None:
    """A whole answer of watsonx."""
    results = body.get("results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict):
            tally.has_output = tally.has_output or bool(result.get("generated_text"))
            _watsonx_result(tally, result, whole(result.get("generated_token_count")))


def _grown(tally: Tally, index: int, text: Any) -> bool:
    """Whether cumulative (or new) text says something it did not say before."""
    if not isinstance(text, str) or not text:
        return False
    before = tally.lengths.get(index, 0)
    tally.lengths[index] = len(text)
    return len(text) > before


def _sglang_meta(tally: Tally, index: int, meta: dict[str, Any], total: int | None) -> None:
    if total is not None:
        tally.output_by_index[index] = tally.output_tokens = total
    given = whole(meta.get("prompt_tokens"))
    tally.input_tokens = tally.input_tokens if given is None else given
    cached = whole(meta.get("cached_tokens"))
    tally.cached_tokens = tally.cached_tokens if cached is None else cached
    finish = meta.get("finish_reason")
    if isinstance(finish, dict):
        if finish.get("type") == "abort":
            tally.fail(finish.get("status_code"), finish.get("err_type"))
        tally.finish(index, finish.get("type"))
    elif finish is not None:
        tally.finish(index, finish)
    queue_ns = span_ns(meta.get("queue_time"), 1e9)
    tally.queue_ns = tally.queue_ns if queue_ns is None else queue_ns
    begun, ended = meta.get("forward_entry_time"), meta.get("prefill_finished_time")
    if isinstance(begun, int | float) and isinstance(ended, int | float):
        tally.prefill_ns = span_ns(ended - begun, 1e9)


def _tgi_details(tally: Tally, details: dict[str, Any]) -> None:
    if details.get("finish_reason") is not None:
        tally.finish(0, details["finish_reason"])
    made, given = whole(details.get("generated_tokens")), whole(details.get("input_length"))
    tally.output_tokens = tally.output_tokens if made is None else made
    if given is None and isinstance(details.get("prefill"), list) and details["prefill"]:
        given = len(details["prefill"])
    tally.input_tokens = tally.input_tokens if given is None else given


def _llamacpp_end(tally: Tally, chunk: dict[str, Any]) -> None:
    if chunk.get("stop") is True:
        tally.done = True
        kind = word(chunk.get("stop_type"))
        tally.finish(0, {"limit": "length", "eos": "stop", "word": "stop"}.get(kind, "stop") if kind else "stop")
        tally.output_tokens = whole(chunk.get("tokens_predicted"))
        tally.input_tokens = whole(chunk.get("tokens_evaluated"))
        tally.cached_tokens = whole(chunk.get("tokens_cached")) if tally.cached_tokens is None else tally.cached_tokens
    timings = chunk.get("timings")
    if isinstance(timings, dict):
        tally.prefill_ns = span_ns(timings.get("prompt_ms"), 1e6)
        for field, key in (("output_tokens", "predicted_n"), ("cached_tokens", "cache_n")):
            value = whole(timings.get(key))
            if value is not None:
                setattr(tally, field, value)


def _watsonx_result(tally: Tally, result: dict[str, Any], total: int | None) -> None:
    if total is not None:
        tally.output_by_index[0] = tally.output_tokens = total
    given = whole(result.get("input_token_count"))
    if given:
        tally.input_tokens = given
    stopped = word(result.get("stop_reason"))
    if stopped and stopped != "not_finished":
        tally.finish(0, stopped)
