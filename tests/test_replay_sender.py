"""The sender's loop on a clock of the test's own, with a transport that does as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from replay import plan as planning
from replay.counters import Counters
from replay.exchange import Exchange
from replay.prompts import Bodies, Wiring
from replay.rows import RowWriter, read_part
from replay.schedule import NEVER, Schedule
from replay.sender import Sender
from replay.snapshot import field
from replay.vocabulary import ASSUMED
from traces.record import Metadata, table

MS = 1_000_000
START = 1_000_000 * MS
OK = [b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n', b"data: [DONE]\n\n"]


class TimedExchange(Exchange):
    """An exchange that is given up at the test's time."""

    __slots__ = ("world",)

    def cancel(self, end):
        self.finish(self.world.now_ns, end)


class World:
    """A clock, a loop and a server: `serve(row, attempt)` gives (service ms, status, end) of an answer."""

    name, made = "fake", 1

    def __init__(self, tmp_path, serve=lambda row, attempt: (10, 200, "eof"), schedule=None, sender=None, **columns):
        rows = len(columns["arrival_ns"])
        columns.setdefault("input_tokens", [8] * rows)
        columns.setdefault("output_tokens", [1] * rows)
        self.plan = planning.build(table(columns, Metadata()))
        self.now_ns = START
        self.serve = serve
        self.bells: list[int] = []
        self.turns: list = []
        self.ends: list[tuple[int, Exchange, str]] = []
        self.sent: list[tuple[int, float]] = []
        self.attempts: dict[int, int] = {}
        self.path = tmp_path / "part.arrow"
        self.writer = RowWriter(self.path)
        self.counters = Counters.create(tmp_path / "counters", 1, self.plan.tenants)
        self.schedule = Schedule(self.plan, np.arange(rows), **(schedule or {}))
        self.sender = Sender(
            self.schedule,
            Bodies(self.plan, Wiring(model="m", ids=False), ASSUMED),
            self,
            self.writer,
            self.counters.block(0),
            alarm=self.bells.append,
            soon=self.turns.append,
            clock=lambda: self.now_ns,
            **(sender or {}),
        )

    def start(self, request, done):
        row = int(request.header.rsplit(b"-", 1)[1])
        attempt = self.attempts[row] = self.attempts.get(row, 0) + 1
        self.sent.append((row, (self.now_ns - START) / MS))
        exchange = TimedExchange(request, done, self.now_ns)
        exchange.world = self
        service_ms, status, end = self.serve(row, attempt)
        if service_ms is not None:
            self.ends.append((self.now_ns + int(service_ms * MS), exchange, (status, end)))
        return exchange

    def play(self, until_ms=10_000):
        """Run the loop until nothing is left to do."""
        self.sender.begin(START)
        while not self.sender.finished.is_set():
            while self.turns:
                self.turns.pop(0)()
            times = [bell for bell in self.bells if bell < NEVER] + [end for end, _, _ in self.ends]
            if not times or min(times) > START + until_ms * MS:
                break
            self.bells.clear()
            self.now_ns = max(self.now_ns, min(times))
            for item in [item for item in self.ends if item[0] <= self.now_ns]:
                self.ends.remove(item)
                self.end(item[1], *item[2])
            self.sender.wake()
        while self.turns:
            self.turns.pop(0)()
        return self

    def end(self, exchange, status, end):
        if exchange.end_ns is not None:
            return
        if end != "connect_error":
            exchange.status, exchange.headers_ns = status, self.now_ns
            exchange.raw_headers = [(b"content-type", b"text/event-stream")]
            if status == 200:
                for data in OK:
                    exchange.received(self.now_ns, data)
            elif status == 429:
                exchange.raw_headers = [(b"Retry-After", b"2")]
        exchange.finish(self.now_ns, end, None if end == "eof" else "connect ECONNREFUSED")

    def rows(self):
        """Measured rows by row number."""
        self.writer.close()
        found = {}
        for batch in read_part(self.path):
            for row in batch.to_pylist():
                assert row["row"] not in found, "every row exactly once"
                found[row["row"]] = row
        return found


def at(*ms):
    return [int(value * MS) for value in ms]


def test_requests_go_at_their_time_and_become_rows(tmp_path):
    world = World(tmp_path, arrival_ns=at(0, 5, 20)).play()
    assert world.sent == [(0, 0.0), (1, 5.0), (2, 20.0)]
    rows = world.rows()
    assert sorted(rows) == [0, 1, 2]
    assert {row["outcome"] for row in rows.values()} == {"ok"}
    assert rows[1]["due_ns"] == rows[1]["released_ns"] == rows[1]["sent_ns"] == 5 * MS
    assert rows[1]["first_token_ns"] == 10 * MS
    assert rows[1]["attempts"] == 1
    assert rows[1]["request_bytes"] > 0
    assert world.sender.finished.is_set()


def test_the_counters_end_with_the_same_totals(tmp_path):
    world = World(tmp_path, arrival_ns=at(0, 5, 20)).play()
    row = world.counters.rows()[0, 0]
    assert [int(row[field(name)]) for name in ("sent", "done", "ok", "failed", "output_tokens")] == [3, 3, 3, 0, 3]


def test_a_linked_turn_waits_for_its_predecessors_end(tmp_path):
    columns = {"arrival_ns": at(0, 1), "session_id": ["s", "s"], "turn": [0, 1], "think_ns": [None, 7 * MS]}
    world = World(tmp_path, **columns).play()
    assert world.sent == [(0, 0.0), (1, 17.0)]
    assert world.rows()[1]["due_ns"] == 17 * MS


def test_a_held_request_keeps_its_due_time(tmp_path):
    world = World(tmp_path, schedule={"caps": {0: 1}}, arrival_ns=at(0, 0)).play()
    row = world.rows()[1]
    assert (row["due_ns"], row["released_ns"], row["sent_ns"]) == (0, 10 * MS, 10 * MS)


def test_a_recorded_abort_happens_at_its_point_unless_the_answer_was_faster(tmp_path):
    columns = {"arrival_ns": at(0, 100), "outcome": ["client_abort"] * 2, "end_ns": at(30, 30)}
    world = World(tmp_path, serve=lambda row, attempt: ((50, 10)[row], 200, "eof"), **columns).play()
    rows = world.rows()
    assert (rows[0]["outcome"], rows[0]["end_ns"]) == ("client_abort", 30 * MS)
    assert rows[1]["outcome"] == "ok"


@pytest.mark.parametrize(
    ("retry", "answers", "outcome", "attempts", "sent_ms"),
    [
        (0, [(1, 503, "eof")], "http_error", 1, [0]),
        (1, [(1, 503, "eof"), (1, 200, "eof")], "ok", 2, [0, 501]),
        (2, [(1, 0, "connect_error"), (1, 0, "connect_error"), (1, 200, "eof")], "ok", 3, [0, 501, 1502]),
        (1, [(1, 429, "eof"), (1, 429, "eof")], "http_error", 2, [0, 2001]),
        (3, [(1, 400, "eof")], "http_error", 1, [0]),
    ],
)
def test_retries_are_counted_and_measured_from_the_first_attempt(tmp_path, retry, answers, outcome, attempts, sent_ms):
    world = World(
        tmp_path, serve=lambda row, attempt: answers[attempt - 1], sender={"retry": retry}, arrival_ns=at(0)
    ).play()
    row = world.rows()[0]
    assert (row["outcome"], row["attempts"], row["sent_ns"]) == (outcome, attempts, 0)
    assert [ms for _, ms in world.sent] == sent_ms
    assert row["end_ns"] == (sent_ms[-1] + 1) * MS
    assert world.sender.retries == attempts - 1


def test_the_drain_is_bounded_and_what_is_in_flight_is_cut_c11(tmp_path):
    world = World(
        tmp_path, serve=lambda row, attempt: (None, 0, ""), sender={"drain_ns": 500 * MS}, arrival_ns=at(0, 5)
    ).play()
    rows = world.rows()
    assert {row["outcome"] for row in rows.values()} == {"cut"}
    assert rows[0]["end_ns"] == 505 * MS
    assert world.sender.drain_ended
    assert world.sender.finished.is_set()


def test_stop_cuts_what_is_in_flight_and_sends_nothing_more(tmp_path):
    world = World(tmp_path, serve=lambda row, attempt: (None, 0, ""), arrival_ns=at(0, 5000))
    world.play(until_ms=100)
    world.now_ns = START + 200 * MS
    world.sender.stop()
    while world.turns:
        world.turns.pop(0)()
    assert world.sender.finished.is_set()
    assert {number: row["outcome"] for number, row in world.rows().items()} == {0: "cut"}


def test_stop_between_two_attempts_keeps_the_last_answer(tmp_path):
    world = World(tmp_path, serve=lambda row, attempt: (1, 503, "eof"), sender={"retry": 5}, arrival_ns=at(0))
    world.play(until_ms=100)
    world.sender.stop()
    while world.turns:
        world.turns.pop(0)()
    row = world.rows()[0]
    assert (row["outcome"], row["status"], row["attempts"]) == ("http_error", 503, 1)
    assert world.sender.finished.is_set()


def test_a_closed_loop_has_no_due_time(tmp_path):
    world = World(tmp_path, schedule={"concurrency": 1}, arrival_ns=at(0, 0, 0)).play()
    assert [ms for _, ms in world.sent] == [0, 10, 20]
    row = world.rows()[2]
    assert row["due_ns"] is None
    assert row["released_ns"] == row["sent_ns"] == 20 * MS


def test_measuring_waits_while_something_is_due_but_not_for_ever(tmp_path):
    world = World(tmp_path, arrival_ns=at(*[index * 0.1 for index in range(300)])).play()
    assert len(world.rows()) == 300


def test_an_answer_of_any_length_is_measured_in_pieces(tmp_path):
    world = World(tmp_path, serve=lambda row, attempt: (None, 0, ""), output_tokens=[5000], arrival_ns=at(0))
    world.play(until_ms=1)
    flight = next(iter(world.sender._flying))
    exchange = flight.exchange
    exchange.status, exchange.headers_ns = 200, START + 2 * MS
    exchange.raw_headers = [(b"content-type", b"text/event-stream")]
    event = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    waiting = []
    for index in range(5000):
        exchange.received(START + (2 + index) * MS, event)
        waiting.append(len(exchange.segments))
    assert max(waiting) < 2000, "what has come is taken before it piles up"
    exchange.received(START + 6000 * MS, OK[1])
    exchange.finish(START + 6000 * MS, "eof")
    while world.turns:
        world.turns.pop(0)()
    row = world.rows()[0]
    assert (row["outcome"], len(row["chunk_ns"]), row["last_token_ns"]) == ("ok", 5000, 5001 * MS)
