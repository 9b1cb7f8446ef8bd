"""Make `sample.parquet`, the trace that `replay` plays when none is named.

    python traces/sample/make_sample.py AzureLLMInferenceTrace_conv.csv

Ten minutes of the Azure LLM inference trace 2023, conversation service (CC-BY-4.0, see LICENSE-DATA.md), thinned to
fit an engine of 8 slots, which Azure's own rate would drown, and a second tenant with long answers beside it:

- `risk`: the short questions of the first 600 s, at most 1,500 tokens in and 120 out, thinned by a seeded draw to 0.8
  requests/s. Arrivals and lengths are Azure's own, bursts included.
- `summary`: 148 requests, as Azure has no tenant that writes long answers. Arrivals are Poisson; input lengths are
  drawn from Azure's own prompts of 2,000 to 5,000 tokens in these 600 s; output lengths are lognormal with median
  1,400 and sigma 0.3, between 600 and 3,000 tokens. This tenant's arrivals and output lengths are the only invented
  figures.

With the embedded engine's defaults (llama3-8b-a100-80, 8 slots) its slots are 73 % busy (docs/sample.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from traces import parquet
from traces.importers.load import table as import_table
from traces.record import Metadata, table

SPAN_NS = 600 * 1_000_000_000
RISK_PER_S = 0.8
SUMMARIES = 148
SEED = 2023


def sample(conversations: pa.Table) -> pa.Table:
    """The sample trace from the imported Azure conversation trace."""
    arrival_ns = conversations.column("arrival_ns").to_numpy()
    arrival_ns = arrival_ns - arrival_ns[0]
    input_tokens = conversations.column("input_tokens").to_numpy()
    output_tokens = conversations.column("output_tokens").to_numpy()
    rng = np.random.default_rng(SEED)
    early = arrival_ns < SPAN_NS

    short = np.flatnonzero(early & (input_tokens <= 1500) & (output_tokens <= 120))
    risk = short[rng.random(len(short)) < RISK_PER_S * SPAN_NS / 1e9 / len(short)]

    gaps = rng.exponential(size=SUMMARIES)
    summary_ns = (np.cumsum(gaps) / gaps.sum() * SPAN_NS * 0.97).astype(np.int64)
    long_prompts = input_tokens[early & (input_tokens > 2000) & (input_tokens <= 5000)]
    summary_input = rng.choice(long_prompts, SUMMARIES)
    summary_output = np.clip(rng.lognormal(np.log(1400), 0.3, SUMMARIES), 600, 3000).astype(np.int32)

    arrivals = np.concatenate([arrival_ns[risk], summary_ns])
    order = np.argsort(arrivals, kind="stable")
    rows = len(order)
    step = (
        f"first 600 s; risk: input <= 1500 and output <= 120 thinned to {RISK_PER_S}/s; "
        f"summary: {SUMMARIES} Poisson arrivals, inputs from prompts of 2000 to 5000, "
        f"outputs lognormal(1400, 0.3); seed {SEED}"
    )
    return table(
        {
            "request_id": [f"s{number:04d}" for number in range(rows)],
            "tenant": np.array(["risk"] * len(risk) + ["summary"] * SUMMARIES)[order],
            "arrival_ns": arrivals[order],
            "endpoint": ["completions"] * rows,
            "stream": np.ones(rows, dtype=bool),
            "input_tokens": np.concatenate([input_tokens[risk], summary_input])[order],
            "output_tokens": np.concatenate([output_tokens[risk], summary_output])[order],
            "tokens_source": ["usage"] * rows,
        },
        Metadata(source="Azure LLM inference trace 2023 (conversation), CC-BY-4.0, changed", history=(step,)),
    )


def main() -> None:
    """Write the sample beside this file."""
    if len(sys.argv) != 2:
        sys.exit("usage: python traces/sample/make_sample.py AzureLLMInferenceTrace_conv.csv")
    rows = sample(import_table("azure", sys.argv[1]))
    parquet.write(rows, Path(__file__).with_name("sample.parquet"))


if __name__ == "__main__":
    main()
