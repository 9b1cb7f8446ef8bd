"""Draws belong to a session: the same wherever it stands, independent of every other."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from traces.record import Metadata, table
from traces.seeded import mix_one, session_keys, text_keys, uniform

texts = st.lists(st.none() | st.text(max_size=20), min_size=1, max_size=50)


def test_the_mixer_is_splitmix64():
    assert mix_one(0) == 0xE220A8397B1DCDAF  # first output for seed 0, as published
    assert mix_one(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # the second


@given(words=texts, chunk=st.integers(1, 7))
def test_equal_texts_get_equal_keys_however_they_are_chunked(words, chunk):
    whole = pa.chunked_array([pa.array(words, pa.string())])
    parts = pa.chunked_array([pa.array(words[i : i + chunk], pa.string()) for i in range(0, len(words), chunk)])
    keys = text_keys(whole, np.zeros(len(words), dtype=np.uint64))
    assert text_keys(parts, np.zeros(len(words), dtype=np.uint64)).tolist() == keys.tolist()
    by_text = {}
    for word, key in zip(words, keys.tolist(), strict=True):
        assert by_text.setdefault(word, key) == key
    assert len(set(by_text.values())) == len(by_text)
    assert by_text.get(None, 0) == 0


def test_rows_of_a_session_share_a_key_and_rows_without_one_have_their_own():
    trace = table(
        {"arrival_ns": range(5), "session_id": ["a", None, "a", None, "b"], "request_id": list("vwxyz")}, Metadata()
    )
    keys = session_keys(trace).tolist()
    assert keys[0] == keys[2]
    assert len(set(keys)) == 4


def test_draws_are_uniform_and_depend_on_seed_and_purpose():
    keys = np.arange(100_000, dtype=np.uint64)
    one = uniform(keys, 7, "sample")
    counts = np.bincount((one * 20).astype(int), minlength=20)
    assert ((counts - 5000) ** 2 / 5000).sum() < 45  # chi-squared with 19 degrees of freedom: 45 is the 99.9 % point
    for other in (uniform(keys, 8, "sample"), uniform(keys, 7, "rate")):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    assert uniform(keys[500:510], 7, "sample").tolist() == one[500:510].tolist()
