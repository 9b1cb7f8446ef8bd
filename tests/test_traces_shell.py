"""The terminal's habits that all four commands share."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from traces.errors import BadRow
from traces.shell import DURATION, FACTOR, LazyGroup, parsed, run


def ended(command: click.Command, *words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """(exit code, stdout, stderr) of a command run as a program."""
    monkeypatch.setattr("sys.argv", ["x", *words])
    with pytest.raises(SystemExit) as left:
        run(command, "x")
    out, err = capsys.readouterr()
    return left.value.code, out, err


def failing(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            BadRow("t.parquet", 3, "input_tokens", "-7 is below 0"),
            2,
            "t.parquet, row 3, column input_tokens: -7 is below 0",
        ),
        (click.UsageError("--speed wants 2x"), 2, "x: --speed wants 2x (try: x --help)"),
        (click.ClickException("no"), 2, "x: no"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(error, code, says, monkeypatch, capsys):
    found, out, err = ended(failing(error), monkeypatch=monkeypatch, capsys=capsys)
    assert found == code
    assert out == ""
    assert says in err
    assert err.count("\n") <= 1
    assert "Traceback" not in err


def test_the_command_s_own_code_is_the_program_s(monkeypatch, capsys):
    @click.command()
    def command() -> int:
        return 3

    assert ended(command, monkeypatch=monkeypatch, capsys=capsys)[0] == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--speed", "fast"], "Invalid value for '--speed': 'fast' is not a factor: write it as 2x"),
        (["--speed", "0"], "Invalid value for '--speed': '0' must be above 0"),
        (["--for", "5"], "Invalid value for '--for': '5' is not a duration"),
        (["--sped", "2x"], "No such option"),
    ],
)
def test_a_wrong_value_names_its_option_and_shows_a_right_one(words, says, monkeypatch, capsys):
    @click.command()
    @click.option("--speed", type=FACTOR)
    @click.option("--for", "span", type=DURATION)
    def command(speed: float, span: int) -> None:
        raise AssertionError((speed, span))

    code, _, err = ended(command, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert says in err


def test_an_option_type_is_a_parsing_function():
    @click.command()
    @click.option("--n", type=parsed("n", lambda text: int(text) * 2))
    def command(n: int) -> None:
        click.echo(n)

    assert CliRunner().invoke(command, ["--n", "4"]).output == "8\n"


def test_a_group_lists_its_commands_without_importing_them():
    group = LazyGroup("x", lazy={"gone": ("no.such.module:thing", "is never imported")})
    assert "gone  is never imported" in CliRunner().invoke(group, ["--help"]).output


def test_a_group_imports_the_command_that_is_used():
    group = LazyGroup("x", lazy={"stats": ("traces.stats:stats", "statistics")})
    assert "Usage: x stats" in CliRunner().invoke(group, ["stats", "--help"]).output
