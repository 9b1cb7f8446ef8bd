"""The whole chain on loopback, against the engine's own log: official `openai` client → capture → embedded engine.

    python benchmarks/capture_chain.py --client-python PATH     # a Python that has `openai`, if this one has not
    ... --write docs/capture.md                                 # puts what it found there

200 requests at 20 per second, half of them streamed, two tenants by header. Each asks for a number of tokens of its
own, by which its row and the engine's log line find each other. Then the same requests straight to the engine: the
bytes of the answers that the client saw must be the same, but for ids, times and what the prefix cache held.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page
from capture_overhead import RECORDS, child, recorder

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CLIENT = r"""
import asyncio, hashlib, json, re, sys, time, httpx, openai
url, model, count, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
VOLATILE = re.compile(rb'"(id|created|cached_tokens|metrics)":\s?("[^"]*"|\d+|\{[^}]*\})')
seen = {}
class Raw(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        response = await super().handle_async_request(request)
        key, stream, pieces = request.headers["x-key"], response.stream, []
        class Tee(httpx.AsyncByteStream):
            async def __aiter__(self):
                try:
                    async for piece in stream:
                        pieces.append(piece)
                        yield piece
                finally:
                    seen[key] = hashlib.sha256(VOLATILE.sub(b"", b"".join(pieces))).hexdigest()
            async def aclose(self):
                await stream.aclose()
        return httpx.Response(response.status_code, headers=response.headers, stream=Tee(),
                              extensions=response.extensions)
async def one(client, i, begin):
    await asyncio.sleep(max(0, begin + i / rate - time.monotonic()))
    tenant = "risk" if i % 2 else "summary"
    ask = dict(model=model, max_tokens=8 + i, messages=[{"role": "user", "content": "word " * (5 + i % 40)}],
               extra_headers={"x-tenant": tenant, "x-key": str(8 + i)},
               extra_body={"ignore_eos": True, "priority": i % 2})
    if i % 4 < 2:
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
        async for _ in stream:
            pass
    else:
        await client.chat.completions.create(**ask)
async def main():
    http = httpx.AsyncClient(transport=Raw(), timeout=60)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="sk-none", http_client=http, max_retries=0) as client:
        begin = time.monotonic() + 0.5
        await asyncio.gather(*(one(client, i, begin) for i in range(count)))
    print(json.dumps(seen))
asyncio.run(main())
"""


def percentile(values: list[float], q: float) -> float:
    """Order statistic."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def client(python: str, url: str, model: str, args: argparse.Namespace) -> dict[str, str]:
    """Run the client: max_tokens of each request → digest of the answer's bytes."""
    done = subprocess.run(
        [python, "-c", CLIENT, url, model, str(args.count), str(args.rate)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the client failed against {url}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def compare(rows: list[dict[str, object]], log: list[dict[str, object]]) -> list[list[str]]:
    """Rows against the engine's log lines: what, and how much of it."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    truth = {line["max_tokens"]: line for line in log}
    late, path, wrong = [], [], 0
    for row in rows:
        line = truth[row["max_tokens"]]
        wrong += any(
            row[ours] != line[theirs]
            for ours, theirs in (("tenant", "tenant"), ("input_tokens", "input_tokens"), ("stream", "stream"),
                                 ("output_tokens", "output_tokens"), ("priority", "priority"))
        )  # fmt: skip
        path.append((line["arrival_ns"] - (row["arrival_ns"] - offset_ns)) / 1e6)
        if row["stream"]:
            late.append((row["arrival_ns"] - offset_ns + row["first_token_ns"] - line["first_token_ns"]) / 1e6)
    first = f"P50 {percentile(late, 0.5):.2f} ms, P99 {percentile(late, 0.99):.2f} ms, least {min(late):.2f} ms"
    whole = f"P50 {percentile(path, 0.5):.2f} ms, P99 {percentile(path, 0.99):.2f} ms"
    ids = {row["request_id"] for row in rows}
    return [
        ["requests in the engine's log; rows; different request ids", f"{len(log)}; {len(rows)}; {len(ids)}"],
        ["rows whose tenant, priority, stream or lengths differ from the engine's log", f"{wrong}"],
        ["first token, recorder − engine", f"{first} (n = {len(late)})"],
        ["arrival of the whole request, engine − recorder", f"{whole} (n = {len(path)})"],
    ]


def main() -> None:
    """Run the chain."""
    from traces import parquet

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client-python", default=sys.executable)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0)
    page.option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder) / "engine.jsonl", Path(folder) / "out"
        serve = [sys.executable, "-m", "replay", "serve", "--port", "0", "--log", str(log)]
        with child(serve, r"(http://127\.0\.0\.1:(\d+))\n") as (_, match):
            models = subprocess.run(["curl", "-s", f"{match[1]}/v1/models"], capture_output=True, check=True).stdout
            model = json.loads(models)["data"][0]["id"]
            with child(recorder(int(match[2]), str(out)), RECORDS) as (_, captured):
                through = client(args.client_python, f"http://127.0.0.1:{captured[1]}", model, args)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            found = compare(parquet.read(out).to_pylist(), lines)
            direct = client(args.client_python, match[1], model, args)
        same = sum(through[key] == direct[key] for key in direct)
        found.append(["answers whose bytes are the same with and without the recorder", f"{same} of {len(direct)}"])
    what = f"{args.count} requests at {args.rate:g} per second, half of them streamed:"
    page.say(f"{what}\n\n{page.table(['', ''], found)}\n\n{page.machine('mitmproxy')}", args.write, "chain")


if __name__ == "__main__":
    main()
