"""The engine's tokenizer: small, without files, and reversible for any text.

A token is one to three lower-case letters with or without a space before them, or one byte of UTF-8, or special.
Ids are arithmetic, so there is no vocabulary to ship:

    0 .. 15              special tokens (the chat roles, end of text)
    16 .. 271            bytes
    272 .. 18549         letters, in base 26: a .. z, aa .. zz, aaa .. zzz
    18550 .. 36827       the same with a space before

`decode(encode(text)) == text` for every text. `encode(decode(ids)) == ids` holds for ids that came from `encode`, and
for any run of ids from FIRST_WORD on (what the engine writes), not for every list of ids: as with real tokenizers,
neighbours may merge.

A chat is its messages in order, each as role, content, end, and then the assistant's role: an answer that comes back in
the next turn has the ids it was written with, and hits the prefix cache.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence

SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_BYTES = 16
_LETTERS = _BYTES + 256
_COMBINATIONS = 26 + 26**2 + 26**3
_SPACED = _LETTERS + _COMBINATIONS
VOCABULARY = _SPACED + _COMBINATIONS

END_OF_TEXT = 0
_ROLES = {"system": 1, "developer": 1, "user": 2, "assistant": 3, "tool": 4, "function": 4}
_END = 5

# The first id of " aaa": from here on every id is a space and three letters, and any run of them encodes to itself.
FIRST_WORD = _SPACED + 26 + 26**2
WORDS = VOCABULARY - FIRST_WORD

_PIECE = re.compile(r" ?[a-z]{1,3}|.", re.DOTALL)


@functools.cache
def _pieces() -> tuple[list[bytes], dict[str, int]]:
    """Every token's bytes by id, and the id of every piece of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters]
    words += [a + b for a in letters for b in letters]
    words += [a + b + c for a in letters for b in letters for c in letters]
    texts = [*words, *(" " + word for word in words)]
    by_id = [name.encode() for name in SPECIAL]
    by_id += [b""] * (_BYTES - len(SPECIAL))
    by_id += [bytes([value]) for value in range(256)]
    by_id += [text.encode() for text in texts]
    return by_id, {text: _LETTERS + i for i, text in enumerate(texts)}


def encode(text: str) -> list[int]:
    """The ids of a text."""
    ids = _pieces()[1]
    found = _PIECE.findall(text)
    with contextlib.suppress(KeyError):
        return [ids[piece] for piece in found]  # nothing but letters and spaces: the common case
    out: list[int] = []
    for piece in found:
        token = ids.get(piece)
        if token is not None:
            out.append(token)
        else:
            out.extend(_BYTES + value for value in piece.encode("utf-8", "surrogatepass"))
    return out


def decode(ids: Iterable[int]) -> str:
    """The text of ids; bytes that are no UTF-8 become the replacement character. Raises IndexError."""
    by_id = _pieces()[0]
    return b"".join([by_id[token] for token in ids]).decode("utf-8", "replace")


def pieces() -> Sequence[bytes]:
    """The bytes of every token, by id."""
    return _pieces()[0]


def chat(messages: Sequence[tuple[str, str]], *, answer: bool = True) -> list[int]:
    """The ids of a chat given as (role, content); an unknown role counts as the user's.

    Args:
        messages: roles and contents in order.
        answer: end with the assistant's role, ready for its answer.
    """
    out: list[int] = []
    for role, content in messages:
        out.append(_ROLES.get(role, 2))
        out.extend(encode(content))
        out.append(_END)
    if answer:
        out.append(_ROLES["assistant"])
    return out
