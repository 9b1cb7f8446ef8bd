"""An alarm never rings early, rings once, and keeps the moment it was given last."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from replay.alarm import Alarm

MS = 1_000_000
LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=[(loop, precise) for loop in LOOPS for precise in (True, False)], ids=str)
def rings(request):
    """Sets alarms, waits, and gives the times it rang, from the begin."""
    name, precise = request.param

    def play(moments_ns: list[int], wait_ms: int) -> list[int]:
        async def main() -> list[int]:
            seen: list[int] = []
            begin_ns = time.monotonic_ns()
            alarm = Alarm(lambda: seen.append(time.monotonic_ns() - begin_ns), precise=precise)
            assert alarm.kind == ("timerfd" if precise else "loop")
            for moment_ns in moments_ns:
                alarm.at(begin_ns + moment_ns)
            await asyncio.sleep(wait_ms / 1000)
            alarm.close()
            return seen

        with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
            return runner.run(main())

    return play


def test_it_rings_once_and_not_early(rings):
    seen = rings([20 * MS], 200)
    assert len(seen) == 1
    assert seen[0] >= 19 * MS  # a loop's own timer is rounded to milliseconds


def test_a_moment_that_has_passed_rings_at_once(rings):
    assert len(rings([-5 * MS], 100)) == 1


def test_the_last_moment_replaces_the_others(rings):
    seen = rings([1000 * MS, 10 * MS, 40 * MS], 300)
    assert len(seen) == 1
    assert seen[0] >= 39 * MS


def test_a_moment_before_the_clocks_zero_rings_too(rings):
    assert len(rings([-time.monotonic_ns() - 1], 100)) == 1


def test_the_timerfd_is_closer_than_a_millisecond_when_the_machine_lets_it():
    """The best of many: what the mechanism can do, whatever else runs here."""

    async def best() -> int:
        late: list[int] = []
        rang = asyncio.Event()
        alarm = Alarm(rang.set)
        for _ in range(40):
            rang.clear()
            moment_ns = time.monotonic_ns() + 3 * MS + 300_000
            alarm.at(moment_ns)
            await rang.wait()
            late.append(time.monotonic_ns() - moment_ns)
        alarm.close()
        assert min(late) >= 0
        return min(late)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(best()) < MS
