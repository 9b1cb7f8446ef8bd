"""The engine's tokenizer: reversible for any text, exact for its own words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replay.engine import words


@given(st.text())
def test_decoding_gives_every_text_back(text):
    assert words.decode(words.encode(text)) == text


@given(st.text())
def test_ids_that_came_from_a_text_encode_to_themselves_and_lie_in_the_vocabulary(text):
    ids = words.encode(text)
    assert words.encode(words.decode(ids)) == ids
    assert all(0 <= token < words.VOCABULARY for token in ids)


@given(st.lists(st.integers(words.FIRST_WORD, words.VOCABULARY - 1)))
def test_any_run_of_words_encodes_to_itself_one_token_a_word(ids):
    assert words.encode(words.decode(ids)) == ids


def test_texts_and_their_ids_worked_out_by_hand():
    spaced, letters, byte = 18_550, 272, 16
    table = {
        "": [],
        "a": [letters],
        " z": [spaced + 25],
        "ab": [letters + 26 + 1],
        "hello": [letters + 26 + 676 + 7 * 676 + 4 * 26 + 11, letters + 26 + 11 * 26 + 14],
        "A": [byte + 65],
        "é": [byte + 0xC3, byte + 0xA9],
        "  a": [byte + 32, spaced],
    }
    for text, ids in table.items():
        assert words.encode(text) == ids, text
    assert words.VOCABULARY == 36_828
    assert words.decode([words.FIRST_WORD, words.VOCABULARY - 1]) == " aaa zzz"


def test_a_chat_costs_two_tokens_a_message_and_one_for_the_answer_to_come():
    messages = [("system", "ab"), ("user", " abc def"), ("assistant", " ghi")]
    ids = words.chat(messages)
    assert len(ids) == 3 * 2 + 1 + 2 + 1 + 1
    assert ids[-1] == 3
    assert words.chat(messages, answer=False) == ids[:-1]
    assert words.decode(ids).startswith("<|system|>ab<|end|><|user|> abc def<|end|>")


def test_the_next_turn_begins_with_all_ids_of_this_one():
    first = words.chat([("user", " abc")])
    said = " def ghi"
    second = words.chat([("user", " abc"), ("assistant", said), ("user", " jkl")])
    before = first + words.encode(said)
    assert second[: len(before)] == before
