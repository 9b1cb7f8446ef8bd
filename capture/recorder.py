"""The recorder: a thread that turns exchanges into rows and keeps them, whatever happens to the disk.

    exchange → row → spool (flushed every half second) → part (every minute or N rows)

The proxy hands an exchange over and goes on; it never waits. The queue has an end: what does not fit is dropped and
counted. A write that fails drops its rows, counts them and says so; the next one is tried again. A folder that was
removed in mid-run is made again, with all that was in the spool.

The thread is polite: it works on one exchange at a time and lets go of the interpreter in between, so that a burst of
ends does not hold up the streams that still run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from capture.exchange import Answer, Exchange, Rows
from capture.settings import Settings
from traces import spool
from traces.record import Metadata

FLUSH_S = 0.5
TELL_S = 2.0
SAY_S = 10.0
QUEUE_ROWS = 20_000
QUEUE_BYTES = 256 << 20
ANSWER_BYTES = 8 << 20  # of one answer that a tokenizer may have to count; a longer one is counted by its chunks
ANSWERS_BYTES = 128 << 20  # of all of them
_PAUSE_S = 0.0002  # between rows the proxy's loop goes on
_BEHIND = 64  # rows that wait: for each so many one row more a pause,
_MOST_AT_A_TIME = 16  # for a busy loop lets go only after its switch interval: 5 ms a row would be 200 rows/s
_BATCH = 500  # rows on their way to the spool at a time
_SALT_FILE = "salt"


class Counts(msgspec.Struct):
    """What `capture status` and the line on stderr tell; `recorder-NAME.json` holds it."""

    name: str
    pid: int
    started_s: float
    pid_began: int = 0  # see `began`
    now_s: float = 0.0
    rows: int = 0  # written
    dropped: int = 0  # lost, for want of room or a disk
    in_flight: int = 0
    passed: int = 0  # requests that are none to an LLM
    failed: int = 0  # exceptions of the recorder's own
    spool_bytes: int = 0
    rows_per_s: float = 0.0
    over: bool = False


class Recorder:
    """Keeps rows. `put` may be called from any thread; everything else is the recorder's own thread's.

    Args:
        settings: where and how; see `prepared`.
        say: prints a line for people.
        quiet: leave out the line every 10 s (a parent prints one for all).
    """

    def __init__(self, settings: Settings, say: Callable[[str], None], *, quiet: bool = False) -> None:
        self.settings, self._say, self._quiet = settings, say, quiet
        self.name = settings.name or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        tenants, encode = _tenants(settings), _tokenizer(settings)
        self.rows = Rows(settings, tenants, self.name, encode)
        self._metadata = Metadata(
            epoch="unix",
            block_unit="tokens" if encode else "characters",
            source="capture",
            history=(f"captured from {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} on",),
        )
        self.counts = Counts(name=self.name, pid=os.getpid(), pid_began=began(os.getpid()), started_s=time.time())
        self._queue: deque[Exchange] = deque()
        self._queued_bytes = 0
        self.answers_bytes = 0  # kept for the tokenizer
        self.counts_answers = encode is not None
        self._stop = threading.Event()
        self._spool: spool.Spool | None = None
        self._part = 0
        self._part_began_s = time.monotonic()
        self._unmade: list[Path] = []  # spools whose part could not be written
        self._trouble = ""
        self._said_s = time.monotonic()
        self._said_rows = 0
        self._told_s = 0.0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin: the salt, what an earlier recorder left behind, the thread."""
        spool.warm_up()
        for path in spool.left_behind(self.settings.folder):
            with contextlib.suppress(OSError):
                part, rows = spool.recover(path)
                if part:
                    self._say(f"recovered {rows} rows of an earlier recorder: {part.name}")
        self._thread.start()

    def put(self, exchange: Exchange) -> None:
        """Take over an exchange that is over; drops it when too many wait."""
        size = len(exchange.body or b"")
        if len(self._queue) >= QUEUE_ROWS:
            self.counts.dropped += 1
            self._let_go(exchange)
            return
        if self._queued_bytes + size > QUEUE_BYTES:
            exchange.body, size = None, 0
        self._queued_bytes += size
        self._queue.append(exchange)

    def answer(self, status: int, headers: list[tuple[str, str]]) -> Answer | None:
        """Room for an answer's bytes, where a tokenizer may have to count them and there is room."""
        room = self.counts_answers and self.answers_bytes < ANSWERS_BYTES
        return Answer(status, headers, ANSWER_BYTES) if room else None

    def _let_go(self, exchange: Exchange) -> None:
        if exchange.answer is not None:
            self.answers_bytes += exchange.answer.let_go()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Write all that came and end; waits for it."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._turn()
        self._turn()
        self._close_part()
        self._make_up()
        if self._unmade:
            self._say(f"{len(self._unmade)} spools are left: make room, then traces recover {self.settings.out}")
        self.counts.over = True
        self._tell()

    def _turn(self) -> None:
        self._flush()
        now_s = time.monotonic()
        if self._spool and (
            self._spool.rows >= self.settings.part_rows or now_s - self._part_began_s >= self.settings.part_s
        ):
            self._close_part()
        self._tell()

    def _flush(self) -> None:
        """Make rows of what waits and write them, a batch at a time."""
        waiting = len(self._queue)
        while waiting > _BATCH:
            self._write(self._made(_BATCH))
            waiting -= _BATCH
        self._write(self._made(waiting))

    def _made(self, number: int) -> list[dict[str, Any]]:
        """Rows of the next exchanges."""
        rows: list[dict[str, Any]] = []
        for count in range(1, number + 1):
            exchange = self._queue.popleft()
            self._queued_bytes -= len(exchange.body or b"")
            try:
                rows.append(self.rows.row(exchange))
            except Exception:  # noqa: BLE001 - one odd request must not end the recording
                self.counts.failed += 1
                self.counts.dropped += 1
            self._let_go(exchange)
            if count % (1 + min(len(self._queue) // _BEHIND, _MOST_AT_A_TIME)) == 0:
                time.sleep(_PAUSE_S)
        return rows

    def _write(self, rows: list[dict[str, Any]]) -> None:
        written, dropped = self.counts.rows, self.counts.dropped
        try:
            if self._spool and not self._spool.is_there():
                self._spool.put_back()
                self._say(f"{self.settings.out} had been removed: made again, no row lost")
            if not rows:
                return
            if self._spool is None:
                self._part += 1
                path = self.settings.folder / f"spool-{self.name}-{self._part:05d}{spool.SUFFIX}"
                self._spool = spool.Spool(path, self._metadata)
                self._part_began_s = time.monotonic()
            self._append(self._spool, rows)
            if self._trouble:
                self._say(f"recording again; {self.counts.dropped} rows were dropped")
                self._trouble = ""
        except OSError as error:
            self.counts.dropped = dropped + len(rows) - (self.counts.rows - written)
            self._trouble_with(error)

    def _append(self, kept: spool.Spool, rows: list[dict[str, Any]]) -> None:
        """Write rows; of those that Arrow does not take (one odd value spoils a batch) all but the odd ones."""
        try:
            kept.append(rows)
            self.counts.rows += len(rows)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - one odd request must not end the recording
            if len(rows) == 1:
                self.counts.failed += 1
                self.counts.dropped += 1
                return
            middle = len(rows) // 2
            self._append(kept, rows[:middle])
            self._append(kept, rows[middle:])

    def _trouble_with(self, error: OSError) -> None:
        what = error.strerror or type(error).__name__
        if what != self._trouble:
            self._trouble = what
            self._say(f"cannot write to {self.settings.out}: {what}; rows are dropped, traffic passes on")

    def _close_part(self) -> None:
        self._make_up()
        if self._spool is None:
            return
        closing, self._spool = self._spool, None
        try:
            closing.finish()
        except OSError as error:
            closing.let_go()
            self._unmade.append(closing.path)
            self._trouble_with(error)
        with contextlib.suppress(OSError):
            self._forget_old()

    def _make_up(self) -> None:
        """Make the parts that could not be made when their time came, for want of room."""
        while self._unmade:
            try:
                spool.recover(self._unmade[0])
            except OSError:
                return  # `traces recover` or the next start makes it
            del self._unmade[0]

    def _forget_old(self) -> None:
        """Hold the folder's parts to `max_bytes` and `max_age_s`, oldest first."""
        settings = self.settings
        if not settings.max_bytes and not settings.max_age_s:
            return
        parts = sorted(settings.folder.glob("part-*.parquet"), key=lambda path: path.stat().st_mtime)
        kept = sum(path.stat().st_size for path in parts)
        for path in parts:
            size, age_s = path.stat().st_size, time.time() - path.stat().st_mtime
            if (settings.max_bytes and kept > settings.max_bytes) or (
                settings.max_age_s and age_s > settings.max_age_s
            ):
                path.unlink(missing_ok=True)
                kept -= size

    def _tell(self) -> None:
        """Write the counts for `capture status`, and a line every 10 s."""
        counts, now_s = self.counts, time.monotonic()
        counts.now_s = time.time()
        counts.spool_bytes = self._spool.size if self._spool else 0
        if now_s - self._said_s >= SAY_S:
            counts.rows_per_s = (counts.rows - self._said_rows) / (now_s - self._said_s)
            self._said_s, self._said_rows = now_s, counts.rows
            if not self._quiet:
                self._say(line(counts, kept_bytes(self.settings.folder)))
        if now_s - self._told_s < TELL_S and not counts.over:
            return
        self._told_s = now_s
        with contextlib.suppress(OSError):
            path = self.settings.folder / f"recorder-{self.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_private(path, msgspec.json.encode(counts))


def prepared(settings: Settings) -> Settings:
    """The settings with a salt, and the folder made. Raises OSError when the folder cannot be."""
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to")
    path = folder / _SALT_FILE
    if settings.salt:
        return settings
    if settings.keep_salt and path.exists():
        return msgspec.structs.replace(settings, salt=bytes.fromhex(path.read_text().strip()))
    salt = secrets.token_bytes(32)
    if settings.keep_salt:
        _write_private(path, salt.hex().encode() + b"\n")
    return msgspec.structs.replace(settings, salt=salt)


def line(counts: Counts, folder_bytes: int) -> str:
    """One line about a recording that runs."""
    return (
        f"{counts.rows:,} rows ({counts.rows_per_s:.1f}/s), {counts.dropped:,} dropped, "
        f"{counts.in_flight:,} in flight, {counts.passed:,} other requests passed, {folder_bytes / 1e6:.1f} MB"
    )


def began(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot: with its number, its name. 0 where nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def kept_bytes(folder: Path) -> int:
    """Bytes of parts and spools in a folder."""
    total = 0
    for path in (*folder.glob("part-*.parquet"), *folder.glob(f"spool-*{spool.SUFFIX}")):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _write_private(path: Path, data: bytes) -> None:
    """Replace a small file in one step, mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, data)
    finally:
        os.close(file)
    temporary.replace(path)


def _tenants(settings: Settings) -> tuple[Any, ...]:
    if not settings.tenants:
        return ()
    from tenants.tenant import load

    return load(settings.tenants)


def _tokenizer(settings: Settings) -> Any:
    if not settings.tokenizer:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(settings.tokenizer)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
