"""Which formats can be imported: name, module, what it is, and the options it takes. The one list of them."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """A format by its importer's module, whose `read(source, intake)` yields batches of records."""

    module: str
    what: str
    takes: tuple[str, ...] = ()  # options of its own: "map", "block-size", "seed", "duration"


FORMATS: dict[str, Format] = {
    "azure": Format("traces.importers.azure", "Azure LLM inference traces 2023 and 2024 (CSV)"),
    "burstgpt": Format("traces.importers.burstgpt", "BurstGPT, both column layouts (CSV)"),
    "mooncake": Format("traces.importers.mooncake", "Mooncake FAST'25 traces (JSON lines)", ("block-size",)),
    "csv": Format("traces.importers.csvmap", "any CSV with a header, by --map", ("map",)),
}
