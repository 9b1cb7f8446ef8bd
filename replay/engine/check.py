"""Compare the scheduler's decisions with recorded ones of vLLM's own scheduler.

    python -m replay.engine.check [--engine-version 0.32|0.33] FILE.json FILE.jsonl.gz FOLDER ...

The version is the one the decisions were recorded with (`vllm_version`), unless named.

A file holds `{"scenario": S, "decisions": D}` (one object, or one a line; gzip by its name's end). A scenario gives
the engine's settings and requests with the step they arrive in; the decisions say, step by step, who got how many
tokens, who was preempted, who waits and runs, how many blocks are free. Decisions do not depend on time, so equality
is exact.
The first difference of each scenario is printed (later ones follow from it); exit code 0 only when all agree.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from replay.engine.config import ENGINE_VERSIONS, SchedulerConfig
from replay.engine.request import EngineRequest, Step
from replay.engine.scheduler import Scheduler

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks": 200,
    "max_model_len": 1024,
    "engine_version": "0.32",
}
FIELDS = (
    "step",
    "sched",
    "preempted",
    "finished",
    "cached",
    "waiting",
    "running",
    "free",
    "free_end",
    "stop",
    "aborted",
)
REQUEST_FIELDS = ("first_token_step", "finish_step", "finish", "output_tokens", "preemptions", "cached")
PROMPT_STRIDE, OUTPUT_BASE = 1 << 20, 1 << 40

Record = dict[str, Any]


def scenarios(path: Path) -> Iterator[Record]:
    """The objects of a file."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    if ".jsonl" in path.suffixes:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())
    else:
        yield json.loads(text)


def configuration(values: Record) -> SchedulerConfig:
    """A scenario's settings; a missing key takes the format's default. Raises ValueError for an unknown key."""
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}")
    return SchedulerConfig(**{**DEFAULTS, **values})


def requests_of(scenario: Record) -> list[EngineRequest]:
    """The scenario's requests in list order, with the token ids that FORMAT.md's rules give them."""
    made: list[EngineRequest] = []
    tokens: dict[str, Callable[[int], int]] = {}
    for index, asked in enumerate(scenario["requests"]):
        prompt = _prompt(asked["prompt_tokens"], tokens)
        outputs = _output_ids(index)
        tokens[asked["id"]] = _continued(prompt, outputs)
        made.append(
            EngineRequest(
                asked["id"],
                prompt_tokens=prompt,
                max_tokens=asked["max_tokens"],
                priority=asked.get("priority", 0),
                arrival_time=asked.get("arrival_time", 0.0),
                output_ids=outputs,
                tag=asked,
            )
        )
    return made


def _prompt(asked: Any, tokens: dict[str, Callable[[int], int]]) -> list[int]:
    if isinstance(asked, list):
        return asked
    length = asked["length"]
    own = [asked["seed"] * PROMPT_STRIDE + position for position in range(length)]
    if asked.get("shared_prefix_of") is None:
        return own
    shared = min(asked.get("shared_tokens", 0), length)
    other = tokens[asked["shared_prefix_of"]]
    return [other(position) for position in range(shared)] + own[shared:]


def _output_ids(index: int) -> Callable[[int], int]:
    return lambda k: OUTPUT_BASE + index * PROMPT_STRIDE + k


def _continued(prompt: list[int], outputs: Callable[[int], int]) -> Callable[[int], int]:
    return lambda position: prompt[position] if position < len(prompt) else outputs(position - len(prompt))


class Run:
    """Drives a scheduler through one scenario and records what FORMAT.md asks for."""

    def __init__(self, scenario: Record) -> None:
        self.config = configuration(scenario["config"])
        self.scheduler = Scheduler(self.config)
        self.max_steps = scenario.get("max_steps", 5000)
        self.requests = requests_of(scenario)
        self.records: list[Record] = []
        self.in_flight: deque[Step] = deque()
        self.first_token: dict[str, int] = {}
        self.finish_step: dict[str, int] = {}
        self.events = sorted(
            {request.tag["arrival_step"] for request in self.requests}
            | {
                request.tag["abort_at_step"]
                for request in self.requests
                if request.tag.get("abort_at_step") is not None
            }
        )

    def decisions(self) -> Record:
        """All step records, how it ended, and a summary of each request."""
        number = 0
        end = "all_finished"
        while True:
            aborted = self._apply_events(number)
            if not self.scheduler.unfinished and not self.in_flight:
                if aborted:
                    self._record(number, Step(-1), aborted, [])
                following = next((step for step in self.events if step > number), None)
                if following is None:
                    break
                number = following
                continue
            if len(self.records) >= self.max_steps:
                end = "step_bound"
                break
            if self._step(number, aborted) and not any(step > number for step in self.events):
                end = "stalled"
                break
            number += 1
        return {"steps": self.records, "end": end, "requests": {r.request_id: self._summary(r) for r in self.requests}}

    def _apply_events(self, number: int) -> list[str]:
        for request in self.requests:
            if request.tag["arrival_step"] == number:
                self.scheduler.add(request)
        aborting = [request for request in self.requests if request.tag.get("abort_at_step") == number]
        aborted = [request.request_id for request in aborting if self.scheduler.abort(request.request_id)]
        self.finish_step.update(dict.fromkeys(aborted, number))
        return aborted

    def _step(self, number: int, aborted: list[str]) -> bool:
        """One step; True when nothing happened in it and nothing is in flight."""
        step = self.scheduler.schedule()
        record = self._record(number, step, aborted, [])
        self.in_flight.append(step)
        was_empty = True
        if len(self.in_flight) > (1 if self.config.async_scheduling else 0):
            done = self.in_flight.popleft()
            was_empty = not done.scheduled
            finished = self.scheduler.update(done)
            record["finished"] = [request.request_id for request in finished]
            for request in done.emitted:
                self.first_token.setdefault(request.request_id, number)
            self.finish_step.update(dict.fromkeys(record["finished"], number))
        record["free_end"] = len(self.scheduler.pool.free)
        if self.config.async_scheduling and not self.scheduler.unfinished and not step.scheduled:
            self.in_flight.clear()
        return (
            not step.scheduled and not step.preempted and not aborted and was_empty and bool(self.scheduler.unfinished)
        )

    def _record(self, number: int, step: Step, aborted: list[str], finished: list[str]) -> Record:
        free = len(self.scheduler.pool.free)
        record = {
            "step": number,
            "sched": [[row.request.request_id, row.tokens, row.kind] for row in step.scheduled],
            "preempted": [request.request_id for request in step.preempted],
            "cached": [[request.request_id, tokens] for request, tokens in step.cached],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "running": [request.request_id for request in self.scheduler.running],
            "free": free,
            "free_end": free,
            "stop": step.stop,
            "finished": finished,
            "aborted": aborted,
        }
        self.records.append(record)
        return record

    def _summary(self, request: EngineRequest) -> Record:
        return {
            "first_token_step": self.first_token.get(request.request_id),
            "finish_step": self.finish_step.get(request.request_id),
            "finish": request.finish,
            "output_tokens": request.output_tokens,
            "preemptions": request.preemptions,
            "cached": request.cached_tokens,
        }


def first_difference(expected: Record, got: Record) -> str | None:
    """The first differing step and field, in words; None when all fields agree."""
    for want, have in zip(expected["steps"], got["steps"], strict=False):
        for field in FIELDS:
            wanted = want.get(field, [] if field in {"cached", "aborted"} else None)
            if wanted != have[field]:
                return f"step {want['step']}: {field}: recorded {wanted}, here {have[field]}"
    if len(expected["steps"]) != len(got["steps"]):
        return f"recorded {len(expected['steps'])} steps, here {len(got['steps'])}"
    if expected["end"] != got["end"]:
        return f"end: recorded {expected['end']}, here {got['end']}"
    for request_id, want in expected.get("requests", {}).items():
        for field in REQUEST_FIELDS:
            if field in want and want[field] != got["requests"][request_id][field]:
                return (
                    f"request {request_id}: {field}: recorded {want[field]}, here {got['requests'][request_id][field]}"
                )
    return None


def compare(entry: Record, version: str | None = None) -> str | None:
    """Run one scenario; its first difference from the recorded decisions, or None.

    Args:
        entry: scenario and decisions.
        version: engine version; None: the scenario's own, else the one that decided.
    """
    scenario = entry["scenario"]
    settings = dict(scenario["config"])
    recorded = ".".join(str(entry["decisions"].get("vllm_version", "")).split(".")[:2])
    if version or (recorded in ENGINE_VERSIONS and "engine_version" not in settings):
        settings["engine_version"] = version or recorded
    return first_difference(entry["decisions"], Run({**scenario, "config": settings}).decisions())


def files_of(argument: str) -> list[Path]:
    """A file, or all scenario files of a folder and its folders."""
    path = Path(argument)
    if not path.is_dir():
        return [path]
    return sorted(file for pattern in ("*.json", "*.jsonl", "*.jsonl.gz") for file in path.rglob(pattern))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every scenario of the files named: 0 when all agree, 1 when some differ, 2 for a file that is none."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    version = None
    if given[:1] == ["--engine-version"]:
        version = given[1] if len(given) > 1 else ""
        given = given[2:]
    if not given or (version is not None and version not in ENGINE_VERSIONS):
        usage = "usage: python -m replay.engine.check [--engine-version 0.32|0.33] FILE.json|FILE.jsonl.gz|FOLDER ..."
        print(usage, file=sys.stderr)  # noqa: T201
        return 2
    paths = [path for argument in given for path in files_of(argument)]
    agree = differ = 0
    for path in paths:
        try:
            for entry in scenarios(path):
                difference = compare(entry, version)
                agree += difference is None
                differ += difference is not None
                if difference is not None:
                    print(f"{entry['scenario'].get('name', path.name)}: {difference}")  # noqa: T201
        except (OSError, ValueError, KeyError) as error:
            print(f"{path}: cannot be read as scenarios: {error}", file=sys.stderr)  # noqa: T201
            return 2
    print(f"{agree} agree, {differ} differ")  # noqa: T201
    return 1 if differ or not agree else 0


if __name__ == "__main__":
    sys.exit(main())
