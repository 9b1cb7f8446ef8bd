"""Tokens that the server says it read and wrote during a run, beside what the client counted. No verdict hangs on it.

    before = asked(ask)  ...the run...  found = reconciled(before, asked(ask), outcomes)

A server's counters hold everybody's traffic, so a difference is not an error of either: it says that somebody else was
there, or that the address has several servers behind it. What the client cannot have seen counts as explained: a prompt
whose answer broke off before `usage`, tokens written after a client had gone, attempts that were made again.

    explained:  client · (1 − 1 %)  ≤  server  ≤  (client + unseen) · (1 + 1 %)
"""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from tenants.measures import Columns

if TYPE_CHECKING:
    from replay.preflight import Ask

APART = 0.01  # share from which on a difference is worth a word
_COUNTER = re.compile(
    r"^(?:vllm:|sglang:|trtllm_|llamacpp:)(prompt_tokens|generation_tokens|tokens_predicted)_total(?:\{.*\})? (\S+)",
    re.MULTILINE,
)


class Tokens(msgspec.Struct, frozen=True):
    """Of prompts and of answers."""

    prompt: int
    generation: int


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted during a run; `unseen` is the most that the client cannot have seen."""

    server: Tokens
    client: Tokens
    unseen: Tokens
    notes: tuple[str, ...] = ()


def asked(ask: Ask) -> Tokens | None:
    """The counters of this moment; None where the server has none or does not answer."""
    try:
        status, text = ask.get("/metrics")
    except (OSError, http.client.HTTPException):
        return None
    return told(text) if status == http.client.OK else None


def told(metrics: str) -> Tokens | None:
    """The counters in a Prometheus text, summed over engines and models; None unless both are there."""
    found: dict[str, float] = {}
    for name, value in _COUNTER.findall(metrics):
        kind = "prompt" if name == "prompt_tokens" else "generation"
        try:
            found[kind] = found.get(kind, 0.0) + float(value)
        except ValueError:
            return None
    if len(found) < 2 or not all(np.isfinite(list(found.values()))):
        return None
    return Tokens(round(found["prompt"]), round(found["generation"]))


def reconciled(before: Tokens | None, after: Tokens | None, outcomes: pa.Table) -> Reconciled | None:
    """Both sides of a run; None where the server did not tell, before or after.

    Args:
        before: its counters before the first request.
        after: the same after the last answer.
        outcomes: all rows of the run, those of the warm-up too.
    """
    if before is None or after is None:
        return None
    server = Tokens(after.prompt - before.prompt, after.generation - before.generation)
    client, unseen = counted(outcomes)
    if min(server.prompt, server.generation) < 0:
        notes = ["the server's token counters went back during the run: it was started anew, or several answer there"]
    else:
        kinds = Tokens.__struct_fields__
        notes = [_note(kind, *(getattr(side, kind) for side in (server, client, unseen))) for kind in kinds]
    return Reconciled(server=server, client=client, unseen=unseen, notes=tuple(note for note in notes if note))


def counted(outcomes: pa.Table) -> tuple[Tokens, Tokens]:
    """What the client counted, and the most it cannot have seen. A prompt counts once for each answer asked for."""
    get = Columns(outcomes)
    sent = ~np.isnan(get.numbers("sent_ns"))
    choices = np.nan_to_num(get.numbers("n"), nan=1.0)
    again = np.maximum(np.nan_to_num(get.numbers("attempts"), nan=1.0) - 1, 0)
    exact = (get.codes("outcome", ["ok"]) == 0) & (get.codes("tokens_source", ["usage"]) == 0)
    seen, hidden = [], []
    for kind in ("input", "output"):
        had, planned = get.numbers(f"{kind}_tokens"), choices * np.nan_to_num(get.numbers(f"planned_{kind}_tokens"))
        had = np.nan_to_num(had * choices if kind == "input" else had)
        open_end = np.where(exact, 0, np.maximum(planned - had, 0))
        seen.append(int(had[sent].sum()))
        hidden.append(int((open_end + again * planned)[sent].sum()))
    return Tokens(*seen), Tokens(*hidden)


def _note(kind: str, server: int, client: int, unseen: int) -> str:
    """A difference in words; empty where it is small or explained."""
    if client * (1 - APART) <= server <= (client + unseen) * (1 + APART):
        return ""
    share = f"{(server - client) / client:+.1%}" if client else "none of ours"
    why = (
        "other traffic on the server is the usual reason"
        if server > client
        else "several servers behind one address are the usual reason"
    )
    return f"the server counted {server:,} {kind} tokens during the run, the client {client:,} ({share}): {why}"
