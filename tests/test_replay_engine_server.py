"""The embedded engine over HTTP: routes, streams, errors and disconnects, in shapes that vLLM gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from replay.engine import words
from replay.engine.record import Log
from replay.engine.serve import build, make_config, make_profile, serve
from replay.engine.server import Server
from tenants.dialects import detect

BRISK = ("--speed-of-time", "200x", "--served-model-name", "tiny")


class Engine:
    """A running server, its client and its log."""

    def __init__(self, server: Server, client: aiohttp.ClientSession, log: list[Log]) -> None:
        self.server, self.client, self.log = server, client, log

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, bytes]:
        async with self.client.post(path, json=body, headers=headers) as response:
            return response.status, await response.read()

    async def events(self, path: str, body: dict, **headers: str) -> list[object]:
        status, data = await self.post(path, body | {"stream": True}, **headers)
        assert status == 200
        events = data.decode().split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


@contextlib.asynccontextmanager
async def engine(*options: str) -> AsyncIterator[Engine]:
    values = serve.make_context("serve", [*BRISK, *options]).params
    profile = make_profile(values)
    log: list[Log] = []
    server = build(values, profile, make_config(values, profile), log=log.append)
    runner = server.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(base) as client:
            yield Engine(server, client, log)
    finally:
        await runner.cleanup()
        server.engine.close()


def run(scenario, *options: str) -> None:
    async def main() -> None:
        async with engine(*options) as started:
            await asyncio.wait_for(scenario(started), 30)

    asyncio.run(main())


async def until(condition, timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 4}


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_chat_stream_is_role_then_a_token_an_event_then_usage_then_done():
    async def scenario(engine: Engine) -> None:
        events = await engine.events("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
        role, *tokens, usage, done = events
        assert done == "[DONE]"
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, None, "length"]
        assert all(re.fullmatch(" [a-z]{3}", event["choices"][0]["delta"]["content"]) for event in tokens)
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens"] == len(words.chat([("user", "the quick brown fox")]))
        assert usage["usage"]["completion_tokens"] == 4
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4
        assert usage["metrics"]["queue_time_ms"] >= 0
        assert len({event["id"] for event in events[:-1]}) == 1

    run(scenario)


def test_without_include_usage_there_is_no_usage_event_and_the_last_token_has_the_fingerprint():
    async def scenario(engine: Engine) -> None:
        *tokens, done = await engine.events("/v1/completions", TEXT)
        assert done == "[DONE]"
        assert len(tokens) == 4
        assert "usage" not in tokens[-1]
        assert tokens[-1]["system_fingerprint"].startswith("vllm-0.33")

    run(scenario)


def test_continuous_usage_counts_the_tokens_so_far_in_every_event():
    async def scenario(engine: Engine) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, body, role in (("/v1/chat/completions", CHAT, [0]), ("/v1/completions", TEXT, [])):
            events = await engine.events(path, body | {"stream_options": options})
            counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
            assert counts == [*role, 1, 2, 3, 4, 4]

    run(scenario)


def test_n_answers_of_many_prompts_have_an_index_each_and_share_one_usage():
    async def scenario(engine: Engine) -> None:
        body = TEXT | {"prompt": [[20, 21], [22, 23, 24]], "n": 2, "stream_options": {"include_usage": True}}
        *tokens, usage, _ = await engine.events("/v1/completions", body)
        by_index = [event["choices"][0]["index"] for event in tokens]
        assert sorted(by_index) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        assert usage["usage"] | {"prompt_tokens_details": None} == {
            "prompt_tokens": 5,
            "total_tokens": 21,
            "completion_tokens": 16,
            "prompt_tokens_details": None,
        }
        assert "metrics" not in usage
        roles = (await engine.events("/v1/chat/completions", CHAT | {"n": 2}))[:2]
        assert [event["choices"][0]["index"] for event in roles] == [0, 1]
        assert all("role" in event["choices"][0]["delta"] for event in roles)

    run(scenario)


def test_echo_puts_the_prompt_before_the_first_token_and_adds_no_event():
    async def scenario(engine: Engine) -> None:
        *tokens, _ = await engine.events("/v1/completions", TEXT | {"prompt": 'say "é"\n', "echo": True})
        assert len(tokens) == 4
        assert tokens[0]["choices"][0]["text"].startswith('say "é"\n ')

    run(scenario)


def test_a_silent_stream_gets_keep_alive_comments():
    async def scenario(engine: Engine) -> None:
        status, data = await engine.post("/v1/completions", TEXT | {"stream": True, "max_tokens": 2})
        assert status == 200
        assert data.startswith(b": keep-alive\n\n")
        assert data.endswith(b"data: [DONE]\n\n")

    run(scenario, "--speed-of-time", "0.1x", "--sse-keep-alive-interval", "0.02")


def test_http_1_0_gets_an_unframed_stream_that_ends_with_the_connection():
    async def scenario(engine: Engine) -> None:
        body = json.dumps(TEXT | {"stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.client._base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head, _, events = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert b"chunked" not in head.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")

    run(scenario)


# --- whole answers, tokens, models ------------------------------------------------------------------------------------


def test_a_whole_answer_has_the_words_of_the_stream():
    async def scenario(engine: Engine) -> None:
        status, data = await engine.post("/v1/chat/completions", CHAT)
        assert status == 200
        answer = json.loads(data)
        streamed = await engine.events("/v1/chat/completions", CHAT)
        said = "".join(event["choices"][0]["delta"]["content"] for event in streamed[1:-1])
        assert answer["choices"][0]["message"]["content"] == said
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4

    run(scenario)


def test_tokenize_and_usage_agree_and_detokenize_gives_the_text_back():
    async def scenario(engine: Engine) -> None:
        text = "Hello, wörld: the prices are 3.50 €"
        tokens = json.loads((await engine.post("/tokenize", {"prompt": text}))[1])
        assert tokens["count"] == len(tokens["tokens"])
        answer = json.loads((await engine.post("/v1/completions", TEXT | {"prompt": text}))[1])
        assert answer["usage"]["prompt_tokens"] == tokens["count"]
        again = json.loads((await engine.post("/detokenize", {"tokens": tokens["tokens"]}))[1])
        assert again["prompt"] == text
        chat = json.loads((await engine.post("/tokenize", {"messages": CHAT["messages"]}))[1])
        answer = json.loads((await engine.post("/v1/chat/completions", CHAT))[1])
        assert answer["usage"]["prompt_tokens"] == chat["count"]

    run(scenario)


def test_a_second_turn_finds_its_first_turn_in_the_prefix_cache_answer_included():
    async def scenario(engine: Engine) -> None:
        messages = [{"role": "user", "content": " abc" * 40}]
        first = json.loads(
            (await engine.post("/v1/chat/completions", CHAT | {"messages": messages, "max_tokens": 40}))[1]
        )
        said = first["choices"][0]["message"]
        messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": " def"}]
        second = json.loads((await engine.post("/v1/chat/completions", CHAT | {"messages": messages}))[1])
        before = first["usage"]["prompt_tokens"] + 40
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (before - 1) // 16 * 16

    run(scenario)


def test_the_server_tells_what_it_is():
    async def scenario(engine: Engine) -> None:
        async def get(path: str) -> bytes:
            async with engine.client.get(path) as response:
                assert response.status == 200
                return await response.read()

        card = json.loads(await get("/v1/models"))["data"][0]
        assert (card["id"], card["owned_by"], card["max_model_len"]) == ("tiny", "convoy", 8192)
        assert json.loads(await get("/version")) == {"version": "0.32.0"}
        assert await get("/health") == b""
        info = json.loads(await get("/server_info"))
        assert info["vllm_config"]["scheduling_policy"] == "priority"
        assert info["profile"]["provenance"] == "modelled, not measured"

    run(scenario, "--policy", "priority", "--engine-version", "0.32")


def test_the_auto_dialect_takes_it_for_a_vllm():
    async def scenario(engine: Engine) -> None:
        async def get(path: str) -> str:
            async with engine.client.get(path) as response:
                return await response.text()

        told = detect(await get("/version"), await get("/v1/models"), await get("/metrics"))
        assert told.dialect == "vllm"
        assert "vllm:" in told.why

    run(scenario)


def test_an_idle_connection_is_closed_and_one_with_a_stream_on_it_is_not():
    async def scenario(engine: Engine) -> None:
        body = json.dumps(TEXT | {"max_tokens": 40, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.client._base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        data = await asyncio.wait_for(reader.read(), 10)  # ends when the server closes
        writer.close()
        await writer.wait_closed()
        assert data.endswith(b"0\r\n\r\n")

    run(scenario, "--timeout-keep-alive", "0.1", "--speed-of-time", "1x")


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = [
    ("/v1/completions", TEXT | {"model": "other"}, 404, "NotFoundError", "The model `other` does not exist."),
    (
        "/v1/completions",
        TEXT | {"prompt": [300] * 8193},
        400,
        "BadRequestError",
        "maximum context length is 8192 tokens",
    ),
    ("/v1/completions", TEXT | {"prompt": [words.VOCABULARY]}, 400, "BadRequestError", "is out of vocabulary"),
    ("/v1/completions", TEXT | {"prompt": [-1]}, 400, "BadRequestError", "Token id -1 is out of vocabulary"),
    ("/v1/completions", TEXT | {"prompt": ""}, 400, "BadRequestError", "must be provided and non-empty"),
    ("/v1/completions", TEXT | {"prompt": {}}, 400, "Bad Request", "body.prompt"),
    ("/v1/completions", TEXT | {"prompt": [[20], "a"]}, 400, "Bad Request", "1 validation error"),
    ("/v1/completions", TEXT | {"max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
    ("/v1/completions", TEXT | {"max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
    ("/v1/completions", TEXT | {"n": 0}, 400, "BadRequestError", "n must be at least 1"),
    ("/v1/completions", TEXT | {"n": 2, "temperature": 0}, 400, "BadRequestError", "greedy"),
    ("/v1/completions", TEXT | {"min_tokens": 5}, 400, "BadRequestError", "min_tokens must be less than or equal"),
    ("/v1/completions", TEXT | {"priority": 1.5}, 400, "Bad Request", "body.priority"),
    ("/v1/completions", TEXT | {"stream_options": {}}, 400, "BadRequestError", "Stream options"),
    ("/v1/chat/completions", {"model": "tiny"}, 400, "Bad Request", "messages"),
    ("/v1/chat/completions", CHAT | {"messages": []}, 400, "BadRequestError", "messages"),
    ("/tokenize", {}, 400, "Bad Request", "prompt"),
    ("/detokenize", {"tokens": [words.VOCABULARY]}, 400, "Bad Request", "tokens"),
]


def test_errors_have_the_status_type_and_words_of_vllm():
    async def scenario(engine: Engine) -> None:
        for path, body, status, kind, message in ERRORS:
            got, data = await engine.post(path, body)
            error = json.loads(data)["error"]
            assert (got, error["code"], error["type"]) == (status, status, kind), body
            assert message in error["message"], error
        async with engine.client.post("/v1/completions", data=b'{"prompt":') as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "body"
        for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v2/none", 404)):
            async with engine.client.request(method, path) as response:
                assert response.status == status
        assert engine.log == []

    run(scenario)


@pytest.mark.data
def test_a_prompt_too_long_is_refused_in_the_very_words_that_vllm_used(data):
    recorded = (data("vllm-cpu", "recordings", "too_long.http")).read_bytes().partition(b"\r\n\r\n")[2]

    async def scenario(engine: Engine) -> None:
        status, body = await engine.post("/v1/completions", TEXT | {"prompt": [300] * 8193})
        assert status == 400
        assert json.loads(body) == json.loads(recorded)

    run(scenario)


def refusals(engine: Engine, reason: str) -> float:
    text = engine.server.engine.metrics.text(engine.server.engine.gauges())
    (line,) = [
        line for line in text.splitlines() if f'admission_rejections_total{{model_name="tiny",reason="{reason}"' in line
    ]
    return float(line.rsplit(" ", 1)[1])


def test_a_full_engine_is_a_503_before_the_stream_begins_and_running_ones_count():
    async def scenario(engine: Engine) -> None:
        asked = TEXT | {"stream": True, "max_tokens": 400}
        tasks = [asyncio.create_task(engine.post("/v1/completions", asked)) for _ in range(2)]
        await until(lambda: engine.server.engine.scheduler.unfinished == 2)
        status, body = await engine.post("/v1/completions", asked | {"n": 2})
        assert status == 503
        assert json.loads(body)["error"]["type"] == "Service Unavailable"
        assert json.loads(body)["error"]["message"].startswith("The engine is currently busy")
        tasks.append(asyncio.create_task(engine.post("/v1/completions", asked)))
        await until(lambda: engine.server.engine.scheduler.unfinished == 3)
        assert (await engine.post("/v1/completions", TEXT))[0] == 503
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200, 200]
        assert refusals(engine, "max_num_queued_reqs") == 2
        assert sum(row.outcome == "refused" for row in engine.log) == 2

    run(scenario, "--max-num-seqs", "1", "--max-num-queued-reqs", "3", "--speed-of-time", "20x")


def test_a_backlog_of_prompt_tokens_without_a_first_token_is_a_503():
    async def scenario(engine: Engine) -> None:
        asked = TEXT | {"prompt": [300] * 60, "max_tokens": 400}
        first = asyncio.create_task(engine.post("/v1/completions", asked))
        await until(lambda: engine.server.engine.metrics.prompt_tokens == 60)
        waiting = []
        for count in (1, 2):
            waiting.append(asyncio.create_task(engine.post("/v1/completions", asked)))
            await until(lambda count=count: engine.server.engine.gauges().waiting == count)
        status, body = await engine.post("/v1/completions", asked)
        assert status == 503
        assert "prefill token backlog" in json.loads(body)["error"]["message"]
        assert refusals(engine, "max_num_queued_tokens") == 1
        for task in [first, *waiting]:
            task.cancel()

    run(scenario, "--max-num-seqs", "1", "--max-num-queued-tokens", "100", "--speed-of-time", "5x")


# --- priority, ends, disconnects --------------------------------------------------------------------------------------


def orders(bodies: list[dict], headers: list[dict], *options: str) -> list[str]:
    """Names in the order of their first tokens, with one slot that a first request keeps busy while all arrive."""
    order: list[str] = []

    async def scenario(engine: Engine) -> None:
        busy = asyncio.create_task(engine.post("/v1/completions", TEXT | {"max_tokens": 300}))
        await until(lambda: engine.server.engine.gauges().running == 1)
        tasks = []
        for number, (body, header) in enumerate(zip(bodies, headers, strict=True)):
            name = f"r{number}"
            tasks.append(
                asyncio.create_task(engine.post("/v1/completions", TEXT | body, **{"X-Request-Id": name} | header))
            )
            await until(lambda wanted=number + 1: engine.server.engine.gauges().waiting == wanted)
        await asyncio.gather(busy, *tasks)
        rows = sorted(engine.log, key=lambda row: row.first_token_ns or 0)
        order.extend(row.request_id for row in rows if row.request_id.startswith("r"))

    run(scenario, "--max-num-seqs", "1", "--speed-of-time", "20x", *options)
    return order


def test_the_smaller_priority_comes_first_and_the_header_wins_over_the_body():
    bodies = [{"priority": 5}, {"priority": 1}, {"priority": 9}, {}]
    headers = [{}, {}, {"X-Vllm-Priority": "-3"}, {"X-Vllm-Priority": "no number"}]
    assert orders(bodies, headers, "--policy", "priority") == ["r2", "r3", "r1", "r0"]


def test_under_fcfs_a_priority_is_accepted_and_ignored():
    assert orders([{"priority": 5}, {"priority": 1}], [{}, {}], "--policy", "fcfs") == ["r0", "r1"]


def test_with_higher_first_the_larger_priority_comes_first_and_the_missing_one_last():
    bodies = [{}, {"priority": 1}, {"priority": -4}, {"priority": 7}]
    assert orders(bodies, [{}] * 4, "--policy", "priority", "--higher-first") == ["r3", "r1", "r2", "r0"]


def test_fair_queueing_tells_tenants_by_their_header():
    bodies = [{"max_tokens": 50}] * 3
    headers = [{"x-tenant": "a"}, {"x-tenant": "a"}, {"x-tenant": "b"}]
    assert orders(bodies, headers, "--policy", "fair") == ["r0", "r2", "r1"]


def test_an_answer_may_end_by_itself_unless_ignore_eos_and_min_tokens_forbid_it():
    async def scenario(engine: Engine) -> None:
        async def length(**body: object) -> tuple[int, str]:
            answer = json.loads((await engine.post("/v1/completions", TEXT | {"max_tokens": 500} | body))[1])
            return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

        ends = [await length(prompt=[300 + i]) for i in range(30)]
        assert {reason for _, reason in ends} == {"stop"}
        assert 5 < sum(count for count, _ in ends) / 30 < 20
        assert await length(prompt=[300]) == ends[0]
        assert await length(ignore_eos=True) == (500, "length")
        assert (await length(min_tokens=400))[0] >= 400

    run(scenario, "--mean-output-tokens", "10", "--speed-of-time", "2000x")


def test_max_tokens_is_cut_to_what_the_context_leaves():
    async def scenario(engine: Engine) -> None:
        for path, body in (
            ("/v1/completions", {"prompt": [300] * 90, "max_tokens": 500}),
            ("/v1/chat/completions", {"messages": CHAT["messages"]}),
        ):
            answer = json.loads((await engine.post(path, body))[1])
            assert answer["usage"]["total_tokens"] == 100
            assert answer["choices"][0]["finish_reason"] == "length"

    run(scenario, "--max-model-len", "100")


def test_a_client_that_goes_away_frees_its_slot_for_the_next():
    async def scenario(engine: Engine) -> None:
        async with engine.client.post("/v1/completions", json=TEXT | {"max_tokens": 8000, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            assert engine.server.engine.gauges().running == 1
        await until(lambda: engine.server.engine.gauges().running == 0)
        assert engine.server.engine.gauges().kv_usage == 0
        row = engine.log[-1]
        assert row.outcome == "abort"
        assert 0 < row.output_tokens < 8000
        waiting = asyncio.create_task(engine.post("/v1/completions", TEXT | {"max_tokens": 8000}))
        await until(lambda: engine.server.engine.gauges().running == 1)
        waiting.cancel()
        await until(lambda: engine.server.engine.gauges().running == 0)
        assert (await engine.post("/v1/completions", TEXT))[0] == 200
        text = engine.server.engine.metrics.text(engine.server.engine.gauges())
        assert 'request_success_total{engine="0",model_name="tiny",finished_reason="abort"} 2.0' in text

    run(scenario, "--max-num-seqs", "1")


def test_a_waiting_request_that_a_full_sglang_queue_displaces_ends_in_an_error_event():
    async def scenario(engine: Engine) -> None:
        async def ask(priority: int, tokens: int) -> tuple[int, bytes]:
            return await engine.post(
                "/v1/completions", TEXT | {"priority": priority, "max_tokens": tokens, "stream": True}
            )

        first = asyncio.create_task(ask(5, 300))
        await until(lambda: engine.server.engine.gauges().running == 1)
        displaced = asyncio.create_task(ask(3, 4))
        await until(lambda: engine.server.engine.gauges().waiting == 1)
        status, _ = await ask(4, 4)
        assert status == 200
        status, body = await displaced
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        assert json.loads(body.split(b"\n\n")[0][6:])["error"]["code"] == 503
        await first

    run(
        scenario,
        "--policy",
        "sglang",
        "--higher-first",
        "--max-num-seqs",
        "1",
        "--max-num-queued-reqs",
        "1",
        "--speed-of-time",
        "20x",
    )


def test_the_log_has_the_clients_id_the_tenant_and_times_in_order():
    async def scenario(engine: Engine) -> None:
        await engine.events("/v1/completions", TEXT | {"priority": 2}, **{"X-Request-Id": "abc-7", "x-tenant": "risk"})
        (row,) = engine.log
        assert (row.request_id, row.tenant, row.priority, row.outcome) == ("abc-7", "risk", 2, "length")
        assert (row.input_tokens, row.output_tokens) == (len(words.encode("the quick brown fox")), 4)
        times = [row.arrival_ns, row.scheduled_ns, row.first_token_ns, row.last_token_ns, row.end_ns]
        assert times == sorted(times)

    run(scenario)
