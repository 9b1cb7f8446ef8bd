"""Words and ids that cost exactly one token, found by asking."""

from __future__ import annotations

import pytest

from replay import vocabulary


def costs(expensive=(), factor=3):
    """A tokenizer by words: one token each, but `factor` for the expensive ones."""
    asked = []

    def count(text):
        asked.append(text)
        return sum(factor if word in expensive else 1 for word in text.split())

    count.asked = asked
    return count


def test_a_tokenizer_that_knows_all_words_is_asked_a_handful_of_times():
    count = costs()
    words = vocabulary.single_token_words(count)
    assert len(words) == vocabulary.ENOUGH
    assert len(count.asked) == vocabulary.ENOUGH // vocabulary.GROUP


@pytest.mark.parametrize("every", [2, 3, 7, 31])
def test_words_of_several_tokens_are_sorted_out(every):
    expensive = set(list(dict.fromkeys(vocabulary.CANDIDATES))[::every])
    words = vocabulary.single_token_words(costs(expensive))
    assert words
    assert not expensive & set(words)


def test_the_number_of_questions_is_bounded():
    count = costs(set(vocabulary.CANDIDATES))
    assert vocabulary.single_token_words(count, asks=50) == ()
    assert len(count.asked) == 50


def test_without_one_token_words_the_mean_cost_is_used_and_said():
    learnt = vocabulary.learn(costs(set(vocabulary.CANDIDATES)), None, "usage")
    assert learnt.tokens_per_word == pytest.approx(3.0)
    assert not learnt.exact


def test_ids_are_the_tokens_of_the_words_each_once():
    learnt = vocabulary.learn(costs(), lambda text: [len(word) for word in text.split()], "tokenize")
    assert learnt.ids == tuple(dict.fromkeys(len(word) for word in vocabulary.CANDIDATES))
    assert learnt.exact


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [" ".join(vocabulary.CANDIDATES[start : start + 40]) for start in range(0, 200, 5)]
    tokenizer.train_from_iterator(corpus, trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def test_a_tokenizer_file_gives_words_that_are_counted_back_exactly_e01_e05(tokenizer_file):
    from tokenizers import Tokenizer

    learnt = vocabulary.from_tokenizer_file(tokenizer_file)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    assert learnt.exact
    text = vocabulary.text_of([learnt.words[index % len(learnt.words)] for index in range(8192)])
    assert len(tokenizer.encode(text).ids) == 8192
    assert not {0, 1} & set(learnt.ids), "special tokens are left out"


@pytest.mark.parametrize(("content", "message"), [(None, "no such tokenizer file"), ("{}", "not a tokenizer.json")])
def test_a_wrong_tokenizer_file_is_one_clear_line(tmp_path, content, message):
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        vocabulary.from_tokenizer_file(file)
