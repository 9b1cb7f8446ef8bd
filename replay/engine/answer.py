"""Answers as bytes, in the shape vLLM 0.33 gives them: field by field, chunk by chunk.

A streamed answer is a run of server-sent events, each a chunk of its own: for chat one role event per choice, sent with
the first token; a token an event; the last with its `finish_reason`; the usage event where it was asked for; `[DONE]`.
What does not change from token to token is encoded once per choice. All events that a step brings for one response are
one write.

The times in `metrics` are vLLM's: `time_to_first_token_ms` counts from *scheduled*, so add `queue_time_ms` for the wait
a client saw.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from replay.engine import words
from replay.engine.api import Ask, overloaded
from replay.engine.loop import Choice
from replay.engine.record import Log
from replay.engine.request import EngineRequest

KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """What the server was told to put into answers.

    Attributes:
        fingerprint: `system_fingerprint`.
        request_metrics: the `metrics` of a request with one choice (`--enable-per-request-metrics`).
        prompt_details: `usage.prompt_tokens_details` (`--enable-prompt-tokens-details`).
    """

    fingerprint: str
    request_metrics: bool = True
    prompt_details: bool = True


class Reply:
    """One HTTP response on its way: its choices, and their tokens so far.

    Args:
        ask: what was asked.
        request_id: id of the response.
        arrival_ns: when the request had been read.
        tenant: whose it is.
    """

    def __init__(self, ask: Ask, request_id: str, arrival_ns: int, tenant: str | None, style: Style) -> None:
        self.ask = ask
        self.id = request_id
        self.arrival_ns = arrival_ns
        self.tenant = tenant
        self.style = style
        self.created = int(time.time())
        self.choices: list[Choice] = []
        self.unfinished = len(ask.prompts) * ask.n
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refusal: str | None = None

    def token(self, choice: Choice) -> None:
        """One more token of a choice."""
        if choice.request.finish is not None:
            self.unfinished -= 1

    def flush(self) -> None:
        """All tokens of a step have been given."""
        self.end_if_finished()

    def refused(self, message: str) -> None:
        """The engine ended it before its time."""
        self.refusal = message
        self.unfinished = 0
        self.end_if_finished()

    def end_if_finished(self) -> None:
        """Wake the handler when nothing is left to come."""
        if not self.unfinished and not self.done.done():
            self.done.set_result(None)

    def usage(self, choice: Choice | None = None) -> dict[str, Any]:
        """Token counts of one choice so far, or of the whole response."""
        if choice is not None:
            prompt, completion = choice.request.prompt_tokens, choice.request.output_tokens
        else:
            prompt = sum(len(ids) for ids in self.ask.prompts)
            completion = sum(choice.request.output_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def details(self) -> dict[str, Any] | None:
        """What of the prompt came from the cache (of the first choice, as vLLM has it)."""
        if not self.style.prompt_details:
            return None
        return {"cached_tokens": self.choices[0].request.cached_tokens or 0}

    def metrics(self) -> dict[str, Any] | None:
        """The per-request metrics; None for several choices, as there they belong to no single stream."""
        if not self.style.request_metrics or len(self.choices) != 1:
            return None
        return request_metrics(self.choices[0])

    def log(self) -> Log:
        """The engine's row of this request, at its end."""
        requests = [choice.request for choice in self.choices]
        finishes = {request.finish for request in requests}
        outcome = "refused" if self.refusal is not None or not requests else "abort"
        if self.refusal is None and requests and not finishes & {None, "abort"}:
            outcome = "stop" if "stop" in finishes else "length"
        return Log(
            request_id=self.id.partition("-")[2],
            tenant=self.tenant,
            endpoint="chat" if self.ask.chat else "completions",
            stream=self.ask.stream,
            priority=self.ask.priority,
            n=self.ask.n,
            input_tokens=sum(len(ids) for ids in self.ask.prompts),
            cached_tokens=sum(request.cached_tokens or 0 for request in requests),
            output_tokens=sum(request.output_tokens for request in requests),
            max_tokens=sum(self.ask.max_tokens) * self.ask.n,
            preemptions=sum(request.preemptions for request in requests),
            outcome=outcome,
            arrival_ns=self.arrival_ns,
            scheduled_ns=min((choice.scheduled_ns for choice in self.choices if choice.scheduled_ns), default=None),
            first_token_ns=min((choice.first_ns for choice in self.choices if choice.first_ns), default=None),
            last_token_ns=max((choice.last_ns for choice in self.choices if choice.last_ns), default=None),
            end_ns=time.monotonic_ns(),
        )


class Streamed(Reply):
    """A reply that goes out token by token.

    Args:
        write: hands bytes to the connection.
        chunked: frame each event as a chunk (HTTP/1.1).
    """

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        arrival_ns: int,
        tenant: str | None,
        style: Style,
        *,
        write: Callable[[bytes], None],
        chunked: bool,
    ) -> None:
        super().__init__(ask, request_id, arrival_ns, tenant, style)
        self.written_ns = time.monotonic_ns()
        self._write = write
        self._chunked = chunked
        self._out: list[bytes] = []
        self._began = False
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        common = {"id": request_id, "object": kind, "created": self.created, "model": ask.model}
        self._start = b"data: " + _encode(common)[:-1] + b',"choices":['
        open_, null = (b',"delta":{"content":"', b'},"logprobs":null,"finish_reason":null')
        if not ask.chat:
            open_, null = (b',"text":"', b',"logprobs":null,"finish_reason":null,"stop_reason":null')
        closing = b',"token_ids":null}]' if ask.chat else b',"prompt_token_ids":null,"token_ids":null}]'
        self._open = [self._start + b'{"index":%d' % index + open_ for index in range(len(ask.prompts) * ask.n)]
        self._rest = b'"' + null + closing
        self._last_rest = {
            reason: self._rest.replace(
                b'"finish_reason":null' + (b"" if ask.chat else b',"stop_reason":null'),
                b'"finish_reason":"%s","stop_reason":null' % reason.encode(),
            )
            for reason in ("length", "stop")
        }

    def token(self, choice: Choice) -> None:
        """Append the event of one token, and before the first of all the role events."""
        if not self._began:
            self._begin(choice)
        request: EngineRequest = choice.request
        count = request.output_tokens
        word = words.pieces()[output_id(choice.seed, count - 1)]
        if count == 1 and self.ask.echo:
            word = _encode(words.decode(self.ask.prompts[choice.prompt]))[1:-1] + word
        finish = request.finish
        rest = self._rest if finish is None else self._last_rest[finish]
        tail = b"}\n\n"
        if self.ask.continuous_usage:
            tail = b',"usage":' + _encode(self.usage(choice)) + tail
        if finish is not None:
            self.unfinished -= 1
            if not self.ask.include_usage:
                tail = b',"system_fingerprint":' + _encode(self.style.fingerprint) + tail
        self._event(self._open[choice.index] + word + rest + tail)
        if not self.unfinished:
            self._finish()

    def flush(self) -> None:
        """Write what a step brought, in one write."""
        if self._out:
            self.written_ns = time.monotonic_ns()
            self._write(b"".join(self._out))
            self._out.clear()
        self.end_if_finished()

    def refused(self, message: str) -> None:
        """An error event and `[DONE]`: the status has been sent long ago."""
        self._event(b"data: " + overloaded(message).body() + b"\n\n")
        self._event(_DONE)
        super().refused(message)
        self.flush()

    def keep_alive(self) -> None:
        """A comment, so that nobody between takes the connection for dead."""
        self._event(KEEP_ALIVE)
        self.flush()

    def _begin(self, choice: Choice) -> None:
        self._began = True
        if not self.ask.chat:
            return
        tail = b',"prompt_token_ids":null,"prompt_text":null}\n\n'
        if self.ask.continuous_usage:
            prompt = choice.request.prompt_tokens
            none_yet = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
            tail = b',"usage":' + _encode(none_yet) + tail
        for index in range(len(self._open)):
            role = (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
            )
            self._event(self._start + role + tail)

    def _finish(self) -> None:
        if self.ask.include_usage:
            last: dict[str, Any] = {"usage": self.usage()}
            details, metrics = self.details(), self.metrics()
            if details is not None:
                last["usage"]["prompt_tokens_details"] = details
            last["system_fingerprint"] = self.style.fingerprint
            if metrics is not None:
                last["metrics"] = {key: value for key, value in metrics.items() if value is not None}
            self._event(self._start + b"]," + _encode(last)[1:] + b"\n\n")
        self._event(_DONE)

    def _event(self, data: bytes) -> None:
        self._out.append(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


def whole(reply: Reply) -> bytes:
    """The JSON of a reply that was not streamed."""
    ask = reply.ask
    usage = reply.usage() | {"prompt_tokens_details": reply.details(), "completion_tokens_details": None}
    answer: dict[str, Any] = {
        "id": reply.id,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": reply.created,
        "model": ask.model,
        "choices": [_whole_choice(reply, choice) for choice in reply.choices],
        "service_tier": None,
        "system_fingerprint": reply.style.fingerprint,
        "usage": usage,
    }
    if ask.chat:
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    answer |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": reply.metrics()}
    return _encode(answer)


def _whole_choice(reply: Reply, choice: Choice) -> dict[str, Any]:
    text = words.decode(output_id(choice.seed, k) for k in range(choice.request.output_tokens))
    end = {"logprobs": None, "finish_reason": choice.request.finish, "stop_reason": None, "token_ids": None}
    if not reply.ask.chat:
        if reply.ask.echo:
            text = words.decode(reply.ask.prompts[choice.prompt]) + text
        more = {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        return {"index": choice.index, "text": text} | end | more
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {"index": choice.index, "message": message} | end | {"routed_experts": None}


def output_id(seed: int, k: int) -> int:
    """Id of the k-th token a choice puts out: a word, from a sequence that its seed names."""
    return words.FIRST_WORD + ((seed + k) * 40_503 + (k >> 3)) % words.WORDS


def seed_of(prompt: Sequence[int], index: int) -> int:
    """The seed of a choice: the same prompt is answered with the same words."""
    return hash((index, len(prompt), *prompt[-32:])) & 0xFFFFFFFF


def request_metrics(choice: Choice) -> dict[str, Any]:
    """Per-request timing metrics, in ms; None where a time is missing."""
    queue_ns = choice.scheduled_ns - choice.arrival_ns
    prefill_ns = choice.first_ns - choice.scheduled_ns
    decode_ns = choice.last_ns - choice.first_ns
    count = choice.request.output_tokens
    inference_ns = choice.last_ns - choice.scheduled_ns
    return {
        "time_to_first_token_ms": prefill_ns / 1e6,
        "generation_time_ms": decode_ns / 1e6,
        "queue_time_ms": queue_ns / 1e6,
        "mean_itl_ms": decode_ns / (count - 1) / 1e6 if count > 1 else None,
        "tokens_per_second": count / inference_ns * 1e9 if inference_ns > 0 else None,
    }
