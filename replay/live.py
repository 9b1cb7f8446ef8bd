"""The live view: while a replay runs, each rule with what is seen now, and each tenant's flow.

It is fed with snapshots of growing counters and reads no clock of its own, so that a test can play a whole run
through it. Time left comes from the schedule, which is known; the last 30 s are the difference of two snapshots. On a
terminal it redraws in place on stderr; elsewhere it writes one plain line every 10 s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from replay.snapshot import BUCKETS, LiveSnapshot, TenantLive, percentile_ms, upper_edges_ms
from tenants import figures, sla
from tenants.columns import Column, lines
from tenants.sentence import title
from tenants.sla import Rule
from traces.units import NS_PER_S

RECENT_S = 30
BIN_S = 5
PLAIN_EVERY_S = 10
KEEP_EVERY_S = 1
BARS = "▁▂▃▄▅▆▇█"
LIVE_TIMES = {"ttft": "ttft", "ttft_sent": "ttft", "tpot": "tpot", "e2e": "e2e"}
STATES = {"FAILING": "bold red", "ok": "green", "so far": "yellow", "no data": "dim", "at the end": "dim"}


class RuleNow(NamedTuple):
    """A rule at one moment."""

    rule: Rule
    recent: float | None
    whole: float | None
    n: int
    state: str


class LiveView:
    """Shows a run while it runs; use as a context manager and call `update` about four times a second.

    Args:
        title: one line that says what runs: trace, target, speed, mix.
        rules: to be judged as far as counters can.
        console: on stderr.
    """

    def __init__(self, title: str, rules: Sequence[Rule], console: Console | None = None) -> None:
        self.title = title
        self.rules = [rule for rule in rules if not rule.is_bound]
        if not any(rule.metric == "error_rate" and rule.tenant == sla.ALL for rule in self.rules):
            self.rules.append(sla.parse("all: error_rate <= 1%"))
        self.console = console or Console(stderr=True, highlight=False, emoji=False)
        self.events: deque[str] = deque(maxlen=3)
        self.history: deque[LiveSnapshot] = deque()
        self.bins: list[float] = []  # P95 TTFT of the first TTFT rule in each bin, ms
        self._bin_start: LiveSnapshot | None = None
        self._failing_since_s: dict[str, float] = {}
        self._failed = 0
        self._next_plain_s = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, now: LiveSnapshot) -> None:
        """Take a snapshot in and show it."""
        self.remember(now)
        if self._live is not None:
            self._live.update(self.render(now, self.console.width), refresh=True)
        elif not self.console.is_terminal:
            elapsed_s = now.elapsed_ns / NS_PER_S
            if elapsed_s >= self._next_plain_s:
                self._next_plain_s = (elapsed_s // PLAIN_EVERY_S + 1) * PLAIN_EVERY_S
                self.console.print(self.plain(now), soft_wrap=True, markup=False)

    def remember(self, now: LiveSnapshot) -> None:
        """Keep what the last 30 s and the bins need, and note what changed."""
        if not self.history or now.elapsed_ns - self.history[-1].elapsed_ns >= KEEP_EVERY_S * NS_PER_S:
            self.history.append(now)
        while len(self.history) > 1 and now.elapsed_ns - self.history[1].elapsed_ns >= RECENT_S * NS_PER_S:
            self.history.popleft()
        self._fill_bins(now)
        self._note_failures(now)
        for state in self.rules_now(now):
            self._note_rule(state, now.elapsed_ns / NS_PER_S)

    def rules_now(self, now: LiveSnapshot) -> list[RuleNow]:
        """Every rule with its value in the last 30 s and in the whole run."""
        past = self.history[0] if self.history else None
        return [_rule_now(rule, now, past) for rule in self.rules]

    def render(self, now: LiveSnapshot, width: int) -> RenderableType:
        """The whole view for a terminal of this width."""
        rules = self.rules_now(now)
        parts: list[RenderableType] = [self._headline(rules, width), _progress(now, width), Text("")]
        parts += lines(_rule_columns(rules), width, [STATES[state_word(rule.state)] for rule in rules])
        parts += [Text(""), *lines(self._tenant_columns(now), width)]
        if self.bins:
            parts.append(Text(""))
            parts.append(self._sparkline(width))
        parts += [Text(_cut(event, width), "dim") for event in self.events]
        parts.append(Text("Ctrl-C stops sending and saves what there is", "dim"))
        return Group(*parts)

    def plain(self, now: LiveSnapshot) -> str:
        """One line without colour: for logs."""
        sent, done, failed, flying = _totals(now)
        planned = sum(tenant.planned for tenant in now.tenants)
        rules = [
            f"{rule.rule.tenant} {title(rule.rule.name)} {_value(rule.whole, rule.rule)} ({rule.state})"
            for rule in self.rules_now(now)
            if rule.rule.text != "all: error_rate <= 1%"
        ]
        head = (
            f"{figures.clock(now.elapsed_ns / NS_PER_S)} of {figures.clock(now.planned_ns / NS_PER_S)} {now.stage}: "
            f"sent {sent:,} of {planned:,}, done {done:,}, failed {failed:,}, in flight {flying:,}"
        )
        return "; ".join([head, *rules, _late_text(now)])

    def _headline(self, rules: Sequence[RuleNow], width: int) -> Text:
        failing = sum(rule.state.startswith("FAILING") for rule in rules)
        word = f"FAILING {failing} of {len(rules)} rules" if failing else "no rule is failing"
        left = _cut(self.title, max(8, width - len(word) - 3))
        line = Text(left.ljust(max(0, width - len(word))), "bold")
        line.append(word, "bold red" if failing else "green")
        return line

    def _tenant_columns(self, now: LiveSnapshot) -> list[Column]:
        past = {tenant.name: tenant for tenant in self.history[0].tenants} if self.history else {}
        span_s = (now.elapsed_ns - self.history[0].elapsed_ns) / NS_PER_S if self.history else 0.0
        recent = [_since(tenant, past.get(tenant.name)) for tenant in now.tenants]

        def rate(before: TenantLive | None, tenant: TenantLive) -> str:
            grown = tenant.output_tokens - (before.output_tokens if before else 0)
            return figures.digits(grown / span_s) if span_s > 0 else figures.NONE

        return [
            Column("tenant", [tenant.name for tenant in now.tenants], right=False),
            Column("planned", [f"{tenant.planned:,}" for tenant in now.tenants], 4),
            Column("sent", [f"{tenant.sent:,}" for tenant in now.tenants]),
            Column("in flight", [f"{tenant.in_flight:,}" for tenant in now.tenants]),
            Column("held", [f"{tenant.held:,}" for tenant in now.tenants], 5),
            Column("done", [f"{tenant.done:,}" for tenant in now.tenants], 3),
            Column("failed", [f"{tenant.failed:,}" for tenant in now.tenants]),
            Column("TTFT ms, 30 s P50", [_ms(part["ttft"], 0.5) for part in recent], 2),
            Column("TTFT ms, 30 s P95", [_ms(part["ttft"], 0.95) for part in recent]),
            Column("TPOT ms P50", [_ms(part["tpot"], 0.5) for part in recent], 6),
            Column("tokens/s", [rate(past.get(t.name), t) for t in now.tenants]),
            Column("late ms P99", [_ms(tenant.times["late"], 0.99) for tenant in now.tenants], 1),
        ]

    def _sparkline(self, width: int) -> Text:
        rule = self._followed()
        assert rule is not None
        head = f"{rule.tenant} TTFT P{rule.q * 100 if rule.q else 0:g}, {BIN_S} s bins  "
        seen = [(value, number) for number, value in enumerate(self.bins) if not math.isnan(value)]
        if not seen:
            return Text(f"{head}no answers yet", "dim")
        worst, number = max(seen)
        tail = f"  worst {figures.digits(worst)} ms at {figures.clock(number * BIN_S)}, limit {rule.limit_text}"
        top = max(rule.limit, *(value for value, _ in seen if math.isfinite(value)), 1e-9)
        text = Text(head)
        for value in self.bins[-max(8, width - len(head) - len(tail)) :]:
            text.append(_bar(value / top), "red" if value >= rule.limit else "green")
        text.append(tail, "dim")
        return text

    def _followed(self) -> Rule | None:
        """The rule whose value is drawn over time: the first about TTFT."""
        return next((rule for rule in self.rules if rule.metric == "ttft" and rule.q is not None), None)

    def _fill_bins(self, now: LiveSnapshot) -> None:
        rule = self._followed()
        if rule is None or now.elapsed_ns < 0:
            return
        if self._bin_start is None:
            self._bin_start = now
        if now.elapsed_ns // (BIN_S * NS_PER_S) == self._bin_start.elapsed_ns // (BIN_S * NS_PER_S):
            return
        counts = _counts(now, rule.tenant, "ttft") - _counts(self._bin_start, rule.tenant, "ttft")
        value = percentile_ms(counts, rule.q or 0.95)
        self.bins.append(math.nan if value is None else value)
        self._bin_start = now

    def _note_rule(self, state: RuleNow, at_s: float) -> None:
        key = state.rule.text
        failing = state.state.startswith("FAILING")
        if failing and key not in self._failing_since_s:
            self._failing_since_s[key] = at_s
            name = f"{state.rule.tenant} {title(state.rule.name)}"
            self.events.append(f"{figures.clock(at_s)}  {name} fails its limit of {state.rule.limit_text}")
        elif not failing and key in self._failing_since_s:
            del self._failing_since_s[key]
            self.events.append(f"{figures.clock(at_s)}  {state.rule.tenant} {title(state.rule.name)} no longer fails")

    def _note_failures(self, now: LiveSnapshot) -> None:
        failed = _totals(now)[2]
        if failed and not self._failed:
            causes = ", ".join(f"{name} {n:,}" for name, n in now.failures.items())
            self.events.append(f"{figures.clock(now.elapsed_ns / NS_PER_S)}  first failure {causes}".rstrip())
        self._failed = failed


def state_word(state: str) -> str:
    """The state without its details, for its colour."""
    return next(word for word in STATES if state.startswith(word))


def _rule_now(rule: Rule, now: LiveSnapshot, past: LiveSnapshot | None) -> RuleNow:
    if rule.metric == "error_rate":
        return _error_rate_now(rule, now, past)
    if rule.q is None or rule.metric not in LIVE_TIMES:
        return RuleNow(rule, None, None, 0, "at the end")
    time = LIVE_TIMES[rule.metric]
    whole = _counts(now, rule.tenant, time)
    recent = whole - _counts(past, rule.tenant, time) if past is not None else whole
    n = int(whole.sum())
    over = int(whole[_first_bucket_over(rule.limit) :].sum())
    values = percentile_ms(recent, rule.q), percentile_ms(whole, rule.q)
    return RuleNow(rule, values[0], values[1], n, _state(sla.judge_count(over, n, 1 - rule.q), n))


def _error_rate_now(rule: Rule, now: LiveSnapshot, past: LiveSnapshot | None) -> RuleNow:
    done, failed = _done(now, rule.tenant)
    before_done, before_failed = _done(past, rule.tenant) if past is not None else (0, 0)
    recent = (failed - before_failed) / (done - before_done) if done > before_done else None
    share = failed / done if done else None
    state = "no data" if share is None else "FAILING" if share > rule.limit else "ok"
    return RuleNow(rule, recent, share, done, state)


def _state(verdict: str, n: int) -> str:
    if n == 0:
        return "no data"
    return {sla.PASS: "ok", sla.FAIL: "FAILING", sla.INCONCLUSIVE: "so far undecided"}[verdict]


def _first_bucket_over(limit_ms: float) -> int:
    """The first bucket that lies wholly above the limit."""
    return min(BUCKETS - 1, int(np.searchsorted(upper_edges_ms(), limit_ms)) + 1)


def _tenants(now: LiveSnapshot, name: str) -> list[TenantLive]:
    return [tenant for tenant in now.tenants if name in {sla.ALL, tenant.name}]


def _counts(now: LiveSnapshot, name: str, time: str) -> NDArray[np.int64]:
    total = np.zeros(BUCKETS, np.int64)
    for tenant in _tenants(now, name):
        total += tenant.times[time]
    return total


def _done(now: LiveSnapshot, name: str) -> tuple[int, int]:
    found = _tenants(now, name)
    return sum(tenant.done for tenant in found), sum(tenant.failed for tenant in found)


def _since(tenant: TenantLive, before: TenantLive | None) -> dict[str, NDArray[np.int64]]:
    return {time: counts - before.times[time] if before else counts for time, counts in tenant.times.items()}


def _totals(now: LiveSnapshot) -> tuple[int, int, int, int]:
    """Sent, done, failed, in flight."""
    return (
        sum(tenant.sent for tenant in now.tenants),
        sum(tenant.done for tenant in now.tenants),
        sum(tenant.failed for tenant in now.tenants),
        sum(tenant.in_flight for tenant in now.tenants),
    )


def _late_text(now: LiveSnapshot) -> str:
    late = percentile_ms(_counts(now, sla.ALL, "late"), 0.99)
    return "nothing sent yet" if late is None else f"sends late by {figures.digits(late)} ms at P99"


def _progress(now: LiveSnapshot, width: int) -> Text:
    """A bar over the schedule with time left, or what is still in flight after it."""
    elapsed_s, planned_s = now.elapsed_ns / NS_PER_S, now.planned_ns / NS_PER_S
    share = 1.0 if planned_s <= 0 else min(1.0, max(0.0, elapsed_s / planned_s))
    if now.elapsed_ns < 0:
        words = f"starts in {-elapsed_s:.0f} s"
    elif share < 1 and now.stage == "sending":
        left = figures.clock(math.ceil(planned_s - elapsed_s))
        words = (
            f"{share:4.0%}  {figures.clock(elapsed_s)} of {figures.clock(planned_s)}   {left} left   {_late_text(now)}"
        )
    else:
        words = (
            f"{now.stage if now.stage != 'sending' else 'draining'}: {_totals(now)[3]:,} in flight   {_late_text(now)}"
        )
    room = max(10, min(40, width - len(words) - 4))
    filled = round(share * room)
    return Text.assemble(
        "[", ("#" * filled, "cyan"), ("-" * (room - filled), "dim"), "]  ", _cut(words, max(10, width - room - 4))
    )


def _rule_columns(rules: Sequence[RuleNow]) -> list[Column]:
    return [
        Column("rule", [rule.rule.tenant for rule in rules], right=False),
        Column("", [title(rule.rule.name) for rule in rules], right=False),
        Column("limit", [rule.rule.limit_text for rule in rules]),
        Column("last 30 s", [_value(rule.recent, rule.rule) for rule in rules]),
        Column("whole run", [_value(rule.whole, rule.rule) for rule in rules]),
        Column("n", [f"{rule.n:,}" for rule in rules], 1),
        Column("state", [rule.state for rule in rules], right=False),
    ]


def _value(value: float | None, rule: Rule) -> str:
    if value is None:
        return figures.NONE
    return figures.INFINITE if math.isinf(value) else figures.amount(value, rule.unit)


def _ms(counts: NDArray[np.int64], q: float) -> str:
    return figures.digits(percentile_ms(counts, q))


def _bar(share: float) -> str:
    """A bar as high as the share of the highest; a gap where there was no answer, full where requests failed."""
    if math.isnan(share):
        return " "
    return BARS[-1] if math.isinf(share) else BARS[min(len(BARS) - 1, int(share * (len(BARS) - 0.01)))]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
