"""What /proc says, read rightly; and this machine."""

from __future__ import annotations

import pytest

from replay import machine


@pytest.mark.parametrize(
    ("stat", "share"),
    [
        ("cpu  10 0 10 70 0 0 0 10 0 0\ncpu0 ...", 0.1),
        ("cpu  1 1 1 1 1 1 1 0 0 0\n", 0.0),
        ("cpu  1 1 1 1\n", None),
        ("", None),
    ],
)
def test_stolen_time_is_the_eighth_number(stat, share):
    assert machine.stolen(stat) == share


@pytest.mark.parametrize(("text", "expected"), [("12 34 5\n", 34), ("", None), ("1 2", None)])
def test_awaited_time_is_the_second_number_of_schedstat(text, expected):
    assert machine.waited(text) == expected


def test_this_machine_has_cores_files_and_ports():
    found = machine.look()
    assert found.cores >= 1
    assert found.files > 0
    assert found.ports is None or found.ports > 0
