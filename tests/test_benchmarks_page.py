"""What benchmarks write into documents: between their own marks, by themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import capture_overhead
import page


def test_tables_are_put_between_the_marks_and_nowhere_else(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- sender: begin -->\nold\n<!-- sender: end -->\nafter\n")
    page.put(file, page.table(["a", "b"], [["1", "2"]]), "sender")
    assert file.read_text() == (
        "before\n<!-- sender: begin -->\n| a | b |\n| --- | --- |\n| 1 | 2 |\n<!-- sender: end -->\nafter\n"
    )


def test_a_document_without_the_marks_stays_as_it_is_and_that_is_said(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("<!-- ports: begin --><!-- ports: end -->")
    with pytest.raises(SystemExit, match="has no <!-- sender: begin -->"):
        page.put(file, "text", "sender")
    assert file.read_text() == "<!-- ports: begin --><!-- ports: end -->"


@pytest.mark.parametrize("mark", ["overhead", "memory", "workers", "ports", "chain"])
def test_the_page_on_recording_has_a_place_for_each_of_its_benchmarks(mark):
    text = (ROOT / "docs" / "capture.md").read_text()
    assert text.count(f"<!-- {mark}: begin -->") == text.count(f"<!-- {mark}: end -->") == 1


def test_a_benchmark_of_recording_runs_and_writes_itself_into_the_document(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("a\n<!-- memory: begin -->\n<!-- memory: end -->\nb\n")
    command = [sys.executable, str(ROOT / "benchmarks/capture_overhead.py"), "--memory", "16", "--write", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    text = file.read_text()
    assert "| requests so far | resident memory, MB |" in text
    assert "| 16 | " in text
    assert "mitmproxy" in text


def test_a_ratio_is_the_geometric_mean_of_pairs_with_its_interval():
    assert capture_overhead.ratio([2.0, 8.0], [1.0, 2.0]).startswith("× 2.83 [")
    assert capture_overhead.ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == "× 2.00 [2.00, 2.00] (n = 3)"
    assert capture_overhead.ratio([3.0], [2.0]) == "× 1.50 (n = 1)"
