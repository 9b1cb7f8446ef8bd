"""`python -m tenants` is the `tenants` command."""

from tenants.cli import main

main()
