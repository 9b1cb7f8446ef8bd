"""Policies that vLLM's V1 engine does not have: scenarios worked out by hand before the code was run.

The notation is that of test_replay_engine_scheduler.py: `c:5 !a` = c gets 5 tokens, a was preempted. Blocks hold 4.
"""

from __future__ import annotations

import pytest

from replay.engine.config import SchedulerConfig
from replay.engine.request import EngineRequest
from replay.engine.scheduler import Scheduler


def config(policy, *, blocks=100, **more):
    defaults = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": False}
    return SchedulerConfig(scheduling_policy=policy, num_gpu_blocks=blocks + 1, **{**defaults, **more})


def log_of(settings, asks, steps=25):
    """Play asks (step, id, prompt, outputs, priority) to the end; the tenant is the id's first letter."""
    scheduler, lines = Scheduler(settings), []
    for number in range(steps):
        for at, name, prompt, outputs, priority in asks:
            if at == number:
                request = EngineRequest(
                    name,
                    prompt_tokens=prompt,
                    max_tokens=outputs,
                    priority=priority,
                    arrival_time=float(at),
                    tenant=name[0],
                )
                scheduler.add(request)
        step = scheduler.schedule()
        words = [f"{row.request.request_id}:{row.tokens}" for row in step.scheduled]
        lines.append(" ".join(words + [f"!{request.request_id}" for request in step.preempted]))
        scheduler.update(step)
    while lines and not lines[-1]:
        lines.pop()
    return lines


ONE_SLOT = {"max_num_seqs": 1}
FOUR_IN_ONE_STEP = (4, 1, 0)  # prompt, outputs, priority: served in one step, 4·1 + 1·2 = 6 virtual tokens

SCENARIOS = {
    "V0: an urgent head takes the slot of a less urgent one, which computes its 6 tokens again": (
        config("priority-preemptive", **ONE_SLOT),
        [(0, "l", 4, 4, 5), (2, "h", 2, 1, 0)],
        ["l:4", "l:1", "h:2 !l", "l:6", "l:1"],
    ),
    "V0: not at equal priority": (
        config("priority-preemptive", **ONE_SLOT),
        [(0, "l", 4, 4, 5), (2, "h", 2, 1, 5)],
        ["l:4", "l:1", "l:1", "l:1", "h:2"],
    ),
    "V0: an urgent head takes blocks": (
        config("priority-preemptive", blocks=3),
        [(0, "a", 8, 3, 9), (1, "c", 5, 1, 1)],
        ["a:8", "c:5 !a", "a:9", "a:1"],
    ),
    "V0: an urgent head takes the tokens of a long prefill, which starts again with what is left": (
        config("priority-preemptive", max_num_batched_tokens=4),
        [(0, "a", 12, 1, 9), (1, "c", 2, 1, 0)],
        ["a:4", "c:2 a:2 !a", "a:4", "a:4", "a:2"],
    ),
    "SGLang: a difference of the threshold itself does not preempt": (
        config("sglang", **ONE_SLOT),
        [(0, "l", 4, 3, 10), (1, "h", 2, 1, 0)],
        ["l:4", "l:1", "l:1", "h:2"],
    ),
    "SGLang: a difference above the threshold does": (
        config("sglang", **ONE_SLOT),
        [(0, "l", 4, 3, 11), (1, "h", 2, 1, 0)],
        ["l:4", "h:2 !l", "l:5", "l:1"],
    ),
    "SGLang: of equally unimportant ones the latest goes": (
        config("sglang", max_num_seqs=2),
        [(0, "a", 4, 4, 20), (1, "b", 4, 2, 20), (2, "c", 2, 1, 0)],
        ["a:4", "a:1 b:4", "a:1 c:2 !b", "a:1 b:5"],
    ),
    "SGLang: missing blocks alone do not preempt": (
        config("sglang", blocks=3),
        [(0, "a", 8, 3, 50), (1, "c", 5, 1, 0)],
        ["a:8", "a:1", "a:1", "c:5"],
    ),
    "SGLang: nobody goes when that would not free blocks enough": (
        config("sglang", blocks=6, max_num_seqs=2),
        [(0, "a", 3, 3, 50), (0, "b", 14, 2, 5), (1, "c", 12, 1, 0)],
        ["b:14 a:3", "b:1 a:1", "a:1 c:12"],
    ),
    "SGLang: a running one that lacks a block takes it from who has produced least, urgent or not": (
        config("sglang", blocks=3),
        [(0, "a", 4, 6, 9), (3, "b", 3, 3, 0)],
        ["a:4", "a:1", "a:1", "a:1 b:3", "a:1 b:1", "a:1 !b", "b:5"],
    ),
    "fair: a tenant with one request does not wait behind another's backlog": (
        config("fair", **ONE_SLOT),
        [
            (0, "x1", *FOUR_IN_ONE_STEP),
            (0, "x2", *FOUR_IN_ONE_STEP),
            (0, "x3", *FOUR_IN_ONE_STEP),
            (0, "y1", *FOUR_IN_ONE_STEP),
        ],
        ["x1:4", "y1:4", "x2:4", "x3:4"],
    ),
    "fair: weight 3 against 1 serves three for one": (
        config("fair", **ONE_SLOT, tenant_weights={"x": 3.0}),
        [(0, name, *FOUR_IN_ONE_STEP) for name in ("x1", "x2", "x3", "x4", "y1", "y2")],
        ["x1:4", "y1:4", "x2:4", "x3:4", "x4:4", "y2:4"],
    ),
    "fair: who was away has saved up nothing": (
        config("fair", **ONE_SLOT),
        [(0, name, *FOUR_IN_ONE_STEP) for name in ("x1", "x2")]
        + [(2, name, *FOUR_IN_ONE_STEP) for name in ("x3", "x4", "y1", "y2")],
        ["x1:4", "x2:4", "x3:4", "y1:4", "x4:4", "y2:4"],
    ),
    "ageing: two ranks are worth 20 s of waiting; 25 s later is too late to overtake": (
        config("ageing", **ONE_SLOT, ageing_s=10.0),
        [(0, "r", 4, 8, 0), (1, "l", 4, 1, 2), (7, "h", 4, 1, 0)],
        ["r:4", *["r:1"] * 7, "h:4", "l:4"],
    ),
    "ageing: with 2 s a rank, 6 s later does not overtake two ranks": (
        config("ageing", **ONE_SLOT, ageing_s=2.0),
        [(0, "r", 4, 8, 0), (1, "l", 4, 1, 2), (7, "h", 4, 1, 0)],
        ["r:4", *["r:1"] * 7, "l:4", "h:4"],
    ),
    "ageing: the victim is who has waited least for its rank": (
        config("ageing", blocks=4, ageing_s=1.0),
        [(0, "b", 4, 10, 3), (5, "a", 3, 4, 0)],
        ["b:4", *["b:1"] * 4, "b:1 a:3", "b:1 a:1", "b:1 !a", "b:1", "b:1", "a:5", "a:1"],
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_worked_out_by_hand(name):
    settings, asks, expected = SCENARIOS[name]
    assert log_of(settings, asks) == expected
