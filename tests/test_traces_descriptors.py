"""Room for open files, tried in a process of its own: a limit that was lowered stays so."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITED = """
import os, resource
from traces.descriptors import attainable, make_room
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(attainable(), make_room({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(len(os.listdir("/dev/fd")) < 20)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "left"),
    [
        (64, 900, 500, 500),  # raised to what is wanted
        (64, 900, 5_000, 900),  # as far as it goes
        (300, 900, 100, 300),  # never lowered
        (300, 300, 0, 300),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes_and_no_descriptor_stays_open(soft, hard, wanted, left):
    code = LIMITED.format(soft=soft, hard=hard, wanted=wanted)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    limits, few = done.stdout.splitlines()
    assert [int(word) for word in limits.split()] == [hard, left, left, hard]
    assert few == "True"


def test_with_no_descriptor_free_it_does_nothing():
    code = LIMITED.format(soft=3, hard=3, wanted=100).replace('print(len(os.listdir("/dev/fd")) < 20)', "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3", "3", "3"]
