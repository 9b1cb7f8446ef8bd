"""Which formats can be imported: name, module, what it is, and the options it takes. The one list of them."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """A format by its importer's module, whose `read(source, intake)` yields batches of records."""

    module: str
    what: str
    takes: tuple[str, ...] = ()  # options of its own


def _here(name: str) -> str:
    return f"traces.importers.{name}"


FORMATS: dict[str, Format] = {
    "azure": Format(_here("azure"), "Azure LLM inference traces 2023 and 2024 (CSV)"),
    "burstgpt": Format(_here("burstgpt"), "BurstGPT, both column layouts (CSV)"),
    "mooncake": Format(_here("mooncake"), "Mooncake FAST'25 traces (JSON lines)", ("block-size",)),
    "bailian": Format(_here("bailian"), "Qwen-Bailian traces (JSON lines)"),
    "kvcache": Format(_here("kvcache"), "kv-cache-tester conversations (JSON file or folder)", ("subagents",)),
    "servegen": Format(_here("servegen"), "ServeGen clients (folder): draws a trace", ("seed", "start", "duration")),
    "vidur": Format(_here("vidur"), "Vidur processed traces (CSV), lengths too"),
    "llmservingsim": Format(_here("llmservingsim"), "LLMServingSim workloads and vLLM runs (JSON lines)"),
    "sharegpt": Format(_here("sharegpt"), "ShareGPT-style conversations (JSON): lengths only"),
    "vllmbench": Format(_here("vllmbench"), "result of vllm bench serve --save-detailed (JSON)"),
    "aiperf": Format(_here("aiperf"), "AIPerf profile_export.jsonl"),
    "otel": Format(_here("otel"), "OpenTelemetry GenAI spans (OTLP JSON)"),
    "litellm": Format(_here("litellm"), "LiteLLM spend logs (JSON)"),
    "accesslog": Format(_here("accesslog"), "nginx and Envoy access logs in JSON"),
    "gor": Format(_here("gor"), "GoReplay recordings (.gor)"),
    "mitm": Format(_here("mitm"), "mitmproxy flow dumps"),
    "har": Format(_here("har"), "HTTP archives (.har)"),
    "arex": Format(_here("arex"), "AREX recordings (JSON)"),
    "csv": Format(_here("csvmap"), "any CSV with a header, by --map", ("map",)),
    "jsonl": Format(_here("jsonlmap"), "any JSON lines, by --map", ("map",)),
    "parquet": Format(_here("parquetmap"), "any Parquet file, by --map", ("map",)),
}
