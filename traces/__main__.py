"""`python -m traces` is the `traces` command."""

from traces.cli import main

main()
