"""The page of `replay diagnose`, and that it comes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from replay import diagnose
from replay.machine import Machine

QUIET = Machine(cores=4, load=0.2, stolen=0.0, files=65_536, ports=28_000, backlog=4096)
TIMER = {"p50": 0.03, "p99": 0.2, "max": 1.0, "kind": "timerfd"}


def test_a_quiet_machine_needs_no_advice():
    assert diagnose.advices(QUIET, TIMER) == []


@pytest.mark.parametrize(
    ("changed", "timer", "word"),
    [
        ({"load": 3.5}, {}, "are busy"),
        ({"files": 1024}, {}, "only 1,024 open files"),
        ({"stolen": 0.05}, {}, "hypervisor"),
        ({}, {"p99": 4.0}, "over 1 ms late"),
        ({}, {"kind": "loop"}, "no timerfd"),
    ],
)
def test_what_stands_in_the_way_is_named(changed, timer, word):
    import msgspec

    (advice,) = diagnose.advices(msgspec.structs.replace(QUIET, **changed), TIMER | timer)
    assert word in advice


def test_it_measures_this_machine():
    result = CliRunner().invoke(diagnose.diagnose, ["--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["timer_ms"]["p50"] > 0
    assert found["floors"]["16"]["worker_rps"] > 0
    assert found["floors"]["16"]["failed"] == 0
