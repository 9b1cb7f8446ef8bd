"""What a recorder is told: one frozen record, made from the command line or from mitmproxy's options."""

from __future__ import annotations

from pathlib import Path

import msgspec

CHUNKS = ("all", "first", "none")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to record.

    Attributes:
        out: folder of parts.
        chunks: which chunk times to keep.
        tenant: how a tenant is told: "header:NAME", "key" (salted hash of the API key), "path:REGEX" (its first group),
            "model" or "none"; several are tried in order, separated by commas.
        tenants: path of a `tenants.toml`, whose `match` rules come first.
        session_header: header that names a session; "" = told from shared message prefixes only.
        dialect: how priorities on the wire are read (a row of `tenants.dialects`).
        tokenizer: path of a tokenizer file, for lengths that the server does not tell and for block hashes.
        block_size: prefix block, in characters (in tokens with a tokenizer).
        salt: for hashes; made anew when empty.
        keep_salt: keep the salt in the folder, so that the next recording there has the same hashes.
        part_rows, part_s: a part is closed at so many rows or after so many seconds.
        max_bytes, max_age_s: bounds on what is kept in the folder; 0 = none.
        body_limit: request bodies up to so many bytes are read; longer ones pass through and are only counted.
        name: of this recorder among those that write to the folder.
        sole: whether this recorder sees all requests; one worker of several does not, and cannot count turns.
    """

    out: str
    chunks: str = "all"
    tenant: str = "header:x-tenant"
    tenants: str = ""
    session_header: str = "x-session-id"
    dialect: str = "vllm"
    tokenizer: str = ""
    block_size: int = 256
    salt: bytes = b""
    keep_salt: bool = False
    part_rows: int = 50_000
    part_s: float = 60.0
    max_bytes: int = 0
    max_age_s: float = 0.0
    body_limit: int = 32 << 20
    name: str = ""
    sole: bool = True

    @property
    def folder(self) -> Path:
        """`out` as a path."""
        return Path(self.out)
