"""What the four commands share at the terminal: a lazy group, option types, and errors as one line with exit code 2.

Each command is a thin shell: it parses into domain types, calls one function and prints. Heavy imports wait until a
subcommand is really run, so that `--help` and a typing mistake are answered at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click

from traces import units
from traces.errors import TraceError

EXIT_PASS, EXIT_FAIL, EXIT_USAGE, EXIT_UNJUDGED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class LazyGroup(click.Group):
    """A group whose subcommands live at `module:attribute` and are imported when used.

    Args:
        lazy: subcommand name → ("module:attribute", one-line help). The help line is shown without importing anything.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order they were declared."""
        del ctx
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command when it is one of the lazy ones."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self.lazy[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands by their help lines, without importing them."""
        rows = [(name, command.get_short_help_str(70)) for name, command in self.commands.items()]
        rows += [(name, line) for name, (_, line) in self.lazy.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        del ctx


class _Parsed(click.ParamType):  # type: ignore[type-arg]
    """An option type made of a parsing function that raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse text; pass on what is parsed already (defaults)."""
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = _Parsed("duration", units.duration_ns)
FACTOR = _Parsed("factor", units.factor)


def parsed(name: str, parse: Callable[[str], Any]) -> click.ParamType:  # type: ignore[type-arg]
    """An option type from a function that raises ValueError with an example in its text."""
    return _Parsed(name, parse)


class _NoPandas:
    """An import hook that finds no pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Refuse pandas, leave the rest to the others."""
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used here", name=name)


def without_pandas() -> None:
    """Let pyarrow find no pandas: it would import it with its first array, half a second and 60 MB for nothing."""
    sys.meta_path.insert(0, _NoPandas)


def run(command: click.Command, name: str) -> NoReturn:
    """Run a command as a program: user mistakes become one line on stderr and exit 2, Ctrl-C exits 130."""
    without_pandas()
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else name
        click.echo(f"{name}: {error.format_message()} (try: {where} --help)", err=True)
        sys.exit(EXIT_USAGE)
    except (TraceError, click.ClickException) as error:
        click.echo(f"{name}: {error.format_message() if isinstance(error, click.ClickException) else error}", err=True)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_PASS)
    sys.exit(code if isinstance(code, int) else EXIT_PASS)
