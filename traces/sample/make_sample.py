"""Make `sample.parquet`, the trace that `replay` plays when none is named.

    python traces/sample/make_sample.py AzureLLMInferenceTrace_conv.csv

Ten minutes of the Azure LLM inference trace 2023, conversation service (CC-BY-4.0, see LICENSE-DATA.md), made to fit one
engine with 8 slots, which Azure's own rate would drown:

- `risk`: requests with at most 1,500 input and 160 output tokens, their own arrivals and lengths, thinned by a seeded
  draw to `RISK_SHARE` of them. Short questions with short answers, in the bursts in which they came.
- `summary`: requests with more than 2,000 input tokens, their own arrivals and input lengths, thinned to
  `SUMMARY_SHARE`. Azure's long prompts get short answers; a summary is long, so output lengths are drawn anew:
  lognormal with median 1,400 and sigma 0.35, between 600 and 3,000 tokens. They are the only invented figures.

With the default embedded engine (llama3-8b-a100-80, 8 slots) this offers a load of about 0.75: see docs/sample.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from traces import parquet
from traces.importers.load import table as import_table
from traces.record import Metadata, metadata_of, table

SPAN_NS = 600 * 1_000_000_000
RISK_SHARE = 0.80
SUMMARY_SHARE = 0.42
SEED = 2023


def sample(conversations: pa.Table) -> pa.Table:
    """The sample trace from the imported Azure conversation trace."""
    arrival_ns = conversations.column("arrival_ns").to_numpy()
    arrival_ns = arrival_ns - arrival_ns[0]
    input_tokens = conversations.column("input_tokens").to_numpy()
    output_tokens = conversations.column("output_tokens").to_numpy().copy()
    rng = np.random.default_rng(SEED)
    draw = rng.random(len(arrival_ns))
    early = arrival_ns < SPAN_NS
    risk = early & (input_tokens <= 1500) & (output_tokens <= 160) & (draw < RISK_SHARE)
    summary = early & (input_tokens > 2000) & (draw < SUMMARY_SHARE)
    drawn = np.clip(rng.lognormal(np.log(1400), 0.35, len(arrival_ns)), 600, 3000).astype(np.int32)
    output_tokens[summary] = drawn[summary]
    kept = risk | summary
    steps = (
        f"first 600 s; risk: input <= 1500, output <= 160, share {RISK_SHARE}; "
        f"summary: input > 2000, share {SUMMARY_SHARE}, output drawn lognormal(1400, 0.35); seed {SEED}"
    )
    metadata: Metadata = metadata_of(conversations).done(steps)
    return table(
        {
            "request_id": [f"s{number:04d}" for number in range(int(kept.sum()))],
            "tenant": np.where(risk, "risk", "summary")[kept],
            "arrival_ns": arrival_ns[kept],
            "endpoint": ["completions"] * int(kept.sum()),
            "stream": np.ones(int(kept.sum()), dtype=bool),
            "input_tokens": input_tokens[kept],
            "output_tokens": output_tokens[kept],
            "tokens_source": ["usage"] * int(kept.sum()),
        },
        Metadata(epoch="relative", source=metadata.source, history=metadata.history),
    )


def main() -> None:
    """Write the sample beside this file."""
    if len(sys.argv) != 2:
        sys.exit("usage: python traces/sample/make_sample.py AzureLLMInferenceTrace_conv.csv")
    rows = sample(import_table("azure", sys.argv[1]))
    parquet.write(rows, Path(__file__).with_name("sample.parquet"))


if __name__ == "__main__":
    main()
