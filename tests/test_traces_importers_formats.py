"""Each format has a right example, quoted from its specification or recorded, and wrong ones that are named."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.errors import BadFile, BadRow
from traces.importers.batching import Seen
from traces.importers.formats import FORMATS
from traces.importers.intake import Options
from traces.importers.load import import_file, table
from traces.importers.sniff import format_of
from traces.importers.source import Source

MONKEYS = "\n🐵🙈🙉\n"
CHAT = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "SECRET"}],
        "stream": True,
        "max_completion_tokens": 64,
        "n": 1,
        "tools": [{}, {}],
    }
)
STREAM = (
    'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"SECRET"}}]}\n\n'
    'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    'data: {"object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
    "data: [DONE]\n\n"
)
WHOLE = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "SECRET"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5},
    }
)


def http_request(path="/v1/chat/completions", body=CHAT):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Tenant: risk\r\nContent-Length: {len(body)}\r\n\r\n"
    return head + body


def http_response(body=STREAM, kind="text/event-stream"):
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n{body}"


def csv(*rows):
    return "".join(f"{row}\n" for row in rows)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def span(span_id="b1", start="1753500000000000000", end="1753500002500000000", **attributes):
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue", bool: "boolValue"}
    return {
        "traceId": "0af7",
        "spanId": span_id,
        "startTimeUnixNano": start,
        "endTimeUnixNano": end,
        "attributes": [
            {"key": key.replace("__", "."), "value": {kinds[type(value)]: value}} for key, value in attributes.items()
        ],
    }


def otlp(*spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


GENAI = {
    "gen_ai__operation__name": "chat",
    "gen_ai__request__model": "m",
    "gen_ai__usage__input_tokens": 1200,
    "gen_ai__usage__output_tokens": 300,
    "gen_ai__conversation__id": "c1",
    "gen_ai__request__max_tokens": 512,
}
CONVERSATION = {
    "id": "c",
    "models": ["m"],
    "block_size": 64,
    "requests": [
        {
            "t": 0.0,
            "type": "n",
            "model": "m",
            "in": 130,
            "out": 5,
            "hash_ids": [1, 2],
            "api_time": 5.23,
            "think_time": 0.0,
        },
        {"t": 9.1, "type": "s", "model": "m", "in": 63, "out": 6, "hash_ids": [], "ttft": 1.75, "think_time": 3.0},
    ],
}
AIPERF = {
    "metadata": {
        "x_request_id": "r1",
        "x_correlation_id": "s1",
        "turn_index": 2,
        "request_start_ns": 1759813207532900363,
        "request_ack_ns": 1759813207650730976,
        "request_end_ns": 1759813207838764604,
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    },
    "metrics": {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
        "time_to_first_token": {"value": 255.886568, "unit": "ms"},
        "inter_chunk_latency": {"value": [4.898437, 5.316006], "unit": "ms"},
    },
    "error": None,
}
LITELLM = {
    "request_id": "chatcmpl-1",
    "call_type": "acompletion",
    "api_key": "SECRET",
    "prompt_tokens": 20,
    "completion_tokens": 30,
    "startTime": "2024-11-27T14:13:11.123000Z",
    "endTime": "2024-11-27T14:13:13.123000Z",
    "completionStartTime": "2024-11-27T14:13:11.423000Z",
    "model": "gpt-4o",
    "team_id": "risk",
    "messages": "SECRET",
    "metadata": {"additional_usage_values": {"cache_read_input_tokens": 16}},
}
NGINX = {
    "time_iso8601": "2024-05-10T00:00:02+00:00",
    "msec": "1715299202.500",
    "request_time": "1.500",
    "upstream_header_time": "0.250",
    "request": "POST /v1/chat/completions HTTP/1.1",
    "status": "200",
    "body_bytes_sent": "1234",
    "http_x_tenant": "risk",
}
ENVOY = {
    "start_time": "2024-05-10T00:00:01.250Z",
    "duration": 1500,
    "response_code": 0,
    "response_flags": "DC",
    "bytes_received": 10,
    "bytes_sent": 0,
    "path": "/v1/messages?beta=true",
    "x-tenant": "summary",
}
AREX = {
    "id": "a1",
    "recordId": "AREX-1",
    "appId": "svc",
    "categoryType": {"name": "HttpClient", "entryPoint": False},
    "operationName": "/v1/chat/completions",
    "creationTime": 1715299200123,
    "targetRequest": {"body": base64.b64encode(CHAT.encode()).decode(), "attributes": {"HttpMethod": "POST"}},
    "targetResponse": {"body": STREAM, "type": "java.lang.String"},
}
HAR = {
    "log": {
        "version": "1.2",
        "creator": {"name": "x", "version": "1"},
        "entries": [
            {
                "startedDateTime": "2024-05-10T00:00:00.123-07:00",
                "time": 321.5,
                "request": {
                    "method": "POST",
                    "url": "https://x/v1/chat/completions",
                    "headers": [{"name": "x-tenant", "value": "risk"}],
                    "postData": {"mimeType": "application/json", "text": CHAT},
                },
                "response": {
                    "status": 200,
                    "headers": [{"name": "Content-Type", "value": "text/event-stream"}],
                    "content": {"size": 1, "mimeType": "text/event-stream", "text": STREAM},
                },
                "timings": {"blocked": -1, "dns": -1, "connect": -1, "send": 1.5, "wait": 100, "receive": 220},
            }
        ],
    }
}
VLLM = {
    "model_id": "m",
    "input_lens": [100, 200, 5],
    "output_lens": [3, 2, 0],
    "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.05, 0.07], [0.1], []],
    "start_times": [10.5, 10.0, 11.0],
    "errors": ["", "", "SECRET traceback"],
    "generated_texts": ["SECRET", "SECRET", ""],
}
SHAREGPT = [
    {
        "id": "q1",
        "conversations": [
            {"from": "human", "value": "x" * 9},
            {"from": "gpt", "value": "y" * 4},
            {"from": "human", "value": "z"},
            {"from": "gpt", "value": ""},
        ],
    }
]
BAILIAN = (
    {
        "chat_id": 55,
        "parent_chat_id": -1,
        "timestamp": 0.5,
        "input_length": 32,
        "output_length": 3,
        "type": "text",
        "turn": 1,
        "hash_ids": [1, 2],
    },
    {
        "chat_id": 159,
        "parent_chat_id": 55,
        "timestamp": 61.114,
        "input_length": 40,
        "output_length": 4,
        "type": "text",
        "turn": 2,
        "hash_ids": [1, 2, 3],
    },
    {
        "chat_id": 200,
        "parent_chat_id": 159,
        "timestamp": 70,
        "input_length": 5,
        "output_length": 0,
        "type": "text",
        "turn": 3,
        "hash_ids": [9],
    },
)

# format → (text of a right file, what its first row says)
RIGHT = {
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.009930+00:00,2162,5\r\n",
        {"arrival_ns": 1_715_299_200_009_930_000, "input_tokens": 2162, "output_tokens": 5, "outcome": "ok"},
    ),
    "burstgpt": (
        csv(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,7,2.5,ChatGPT,472,18,490,Conversation log",
            "45,,,GPT-4,1087,0,1087,API log",
        ),
        {"arrival_ns": 5 * 10**9, "session_id": "7", "end_ns": 2_500_000_000, "model": "ChatGPT", "input_tokens": 472},
    ),
    "mooncake": (
        lines({"timestamp": 3052.5, "input_length": 513, "output_length": 1, "hash_ids": [0, 14]}),
        {"arrival_ns": 3_052_500_000, "input_tokens": 513, "block_size": 512, "block_hashes": [0, 14]},
    ),
    "bailian": (
        lines(*BAILIAN),
        {"session_id": "55", "turn": 0, "arrival_ns": 500_000_000, "block_size": 16, "block_hashes": [1, 2]},
    ),
    "kvcache": (
        json.dumps(CONVERSATION),
        {
            "session_id": "c",
            "turn": 0,
            "think_ns": None,
            "end_ns": 5_230_000_000,
            "block_hashes": [1, 2],
            "stream": False,
        },
    ),
    "vidur": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.052,3180,8\n",
        {"arrival_ns": 52_000_000, "input_tokens": 3180, "output_tokens": 8},
    ),
    "llmservingsim": (
        lines({"input_toks": 2358, "output_toks": 531, "arrival_time_ns": 46926808, "input_tok_ids": [1, 2]}),
        {"arrival_ns": 46_926_808, "input_tokens": 2358, "output_tokens": 531},
    ),
    "sharegpt": (
        json.dumps(SHAREGPT),
        {"session_id": "q1", "turn": 0, "input_tokens": 3, "output_tokens": 1, "tokens_source": "estimate"},
    ),
    "vllmbench": (
        json.dumps(VLLM),
        {"arrival_ns": 0, "input_tokens": 200, "first_token_ns": 200_000_000, "chunk_ns": [200_000_000, 300_000_000]},
    ),
    "aiperf": (
        lines(AIPERF),
        {
            "arrival_ns": 1759813207532900363,
            "session_id": "s1",
            "turn": 2,
            "first_token_ns": 255_886_568,
            "last_token_ns": 266_101_011,
            "headers_ns": 117_830_613,
            "end_ns": 305_864_241,
        },
    ),
    "otel": (
        lines(otlp(span(**GENAI), span("b2", gen_ai__operation__name="execute_tool"))),
        {
            "arrival_ns": 1753500000000000000,
            "end_ns": 2_500_000_000,
            "input_tokens": 1200,
            "max_tokens": 512,
            "session_id": "c1",
        },
    ),
    "litellm": (
        json.dumps([LITELLM]),
        {"tenant": "risk", "endpoint": "chat", "first_token_ns": 300_000_000, "end_ns": 2 * 10**9, "cached_tokens": 16},
    ),
    "accesslog": (
        lines(NGINX, ENVOY),
        {"arrival_ns": 1_715_299_201_000_000_000, "end_ns": 1_500_000_000, "headers_ns": 250_000_000, "tenant": "risk"},
    ),
    "gor": (
        MONKEYS.join(
            [
                f"1 abc 1568139746437296000\n{http_request()}",
                f"2 abc 1568139746537296000 350000000\n{http_response()}",
                "",
            ]
        ),
        {
            "arrival_ns": 1568139746437296000,
            "end_ns": 350_000_000,
            "tenant": "risk",
            "output_tokens": 3,
            "max_tokens": 64,
        },
    ),
    "har": (
        json.dumps(HAR),
        {"arrival_ns": 1_715_324_400_123_000_000, "headers_ns": 101_500_000, "end_ns": 321_500_000, "input_tokens": 9},
    ),
    "arex": (
        lines(AREX),
        {
            "arrival_ns": 1_715_299_200_123_000_000,
            "tenant": "svc",
            "model": "m",
            "stream": True,
            "output_tokens": 3,
            "tools": 2,
        },
    ),
    "csv": (
        "arrival_ns,tenant,input_tokens\n1715299200123000001,risk,5\n",
        {"arrival_ns": 1_715_299_200_123_000_001, "tenant": "risk", "input_tokens": 5},
    ),
    "jsonl": (
        lines({"arrival_ns": 1715299200123000001, "stream": True, "block_hashes": [4, 5]}),
        {"arrival_ns": 1_715_299_200_123_000_001, "stream": True, "block_hashes": [4, 5]},
    ),
}
BINARY = {"mitm", "servegen", "parquet"}  # their examples are recordings, folders and Parquet files, below


def put(tmp_path, text, name="in.dat"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_every_format_has_a_right_example():
    assert set(RIGHT) | BINARY == set(FORMATS)


@pytest.mark.parametrize("form", RIGHT)
def test_a_right_file_imports_and_is_told_by_its_content(tmp_path, form):
    text, wanted = RIGHT[form]
    path = put(tmp_path, text)
    row = table(form, path).to_pylist()[0]
    assert {name: row[name] for name in wanted} == wanted
    assert format_of(Source(path)) == form


@pytest.mark.parametrize("form", RIGHT)
def test_no_text_reaches_the_trace(tmp_path, form):
    trace = table(form, put(tmp_path, RIGHT[form][0]))
    assert "SECRET" not in str(trace.to_pylist())


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_nothing_folder_and_emptiness_are_named(tmp_path, form):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    for name, problem in (
        ("absent", "no such file"),
        ("folder", "folder|no ServeGen client"),
        ("empty", "is empty|no Serve"),
    ):
        with pytest.raises(BadFile, match=problem):
            import_file(form, tmp_path / name, tmp_path / "out.parquet", Options())
    assert not list(tmp_path.glob("*.parquet"))


OTHERS = [
    (form, other)
    for form in sorted(set(FORMATS) - {"csv", "jsonl", "parquet"})
    for other in ("azure", "mooncake", "har", "gor")
    if form != other
]


@pytest.mark.parametrize(("form", "other"), OTHERS)
def test_a_file_of_another_format_is_refused(tmp_path, form, other):
    path = put(tmp_path, RIGHT[other][0])
    with pytest.raises((BadFile, BadRow)) as caught:
        import_file(form, path, tmp_path / "out.parquet", Options())
    assert str(path) in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["in.dat"]


@pytest.mark.parametrize("form", sorted(set(RIGHT) - {"csv", "azure", "burstgpt", "vidur"}))
def test_a_file_cut_short_is_refused(tmp_path, form):
    text = RIGHT[form][0].rstrip()
    path = put(tmp_path, text[:40] if form == "gor" else text[:-1])
    with pytest.raises((BadFile, BadRow)) as caught:
        import_file(form, path, tmp_path / "out.parquet", Options())
    assert str(path) in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["in.dat"]


def changed(record, **values):
    return {**record, **values}


def without(record, name):
    return {key: value for key, value in record.items() if key != name}


MOONCAKE = {"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [0]}
LLMSIM = {"request_id": "b", "input_toks": 5, "output_toks": 1, "arrival_time": 1787267980.0827403}
META = AIPERF["metadata"]

WRONG = [
    ("burstgpt", "Timestamp,Model,Request tokens\n5,m,4\n", "column 'Response tokens' is missing"),
    ("burstgpt", "Timestamp,Model,Request tokens,Response tokens\n-5,m,4,4\n", "row 1, column Timestamp: is below 0"),
    ("burstgpt", "Timestamp,Model,Request tokens,Response tokens\n5,m,nan,4\n", "row 1, column Request tokens: 'nan'"),
    ("vidur", "arrived_at,num_prefill_tokens\n1,2\n", "column 'num_decode_tokens' is missing"),
    ("vidur", "arrived_at,num_prefill_tokens,num_decode_tokens\n,5,5\n", "row 1, column arrived_at: is empty"),
    (
        "vidur",
        "arrived_at,num_prefill_tokens,num_decode_tokens\nnan,5,5\n",
        "row 1, column arrived_at: 'nan' is not a num",
    ),
    ("mooncake", lines(MOONCAKE, without(MOONCAKE, "timestamp")), "row 2, column timestamp: is missing"),
    ("mooncake", lines(changed(MOONCAKE, timestamp=None)), "row 1, column timestamp: expected decimal, got null"),
    (
        "mooncake",
        lines(changed(MOONCAKE, input_length=-1)),
        "row 1, column input_length: expected a whole number, 0 or m",
    ),
    ("mooncake", lines(changed(MOONCAKE, output_length=1.5)), "row 1, column output_length: expected int, got float"),
    ("mooncake", lines(changed(MOONCAKE, timestamp=-1)), "row 1, column timestamp: -1 is below 0"),
    ("mooncake", '{"timestamp": NaN, "input_length": 5, "output_length": 1}\n', "row 1: is not a JSON object"),
    (
        "mooncake",
        lines(changed(MOONCAKE, input_length=20, hash_ids=[1, 2])),
        "row 1, column hash_ids: 2 blocks for 20 tok",
    ),
    ("mooncake", lines(changed(MOONCAKE, timestamp=10**30)), "row 1, column timestamp: 10000000000.* is no time"),
    ("bailian", lines(BAILIAN[0], BAILIAN[0]), "row 2, column chat_id: the same id as an earlier row"),
    ("bailian", lines(changed(BAILIAN[0], hash_ids=[1])), "row 1, column hash_ids: 1 blocks for 32 tokens"),
    ("bailian", lines(without(BAILIAN[0], "turn")), "row 1, column turn: is missing"),
    (
        "kvcache",
        json.dumps(changed(CONVERSATION, requests=[{"t": 1, "type": "n", "out": 4}])),
        "row 1, column in: is miss",
    ),
    (
        "kvcache",
        json.dumps(changed(CONVERSATION, requests=[{"type": "n", "in": 1, "out": 4}])),
        "row 1, column t: is miss",
    ),
    (
        "kvcache",
        json.dumps(changed(CONVERSATION, requests=[{"t": 1, "type": "n", "in": -1, "out": 4}])),
        "row 1, column in",
    ),
    (
        "kvcache",
        json.dumps(without(CONVERSATION, "block_size")),
        "not a kv-cache-tester conversation .block_size is miss",
    ),
    ("llmservingsim", lines(LLMSIM, LLMSIM), "row 2, column request_id: the same id"),
    ("llmservingsim", lines(without(LLMSIM, "arrival_time")), "row 1, column arrival_time: is missing"),
    (
        "llmservingsim",
        lines(changed(LLMSIM, queued_ts=5, first_token_ts=4)),
        "row 1, column first_token_ts: -1 is below 0",
    ),
    ("sharegpt", lines({"id": "x", "items": []}), "row 1, column conversations: is missing"),
    ("vllmbench", json.dumps(changed(VLLM, output_lens=[1])), "output_lens has 1 entries where input_lens has 3"),
    ("vllmbench", json.dumps(without(VLLM, "input_lens")), "row 1, column input_lens: is missing"),
    ("vllmbench", json.dumps(changed(VLLM, itls=[[-1], [], []])), "row 1, column ttfts: a gap of -1 s"),
    ("aiperf", lines(AIPERF, AIPERF), "row 2, column metadata.x_request_id: the same id"),
    (
        "aiperf",
        lines(changed(AIPERF, metadata=without(META, "request_start_ns"))),
        "column metadata.request_start_ns: is m",
    ),
    ("otel", lines(otlp(span(start="-5", **GENAI))), "row 1, column resourceSpans.*startTimeUnixNano"),
    ("otel", lines(otlp(span(end="5", **GENAI))), "row 1, column attributes: endTimeUnixNano is before"),
    ("otel", lines(otlp(span(**GENAI), span(**GENAI))), "row 2, column spanId: the same id"),
    ("litellm", lines(LITELLM, LITELLM), "row 2, column request_id: the same id"),
    ("litellm", lines(changed(LITELLM, startTime="")), "row 1, column startTime: is empty"),
    ("litellm", lines(changed(LITELLM, prompt_tokens=-3)), "row 1, column prompt_tokens: expected a whole number"),
    ("accesslog", lines(without(NGINX, "request_time")), "row 1, column request_time: is missing"),
    ("accesslog", lines({"status": 200}), "row 1, column time: is missing"),
    ("accesslog", lines(changed(NGINX, request_time="-1")), "row 1, column request_time: -1 is below 0"),
    ("gor", f"1 abc noon\nGET / HTTP/1.1\r\n\r\n{MONKEYS}", "row 1, column timestamp: 'noon' is not a time in ns"),
    ("gor", f"1 a 5\nGET / HTTP/1.1\r\n\r\n{MONKEYS}1 a 6\nGET / HTTP/1.1\r\n\r\n", "row 2, column id: the same id"),
    (
        "har",
        json.dumps({"log": {"entries": [{"request": {"url": "/"}, "response": {"status": 200}}]}}),
        "row 1, column startedDateTime: is missing",
    ),
    ("har", json.dumps({"log": {}}), "not a HAR file .log.entries is missing"),
    ("arex", lines(AREX, AREX), "row 2, column id: the same id"),
    ("arex", lines(without(AREX, "creationTime")), "row 1, column creationTime: is missing"),
    ("csv", "a,b\n1,2\n", "no column is mapped to the arrival: --map arrival=COLUMN .found: a, b"),
    ("csv", "arrival_ns,input_tokens\n1,-4\n", "row 1, column input_tokens: '-4' is below 0"),
    ("csv", "arrival_ns,stream\n1,maybe\n", "row 1, column stream: is neither true nor false"),
    ("csv", "arrival_ns,endpoint\n1,mail\n", "row 1, column endpoint: is not one of chat"),
    (
        "csv",
        "arrival_ns,request_id\n1,a\n2,b\n3,a\n",
        "row 3, column request_id: the same id as an earlier row",
    ),
    ("jsonl", lines({"arrival_ns": 1}, {"x": 2}), "row 2, column arrival_ns: is empty"),
]


@pytest.mark.parametrize(("form", "text", "problem"), WRONG)
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path, form, text, problem):
    path = put(tmp_path, text)
    with pytest.raises((BadFile, BadRow), match=problem) as caught:
        import_file(form, path, tmp_path / "out.parquet", Options())
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["in.dat"]


@pytest.mark.parametrize("fresh", [1, 3, 1000])
def test_an_id_that_came_before_is_known_however_long_ago(fresh, monkeypatch):
    monkeypatch.setattr(Seen, "_FRESH", fresh)
    seen = Seen()
    assert [seen.again(str(number % 70)) for number in range(200)] == [number >= 70 for number in range(200)]
    assert seen.repeated(["3", "300", None, "300", None, "301", "69"]) == [0, 3, 6]
    assert seen.repeated([]) == []
    assert seen.again("301")


@given(st.lists(st.lists(st.sampled_from("abcdefg") | st.none(), max_size=6)))
def test_ids_are_remembered_over_batches(parts):
    seen, before = Seen(), set()
    for part in parts:
        expected = []
        for index, name in enumerate(part):
            if name in before:
                expected.append(index)
            before |= {name} - {None}
        assert seen.repeated(part) == expected


def test_e03_a_row_whose_blocks_do_not_fit_its_length_is_an_error_or_skipped_and_counted(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(lines(MOONCAKE, changed(MOONCAKE, input_length=20, hash_ids=[1, 2])))
    with pytest.raises(BadRow, match="row 2, column hash_ids: 2 blocks for 20 tokens"):
        import_file("mooncake", path, tmp_path / "out.parquet", Options())
    intake = import_file("mooncake", path, tmp_path / "out.parquet", Options(bad_rows="skip"))
    assert (intake.rows, intake.bad) == (1, 1)
