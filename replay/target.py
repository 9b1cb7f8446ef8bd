"""Where to send, and whether we may: decided from the text alone, before any socket, name look-up or heavy import."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

_LOCAL_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost"}


class Refused(Exception):
    """The run cannot begin; the text is one clear line with the next step."""


class Target(NamedTuple):
    """Where to send: `base_path` is what stands before `/v1`."""

    scheme: str
    host: str
    port: int
    base_path: str

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_target(text: str) -> Target:
    """`http://host:port/base`; a trailing `/v1` is ours. Raises ValueError with an example."""
    example = "write it as http://127.0.0.1:8000"
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} has no valid port: {example}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{text!r} is not an http or https URL: {example}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{text!r} must be host, port and path alone (keys come from the environment): {example}")
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), base)


def allowed(target: Target, hosts: Sequence[str]) -> None:
    """Refuse a host that is neither this machine nor named by the user. No socket, no look-up.

    Raises:
        Refused
    """
    host = target.host.lower()
    if host in {name.lower() for name in hosts} or host in _LOCAL_NAMES:
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    raise Refused(
        f"--target {target.origin} is not this machine: name it with --allow-host {target.host} to send there"
    )
