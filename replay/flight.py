"""A request on its way: from the moment it is sent until its row is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from replay.exchange import Exchange, WireRequest
from replay.schedule import Release
from traces.meter import Meter


class Transport(Protocol):
    """Who carries exchanges (`replay.connection`, `replay.aiohttp_transport`)."""

    name: str
    made: int

    def start(self, request: WireRequest, done: Callable[[Exchange], None]) -> Exchange:
        """Send; `done` is called once at the end."""

    async def open(self) -> None:
        """Get ready; needs a running loop."""

    async def close(self) -> None:
        """Cut what is in flight and let go of the sockets."""


class Owner(Protocol):
    """Who sent a flight and hears of it."""

    def ended(self, flight: Flight, exchange: Exchange) -> None:
        """An exchange of this flight is over."""

    def spilled(self, flight: Flight) -> None:
        """So much of its answer has come that some should be measured now."""


class Flight:
    """A row that was sent, until it is measured."""

    __slots__ = ("attempts", "exchange", "meter", "owner", "release", "sent_ns", "tries")

    def __init__(self, owner: Owner, release: Release) -> None:
        self.owner = owner
        self.release = release
        self.exchange: Exchange | None = None
        self.sent_ns = 0
        self.attempts = 0  # requests on the wire
        self.tries = 0  # of them, those that were no reaction to a stale connection
        self.meter: Meter | None = None

    def done(self, exchange: Exchange) -> None:
        """The exchange has ended; called by the transport."""
        self.exchange = exchange
        self.owner.ended(self, exchange)

    def spill(self, exchange: Exchange) -> None:
        """A long answer: measure what has come so far, so that it does not pile up."""
        self.exchange = exchange
        self.owner.spilled(self)
