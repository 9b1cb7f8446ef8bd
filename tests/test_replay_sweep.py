"""One replay per speed: which value broke it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from replay import sweep


def summary(verdict):
    return SimpleNamespace(verdict=verdict, sentence="risk is late.")


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        (["pass", "pass", "fail"], "holds at 2, fails at 3: risk is late."),
        (["fail", "pass", "pass"], "fails at 1: risk is late."),
        (["pass", "inconclusive", "fail"], "holds at 1, fails at 3: risk is late."),
        (["pass", "pass", "pass"], "everything holds up to 3"),
        (["pass", "invalid", "pass"], "cannot judge 2"),
    ],
)
def test_the_breaking_point_is_the_first_failure_after_the_last_pass(verdicts, sentence):
    runs = [(str(number), summary(verdict)) for number, verdict in enumerate(verdicts, 1)]
    assert sweep.breaking_point(runs) == sentence


@pytest.mark.parametrize("text", ["2x", "fast,slow", "0,1", ""])
def test_what_is_no_list_of_factors_is_refused(text):
    with pytest.raises(ValueError, match="x"):
        sweep.parse_factors(text)


def test_factors_are_tried_lowest_first_and_once():
    assert sweep.parse_factors("4x,1x,200%,1") == (1.0, 2.0, 4.0)


def test_speeds_or_rates_must_be_given():
    result = CliRunner().invoke(sweep.sweep, [], standalone_mode=False)
    assert "--speeds 1x,2x,4x or --rates" in str(result.exception)
