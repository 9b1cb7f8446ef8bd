"""Before the first request: may we send there, is it up, what is it, has it the model, what is a token there.

    parse_target → allowed → look → model_for → learn_vocabulary, overheads → file_descriptors

`allowed` comes before any socket or name look-up. Everything asked here is a handful of small requests, one after the
other, none of them in the outcomes. No redirect is followed and no proxy is taken from the environment.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replay import vocabulary
from replay.plan import Plan
from replay.prompts import PATHS, shape_of, takes_ids
from replay.target import Refused, Target, allowed, parse_target
from replay.vocabulary import Vocabulary
from tenants import dialects
from tenants.dialects import Detected
from traces import descriptors
from traces.descriptors import SPARE_DESCRIPTORS
from traces.record import ENDPOINTS

__all__ = [
    "Ask",
    "Known",
    "Models",
    "Refused",
    "Server",
    "Target",
    "allowed",
    "api_key",
    "file_descriptors",
    "kinds_of",
    "learn_vocabulary",
    "length_notes",
    "look",
    "model_for",
    "overheads",
    "parse_target",
    "usage",
]

ANSWER_S = 10.0
SAMPLE_WORDS = 50
USAGE_WORDS = 32  # enough words where each question is a real request


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says about itself."""

    models: tuple[str, ...]
    detected: Detected
    version: str | None = None
    max_model_len: int | None = None


class Ask:
    """Small questions to the target, one connection each.

    Args:
        target: where.
        headers: sent along, keys among them.
        tls: context for https.
        timeout_s: for each answer.
    """

    def __init__(
        self,
        target: Target,
        headers: Mapping[str, str] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = ANSWER_S,
    ) -> None:
        self.target, self.headers, self.tls, self.timeout_s = target, dict(headers or {}), tls, timeout_s

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a GET. Raises OSError, http.client.HTTPException."""
        return self._ask("GET", path, None, {})

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and parsed JSON (None where it is none) of a POST. Raises OSError, http.client.HTTPException."""
        status, text = self._ask("POST", path, json.dumps(body).encode(), dict(headers or {}))
        try:
            return status, json.loads(text)
        except ValueError:
            return status, None

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str]:
        target = self.target
        connection: http.client.HTTPConnection
        if target.scheme == "https":
            connection = http.client.HTTPSConnection(
                target.host, target.port, timeout=self.timeout_s, context=self.tls or ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(target.host, target.port, timeout=self.timeout_s)
        try:
            sent = {"content-type": "application/json", "connection": "close", **self.headers, **headers}
            connection.request(method, target.base_path + path, body, sent)
            answer = connection.getresponse()
            return answer.status, answer.read(8 << 20).decode("utf-8", "replace")
        finally:
            connection.close()


def look(ask: Ask) -> Server:
    """What answers there.

    Raises:
        Refused: nobody does.
    """
    try:
        status, models = ask.get("/v1/models")
    except ssl.SSLError as error:
        raise Refused(f"--target {ask.target.origin}: TLS failed ({error.reason}); see --ca-file") from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Refused(f"--target {ask.target.origin} does not answer ({why}): is the server up?") from error
    if status in {401, 403}:
        raise Refused(
            f"--target {ask.target.origin} refuses the key (HTTP {status}): set it in the variable of --api-key-env"
        )
    listed = models if status == 200 else None
    version, metrics = _text(ask, "/version"), _text(ask, "/metrics")
    found = _models(listed)
    return Server(
        models=tuple(str(model.get("id")) for model in found if model.get("id")),
        detected=dialects.detect(version, listed, metrics),
        version=_version(version),
        max_model_len=next((int(m["max_model_len"]) for m in found if isinstance(m.get("max_model_len"), int)), None),
    )


def _text(ask: Ask, path: str) -> str | None:
    try:
        status, text = ask.get(path)
    except (OSError, http.client.HTTPException):
        return None
    return text if status == 200 else None


def _models(text: str | None) -> list[dict[str, Any]]:
    try:
        document = json.loads(text or "{}")
    except ValueError:
        return []
    data = document.get("data") if isinstance(document, dict) else None
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []


def _version(text: str | None) -> str | None:
    try:
        document = json.loads(text or "")
    except ValueError:
        return None
    return str(document["version"]) if isinstance(document, dict) and "version" in document else None


class Models(NamedTuple):
    """The server's model name per entry of `Plan.models`, the default for rows without one, and what was said."""

    of_plan: tuple[str, ...]
    default: str
    notes: tuple[str, ...]


def model_for(wanted: str | None, plan: Plan, server: Server) -> Models:
    """`--model`, else the trace's if the server has it, else the server's only one.

    Raises:
        Refused: the model does not exist there, or there are several to choose from.
    """
    have = ", ".join(server.models)
    if wanted is not None:
        if server.models and wanted not in server.models:
            raise Refused(f"--model {wanted}: the server has no such model; it has {have}")
        return Models((wanted,) * len(plan.models), wanted, ())
    if not server.models:
        if not plan.models:
            raise Refused("the server lists no models and the trace names none: say --model NAME")
        return Models(plan.models, plan.models[0], ("the server lists no models: the trace's names are sent",))
    missing = [name for name in plan.models if name not in server.models]
    if not missing and plan.models:
        return Models(plan.models, plan.models[0], ())
    if len(server.models) > 1:
        what = f"the server has no {missing[0]!r}" if missing else "the trace names no model"
        raise Refused(f"{what}; choose one with --model: {have}")
    only = server.models[0]
    notes = (f"model {', '.join(missing)} of the trace becomes {only}, the server's only one",) if missing else ()
    return Models((only,) * len(plan.models), only, notes)


class Known(NamedTuple):
    """Whom to ask, in its own words."""

    ask: Ask
    dialect: str
    model: str


def learn_vocabulary(known: Known, plan: Plan, tokenizer: Path | None) -> Vocabulary:
    """What prompts are made of here: a tokenizer file, else the server's `/tokenize`, else its `usage`.

    Raises:
        Refused: the tokenizer file cannot be used.
    """
    if tokenizer is not None:
        try:
            return vocabulary.from_tokenizer_file(tokenizer)
        except ValueError as error:
            raise Refused(f"--tokenizer {error}") from error

    def encode(text: str) -> list[int]:
        body = {"model": known.model, "prompt": text, "add_special_tokens": False}
        status, answer = known.ask.post("/tokenize", body)
        if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
            raise LookupError(status)
        return [int(token) for token in answer["tokens"]]

    kinds = kinds_of(plan)
    with suppress(LookupError, ValueError, OSError, http.client.HTTPException):
        if all(takes_ids(known.dialect, kind) for kind in kinds):  # ids alone are needed: one question
            ids = tuple(dict.fromkeys(encode(vocabulary.text_of(vocabulary.CANDIDATES))))
            return Vocabulary(ids=ids, words=vocabulary.CANDIDATES, source="tokenize")
        return vocabulary.learn(lambda text: len(encode(text)), encode, "tokenize")

    def count(text: str) -> int:
        used = usage(known, kinds[0], text)
        if used is None:
            raise LookupError
        return used

    with suppress(LookupError, OSError, http.client.HTTPException):
        base = count(vocabulary.text_of(["the"])) - 1
        return vocabulary.learn(lambda text: count(text) - base, None, "usage", enough=USAGE_WORDS)
    return vocabulary.ASSUMED


def overheads(known: Known, plan: Plan, learnt: Vocabulary) -> tuple[dict[str, int], list[str]]:
    """Tokens that each endpoint adds around a text prompt (chat template, begin-of-text), by the server's usage."""
    found: dict[str, int] = {}
    notes: list[str] = []
    words = [learnt.words[index % len(learnt.words)] for index in range(SAMPLE_WORDS)]
    for kind in kinds_of(plan):
        if learnt.ids and takes_ids(known.dialect, kind):
            continue
        try:
            used = usage(known, kind, vocabulary.text_of(words))
        except (OSError, http.client.HTTPException):
            used = None
        if used is None:
            notes.append(f"{kind}: the server gave no usage, so what it adds to a prompt is unknown")
            continue
        found[kind] = max(0, used - round(SAMPLE_WORDS * learnt.tokens_per_word))
    return found, notes


def usage(known: Known, kind: str, text: str) -> int | None:
    """Prompt tokens that the server counts for a text at an endpoint; one real request of one output token."""
    shape = json.dumps(shape_of(kind, dialect=known.dialect, model=known.model, stream=False))
    body = json.loads(shape.replace('"@tokens"', "1").replace("@prompt", text))
    status, answer = known.ask.post(PATHS[kind], body)
    if status != 200 or not isinstance(answer, dict):
        return None
    used = answer.get("usage") or answer.get("meta_info") or {}
    for key in ("prompt_tokens", "input_tokens"):
        if isinstance(used.get(key), int):
            return int(used[key])
    return None


def kinds_of(plan: Plan) -> list[str]:
    """Endpoints that the plan sends to."""
    import numpy as np

    return [ENDPOINTS[index] for index in np.unique(plan.endpoint).tolist()]


def length_notes(plan: Plan, server: Server) -> list[str]:
    """Requests that are longer than the model's context: the server will refuse them."""
    if server.max_model_len is None:
        return []
    too_long = int(((plan.input_tokens.astype("int64") + plan.output_tokens) > server.max_model_len).sum())
    if not too_long:
        return []
    most = server.max_model_len
    what = f"{too_long:,} requests exceed the model's {most:,} tokens and will be refused or cut short"
    return [f"{what}; see --lengths max={most}"]


def file_descriptors(plan: Plan, workers: int, concurrency: int | None) -> list[str]:
    """A note when the connections that the plan could need are more than a worker may have."""
    needed = -(-min(plan.rows, concurrency or plan.rows) // max(1, workers))
    there = descriptors.attainable() - SPARE_DESCRIPTORS
    if needed > there:
        return [f"at most {there:,} connections per worker (ulimit -n), the plan could need {needed:,}"]
    return []


def api_key(name: str) -> str | None:
    """A key from the environment; empty counts as none."""
    return os.environ.get(name) or None
