"""The same as `tenants.terminal`, which `tenants judge` needs too."""

from tenants.terminal import print_comparison, print_result, stdout_console

__all__ = ["print_comparison", "print_result", "stdout_console"]
