"""The house: four packages with these names, imports that run one way, and no file that mitmproxy would trip over."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("capture", "replay", "tenants", "traces")

MAY_IMPORT = {
    "traces": {"traces"},
    "tenants": {"tenants", "traces"},
    "capture": {"capture", "tenants", "traces"},
    "replay": {"replay", "tenants", "traces"},
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever the statement stands, and modules named in lazy command tables."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    for path in sources(package):
        ours = {name.split(".")[0] for name in imported(path)} & set(PACKAGES)
        assert ours <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {sorted(ours - MAY_IMPORT[package])}"


def test_the_engine_imports_nothing_of_the_sender():
    for path in sources("replay/engine"):
        wrong = {
            name
            for name in imported(path)
            if name.split(".")[0] == "replay" and not name.startswith("replay.engine") and name != "replay"
        }
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_nobody_imports_a_cli():
    for package in PACKAGES:
        for path in sources(package):
            if path.name not in {"__main__.py", "cli.py"}:
                assert not [name for name in imported(path) if re.search(r"\.cli(\.|$)", name)], path


def test_no_file_in_capture_bears_a_standard_library_name():
    """`mitmdump -s capture/addon.py` leaves capture/ first on sys.path, so json.py there would shadow the real one."""
    taken = {path.stem for path in sources("capture")} & (set(sys.stdlib_module_names) - {"__init__", "__main__"})
    assert not taken


def test_no_file_is_called_utils_or_the_like():
    bad = {"utils", "util", "common", "base", "helpers", "misc", "manager", "factory", "registry"}
    found = [path for package in PACKAGES for path in sources(package) if path.stem in bad]
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_imported_is_ours_and_not_one_from_an_index(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    marker = Path(spec.origin).read_text()
    assert marker == (ROOT / package / "__init__.py").read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_package_is_ours_seen_from_another_folder(package, tmp_path):
    """In an isolated interpreter, from elsewhere: a foreign `traces` in site-packages would be found here."""
    code = f"import importlib.util as u; s = u.find_spec({package!r}); print(s.origin if s else '')"
    run = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    origin = run.stdout.strip()
    if not origin:
        pytest.skip("not installed in this environment")
    assert Path(origin).read_text() == (ROOT / package / "__init__.py").read_text()


def test_every_package_says_that_it_is_typed():
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_the_project_file_names_four_commands_and_says_private():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {name: f"{name}.cli:main" for name in PACKAGES}
    assert any(line.startswith("Private ::") for line in project["classifiers"])


def test_every_dependency_earns_its_place_in_the_docs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = (ROOT / "docs" / "dependencies.md").read_text().lower()
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    for line in [*project["dependencies"], *extras]:
        name = re.split(r"[^A-Za-z0-9._-]", line)[0].lower()
        if name != "convoy-replay":
            assert f"`{name}`" in told, f"{name} has no line in docs/dependencies.md"


def test_lazy_commands_exist(capsys):
    """Every subcommand that a help page lists can be imported and has help of its own."""
    import click

    import replay.cli
    import tenants.cli
    import traces.cli

    tables = [replay.cli._SUBCOMMANDS, tenants.cli.tenants.lazy, traces.cli.traces.lazy]
    for table in tables:
        for name, (where, line) in table.items():
            module, attribute = where.split(":")
            command = getattr(importlib.import_module(module), attribute)
            assert isinstance(command, click.Command), name
            assert command.help, f"{name} has no help"
            assert line
            assert len(line) < 90


@pytest.mark.parametrize("package", PACKAGES)
def test_help_is_answered_without_heavy_imports(package):
    """`--help` is read by people who wait: nothing that takes long to import may be loaded for it."""
    code = (
        "import sys; sys.argv=['x','--help']\n"
        f"from {package}.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "heavy = {'numpy','scipy','pyarrow','plotly','mitmproxy','aiohttp','tokenizers','pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Usage" in run.stdout
