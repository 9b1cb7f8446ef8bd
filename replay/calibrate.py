"""`replay calibrate URL`: fit the step-time model to a live engine, and keep it as a profile.

A designed set of requests, each alone on the engine or in a batch of its own:

    prefills   one request at a time, prompts of rising length, one token out: the time to the first token
    decodes    B requests at once with prompts of C tokens each; once all decode, the time between tokens of each stream
    mixed      a prompt sent while B decode: the gap that its step tears into their streams

Prompts are random token ids, so that nothing is found in a prefix cache; the lengths of answers are forced. The engine
must serve nobody else meanwhile. A prompt longer than the engine's token budget takes several steps: keep `--prompts`
within max_num_batched_tokens, and `--batches` within max_num_seqs. The profile says what it was fitted from, and how
well.
"""

from __future__ import annotations

import json
import random
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.preflight import Ask, Refused, Server, Target, allowed, look, parse_target
from traces.shell import EXIT_PASS, EXIT_UNJUDGED, parsed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from replay.engine.fitting import Fitted, Observation

_LEAST_STEPS = 8
FIRST_ID, LAST_ID = 100, 999  # in every vocabulary, and in none of them special
NS_PER_MS = 1e6


def parse_counts(text: str) -> tuple[int, ...]:
    """`1,4,16` as rising whole numbers. Raises ValueError."""
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers: write it as 1,4,16") from None
    if values[0] < 1:
        raise ValueError(f"{text!r}: every number must be at least 1")
    return values


COUNTS = parsed("n,n,...", parse_counts)


@click.command()
@click.argument("url")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Profile to write.  [default: HOST-PORT.toml]"
)
@click.option("--model", help="Ask for this model.  [default: the server's only one]")
@click.option(
    "--prompts", type=COUNTS, default="16,64,128,256,512,1024,2048", show_default=True, help="Prompt lengths."
)
@click.option("--batches", type=COUNTS, default="1,2,4,8", show_default=True, help="Requests that decode at once.")
@click.option("--contexts", type=COUNTS, default="64,512,1536", show_default=True, help="Their prompt lengths.")
@click.option("--tokens", type=click.IntRange(12), default=60, show_default=True, help="Tokens timed in each batch.")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Readings of a length; the median counts."
)
@click.option("--allow-host", multiple=True, metavar="HOST", help="A host other than this machine that may be sent to.")
@click.option("--api-key-env", default="OPENAI_API_KEY", metavar="VAR", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else.")
def calibrate(url: str, **options: Any) -> int:
    """Fit the step-time model to the engine at URL, which must be idle."""
    import asyncio

    from replay.engine.fitting import fit

    try:
        target = parse_target(url)
    except ValueError as error:
        raise click.UsageError(f"URL: {error}") from error
    try:
        allowed(target, options["allow_host"])
        server = look(Ask(target, _headers(options["api_key_env"])))
    except Refused as error:
        raise click.UsageError(str(error).replace("--target", "URL")) from error
    model = options["model"] or _only(server)
    out = options["out"] or Path(f"{target.host.replace(':', '.')}-{target.port}.toml")
    if out.exists():
        raise click.UsageError(f"--out {out}: exists already")
    click.echo(f"calibrating {model} at {target.origin}", err=True)
    try:
        readings = asyncio.run(_observe(target, model, server, options))
        fitted = fit(readings)
    except _Failed as error:
        click.echo(f"replay calibrate: {error}", err=True)
        return EXIT_UNJUDGED
    except ValueError as error:
        raise click.UsageError(f"{error}: give more --prompts, --batches or --contexts") from error
    out.write_text(profile_text(fitted, target, model, server))
    _print(fitted, readings, out, as_json=options["as_json"])
    return EXIT_PASS


class _Failed(Exception):
    """The server did not answer as a calibration needs; the text says how."""


async def _observe(target: Target, model: str, server: Server, options: dict[str, Any]) -> list[Observation]:
    """All readings, each the (lower) median of its repeats: what disturbs one only ever adds to it."""
    import aiohttp

    limit = server.max_model_len or 1 << 30
    tokens = options["tokens"]
    prompts = [length for length in options["prompts"] if length + 2 <= limit]
    contexts = [length for length in options["contexts"] if length + 2 * tokens + 64 <= limit]
    source = random.Random(time.time_ns())  # contents must differ from run to run, or a prefix cache would know them
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        target.origin, timeout=timeout, connector=connector, headers=_headers(options["api_key_env"]), trust_env=False
    ) as session:
        client = _Client(session, target.base_path, model, source)
        await client.ask(prompts[0] if prompts else 16, 4)  # the first answer of an engine is never typical
        plan: list[tuple[str, Callable[[], Awaitable[Observation | None]]]] = [
            *((f"prefill of {n} tokens", partial(_prefill, client, n)) for n in prompts),
            *(
                (f"{rows} decodes at {context}", partial(_decode, client, rows, context, tokens))
                for rows in options["batches"]
                for context in contexts
            ),
            *(
                (f"prompt of {n} among {rows} decodes at {context}", partial(_mixed, client, rows, context, n))
                for rows, context, n in _mixtures(options, prompts, contexts)
            ),
        ]
        seen: list[list[Observation]] = [[] for _ in plan]
        for _ in range(options["repeats"]):  # rounds over all readings: a slow minute of the machine hits each once
            for (_, read), found in zip(plan, seen, strict=True):
                if (reading := await read()) is not None:
                    found.append(reading)
    for (name, _), found in zip(plan, seen, strict=True):
        said = f"{_middle(found).seen_ms:.2f} ms" if found else "no reading, the decodes ended before"
        click.echo(f"{name}: {said}", err=True)
    return [_middle(found) for found in seen if found]


def _middle(found: list[Observation]) -> Observation:
    return sorted(found, key=lambda reading: reading.seen_ms)[(len(found) - 1) // 2]


class _Client:
    """Sends completions with token ids and stamps their chunks as they arrive."""

    def __init__(self, session: aiohttp.ClientSession, base: str, model: str, source: random.Random) -> None:
        self.session, self.base, self.model, self.source = session, base, model, source

    async def ask(self, prompt_tokens: int, output_tokens: int, seen: list[int] | None = None) -> list[int]:
        """Arrival of every token, in ns from the moment of sending. Raises _Failed.

        Args:
            prompt_tokens: random token ids.
            output_tokens: exactly so many.
            seen: a list to fill as tokens come, for who wants to look while it runs.
        """
        import aiohttp

        body = {
            "model": self.model,
            "prompt": [self.source.randint(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        encoded = json.dumps(body).encode()
        times: list[int] = [] if seen is None else seen
        start = time.perf_counter_ns()
        try:
            async with self.session.post(
                f"{self.base}/v1/completions",
                data=encoded,
                headers={"content-type": "application/json"},
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise _Failed(
                        f"the server answered HTTP {answer.status} to a completion of {prompt_tokens} token ids"
                    )
                rest = b""
                async for data in answer.content.iter_any():
                    now = time.perf_counter_ns()
                    *lines, rest = (rest + data).split(b"\n")
                    times += [now - start] * sum(1 for line in lines if _is_token(line))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Failed(f"the server broke off ({type(error).__name__})") from error
        if not times:
            raise _Failed("a completion came without a token")
        return times


def _is_token(line: bytes) -> bool:
    """Whether a line of the stream carries a token: a choice, be its text empty (some tokens are half a character)."""
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices")
    return bool(choices) and "text" in choices[0]


async def _prefill(client: _Client, length: int) -> Observation:
    from replay.engine.fitting import Observation

    times = await client.ask(length, 1)
    return Observation(length, 0, 0.0, times[0] / NS_PER_MS)


async def _decode(client: _Client, rows: int, context: int, tokens: int) -> Observation:
    """The mean step while all `rows` decode: from the last first token to the first last one.

    The mean and not the median: what slows one step in ten slows the traffic to be predicted as well.
    """
    import asyncio
    import statistics

    from replay.engine.fitting import Observation

    asked = tokens + 4 + 2 * (rows * context // 2048 + rows // 4)
    begun = time.perf_counter_ns()

    async def one() -> list[int]:
        offset = time.perf_counter_ns() - begun
        return [offset + at for at in await client.ask(context, asked)]

    streams = await asyncio.gather(*(one() for _ in range(rows)))
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    steps: list[float] = []
    grown = 0.0
    for times in streams:
        inside = [index for index, at in enumerate(times) if start <= at <= end]
        if len(inside) > _LEAST_STEPS:
            steps.append((times[inside[-1]] - times[inside[0]]) / (len(inside) - 1))
            grown += context + (inside[0] + inside[-1]) / 2
    if len(steps) < rows:
        raise _Failed(f"{rows} requests never decoded together: the engine has fewer slots, or give more --tokens")
    return Observation(0, rows, grown, statistics.mean(steps) / NS_PER_MS)


def _mixtures(options: dict[str, Any], prompts: list[int], contexts: list[int]) -> list[tuple[int, int, int]]:
    """(rows, context, prompt) of the mixed readings: two contexts, two prompt lengths.

    The rows are one less than the largest batch: the engine may have no more slots than that batch, and a prompt that
    waits for a slot is not in a step with them.
    """
    rows = [count - 1 for count in options["batches"] if count > 1][-1:]
    lengths = prompts[len(prompts) // 2 :: 2][:2]
    ends = list(dict.fromkeys([contexts[0], contexts[-1]])) if contexts else []
    return [(count, context, length) for count in rows for context in ends for length in lengths]


async def _mixed(client: _Client, rows: int, context: int, length: int) -> Observation | None:
    """The step that holds a prompt while `rows` decode: the gap in their streams that ends with its first token.

    None when a stream ended before the prompt came.
    """
    import asyncio
    import statistics

    from replay.engine.fitting import Observation

    begun = time.perf_counter_ns()
    streams: list[list[int]] = [[] for _ in range(rows)]
    asked = 40 + 2 * (rows * context // 2048 + rows // 4)
    starts = []

    async def one(times: list[int]) -> None:
        starts.append(time.perf_counter_ns() - begun)
        await client.ask(context, asked, times)

    tasks = [asyncio.ensure_future(one(times)) for times in streams]
    try:
        while min(len(times) for times in streams) < 8 and not all(task.done() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # the streams fill meanwhile
        sent = time.perf_counter_ns() - begun
        first = sent + (await client.ask(length, 1))[0]
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    gaps, grown = [], 0.0
    for start, times in zip(starts, streams, strict=True):
        nearest = min(range(len(times)), key=lambda index: abs(start + times[index] - first))
        if nearest == 0 or nearest == len(times) - 1:
            return None
        gaps.append(max(times[i] - times[i - 1] for i in (nearest, nearest + 1)))
        grown += context + nearest
    return Observation(length, rows, grown, statistics.median(gaps) / NS_PER_MS)


def profile_text(fitted: Fitted, target: Target, model: str, server: Server) -> str:
    """The profile as TOML."""
    values = ", ".join(
        f"{name} = {getattr(fitted.model, name):.6g}"
        for name in ("w_ms", "u_ms", "g0_ms", "g_ms", "k_ms", "dm_ms", "km_ms", "a_ms", "h_ms")
    )
    day = time.strftime("%Y-%m-%d", time.gmtime())
    said = {
        "provenance": f"fitted from {fitted.observations} readings of a live engine",
        "source": f"{target.origin}, {day}, {server.version or 'version unknown'}",
        "error": error_text(fitted),
        "served_model": model,
    }
    lines = [f"{name} = {json.dumps(text)}" for name, text in said.items()]
    if server.max_model_len:
        lines.append(f"max_model_len = {server.max_model_len}")
    return "\n".join([*lines, f"model = {{ {values} }}", ""])


def error_text(fitted: Fitted) -> str:
    """How well the fit explains the readings, in words."""
    return (
        f"median {fitted.error_p50:.1%}, P95 {fitted.error_p95:.1%} of {fitted.observations} readings; "
        f"median {fitted.kept_out_p50:.1%} of those kept out of the fit"
    )


def _print(fitted: Fitted, readings: list[Observation], out: Path, *, as_json: bool) -> None:
    import msgspec

    from replay.engine.fitting import predicted_ms

    rows = [
        {**reading._asdict(), "fitted_ms": predicted_ms(fitted, reading)}
        for reading in sorted(readings, key=lambda reading: reading[:3])
    ]
    if as_json:
        click.echo(json.dumps({"profile": str(out), "fit": msgspec.to_builtins(fitted), "readings": rows}))
        return
    click.echo(f"{'reading':42}{'seen':>12}{'fitted':>12}{'error':>9}")
    for row in rows:
        decodes = f"{row['rows']} decodes, context {row['context']:.0f}" if row["rows"] else ""
        prefill = f"prefill of {row['prefill']}" if row["prefill"] else ""
        what = " + ".join(part for part in (prefill, decodes) if part)
        error = row["fitted_ms"] / row["seen_ms"] - 1
        click.echo(f"{what:42}{row['seen_ms']:9.2f} ms{row['fitted_ms']:9.2f} ms{error:+9.1%}")
    click.echo(f"error: {error_text(fitted)}; the API adds {fitted.api_ms:.1f} ms to a first token")
    click.echo(f"profile written to {out}; use it with --profile {out} or --profile-file {out}")


def _only(server: Server) -> str:
    if len(server.models) == 1:
        return server.models[0]
    raise click.UsageError(
        f"--model: name one of {', '.join(server.models) or 'the models the server has (it lists none)'}"
    )


def _headers(variable: str) -> dict[str, str]:
    import os

    key = os.environ.get(variable)
    return {"authorization": f"Bearer {key}"} if key else {}
