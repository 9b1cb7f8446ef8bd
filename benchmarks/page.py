"""What a benchmark says, where it stands in the documents: between two marks that bear its name, and nowhere else.

<!-- NAME: begin -->
<!-- NAME: end -->
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from importlib import metadata
from pathlib import Path


def option(parser: argparse.ArgumentParser) -> None:
    """`--write FILE`."""
    parser.add_argument("--write", type=Path, metavar="FILE", help="put what is found between the marks of this file")


def say(text: str, file: Path | None, mark: str) -> None:
    """Print a result, and put it where it belongs."""
    print(text)
    if file:
        put(file, text, mark)


def put(file: Path, text: str, mark: str) -> None:
    """Replace what stands between the marks. Ends the program where there are none."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = file.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{file} has no {begin} ... {end}")
    file.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(*more: str) -> str:
    """Where and with what the figures were taken; versions of `more` packages, too."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    names = ("uvloop", "httptools", "aiohttp", "pyarrow", *more)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({model}), Linux {platform.release()}, "
        f"Python {platform.python_version()}, {versions}; load of the machine at the end: {load:.1f}."
    )
