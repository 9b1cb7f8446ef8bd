"""The scheduler on scenarios small enough to be worked out by hand, and against decisions of vLLM's own class.

A step is written as the engine's log would read: `b4 a1` = b gets 4 tokens, then a gets 1; `!a` = a was preempted.
Blocks hold 4 tokens; a pool of `blocks=n` has n to give.
"""

from __future__ import annotations

import pytest

from replay.engine import check
from replay.engine.config import SchedulerConfig
from replay.engine.request import EngineRequest
from replay.engine.scheduler import Scheduler


def config(policy="fcfs", *, blocks=100, **more):
    defaults = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": False}
    return SchedulerConfig(scheduling_policy=policy, num_gpu_blocks=blocks + 1, **{**defaults, **more})


def log_of(settings, asks, steps=30):
    """Play asks (step, id, prompt, outputs, priority, more) and write one line for each step that does something."""
    scheduler = Scheduler(settings)
    in_flight, lines = [], []
    for number in range(steps):
        for at, name, prompt, outputs, *rest in asks:
            if at == number:
                priority, more = (rest + [0, {}][len(rest) :])[:2]
                arrival = more.pop("arrival_time", float(at))
                scheduler.add(
                    EngineRequest(
                        name, prompt_tokens=prompt, max_tokens=outputs, priority=priority, arrival_time=arrival, **more
                    )
                )
        step = scheduler.schedule()
        words = [f"{row.request.request_id}{row.tokens}" for row in step.scheduled]
        words += [f"!{request.request_id}" for request in step.preempted]
        lines.append(" ".join(words))
        in_flight.append(step)
        if len(in_flight) > settings.async_scheduling:
            scheduler.update(in_flight.pop(0))
    while lines and not lines[-1]:
        lines.pop()
    return lines


VLLM = {
    "an urgent request waits for a slot until the other ends": (
        config("priority", max_num_seqs=1),
        [(0, "l", 3, 4, 9), (1, "h", 3, 1, 0)],
        ["l3", "l1", "l1", "l1", "h3"],
    ),
    "a long prompt drains the budget before anyone else enters": (
        config(max_num_batched_tokens=4),
        [(0, "a", 10, 1), (0, "b", 3, 1)],
        ["a4", "a4", "a2 b2", "b1"],
    ),
    "decodes come first, a prefill takes what is left": (
        config(max_num_batched_tokens=4),
        [(0, "a", 2, 5), (1, "b", 10, 1)],
        ["a2", "a1 b3", "a1 b3", "a1 b3", "a1 b1"],
    ),
    "under priority the least urgent gives its blocks and resumes from what is still cached": (
        config("priority", blocks=4, enable_prefix_caching=True),
        [(0, "a", 4, 9, 5), (0, "b", 4, 9, 1)],
        ["b4 a4", *["b1 a1"] * 4, "b1 !a", *["b1"] * 3, "a5", *["a1"] * 3],
    ),
    "under fcfs the latest admitted gives its blocks": (
        config(blocks=4, enable_prefix_caching=True),
        [(0, "a", 4, 9, 5), (0, "b", 4, 9, 1)],
        ["a4 b4", *["a1 b1"] * 4, "a1 !b", *["a1"] * 3, "b5", *["b1"] * 3],
    ),
    "a step that preempts admits nobody": (
        config(blocks=4),
        [(0, "a", 4, 9), (0, "b", 4, 9), (5, "c", 1, 1)],
        ["a4 b4", *["a1 b1"] * 4, "a1 !b", *["a1"] * 3, "b9 c1", *["b1"] * 3],
    ),
    "with a cadence a newcomer waits until decodes had their steps": (
        config(prefill_schedule_interval=3),
        [(0, "a", 3, 6), (1, "b", 3, 2)],
        ["a3", "a1", "a1", "a1 b3", "a1 b1", "a1"],
    ),
    "0.32 takes the cadence and ignores it": (
        config(prefill_schedule_interval=3, engine_version="0.32"),
        [(0, "a", 3, 6), (1, "b", 3, 2)],
        ["a3", "a1 b3", "a1 b1", "a1", "a1", "a1"],
    ),
    "the cadence holds back the chunks of a prefill that has begun, while somebody decodes": (
        config(prefill_schedule_interval=3, max_num_batched_tokens=4),
        [(0, "a", 2, 9), (1, "b", 10, 1)],
        ["a2", "a1", "a1", "a1 b3", "a1", "a1", "a1 b3", "a1", "a1", "b4"],
    ),
    "a release that leaves somebody waiting ends the cadence until the queue is empty": (
        config(prefill_schedule_interval=4, max_num_seqs=2),
        [(0, "a", 2, 6), (0, "b", 2, 2), (0, "c", 2, 1), (3, "d", 2, 1)],
        ["a2 b2", "a1 b1", "a1 c2", "a1", "a1", "a1", "d2"],
    ),
    "after preempting itself the running pass ends in 0.32": (
        config("priority", blocks=3, engine_version="0.32"),
        [(0, "l", 4, 9, 9), (1, "h", 1, 7, 0)],
        ["l4", "l1 h1", *["l1 h1"] * 3, "!l", *["h1"] * 3, "l9", *["l1"] * 3],
    ),
    "after preempting itself the running pass goes on in 0.33": (
        config("priority", blocks=3, engine_version="0.33"),
        [(0, "l", 4, 9, 9), (1, "h", 1, 7, 0)],
        ["l4", "l1 h1", *["l1 h1"] * 3, "h1 !l", *["h1"] * 2, "l9", *["l1"] * 3],
    ),
    "a victim that already has tokens in this step gives them back": (
        config("priority", blocks=3),
        [(0, "l", 4, 3, 9), (1, "h", 3, 3, 0)],
        ["l4", "l1 h3", "l1 h1", "h1"],
    ),
    "the threshold caps each prefill while there are two": (
        config(long_prefill_token_threshold=3),
        [(0, "a", 8, 1), (0, "b", 8, 1)],
        ["a3 b3", "a3 b3", "a2 b2"],
    ),
    "the threshold is lifted for a request alone": (
        config(long_prefill_token_threshold=3),
        [(0, "a", 8, 1)],
        ["a8"],
    ),
    "a head that does not fit the free blocks holds up all behind it": (
        config(blocks=4),
        [(0, "a", 8, 3), (0, "b", 12, 1), (0, "c", 1, 1)],
        ["a8", "a1", "a1", "b12 c1"],
    ),
    "a fully cached prompt is computed from its last block on": (
        config(enable_prefix_caching=True),
        [(0, "a", list(range(8)), 1), (1, "b", list(range(8)), 1)],
        ["a8", "b4"],
    ),
    "blocks are hit in the very step that computes them": (
        config(enable_prefix_caching=True),
        [(0, "a", list(range(9)), 1), (0, "b", list(range(9)), 1)],
        ["a9 b1"],
    ),
    "the next turn hits the blocks of prompt and answer": (
        config(enable_prefix_caching=True),
        [
            (0, "a", [1, 2, 3], 6, 0, {"output_ids": lambda k: 100 + k}),
            (6, "b", [1, 2, 3, 100, 101, 102, 103, 104, 105, 7], 1),
        ],
        ["a3", *["a1"] * 5, "b2"],
    ),
    "an answer ends where the model's length does": (
        config(max_model_len=6),
        [(0, "a", 4, 10)],
        ["a4", "a1"],
    ),
    "without chunked prefill a prompt waits until it fits the budget whole": (
        config(max_num_batched_tokens=8, enable_chunked_prefill=False),
        [(0, "a", 6, 2), (0, "b", 8, 1)],
        ["a6", "a1", "b8"],
    ),
    "asynchronously a slot comes free one step later": (
        config(max_num_seqs=1, async_scheduling=True),
        [(0, "a", 2, 1), (0, "b", 2, 1)],
        ["a2", "", "b2"],
    ),
}


@pytest.mark.parametrize("name", VLLM)
def test_vllm_decides(name):
    settings, asks, expected = VLLM[name]
    assert log_of(settings, [(*ask[:5], dict(ask[5])) if len(ask) > 5 else ask for ask in asks]) == expected


@pytest.mark.data
@pytest.mark.parametrize("name", ["hand", "random_share.jsonl.gz", "async_random_share.jsonl.gz"])
def test_every_recorded_scenario_of_vllm_agrees_in_all_fields(data, name):
    path = data("engines", "oracle", name)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    differences = [found for file in files for entry in check.scenarios(file) if (found := check.compare(entry))]
    assert differences == []


def test_a_request_with_an_end_of_its_own_stops_there():
    scheduler = Scheduler(config())
    scheduler.add(EngineRequest("a", prompt_tokens=5, max_tokens=10, ends_after=2))
    finished = [scheduler.update(scheduler.schedule()) for _ in range(2)][-1]
    assert [(request.request_id, request.finish, request.output_tokens) for request in finished] == [("a", "stop", 2)]


def test_an_abort_frees_blocks_and_slot_at_once_and_only_once():
    scheduler = Scheduler(config(max_num_seqs=1))
    for name in "ab":
        scheduler.add(EngineRequest(name, prompt_tokens=8, max_tokens=9))
    scheduler.update(scheduler.schedule())
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert len(scheduler.pool.free) == 100
    assert [row.request.request_id for row in scheduler.schedule().scheduled] == ["b"]


def test_every_block_comes_back():
    scheduler = Scheduler(config("priority", blocks=9, enable_prefix_caching=True))
    for index in range(30):
        scheduler.add(
            EngineRequest(f"r{index}", prompt_tokens=1 + index % 9, max_tokens=1 + index % 7, priority=index % 3)
        )
    while scheduler.unfinished:
        scheduler.update(scheduler.schedule())
    assert len(scheduler.pool.free) == 9
    assert not any(scheduler.pool.references)


@pytest.mark.parametrize(
    ("settings", "waiting", "expected"),
    [
        ({}, 3, None),
        ({"max_num_queued_reqs": 3}, 2, None),
        ({"max_num_queued_reqs": 3}, 3, "currently busy"),
        ({"max_num_queued_tokens": 20}, 2, None),
        ({"max_num_queued_tokens": 20}, 4, "token backlog limit"),
        ({"max_num_queued_tokens": 3}, 0, None),
    ],
)
def test_a_full_queue_refuses_with_the_engines_own_words(settings, waiting, expected):
    scheduler = Scheduler(config(**settings))
    for index in range(waiting):
        scheduler.add(EngineRequest(f"r{index}", prompt_tokens=5, max_tokens=1))
    refusal = scheduler.refusal(EngineRequest("new", prompt_tokens=5, max_tokens=1))
    assert (refusal is None) == (expected is None)
    assert refusal is None or expected in refusal.message


def test_sglang_turns_away_the_least_urgent_waiter_for_a_better_newcomer():
    scheduler = Scheduler(config("sglang", max_num_queued_reqs=2))
    for name, priority in (("a", 5), ("b", 9)):
        scheduler.add(EngineRequest(name, prompt_tokens=5, max_tokens=1, priority=priority))
    better = scheduler.refusal(EngineRequest("c", prompt_tokens=5, max_tokens=1, priority=1))
    worse = scheduler.refusal(EngineRequest("d", prompt_tokens=5, max_tokens=1, priority=9))
    assert (better.request.request_id, better.message) == ("b", "The request is aborted by a higher priority request.")
    assert (worse.request.request_id, worse.message) == ("d", "The request queue is full.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduling_policy": "lifo"}, "unknown scheduling policy 'lifo'"),
        ({"engine_version": "0.9"}, "unknown engine version"),
        ({"max_num_seqs": 0}, "max_num_seqs must be above 0"),
        ({"watermark": 1.5}, "watermark is a share"),
    ],
)
def test_settings_no_engine_would_start_with_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**settings)


def test_an_id_in_use_is_refused():
    scheduler = Scheduler(config())
    scheduler.add(EngineRequest("a", prompt_tokens=5, max_tokens=1))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(EngineRequest("a", prompt_tokens=5, max_tokens=1))
