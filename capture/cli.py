"""`capture`: start mitmproxy with the recorder. A thin shell."""

from __future__ import annotations


def main() -> None:
    """Run as a program."""
    from capture.command import capture
    from traces.shell import run

    run(capture, "capture")
