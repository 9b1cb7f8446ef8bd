"""Knows the next chunk of a stream without decoding it.

Chunks of one stream differ in one string: `{"id":"..",...,"delta":{"content":"` TEXT `"},...}`. Once one of them was
decoded and found to be a plain token chunk, a block that begins with the same bytes and ends with the same bytes, with
a non-empty JSON string's inside between them, is the same JSON document but for that string: the same choice, no finish
reason, the same usage. So it is a token chunk too, exactly, and costs two comparisons instead of a decoder run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

_KEY = re.compile(rb'(?<=[{,])"(content|text)":\s?"')
_INSIDE = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))++')  # possessive: no backtracking
_inside = _INSIDE.fullmatch
_TRIES = 16
_SPECIAL = b'"\\' + bytes(range(0x20))
_NOTHING = b"\x00"  # no block begins with it


class Template:
    """The bytes around the text of a token chunk."""

    __slots__ = ("_after", "_before", "_from_end", "_joint", "_last", "_start", "_tries")

    def __init__(self) -> None:
        self._before, self._after, self._last, self._joint = _NOTHING, b"", b"", _NOTHING
        self._start, self._from_end = 0, 0
        self._tries = _TRIES

    def fits(self, block: bytes) -> bool:
        """Whether `block` is the learnt chunk with another text."""
        return (
            block.startswith(self._before)
            and block.endswith(self._after)
            and _inside(block, self._start, len(block) - self._from_end) is not None
        )

    def lead(self, data: bytes, place: int) -> tuple[int, int]:
        """How many events that fit stand in `data` from `place` on without a gap, and their bytes.

        What stands between two texts is one string, so one split finds them all. The last text ends where that string
        begins, and so does the first piece that is no text: a text, and then something of another form.
        """
        if not data.startswith(self._before, place):
            return 0, 0
        *texts, rest = data[place + self._start :].split(self._joint)
        if not are_texts(texts):
            fitting = list(itertools.takewhile(_inside, texts))
            texts, rest = fitting, [*texts, rest][len(fitting)]
        count, size, end = len(texts), sum(map(len, texts)), rest.find(self._last)
        if end > 0 and _inside(rest, 0, end):
            count, size = count + 1, size + end
        return count, count * (self._start + self._from_end + 2) + size

    def run(self, reads: Sequence[tuple[int, bytes]], place: int, origin_ns: int, times_ns: list[int]) -> int:
        """Pass over the reads from `place` on that are one learnt chunk each; their offsets are added to `times_ns`.

        The two ends are compared read by read, what stands between them is looked at once for all.

        Returns:
            How many bytes they have in all.
        """
        before, last, start, stop = self._before, self._last, self._start, -self._from_end - 2
        texts, taken = [], []
        for read in itertools.islice(reads, place, None):
            data = read[1]
            if not (data.startswith(before) and data.endswith(last)):
                break
            texts.append(data[start:stop])
            taken.append(read)
        if not are_texts(texts):
            texts = list(itertools.takewhile(_inside, texts))
        times_ns += [at_ns - origin_ns for at_ns, _ in taken[: len(texts)]]
        return sum(map(len, texts)) + len(texts) * (start - stop)

    def learn(self, block: bytes, chunk: dict[str, Any] | None) -> None:
        """Learn from a block that was decoded, if it is a plain token chunk: one choice, one text, nothing special.

        Args:
            block: the event.
            chunk: its document; None when it is known to be plain.
        """
        if self._tries == 0 or not (chunk is None or _plain(chunk)):
            return
        start = text_start(block)
        if start < 0 or not block.startswith(b"data:") or b"\n" in block:
            return
        self._tries -= 1
        end = text_end(block, start)
        if end < 0:
            return
        self._before, self._after = block[:start], block[end:]
        self._last = self._after + b"\n\n"
        self._joint = self._last + self._before
        self._start, self._from_end = start, len(self._after)


def are_texts(pieces: list[bytes]) -> bool:
    """Whether each piece is the inside of a JSON string, and none is empty; mostly told by one look at all of them."""
    whole = b"".join(pieces)
    return all(pieces) and (len(whole.translate(None, _SPECIAL)) == len(whole) or all(map(_inside, pieces)))


def text_start(block: bytes) -> int:
    """Where the only text of a block begins; -1 when it has none or several.

    The usual spelling is looked for first: a word of the key in the block that is no key of its own (a text that quotes
    it has backslashes before its quotes) makes the count two, and the pattern decides.
    """
    if block.count(b'"content"') + block.count(b'"text"') == 1:
        for key in (b'{"content":"', b',"content":"', b',"text":"'):
            place = block.find(key)
            if place >= 0:
                return place + len(key)
    found = list(_KEY.finditer(block))
    return found[0].end() if len(found) == 1 else -1


def text_end(block: bytes, start: int) -> int:
    """Where the text that begins at `start` ends; -1 when it is empty or no string."""
    inside = _INSIDE.match(block, start)
    return -1 if inside is None or block[inside.end() : inside.end() + 1] != b'"' else inside.end()


def _plain(chunk: dict[str, Any]) -> bool:
    """One choice without finish reason whose only output is a visible text; no usage, no error, no extras."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    held = choice.get("delta", choice)
    if not isinstance(held, dict) or choice.get("finish_reason") is not None or choice.get("error") is not None:
        return False
    text = held.get("content", held.get("text"))
    others = (chunk.get(key) for key in ("usage", "error", "x_groq", "metrics", "timings"))
    return isinstance(text, str) and text != "" and not any(other is not None for other in others)
