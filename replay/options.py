"""Options that `replay`, `replay isolate`, `replay sweep` and `replay simulate` share, and what they make of a trace.

    @click.command()
    @offer_options                 TRACE and all that says what is offered: tenants, shape, turns, seed ...
    @send_options                  all that says where and how it is sent
    def command(offer: OfferOptions, send: SendOptions, ...):
        offered = make_offer(offer)

Parsing is cheap: nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from traces.reshape import ShapeOptions, shape_options
from traces.shell import DURATION, parsed
from traces.units import NS_PER_S, show_ns

if TYPE_CHECKING:
    from replay.plan import Plan
    from tenants.sla import Rule
    from tenants.tenant import Tenant
    from traces.draft import Report
    from traces.record import Metadata

Command = TypeVar("Command", bound=Callable[..., Any])

SAMPLE = "sample"


class OfferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered to the server."""

    trace: str = SAMPLE
    shape: ShapeOptions = ShapeOptions()
    tenant_mix: str | None = None
    tenants_file: str | None = None
    assign: str = "share"
    others: str | None = None
    sla: tuple[str, ...] = ()
    cap: tuple[str, ...] = ()
    seed: int = 0
    turns: str = "linked"
    warmup_ns: int = 0
    endpoint: str | None = None


class SendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it is sent."""

    target: str | None = None
    allow_host: tuple[str, ...] = ()
    dialect: str = "auto"
    model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    header: tuple[str, ...] = ()
    tokenizer: str | None = None
    keep_prefix_cache: bool = False
    workers: int | None = None
    transport: str = "auto"
    concurrency: int | None = None
    retry: int = 0
    catch_up: str = "burst"
    drain_ns: int = 120 * NS_PER_S
    timeout_connect_ns: int = 10 * NS_PER_S
    timeout_idle_ns: int = 300 * NS_PER_S
    timeout_ns: int = 3600 * NS_PER_S
    chunks: str = "all"
    max_lateness_ns: int | None = None
    ca_file: str | None = None
    insecure: bool = False
    probe: bool = True
    self_check: bool = True


class Offered(msgspec.Struct, frozen=True):
    """A plan with all that is known about where it comes from.

    Attributes:
        plan: what will be sent.
        tenants: those of the plan, most urgent first, with rules, caps, models and headers.
        rules: rules about all tenants together.
        metadata: of the trace.
        rows_before: rows of the trace as read; span_before_ns: its span.
        reports: what reshaping planned and achieved.
    """

    plan: Plan
    tenants: tuple[Tenant, ...]
    rules: tuple[Rule, ...]
    metadata: Metadata
    rows_before: int
    span_before_ns: int
    reports: list[Report]

    @property
    def caps(self) -> dict[str, int]:
        """Tenant → requests in flight at most."""
        return {tenant.name: tenant.cap for tenant in self.tenants if tenant.cap is not None}


_CAP = re.compile(r"\s*([^=\s]+)\s*=\s*(\d+)\s*")


def parse_cap(text: str) -> tuple[str, int]:
    """`summary=6`. Raises ValueError."""
    match = _CAP.fullmatch(text)
    if match is None or int(match[2]) < 1:
        raise ValueError(f"{text!r} is not a cap: write TENANT=REQUESTS, such as summary=6")
    return match[1], int(match[2])


def parse_mix(text: str) -> str:
    """A tenant mix, checked and passed on as text. Raises ValueError."""
    from tenants import mix

    mix.parse(text)
    return text


def parse_rule(text: str) -> str:
    """An SLA, checked and passed on as text. Raises ValueError."""
    from tenants import sla

    if sla.parse(text).is_bound:
        raise ValueError(f"{text!r} compares with another arm: give it to replay isolate")
    return text


def parse_cap_text(text: str) -> str:
    """A cap, checked and passed on as text. Raises ValueError."""
    parse_cap(text)
    return text


def parse_dialect(text: str) -> str:
    """`auto` or the name of a dialect. Raises ValueError."""
    from tenants import dialects

    return text if text == "auto" else dialects.named(text).name


def parse_header(text: str) -> str:
    """`NAME: VALUE`. Raises ValueError."""
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name.strip()) or not value.strip().isprintable():
        raise ValueError("not a header: write it as 'x-team: docs'")
    return f"{name.strip()}: {value.strip()}"


_OFFER = (
    click.option(
        "--tenant-mix", type=parsed("mix", parse_mix), help="NAME[=SHARE][@PRIORITY] joined by ':', most urgent first."
    ),
    click.option(
        "--tenants", "tenants_file", type=click.Path(), metavar="FILE", help="tenants.toml: priorities, SLAs, caps ..."
    ),
    click.option(
        "--assign",
        type=click.Choice(("share", "length")),
        default="share",
        help="How a mix tags an untagged trace: a seeded draw by share, or by answer length.",
    ),
    click.option("--others", type=click.Choice(("drop", "lowest")), help="Tenants of the trace that the mix omits."),
    click.option(
        "--sla", multiple=True, type=parsed("rule", parse_rule), help="'risk: ttft_p95 < 800ms'; may be repeated."
    ),
    click.option(
        "--cap",
        multiple=True,
        type=parsed("tenant=n", parse_cap_text),
        help="At most n requests of a tenant in flight: summary=6.",
    ),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Every draw follows from it."),
    click.option(
        "--turns",
        type=click.Choice(("linked", "timed")),
        default="linked",
        help="Later turns wait for their predecessor (linked), or keep their trace time.",
    ),
    click.option(
        "--warmup", "warmup_ns", type=DURATION, default=0, help="First stretch that is sent but not measured."
    ),
    click.option(
        "--endpoint",
        type=click.Choice(("completions", "chat", "responses", "messages", "generate")),
        help="Send everything there instead of where the trace says.",
    ),
)

_SEND = (
    click.option("--target", metavar="URL", help="The server.  [default: start the embedded engine]"),
    click.option(
        "--allow-host", multiple=True, metavar="HOST", help="A host other than this machine that may be sent to."
    ),
    click.option(
        "--dialect", type=parsed("dialect", parse_dialect), default="auto", help="How the server takes a priority."
    ),
    click.option(
        "--model", metavar="NAME", help="Ask for this model.  [default: the trace's, else the server's only one]"
    ),
    click.option(
        "--api-key-env", default="OPENAI_API_KEY", metavar="VAR", show_default=True, help="Variable that holds the key."
    ),
    click.option(
        "--header", multiple=True, type=parsed("header", parse_header), help="'NAME: VALUE', sent with every request."
    ),
    click.option("--tokenizer", type=click.Path(), metavar="FILE", help="tokenizer.json, to size text prompts."),
    click.option("--keep-prefix-cache", is_flag=True, help="The same prompts as in other runs with this seed."),
    click.option(
        "--workers", type=click.IntRange(1, 256), help="Sender processes.  [default: by load, one per core at most]"
    ),
    click.option(
        "--transport", type=click.Choice(("auto", "protocol", "aiohttp")), default="auto", help="Who carries the bytes."
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        metavar="N",
        help="Closed loop: N users, each waits for its answer. Lateness means nothing then.",
    ),
    click.option(
        "--retry", type=click.IntRange(0, 20), default=0, help="Further attempts after connect errors, 429 and 5xx."
    ),
    click.option(
        "--catch-up",
        type=click.Choice(("burst", "drop")),
        default="burst",
        help="Requests that this machine is late for: send at once, or leave unsent.",
    ),
    click.option(
        "--drain", "drain_ns", type=DURATION, default=120 * NS_PER_S, help="Wait after the last send.  [default: 2m]"
    ),
    click.option(
        "--timeout-connect", "timeout_connect_ns", type=DURATION, default=10 * NS_PER_S, help="[default: 10s]"
    ),
    click.option("--timeout-idle", "timeout_idle_ns", type=DURATION, default=300 * NS_PER_S, help="[default: 5m]"),
    click.option(
        "--timeout", "timeout_ns", type=DURATION, default=3600 * NS_PER_S, help="A request as a whole.  [default: 1h]"
    ),
    click.option("--chunks", type=click.Choice(("all", "first", "none")), default="all", help="Chunk times to keep."),
    click.option(
        "--max-lateness", "max_lateness_ns", type=DURATION, help="P99 lateness beyond which a run is invalid."
    ),
    click.option("--ca-file", type=click.Path(), help="Authorities for https."),
    click.option("--insecure", is_flag=True, help="Accept any certificate."),
    click.option("--probe/--no-probe", default=True, help="First ask by behaviour whether priority is honoured."),
    click.option("--self-check/--no-self-check", default=True, help="First measure what this machine can send."),
)


def offer_options(command: Command) -> Command:
    """Give a command the options of what is offered; it gets them as one argument `offer: OfferOptions`."""
    names = set(OfferOptions.__struct_fields__)

    @click.argument("trace", default=SAMPLE)
    @shape_options
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        return command(*args, offer=OfferOptions(**chosen), **kwargs)

    for option in reversed(_OFFER):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def send_options(command: Command) -> Command:
    """Give a command the options of sending; it gets them as one argument `send: SendOptions`."""
    names = SendOptions.__struct_fields__

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in names}
        return command(*args, send=SendOptions(**chosen), **kwargs)

    for option in reversed(_SEND):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def make_offer(options: OfferOptions) -> Offered:
    """Read, tag and reshape the trace, and plan it.

    Raises:
        TraceError: the trace, the mix or the tenants file do not fit.
        click.UsageError: a rule or a cap is about a tenant that is not there.
    """
    import pyarrow.compute as pc

    from replay import plan as planning
    from tenants import mix, sla, tenant
    from traces import reshape
    from traces.record import metadata_of

    described = tenant.load(options.tenants_file) if options.tenants_file else ()
    trace = _read(options, described)
    rows_before = trace.num_rows
    arrival = trace.column("arrival_ns")
    span_before_ns = int(pc.max(arrival).as_py() - pc.min(arrival).as_py()) if rows_before else 0
    chosen = mix.parse(options.tenant_mix) if options.tenant_mix else described
    if options.tenant_mix and described:
        chosen = tenant.merge(chosen, described)
    trace = mix.assign(trace, chosen, seed=options.seed, by=options.assign, others=options.others)
    trace, reports = reshape.apply(trace, options.shape, seed=options.seed)
    plan = planning.build(trace, turns=options.turns, endpoint=options.endpoint, warmup_ns=options.warmup_ns)
    if plan.rows and planning.counts(plan)["warmup"] == plan.rows:
        raise click.UsageError(
            f"--warmup {span_text(options.warmup_ns)} leaves nothing to measure: "
            f"the plan lasts {span_text(plan.span_ns)}"
        )
    rules = tuple(sla.parse(text) for text in options.sla)
    tenants = _tenants(plan, chosen)
    try:
        tenants = tenant.with_rules(tenants, rules)
    except ValueError as error:
        raise click.UsageError(f"--sla: {error}") from error
    return Offered(
        plan,
        _capped(tenants, options.cap),
        tuple(rule for rule in rules if rule.tenant == sla.ALL),
        metadata_of(trace),
        rows_before,
        span_before_ns,
        reports,
    )


def _read(options: OfferOptions, described: tuple[Tenant, ...]) -> Any:
    """The trace, or the tenants' own traces side by side."""
    from replay.plan import READ_COLUMNS
    from tenants import mix
    from traces import assemble, parquet
    from traces.record import metadata_of

    own = [tenant for tenant in described if tenant.trace]
    if not own or options.trace != SAMPLE:
        return parquet.read(sample_path() if options.trace == SAMPLE else options.trace, READ_COLUMNS)
    base = Path(options.tenants_file or ".").parent
    whole = None
    for tenant in own:
        part = mix.assign(parquet.read(base / str(tenant.trace), READ_COLUMNS), [tenant])
        whole = part if whole is None else assemble.merge(whole, part, metadata_of(whole), metadata_of(part))[0]
    return whole


def sample_path() -> Path:
    """The sample trace that ships with the package."""
    import traces

    return Path(traces.__file__).parent / "sample" / "sample.parquet"


def _tenants(plan: Plan, chosen: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
    """The tenants of the plan, most urgent first, with what the mix or the file says of them."""
    from replay.plan import NONE
    from tenants.tenant import Tenant

    known = {tenant.name: tenant for tenant in chosen}
    found = []
    for index, name in enumerate(plan.tenants):
        ranks = plan.rank[plan.tenant == index]
        rank = int(ranks.min()) if len(ranks) and ranks.min() != NONE else None
        found.append(known.get(name) or Tenant(name=name, priority=rank))
    return tuple(sorted(found, key=lambda tenant: (tenant.priority is None, tenant.priority or 0)))


def _capped(tenants: tuple[Tenant, ...], caps: tuple[str, ...]) -> tuple[Tenant, ...]:
    asked = dict(parse_cap(text) for text in caps)
    names = [tenant.name for tenant in tenants]
    for name, cap in asked.items():
        if name not in names:
            raise click.UsageError(f"--cap {name}={cap}: no such tenant; there are {', '.join(names)}")
    return tuple(
        msgspec.structs.replace(tenant, cap=asked[tenant.name]) if tenant.name in asked else tenant
        for tenant in tenants
    )


def span_text(span_ns: int) -> str:
    """A span for people: seconds with one decimal, less than one as it is."""
    return f"{span_ns / NS_PER_S:,.1f} s" if span_ns >= NS_PER_S else show_ns(span_ns)
