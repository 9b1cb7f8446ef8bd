"""The same as `tenants.sentence`, which `tenants judge` needs too."""

from tenants.sentence import IMPLICIT

__all__ = ["IMPLICIT"]
