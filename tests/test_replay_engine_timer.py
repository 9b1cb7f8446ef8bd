"""The engine's clock: an alarm that is never early, replaced by a later one, gone when closed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import uvloop

from replay.engine.timer import RealClock

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=[(factory, timerfd) for factory in LOOPS for timerfd in (True, False)], ids=str)
def case(request):
    return request.param


def run(case, scenario) -> None:
    factory, timerfd = case
    with asyncio.Runner(loop_factory=factory) as runner:

        async def main() -> None:
            clock = RealClock(asyncio.get_running_loop(), timerfd=timerfd)
            try:
                await scenario(clock)
            finally:
                clock.close()

        runner.run(main())


def test_the_alarm_comes_once_and_at_its_time(case):
    async def scenario(clock: RealClock) -> None:
        times: list[int] = []
        due_ns = clock.now_ns() + 20_000_000
        clock.at(due_ns, lambda: times.append(clock.now_ns()))
        await asyncio.sleep(0.06)
        assert len(times) == 1
        assert times[0] >= due_ns - 1_100_000  # the loop's own timer may be a millisecond early

    run(case, scenario)


def test_a_timerfd_is_never_early_and_far_closer_than_the_loops_own_timer():
    late: dict[bool, list[int]] = {True: [], False: []}
    for timerfd in (True, False):

        async def scenario(clock: RealClock, seen: list[int] = late[timerfd]) -> None:
            for _ in range(40):
                rung = asyncio.Event()
                due_ns = clock.now_ns() + 2_500_000
                clock.at(due_ns, rung.set)
                await rung.wait()
                seen.append(clock.now_ns() - due_ns)

        run((uvloop.new_event_loop, timerfd), scenario)
    assert min(late[True]) >= 0
    middle = {timerfd: sorted(abs(value) for value in values)[20] for timerfd, values in late.items()}
    assert middle[True] < middle[False]


def test_a_new_time_replaces_the_old_one(case):
    async def scenario(clock: RealClock) -> None:
        called: list[str] = []
        clock.at(clock.now_ns() + 5_000_000, lambda: called.append("old"))
        clock.at(clock.now_ns() + 10_000_000, lambda: called.append("new"))
        await asyncio.sleep(0.04)
        assert called == ["new"]

    run(case, scenario)


def test_a_time_that_has_passed_rings_in_the_next_turn(case):
    async def scenario(clock: RealClock) -> None:
        rung = asyncio.Event()
        clock.at(clock.now_ns() - 10**9, rung.set)
        await asyncio.wait_for(rung.wait(), 1)

    run(case, scenario)


def test_closing_forgets_the_alarm_and_gives_the_descriptor_back(case):
    before = len(list(Path("/proc/self/fd").iterdir()))

    async def scenario(clock: RealClock) -> None:
        clock.at(clock.now_ns() + 5_000_000, lambda: pytest.fail("rang after close"))
        clock.close()
        await asyncio.sleep(0.02)

    run(case, scenario)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_soon_means_after_this_callback(case):
    async def scenario(clock: RealClock) -> None:
        order: list[int] = []
        clock.soon(lambda: order.append(2))
        order.append(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [1, 2]
        assert abs(clock.now_ns() - time.monotonic_ns()) < 10**9

    run(case, scenario)
