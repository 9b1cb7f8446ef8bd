"""Other load generators beside `replay`, on the same server in the same minutes.

    python benchmarks/peers.py --envs DIR [--write docs/benchmarks.md]      about ten minutes; --count 200: a look

Each peer gets an environment of its own in DIR (made there with its version pinned, used again when it is there) and
the client's core; the ground-truth server has the other. What is told comes from the server's log and the kernel, from
a client's own report only what it says of TTFT:

    closed loop      32 in flight, 16 tokens as fast as the server can: requests/s between the first and the last byte
    constant rate    requests/s reached, and lateness = arrival at the server − (first arrival + index / rate)
    added TTFT       TTFT as the client tells it − what the server took, each their own quantile
    start            from the command to the first request that the server sees
    CPU, memory      of the command and all its children, per 1,000 requests; the largest process

A peer that does not install or run is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import page
import sender
import truth as truth_server
from truth import CLIENT_CORE, Log, Truth, on_core

from traces import parquet

IN_FLIGHT, TOKENS, INPUT_TOKENS = 32, 16, 40
RATES = (50, 200, 500)
LIMIT_S = 180
MODEL = "truth"


class Work(NamedTuple):
    """What a client is to do: `rate` requests/s, or a closed loop where it is None."""

    url: str
    count: int
    rate: int | None
    folder: Path


class Peer(NamedTuple):
    """A load generator: what to install, its command line for some work (None: it cannot do it), and what it tells."""

    name: str
    packages: tuple[str, ...]
    command: Callable[[Work], Sequence[str] | None]
    told_ttft_ms: Callable[[Path], list[float]] = lambda _: []  # of every request, from the folder of its work


def locust(work: Work) -> Sequence[str] | None:
    """Users in a closed loop; locust has no schedule."""
    if work.rate is not None:
        return None
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": " word" * INPUT_TOKENS}],
            "max_tokens": TOKENS,
            "stream": True,
        }
    )
    script = work.folder / "locustfile.py"
    script.write_text(
        f"""
import gevent
from locust import FastHttpUser, constant, task
from locust.exception import StopUser

class User(FastHttpUser):
    wait_time = constant(0)
    sent = ended = 0

    @task
    def ask(self):
        User.sent += 1
        if User.sent > {work.count}:
            raise StopUser
        head = {{"content-type": "application/json"}}
        with self.client.post("/v1/chat/completions", data={body!r}, headers=head, stream=True) as answer:
            for _ in answer.iter_content(65536, False):
                pass
        User.ended += 1
        if User.ended == {work.count}:
            gevent.spawn(self.environment.runner.quit)
"""
    )
    users = ["-u", str(IN_FLIGHT), "-r", str(IN_FLIGHT)]
    return ["locust", "-f", str(script), "--headless", *users, "--host", work.url, "--only-summary"]


def aiperf(work: Work) -> Sequence[str]:
    """Synthetic prompts; a constant request rate."""
    how = ["--concurrency", str(IN_FLIGHT)]
    if work.rate is not None:
        how = ["--request-rate", str(work.rate), "--request-rate-mode", "constant"]
    lengths = ["--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(TOKENS)]
    where = ["--url", work.url, "--artifact-dir", str(work.folder / "aiperf"), "--tokenizer", tokenizer(work.folder)]
    kind = ["-m", MODEL, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
    return ["aiperf", "profile", *kind, *how, "--request-count", str(work.count), *lengths, *where]


def guidellm(work: Work) -> Sequence[str]:
    """Synthetic prompts; concurrent streams or a constant rate."""
    profile = f"kind=concurrent,streams={IN_FLIGHT}" if work.rate is None else f"kind=constant,rate={work.rate}"
    data = f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={TOKENS}"
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={work.url},model={MODEL}"]
    command += ["--profile", profile, "--constraint", f"kind=max_requests,count={work.count}", "--data", data]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer(work.folder)}", "--disable-console"]
    return [*command, "--output", f"kind=json,path={work.folder / 'guidellm.json'}"]


def told_by_aiperf(folder: Path) -> list[float]:
    """One JSON object a request."""
    records = map(json.loads, (folder / "aiperf" / "profile_export.jsonl").read_text().splitlines())
    return [record["metrics"]["time_to_first_token"]["value"] for record in records]


def told_by_guidellm(folder: Path) -> list[float]:
    """All requests in one document."""
    document = json.loads((folder / "guidellm.json").read_text())
    return [row["time_to_first_token_ms"] for row in document["benchmarks"][0]["requests"]["successful"]]


def told_by_us(folder: Path) -> list[float]:
    """The outcomes."""
    first_ns = parquet.read(folder / "run" / "outcomes.parquet", ["first_token_ns"]).column("first_token_ns")
    return [ns / 1e6 for ns in first_ns.to_pylist()]


PEERS = (
    Peer("locust 2.47.0 FastHttp", ("locust==2.47.0",), locust),
    Peer("aiperf 0.13.0", ("aiperf==0.13.0",), aiperf, told_by_aiperf),
    Peer("guidellm 0.8.1", ("guidellm==0.8.1",), guidellm, told_by_guidellm),
)


def tokenizer(folder: Path) -> str:
    """A folder with a small tokenizer of words, for peers that will not start without one; nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = folder / "tokenizer"
    if not place.exists():
        place.mkdir()
        words = ["[UNK]", *(f"w{number}" for number in range(4000))]
        made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106 no password
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.save(str(place / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"}
        (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(place)


def environment(peer: Peer, envs: Path) -> Path:
    """The peer's programs, installed if they are not there. Raises CalledProcessError."""
    place = envs / peer.packages[0].replace("==", "-")
    if not (place / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(place / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *peer.packages]
        subprocess.run(pip, check=True)
        (place / "installed").touch()
    return place / "bin"


class Seen(NamedTuple):
    """One client's run as the server and the kernel saw it."""

    rps: float
    late_p50_ms: float
    late_p99_ms: float
    added_p50_ms: float | None
    added_p99_ms: float | None
    start_s: float
    cpu_s: float  # per 1,000 requests
    rss_mb: float


def watch(command: Sequence[str], server: Truth, work: Work, told_ttft_ms: Callable[[Path], list[float]]) -> Seen | str:
    """Run a command against the server; what came there, or why nothing did."""
    server.set(ttft_ms=0 if work.rate is None else sender.TTFT_MS, itl_ms=0 if work.rate is None else sender.ITL_MS)
    began_ns = time.monotonic_ns()
    limited = ["timeout", "--kill-after=5", str(LIMIT_S), *command]
    try:
        ran = sender.spend(limited)
    except SystemExit as failed:
        return str(failed).strip().splitlines()[-1][:100]
    log = chats(server.log())
    if len(log.ids) < work.count / 2:
        return f"{len(log.ids):,} of {work.count:,} requests came"
    arrived = np.sort(log.first_byte_ns)
    late_ms = np.zeros(1)
    if work.rate:
        late_ms = (arrived - arrived[0]) / 1e6 - np.arange(len(arrived)) * 1e3 / work.rate
        late_ms -= late_ms.min()
    added_ms = [
        float(np.quantile(told, q) - np.quantile(log.token_ns - log.complete_ns, q) / 1e6)
        for q in (0.5, 0.99)
        if work.rate and (told := told_ttft_ms(work.folder))
    ]
    span_s = (log.last_ns.max() - arrived[0]) / 1e9 if work.rate is None else (arrived[-1] - arrived[0]) / 1e9
    return Seen(
        rps=len(arrived) / span_s,
        late_p50_ms=float(np.quantile(late_ms, 0.5)),
        late_p99_ms=float(np.quantile(late_ms, 0.99)),
        added_p50_ms=added_ms[0] if added_ms else None,
        added_p99_ms=added_ms[1] if added_ms else None,
        start_s=(arrived[0] - began_ns) / 1e9,
        cpu_s=ran.cpu_s / len(arrived) * 1000,
        rss_mb=ran.rss_mb,
    )


def chats(log: Log) -> Log:
    """The streamed requests alone: some clients look at the server before they start."""
    keep = log.tokens > 1
    return Log(*(column[keep] for column in log[:-1]), log.written_ns)


def ours(work: Work) -> Sequence[str]:
    """The default command, its Parquet and report included."""
    trace, out = work.folder / "trace.parquet", work.folder / "run"
    sender.write_trace(trace, work.count, TOKENS, work.rate or 1e6)
    command = [sys.executable, "-m", "replay", str(trace), "--target", work.url, "--out", str(out), "--no-probe"]
    command += ["--no-self-check", "--workers", "1"]
    return command if work.rate else [*command, "--concurrency", str(IN_FLIGHT)]


US = Peer("replay", (), ours, told_by_us)


def cells_of(peer: Peer, server: Truth, folder: Path, envs: Path, count: int | None) -> list[Seen | str]:
    """A client's closed loop and its rates."""
    try:
        bin_ = environment(peer, envs) if peer.packages else None
    except subprocess.CalledProcessError:
        return ["does not install", *[""] * len(RATES)]
    cells: list[Seen | str] = []
    for rate in (None, *RATES):
        place = folder / f"{peer.name}-{rate or 'closed'}".replace(" ", "-")
        place.mkdir()
        few = count or ((2_000 if peer.packages else 20_000) if rate is None else rate * 8)
        work = Work(server.url, few, rate, place)
        command = peer.command(work)
        if command is not None and bin_ is not None:
            command = [str(bin_ / command[0]), *command[1:]]
        cells.append("has no schedule" if command is None else watch(command, server, work, peer.told_ttft_ms))
        print(f"  {peer.name}, {rate or 'closed'}: {cells[-1]}", file=sys.stderr)
    return cells


def closed(cell: Seen | str) -> list[str]:
    """The cells of a closed loop, as text."""
    if isinstance(cell, str):
        return [cell, "", "", ""]
    return [f"{cell.rps:,.0f}", f"{cell.cpu_s:.2f}", f"{cell.rss_mb:,.0f}", f"{cell.start_s:.1f}"]


def at_rate(cell: Seen | str, rate: int, what: str) -> str:
    """Lateness (`late`) or added TTFT (`added`) at a rate, as text."""
    if isinstance(cell, str):
        return cell
    if cell.rps < 0.97 * rate:
        return f"manages {cell.rps:,.0f}/s"
    p50, p99 = getattr(cell, f"{what}_p50_ms"), getattr(cell, f"{what}_p99_ms")
    return "not told" if p50 is None else f"{p50:.1f} / {p99:.1f}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--envs", type=Path, required=True, help="where the peers' environments are or will be")
    options.add_argument("--count", type=int, help="requests of every run")
    page.option(options)
    asked = options.parse_args()
    with truth_server.server() as server, tempfile.TemporaryDirectory() as place:
        envs = asked.envs.resolve()
        found = {peer.name: cells_of(peer, server, Path(place), envs, asked.count) for peer in (US, *PEERS)}
    head = ["client", "closed loop, req/s", "CPU s per 1,000", "largest process, MB", "start to first request, s"]
    parts = [
        f"Closed loop, {IN_FLIGHT} in flight, {TOKENS} tokens:",
        page.table(head, [[name, *closed(cells[0])] for name, cells in found.items()]),
    ]
    for what, heading in (("late", "Lateness at the server"), ("added", "TTFT added to the truth")):
        lines = [
            [name, *(at_rate(cell, rate, what) for cell, rate in zip(cells[1:], RATES, strict=True))]
            for name, cells in found.items()
        ]
        parts += [f"{heading}, ms P50 / P99:", page.table(["client", *(f"{rate}/s" for rate in RATES)], lines)]
    parts.append(f"{page.machine()} The client's core: {' '.join(on_core(CLIENT_CORE)) or 'any'}.")
    page.say("\n\n".join(parts), asked.write, "peers")


if __name__ == "__main__":
    main()
