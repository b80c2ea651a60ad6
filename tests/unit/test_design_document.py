"""Holds the tables of docs/design.md against the code.

Each table is found by its header row, anywhere in the document. Names are written `in backquotes`; text outside of
backquotes is for people and is not checked. The tables:

| packages | … |          one row per layer of [tool.importlinter], same order (each imports only from rows below it);
                          the last row is `exhaustive_ignores`
| process | … |           the names that long-lived processes give themselves: `stoker-…`
| seam | … | implementations | registry |
                          `package.Protocol`; the keys of the registry. A seam without a registry leaves the last cell
                          empty and names its implementing classes as `package.module.Class`
| purpose | verbs |       every verb of the command line once, in any grouping
| variable | … |          every STOKER_* variable that src mentions
| file | function | … |   the path of a job: a file under src/stoker and a function in it; at most 35 in 25 files
"""

import ast
import importlib
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click
import pytest

from stoker.cli.app import stoker as command_line
from tests.support.scripts import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "design.md"
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
PROCESS = re.compile(r"stoker-[a-z]+")
VARIABLE = re.compile(r"\bSTOKER_[A-Z]+(?:_[A-Z]+)*\b")


def table(*header: str) -> list[list[str]]:
    """The cells of the one table whose header begins and ends with these words; `…` stands for any columns."""
    found = []
    lines = DOCUMENT.read_text().splitlines()
    for number, line in enumerate(lines):
        if matches(cells(line), header) and set(lines[number + 1]) <= set("|-: "):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            found.append(rows)
    wanted = f"| {' | '.join(header)} |"
    assert len(found) == 1, f"docs/design.md has {len(found)} tables with the header {wanted}, and needs one"
    return found[0]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def matches(found: list[str], header: tuple[str, ...]) -> bool:
    first, last = header[: header.index("…")], header[header.index("…") + 1 :]
    return (
        len(found) > len(first) + len(last) - 1
        and tuple(found[: len(first)]) == first
        and tuple(found[len(found) - len(last) :]) == last
    )


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def column(rows: list[list[str]], number: int) -> list[str]:
    """All names of a column, each of which may stand there once."""
    found = [name for row in rows for name in names(row[number])]
    assert sorted(found) == sorted(set(found)), "a name stands in the table twice"
    return found


def test_packages_are_those_of_the_import_contract_in_its_order() -> None:
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(re.split(r"\s*[|:]\s*", layer)) for layer in contract["layers"]]
    documented = [set(names(row[0])) for row in table("packages", "…")]
    expected = [*layers, set(contract["exhaustive_ignores"])]
    assert documented == expected, "docs/design.md: its table of packages is not the layers in pyproject.toml"


def test_processes_are_those_that_the_code_names() -> None:
    in_code = {text for path in SOURCES for text in literals(ast.parse(path.read_text())) if PROCESS.fullmatch(text)}
    cgroups = {"stoker-worker"}  # the one that workers of a systemd unit are in
    assert set(column(table("process", "…"), 0)) == in_code - cgroups


@pytest.mark.parametrize(
    "row", table("seam", "…", "implementations", "registry"), ids=lambda row: str(row[0]).strip("`")
)
def test_seam_has_the_documented_implementations(row: list[str]) -> None:
    (seam,) = names(row[0])
    package, _, protocol = seam.rpartition(".")
    assert protocol in protocols(f"stoker.{package}"), f"no module of stoker.{package} defines the protocol {protocol}"
    documented, registry = names(row[-2]), names(row[-1])
    if registry:
        assert set(documented) == set(resolve(registry[0]))
    else:
        for name in documented:
            assert isinstance(resolve(name), type), f"{name} is no class"


def test_verbs_are_those_of_the_command_line() -> None:
    context = click.Context(command_line)
    assert set(column(table("purpose", "…"), 1)) == set(command_line.list_commands(context))


def test_environment_variables_are_those_that_the_code_mentions() -> None:
    in_code = {name for path in SOURCES for name in VARIABLE.findall(path.read_text())}
    assert set(column(table("variable", "…"), 0)) == in_code | set(
        variables_of(command_line, click.Context(command_line))
    )


def literals(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def protocols(package: str) -> set[str]:
    """The names of the protocols that a package's own modules define."""
    folder = importlib.import_module(package)
    modules = [folder, *(importlib.import_module(f"{package}.{found.name}") for found in submodules(folder))]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and getattr(value, "_is_protocol", False) and value.__module__ == module.__name__
    }


def submodules(package: ModuleType) -> Iterator[pkgutil.ModuleInfo]:
    return (found for found in pkgutil.iter_modules(package.__path__) if found.name != "__main__")


def resolve(name: str) -> Any:
    """What `package.module.NAME` stands for, below stoker."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"stoker.{module}"), attribute)


def variables_of(command: click.Command, context: click.Context) -> Iterator[str]:
    """The variables that the options of a command and of its subcommands read."""
    for parameter in command.params:
        declared = parameter.envvar or ()
        yield from [declared] if isinstance(declared, str) else declared
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            if (found := command.get_command(context, verb)) is not None:
                yield from variables_of(found, context)


def test_path_of_a_job_names_functions_that_exist() -> None:
    rows = table("file", "function", "…")
    path = [(file, function) for row in rows for file in names(row[0]) for function in names(row[1])]
    assert len(path) == len(set(path)) == len(rows)
    for file, function in path:
        found: Any = importlib.import_module("stoker." + file.removesuffix(".py").replace("/", "."))
        for name in function.split("."):
            assert hasattr(found, name), f"{file} has no {function}"
            found = getattr(found, name)
        assert callable(found)
    assert len(path) <= 35
    assert len({file for file, _function in path}) <= 25
