"""The same as `tenants.summary`, which `tenants judge` needs too."""

from tenants.summary import (
    Lateness,
    Percentiles,
    Summary,
    TenantSummary,
    exit_code,
    from_json,
    percentiles,
    summarise,
    to_json,
)

__all__ = [
    "Lateness",
    "Percentiles",
    "Summary",
    "TenantSummary",
    "exit_code",
    "from_json",
    "percentiles",
    "summarise",
    "to_json",
]
