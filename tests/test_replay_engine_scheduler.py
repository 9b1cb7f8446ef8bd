"""The scheduler on scenarios small enough to be worked out by hand, and against decisions of vLLM's own class."""

from __future__ import annotations

import pytest

from replay.engine import check
from replay.engine.scheduler import EngineRequest, Scheduler, SchedulerConfig


@pytest.mark.data
@pytest.mark.parametrize("name", ["hand", "random_share.jsonl.gz", "async_random_share.jsonl.gz"])
def test_every_recorded_scenario_of_vllm_agrees_in_all_fields(data, name):
    path = data("engines", "oracle", name)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    differences = [found for file in files for entry in check.scenarios(file) if (found := check.compare(entry))]
    assert differences == []


def test_a_request_with_an_end_of_its_own_stops_there():
    scheduler = Scheduler(SchedulerConfig())
    scheduler.add(EngineRequest("a", prompt_tokens=5, max_tokens=10, ends_after=2))
    finished = [scheduler.update(scheduler.schedule()) for _ in range(2)][-1]
    assert [(request.request_id, request.finish, request.output_tokens) for request in finished] == [("a", "stop", 2)]
