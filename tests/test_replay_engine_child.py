"""The engine as a child: started and ended with the block, never outliving its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from replay.engine.child import EngineFailed, running

ROOT = Path(__file__).resolve().parent.parent


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_it_answers_inside_the_block_and_is_gone_after_it():
    with running("--policy", "priority", "--max-num-seqs", "8") as url:
        assert answers(url)
    assert not answers(url)


def test_it_is_gone_after_an_error_in_the_block():
    seen: list[str] = []

    def work() -> None:
        with running() as url:
            seen.append(url)
            assert answers(url)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert not answers(seen[0])


def test_an_engine_that_cannot_start_says_why_in_its_own_words():
    with pytest.raises(EngineFailed, match="unknown profile 'gpt9'"), running("--profile", "gpt9"):
        pass


def test_it_dies_with_a_parent_that_was_killed():
    script = (
        "import time\n"
        "from replay.engine.child import running\n"
        "with running() as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    assert answers(url)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    end = time.monotonic() + 5
    while answers(url):
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.05)
