"""Knows the next chunk of a stream without decoding it.

Chunks of one stream differ in one string: `{"id":"..",...,"delta":{"content":"` TEXT `"},...}`. Once one of them was
decoded and found to be a plain token chunk, a block that begins with the same bytes and ends with the same bytes, with
a non-empty JSON string's inside between them, is the same JSON document but for that string: the same choice, no finish
reason, the same usage. So it is a token chunk too, exactly, and costs two comparisons instead of a decoder run.
"""

from __future__ import annotations

import re
from typing import Any

_KEY = re.compile(rb'(?<=[{,])"(content|text)":\s?"')
_INSIDE = re.compile(rb'[^"\\\n]*(?:\\[^\n][^"\\\n]*)*')
_TRIES = 16


class Template:
    """The bytes around the text of a token chunk."""

    __slots__ = ("_before", "_inside_from", "_tries", "after", "before", "least")

    def __init__(self) -> None:
        self.before = b"\x00"  # matches nothing
        self.after = b""
        self.least = 0
        self._tries = _TRIES

    def fits(self, block: bytes) -> bool:
        """Whether `block` is the learnt chunk with another text."""
        if not (block.startswith(self.before) and block.endswith(self.after)):
            return False
        inside = block[len(self.before) : len(block) - len(self.after)]
        if b'"' not in inside and b"\\" not in inside and b"\n" not in inside:
            return len(block) > self.least
        return len(block) > self.least and _INSIDE.fullmatch(inside) is not None

    def learn(self, block: bytes, chunk: dict[str, Any]) -> None:
        """Learn from a block that was decoded, if it is a plain token chunk: one choice, one text, nothing special."""
        if self._tries == 0 or not _plain(chunk):
            return
        found = list(_KEY.finditer(block))
        if len(found) != 1 or not block.startswith(b"data:") or b"\n" in block:
            return
        self._tries -= 1
        start = found[0].end()
        inside = _INSIDE.match(block, start)
        if inside is None or inside.end() == start or block[inside.end() : inside.end() + 1] != b'"':
            return
        self.before, self.after = block[:start], block[inside.end() :]
        self.least = len(self.before) + len(self.after)


def _plain(chunk: dict[str, Any]) -> bool:
    """One choice without finish reason whose only output is a visible text; no usage, no error, no extras."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    held = choice.get("delta", choice)
    if not isinstance(held, dict) or choice.get("finish_reason") is not None:
        return False
    text = held.get("content", held.get("text"))
    others = (chunk.get(key) for key in ("usage", "error", "x_groq", "metrics", "timings"))
    return isinstance(text, str) and text != "" and not any(other is not None for other in others)
