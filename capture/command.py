"""The `capture` command: record what passes between clients and an LLM server; `capture status` tells how it goes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from traces.shell import DURATION, parsed

if TYPE_CHECKING:
    from capture.settings import Settings

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B?\s*", re.IGNORECASE)
_OURS = {"mode": "--upstream or --mode", "listen_host": "--listen", "listen_port": "--listen"}
_MODES = {"regular", "upstream", "reverse", "transparent", "socks5"}  # those whose connections come to one TCP port
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def size(text: str) -> int:
    """Bytes of a size such as ``500MB``. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it as 500MB or 20GB")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def address(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:9000`` or ``[::1]:9000``. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not an address: write it as 127.0.0.1:9000")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - `:9000` is the user's own word for all interfaces


def upstream(text: str) -> str:
    """Mitmproxy's reverse mode for a URL such as ``http://vllm:8000``. Raises ValueError."""
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError("a URL with a user's name or key in it: leave them out (clients send their own)")
    try:
        fits = parts.port != 0
    except ValueError:
        fits = False
    if parts.scheme not in {"http", "https"} or not parts.hostname or not fits:
        raise ValueError(f"{text!r} is not the URL of a server: write it as http://vllm:8000")
    if parts.path not in {"", "/"} or parts.query:
        raise ValueError(f"{text!r}: leave the path out (clients send it): {parts.scheme}://{parts.netloc}")
    return f"reverse:{parts.scheme}://{parts.netloc}"


def option(text: str) -> str:
    """One of mitmproxy's own options, ``name=value``. Raises ValueError."""
    if not re.fullmatch(r"[a-z0-9_]+=.*", text):
        raise ValueError(f"{text!r} is not name=value, such as ssl_insecure=true")
    name = text.partition("=")[0]
    if name in _OURS:
        raise ValueError(f"{name} is told by {_OURS[name]}")
    return text


@click.group(invoke_without_command=True)
@click.option("--upstream", "mode_upstream", type=parsed("URL", upstream), help="Server to record: http://vllm:8000.")
@click.option(
    "--listen",
    type=parsed("HOST:PORT", address),
    default="127.0.0.1:9000",
    show_default=True,
    help="Where clients come.",
)
@click.option("--out", type=click.Path(file_okay=False), help="Folder to record into.")
@click.option(
    "--mode", help="Instead of --upstream: a mode of mitmproxy, such as regular or upstream:http://proxy:3128."
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes that share the port.")
@click.option(
    "--tenant",
    default="header:x-tenant",
    show_default=True,
    help="What tells the tenant: header:NAME, key (a hash of the API key), path:REGEX, model; several with commas.",
)
@click.option("--tenants", type=click.Path(), default="", help="A tenants.toml; its match rules come first.")
@click.option("--session-header", default="x-session-id", show_default=True, help="Header that names a session.")
@click.option("--dialect", default="vllm", show_default=True, help="How priorities on the wire are read.")
@click.option(
    "--chunks",
    type=click.Choice(["all", "first", "none"]),
    default="all",
    show_default=True,
    help="Chunk times to keep.",
)
@click.option("--tokenizer", type=click.Path(), default="", help="Tokenizer file, for lengths no server tells.")
@click.option("--block-size", type=click.IntRange(1), default=256, show_default=True,
              help="Prefix block, in characters (tokens with --tokenizer).")  # fmt: skip
@click.option("--keep-salt", is_flag=True, help="Keep the salt of the hashes in the folder, for the next recording.")
@click.option("--part-rows", type=click.IntRange(1), default=50_000, show_default=True, help="Rows in a part at most.")
@click.option("--part-every", type=DURATION, default="1m", show_default=True, help="Close a part after this long.")
@click.option("--max-bytes", type=parsed("SIZE", size), default="0", help="Keep at most this much: 20GB.")
@click.option("--max-age", type=DURATION, default=None, help="Remove parts older than this: 24h.")
@click.option("--set", "sets", type=parsed("NAME=VALUE", option), multiple=True, help="Any option of mitmproxy itself.")
@click.pass_context
def capture(context: click.Context, /, **given: Any) -> None:
    """Record the LLM traffic that passes through: times and lengths, never a word of text.

    \b
    capture --upstream http://vllm:8000 --listen 127.0.0.1:9000 --out traces/staging
    capture status traces/staging
    replay traces/staging --target http://127.0.0.1:8100
    """  # noqa: D301 - click's own mark: keep these lines
    if context.invoked_subcommand is not None:
        return
    if not given["out"]:
        raise click.UsageError("Missing option '--out': name a folder, such as --out traces/staging")
    if given["mode_upstream"] and given["mode"]:
        raise click.UsageError("--upstream and --mode exclude each other: --upstream http://vllm:8000 is all it takes")
    if not given["mode_upstream"] and not given["mode"]:
        raise click.UsageError("name the server to record: --upstream http://vllm:8000 (or a --mode of mitmproxy)")
    settings = _settings(given)
    if given["mode"]:
        _check_mode(given["mode"])
    from capture import workers
    from capture.recorder import prepared

    try:
        settings = prepared(settings)
    except OSError as error:
        raise click.BadParameter(f"{given['out']}: {error.strerror}", param_hint="'--out'") from None
    mode = given["mode_upstream"] or given["mode"]
    plan = workers.Plan(settings=settings, mode=mode, sets=given["sets"], address=given["listen"])
    try:
        counts = workers.run(plan, given["workers"])
    except workers.CannotListen as error:
        raise click.BadParameter(str(error), param_hint="'--listen'") from None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--set'") from None
    lost = f", {counts.dropped:,} dropped" if counts.dropped else ", none dropped"
    click.echo(f"Recorded {counts.rows:,} row{'s' * (counts.rows != 1)}{lost}: {given['out']}")


def _settings(given: dict[str, Any]) -> Settings:
    """Checked settings. Raises click.BadParameter, TraceError."""
    from capture import rules
    from capture.settings import Settings

    try:
        rules.dialect_named(given["dialect"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--dialect'") from None
    try:
        rules.TenantRules(given["tenant"], (), rules.salted(b""))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--tenant'") from None
    if given["tokenizer"]:
        _check_tokenizer(given["tokenizer"])
    if given["tenants"]:
        from tenants.tenant import load

        load(given["tenants"])
    same = ("out", "tenant", "tenants", "session_header", "dialect", "chunks", "tokenizer", "block_size", "keep_salt",
            "part_rows", "max_bytes")  # fmt: skip
    return Settings(
        **{name: given[name] for name in same},
        part_s=given["part_every"] / 1e9,
        max_age_s=(given["max_age"] or 0) / 1e9,
    )


def _check_mode(mode: str) -> None:
    """Raises click.BadParameter."""
    from mitmproxy.proxy import mode_specs

    try:
        found = mode_specs.ProxyMode.parse(mode)
        if found.type_name not in _MODES or found.transport_protocol == "udp":
            raise ValueError("capture records what comes to a port of TCP")  # noqa: TRY301 - said like mitmproxy's own
        if found.custom_listen_port is not None:
            raise ValueError("the address to listen on is told by --listen")  # noqa: TRY301
    except ValueError as error:
        raise click.BadParameter(
            f"{mode}: {error}; such as regular or upstream:http://proxy:3128", param_hint="'--mode'"
        ) from None


def _check_tokenizer(path: str) -> None:
    """Raises click.BadParameter."""
    if not Path(path).is_file():
        raise click.BadParameter(f"{path}: no such file", param_hint="'--tokenizer'")
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(path)
    except Exception:  # noqa: BLE001 - it raises nothing narrower
        raise click.BadParameter(
            f"{path}: not a tokenizer file; a model's own is called tokenizer.json", param_hint="'--tokenizer'"
        ) from None


@capture.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, nothing else.")
def status(folder: Path, *, as_json: bool) -> None:
    """How the recorders that write to FOLDER are doing."""
    from capture.status import describe, read

    recorders, kept = read(folder)
    if as_json:
        json.dump({"recorders": recorders, **kept}, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    for line in describe(folder, recorders, kept):
        click.echo(line)
