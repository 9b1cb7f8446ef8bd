"""`python -m capture` is the `capture` command."""

from capture.cli import main

main()
