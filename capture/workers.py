"""One recorder, or several on one port, each with its own mitmproxy, spool and parts.

One mitmproxy process fills one core. With `--workers N` the parent takes the connections and hands each to the worker
that has the fewest open: kept-alive clients stay on one connection, so what counts is that connections are spread
evenly, which the kernel's own spreading (SO_REUSEPORT, by hash) does only on average. A worker tells of each connection
that closed.

A worker dies with its parent (PR_SET_PDEATHSIG), and one that dies by itself is started again, and that is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from capture.recorder import SAY_S, Counts, Recorder, kept_bytes, line
from capture.settings import Settings
from capture.voice import say
from traces.descriptors import SERVER_DESCRIPTORS, make_room

_PR_SET_PDEATHSIG = 1
_ACCEPTED, _CLOSED = b"+", b"-"
_ADVICE = {
    errno.EADDRINUSE: "choose another port or stop what uses it",
    errno.EACCES: "ports below 1024 are for root: choose another",
}
_REFUSED = 2  # exit code of a worker that cannot do what it was told
START_AGAIN_S = 1.0
STOP_S = 20.0


class CannotListen(Exception):
    """The address cannot be listened on."""


class Plan(msgspec.Struct, frozen=True):
    """What to run: enough to start a worker from its standard input."""

    settings: Settings
    mode: str
    sets: tuple[str, ...]
    address: tuple[str, int]


def run(plan: Plan, workers: int) -> Counts:
    """Record until a signal; returns what was recorded. Raises CannotListen, ValueError (an option of mitmproxy)."""
    try:
        listening = bound(*plan.address)
    except OSError as error:
        host, port = plan.address
        advice = _ADVICE.get(error.errno or 0, "give an address of this machine, such as 127.0.0.1:9000")
        raise CannotListen(f"{host}:{port}: {error.strerror}; {advice}") from error
    if workers == 1:
        return _alone(plan, listening)
    return _Parent(plan, listening, workers).run()


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on an address. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _alone(plan: Plan, listening: socket.socket) -> Counts:
    from capture.addon import Capture
    from capture.proxy import clock_of, listen_on
    from capture.proxy import run as proxy

    make_room(SERVER_DESCRIPTORS)
    recorder = Recorder(plan.settings, say)
    recorder.start()
    try:
        proxy(
            plan.mode,
            plan.sets,
            Capture(plan.settings, recorder, clock_of),
            listen_on(listening),
            lambda: say(_started(plan, listening, 1)),
        )
    finally:
        recorder.stop()
        listening.close()
    return recorder.counts


def _started(plan: Plan, listening: socket.socket, workers: int) -> str:
    host, port, *_ = listening.getsockname()
    many = f", {workers} workers" if workers > 1 else ""
    return f"recording http://{host}:{port} → {plan.mode.removeprefix('reverse:')} into {plan.settings.out}{many}"


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(channel: socket.socket, plan: Plan) -> None:
    """Be a worker: connections come over `channel`, a byte goes back for each that closed."""
    from capture.addon import Capture
    from capture.proxy import clock_of
    from capture.proxy import run as proxy

    die_with_parent()
    make_room(SERVER_DESCRIPTORS)
    recorder = Recorder(plan.settings, say, quiet=True)
    recorder.start()
    try:
        proxy(
            plan.mode,
            plan.sets,
            Capture(plan.settings, recorder, clock_of),
            _handed(channel),
            lambda: _tell(channel),
        )
    finally:
        recorder.stop()


def _tell(channel: socket.socket) -> None:
    """Say that connections are taken."""
    channel.send(_ACCEPTED)


def die_with_parent() -> None:
    """Get SIGTERM when the parent is gone, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells when to stop


class _Handed:
    """What mitmproxy takes for a server: connections that another process accepted."""

    def __init__(self, channel: socket.socket, handle: Callable[..., Awaitable[None]]) -> None:
        self._channel, self._handle = channel, handle
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.sockets: list[socket.socket] = []
        channel.setblocking(False)
        self._loop.add_reader(channel, self._take)

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._channel)

    def _take(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, 256, 64)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.close()
        for descriptor in descriptors:
            task = self._loop.create_task(self._serve(socket.socket(fileno=descriptor)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            reader, writer = await asyncio.open_connection(sock=sock)
            await self._handle(reader, writer)
        finally:
            with contextlib.suppress(OSError):
                self._channel.send(_CLOSED)


def _handed(channel: socket.socket) -> Callable[[Callable[..., Awaitable[None]]], Awaitable[Any]]:
    async def listen(handle: Callable[..., Awaitable[None]]) -> _Handed:
        return _Handed(channel, handle)

    return listen


# --- the parent -------------------------------------------------------------------------------------------------------


class _Worker:
    """A child process, the channel to it, and how many connections it has."""

    def __init__(self, plan: Plan) -> None:
        self.name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self.open = 0
        self.ready = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = ours
        settings = msgspec.structs.replace(plan.settings, name=self.name, sole=False)
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        self.process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "capture.worker", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        assert self.process.stdin is not None
        with self.process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(msgspec.structs.replace(plan, settings=settings)))
        ours.setblocking(False)

    def hear(self) -> None:
        """Read what it tells of its connections."""
        with contextlib.suppress(OSError):
            told = self.channel.recv(4096)
            self.ready = self.ready or _ACCEPTED in told
            self.open -= told.count(_CLOSED)


class _Parent:
    """Takes connections and hands them out."""

    def __init__(self, plan: Plan, listening: socket.socket, count: int) -> None:
        self.plan, self.listening, self.count = plan, listening, count
        # One after the other: the first may make the certificates that all of them use.
        self.workers = [_Worker(plan)]
        self.names = [self.workers[0].name]
        self._signals, self._signalled = socket.socketpair()
        self._stopping = self._said = False
        self._next_line_s = time.monotonic() + SAY_S
        self._rows_before = 0
        self._failures = 0

    def run(self) -> Counts:
        self._signals.setblocking(False)
        self._signalled.setblocking(False)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        try:
            while not self._stopping:
                self._turn()
        finally:
            signal.set_wakeup_fd(-1)
            self.listening.close()
            self._end()
        if self._failures >= 3 and not self._said:
            raise ValueError("the workers did not start; their own lines say why")
        return self._counts(over=True)

    def _on_signal(self, number: int, frame: object) -> None:
        del frame
        if number == signal.SIGCHLD:
            return
        for worker in self.workers if self._stopping else ():
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()  # its second, too
        self._stopping = True

    def _turn(self) -> None:
        takes = [self.listening] if any(worker.ready for worker in self.workers) else []
        channels = {worker.channel: worker for worker in self.workers}
        readable, _, _ = select.select([*takes, self._signals, *channels], [], [], 0.5)
        for sock in readable:
            if sock is self.listening:
                self._accept()
            elif sock is self._signals:
                with contextlib.suppress(OSError):
                    self._signals.recv(4096)
            else:
                channels[sock].hear()
        self._look_after()
        if len(self.workers) < self.count and self.workers[0].ready and not self._stopping:
            self.workers += [_Worker(self.plan) for _ in range(self.count - 1)]
            self.names += [worker.name for worker in self.workers[1:]]
        if not self._said and len(self.workers) == self.count and all(worker.ready for worker in self.workers):
            self._said = True
            say(_started(self.plan, self.listening, self.count))
        if time.monotonic() >= self._next_line_s:
            self._next_line_s += SAY_S
            counts = self._counts()
            counts.rows_per_s = (counts.rows - self._rows_before) / SAY_S
            self._rows_before = counts.rows
            say(line(counts, kept_bytes(self.plan.settings.folder)))

    def _accept(self) -> None:
        """Hand every waiting connection to the worker with the fewest."""
        for _ in range(64):
            try:
                sock, _ = self.listening.accept()
            except OSError:
                return
            with sock:
                for worker in sorted((w for w in self.workers if w.ready), key=lambda each: each.open):
                    try:
                        socket.send_fds(worker.channel, [_ACCEPTED], [sock.fileno()])
                    except OSError:
                        continue
                    worker.open += 1
                    break

    def _look_after(self) -> None:
        """Start again what died."""
        for at, worker in enumerate(self.workers):
            code = worker.process.poll()
            if code is None or self._stopping:
                continue
            worker.channel.close()
            self._failures = 0 if worker.ready else self._failures + 1
            if code == _REFUSED and not worker.ready and not self._said:
                self._failures = 3  # what it was told is wrong: it would say the same again
            if self._failures >= 3:
                self._stopping = True
                return
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            say(f"worker {worker.process.pid} ended {how}; started again, which recovers its rows")
            time.sleep(START_AGAIN_S if not worker.ready else 0)
            self.workers[at] = _Worker(self.plan)
            self.names.append(self.workers[at].name)

    def _end(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
        for worker in self.workers:
            try:
                worker.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.channel.close()
        self._recover()

    def _recover(self) -> None:
        """Make the parts of workers that were killed, where none was started again in time to do it."""
        from traces import spool

        for path in spool.left_behind(self.plan.settings.folder):
            if spool.name_of(path).rpartition("-")[0] in self.names:
                with contextlib.suppress(OSError):
                    spool.recover(path)

    def _counts(self, *, over: bool = False) -> Counts:
        """The sum over all workers there were; at the end also what those that died had not told of."""
        from capture.status import parts_of

        living = {worker.name for worker in self.workers}
        total = Counts(name="all", pid=os.getpid(), started_s=time.time())
        for name in self.names:
            path = self.plan.settings.folder / f"recorder-{name}.json"
            with contextlib.suppress(OSError, msgspec.DecodeError):
                each = msgspec.json.decode(path.read_bytes(), type=Counts)
                each.in_flight *= name in living
                if over and not each.over:
                    each.rows = max(each.rows, parts_of(path.parent, f"part-{name}-*.parquet")[1][name])
                for field in ("rows", "dropped", "passed", "failed", "in_flight"):
                    setattr(total, field, getattr(total, field) + getattr(each, field))
        return total
