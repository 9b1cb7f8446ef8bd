"""The same as `tenants.failures`, which `tenants judge` needs too."""

from tenants.failures import Cause, causes

__all__ = ["Cause", "causes"]
