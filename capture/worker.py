"""`python -m capture.worker FD`: one of several recorders; its plan comes on standard input, connections over FD."""

from __future__ import annotations

import socket
import sys

import msgspec

from capture.voice import say
from capture.workers import Plan, work

if __name__ == "__main__":
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    try:
        work(socket.socket(fileno=int(sys.argv[1])), plan)
    except (ValueError, OSError) as error:
        say(str(error))
        sys.exit(2)
