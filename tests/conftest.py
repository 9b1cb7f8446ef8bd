"""What all tests share: where the reference data is, and a skip that is counted when it is absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# A first example may wait for an import or a busy machine: time is what `pytest-timeout` watches.
hypothesis.settings.register_profile("convoy", deadline=None)
hypothesis.settings.load_profile("convoy")

ROOT = Path(__file__).resolve().parent.parent


def data_root() -> Path:
    """The reference data folder: `CONVOY_DATA`, else `shared` beside the project."""
    return Path(os.environ.get("CONVOY_DATA", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def data() -> Callable[..., Path]:
    """`data("traces", "traces")` is a path in the reference data; the test is skipped when there is none."""

    def find(*parts: str) -> Path:
        path = data_root().joinpath(*parts)
        if not path.exists():
            pytest.skip(f"reference data absent: {'/'.join(parts)} (set CONVOY_DATA)")
        return path

    return find


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the reference data when there is none at all."""
    if data_root().is_dir():
        return
    skip = pytest.mark.skip(reason="reference data absent (set CONVOY_DATA)")
    for item in items:
        if "data" in item.keywords:
            item.add_marker(skip)
