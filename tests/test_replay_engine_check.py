"""The check itself: it sees a planted difference, names it, and counts."""

from __future__ import annotations

import copy
import gzip
import json

import pytest

from replay.engine import check

SCENARIO = {
    "name": "two",
    "config": {"max_num_seqs": 1, "block_size": 4, "num_gpu_blocks": 20},
    "requests": [
        {"id": "a", "arrival_step": 0, "prompt_tokens": {"length": 3, "seed": 1}, "max_tokens": 2},
        {"id": "b", "arrival_step": 1, "prompt_tokens": [7, 8], "max_tokens": 3, "abort_at_step": 4},
        {
            "id": "c",
            "arrival_step": 9,
            "prompt_tokens": {"length": 9, "seed": 2, "shared_prefix_of": "a", "shared_tokens": 4},
            "max_tokens": 1,
        },
    ],
}
# Worked out by hand: a prefills and decodes (steps 0, 1), b prefills and decodes once (2, 3) and is aborted at 4, when
# nothing else is there; c comes at 9 and shares a's prompt and first answer token: one block of 4 is cached.
DECISIONS = {
    "vllm_version": "0.32.0",
    "end": "all_finished",
    "steps": [
        {"step": 0, "sched": [["a", 3, "new"]], "preempted": [], "finished": [], "cached": [["a", 0]], "waiting": [],
         "running": ["a"], "free": 18, "free_end": 18, "stop": "empty"},
        {"step": 1, "sched": [["a", 1, "running"]], "preempted": [], "finished": ["a"], "waiting": ["b"],
         "running": ["a"], "free": 18, "free_end": 19, "stop": "seqs"},
        {"step": 2, "sched": [["b", 2, "new"]], "preempted": [], "finished": [], "cached": [["b", 0]], "waiting": [],
         "running": ["b"], "free": 18, "free_end": 18, "stop": "empty"},
        {"step": 3, "sched": [["b", 1, "running"]], "preempted": [], "finished": [], "waiting": [], "running": ["b"],
         "free": 18, "free_end": 18, "stop": "empty"},
        {"step": 4, "sched": [], "preempted": [], "finished": [], "waiting": [], "running": [], "free": 19,
         "free_end": 19, "stop": "empty", "aborted": ["b"]},
        {"step": 9, "sched": [["c", 5, "new"]], "preempted": [], "finished": ["c"], "cached": [["c", 4]], "waiting": [],
         "running": ["c"], "free": 16, "free_end": 19, "stop": "empty"},
    ],
    "requests": {"b": {"finish": "abort", "output_tokens": 2, "finish_step": 4, "first_token_step": 2}},
}  # fmt: skip
ENTRY = {"scenario": SCENARIO, "decisions": DECISIONS}


def test_a_scenario_worked_out_by_hand_agrees():
    assert check.compare(ENTRY) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["steps"][1].update(stop="kv"), "step 1: stop: recorded kv, here seqs"),
        (lambda d: d["steps"][5]["sched"][0].__setitem__(1, 9), "step 9: sched: recorded [['c', 9, 'new']]"),
        (lambda d: d["steps"][0].update(free=17), "step 0: free: recorded 17, here 18"),
        (lambda d: d["steps"].pop(), "recorded 5 steps, here 6"),
        (lambda d: d.update(end="stalled"), "end: recorded stalled, here all_finished"),
        (lambda d: d["requests"]["b"].update(finish="length"), "request b: finish: recorded length, here abort"),
    ],
)
def test_a_planted_difference_is_found_and_named(change, words):
    entry = copy.deepcopy(ENTRY)
    change(entry["decisions"])
    assert words in check.compare(entry)


def test_the_last_line_counts_and_the_exit_code_tells(tmp_path, capsys):
    wrong = copy.deepcopy(ENTRY)
    wrong["decisions"]["end"] = "stalled"
    (tmp_path / "good.json").write_text(json.dumps(ENTRY))
    (tmp_path / "more.jsonl.gz").write_bytes(gzip.compress((json.dumps(ENTRY) + "\n" + json.dumps(wrong)).encode()))
    assert check.main([str(tmp_path / "good.json")]) == 0
    assert capsys.readouterr().out == "1 agree, 0 differ\n"
    assert check.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 agree, 1 differ"


def test_the_version_that_decided_is_the_one_compared_with():
    requests = [
        {"id": "l", "arrival_step": 0, "priority": 9, "prompt_tokens": {"length": 4, "seed": 1}, "max_tokens": 9},
        {"id": "h", "arrival_step": 1, "priority": 0, "prompt_tokens": {"length": 1, "seed": 2}, "max_tokens": 7},
    ]
    config = {"scheduling_policy": "priority", "block_size": 4, "num_gpu_blocks": 4, "enable_prefix_caching": False}
    scenario = {"name": "self", "config": config, "requests": requests}
    for version in ("0.32", "0.33"):
        run = check.Run({**scenario, "config": {**config, "engine_version": version}}).decisions()
        entry = {"scenario": scenario, "decisions": {**run, "vllm_version": f"{version}.0"}}
        other = "0.33" if version == "0.32" else "0.32"
        assert check.compare(entry) is None
        assert "step 5: sched" in check.compare(entry, other)


@pytest.mark.parametrize(
    "text", ["", "{", '{"scenario": {}}', '{"scenario": {"config": {"speed": 1}, "requests": []}}']
)
def test_a_file_that_is_no_scenario_is_said_so(tmp_path, capsys, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert check.main([str(path)]) == 2
    assert "x.json: cannot be read as scenarios" in capsys.readouterr().err


def test_no_file_and_an_unknown_version_print_the_usage(capsys):
    assert check.main([]) == check.main(["--engine-version", "0.1", "x.json"]) == 2
    assert capsys.readouterr().err.count("usage:") == 2
