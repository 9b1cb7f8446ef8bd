"""What prompts are made of: tokens that the server's own tokenizer knows, none of them special.

Two kinds of material. **Ids**: token ids, where an endpoint takes a prompt as ids; a prompt of k ids is k tokens.
**Words**: text of words that cost one token each when joined by blanks. Byte-pair and unigram tokenizers split text
before each blank first and never merge across that split, so k such words are k tokens, whatever their order, plus what
the endpoint adds around them (chat template, begin-of-text), which is measured once and subtracted.

Words are found by asking for the token count of groups: a group of k words that counts k tokens holds only one-token
words (a word costs at least one); a group that counts more is halved. `count` may be a tokenizer file, the server's
`/tokenize`, or the server's own `usage`: this module does not care and does no I/O of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

GROUP = 32
ENOUGH = 128
FEW = 8

_WORDS = """
the of and to in is it for on as with be at by this that from or are an not if can all was have but has more new so
out one up time no will about they there their which when who what use two how other were its than then into some
could them see only over also back after work first well way even want because any these give day most us get make
like just know take people year your good look come think where much go should very through long little own old
right still before must big high such follow act why ask men change went light kind off need house picture try again
animal point mother world near build self earth father head stand page country found answer school grow study learn
plant cover food sun four between state keep eye never last let thought city tree cross farm hard start might story
saw far sea draw left late run while press close night real life few north open seem together next white children
begin got walk example ease paper group always music those both mark often letter until mile river car feet care
second book carry took science eat room friend began idea fish mountain stop once base hear horse cut sure watch
color face wood main return def class import else value name type set list error object data file path key index
line text code test size table field string number call result True None raise except int str bytes read write
module function method default option
"""

CANDIDATES = tuple(_WORDS.split())
"""Common English and programming words; each is tried, none is assumed."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What a prompt may be made of.

    Attributes:
        ids: token ids, none special; empty where they could not be learnt.
        words: words of one token each (of `tokens_per_word` on average where that could not be had).
        tokens_per_word: 1.0, or the measured ratio.
        source: how it was learnt: `tokenizer`, `tokenize`, `usage` or `assumed`.
    """

    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    tokens_per_word: float = 1.0
    source: str = "assumed"

    @property
    def exact(self) -> bool:
        """Whether k words are k tokens."""
        return self.tokens_per_word == 1.0 and self.source != "assumed"


def text_of(words: Sequence[str]) -> str:
    """Words as they stand in a prompt: each with a blank before it."""
    return "".join(f" {word}" for word in words)


def single_token_words(
    count: Callable[[str], int], candidates: Sequence[str] = CANDIDATES, *, enough: int = ENOUGH, asks: int = 400
) -> tuple[str, ...]:
    """The candidates that cost one token each, in their order; stops at `enough` of them or after `asks` questions."""
    unique = list(dict.fromkeys(candidates))
    groups = [unique[start : start + GROUP] for start in range(0, len(unique), GROUP)]
    found: list[str] = []
    while groups and len(found) < enough and asks > 0:
        group = groups.pop(0)
        asks -= 1
        cost = count(text_of(group))
        if cost == len(group):
            found += group
        elif len(group) > 1:
            middle = len(group) // 2
            groups[:0] = [group[:middle], group[middle:]]
    return tuple(found[:enough])


def learn(
    count: Callable[[str], int], encode: Callable[[str], Sequence[int]] | None, source: str, *, enough: int = ENOUGH
) -> Vocabulary:
    """A vocabulary by asking: ids from the tokens of the candidate words, words by `single_token_words`.

    Where fewer than a handful of words cost one token, all candidates are used with their mean cost, and the
    vocabulary says so (`exact` is false).
    """
    everything = text_of(CANDIDATES)
    ids = tuple(dict.fromkeys(int(token) for token in encode(everything))) if encode else ()
    words = single_token_words(count, enough=enough)
    if len(words) < FEW:
        total = count(everything)
        unique = CANDIDATES
        return Vocabulary(ids=ids, words=unique, tokens_per_word=total / len(unique), source=source)
    sample = text_of([words[index % len(words)] for index in range(0, 7 * 150, 7)])
    ratio = count(sample) / 150
    return Vocabulary(ids=ids, words=words, tokens_per_word=1.0 if ratio == 1.0 else ratio, source=source)


def from_tokenizer_file(path: Path) -> Vocabulary:
    """The vocabulary of a `tokenizer.json`.

    Raises:
        ValueError: no such file, not a tokenizer, or the optional `tokenizers` package is absent.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("a tokenizer file needs the tokenizers package: pip install tokenizers") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: no such tokenizer file (tokenizer.json, or a folder with one)")
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer.json ({str(error).splitlines()[0]})") from error

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    learnt = learn(lambda text: len(encode(text)), encode, "tokenizer")
    return msgspec.structs.replace(learnt, ids=tuple(token for token in learnt.ids if token not in special))


ASSUMED = Vocabulary(words=CANDIDATES[:120], source="assumed")
"""Where nothing can be asked: common words, taken as one token each; the deviation shows in the outcomes."""
