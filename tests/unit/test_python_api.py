"""The documented Python API and `stoker.__all__` agree: docs/reference/python-api.md."""

import inspect
import re
import typing

import pytest

import stoker
from tests.support.scripts import REPOSITORY

PAGE = (REPOSITORY / "docs" / "reference" / "python-api.md").read_text()


def first_column(header: str) -> list[str]:
    """The names in backquotes in the first column of the table with this header."""
    _, found, rest = PAGE.partition(f"\n{header}\n")
    assert found, f"docs/reference/python-api.md has no table with the header {header}"
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_documented_names_are_those_of_all() -> None:
    assert sorted(first_column("| name | what it is |")) == sorted(f"stoker.{name}" for name in stoker.__all__)


def test_names_of_all_can_be_imported() -> None:
    everything: dict[str, object] = {}
    exec("from stoker import *", everything)
    assert set(stoker.__all__) <= everything.keys()
    with pytest.raises(AttributeError, match="has no attribute 'Sentry'"):
        _ = getattr(stoker, "Sentry")  # noqa: B009 - mypy knows that it is not there


def test_documented_methods_of_the_queue_have_their_parameters() -> None:
    methods = inspect.getmembers(stoker.Queue, inspect.isfunction)
    in_code = {signature(name, method) for name, method in methods if not name.startswith("_")}
    assert set(first_column("| method | returns |")) == in_code


def test_documented_options_of_submit_are_those_it_takes() -> None:
    accepted = typing.get_args(inspect.signature(stoker.Queue.submit).parameters["options"].annotation)[0]
    assert set(first_column("| option | meaning |")) == set(accepted.__annotations__)


@pytest.mark.parametrize("name", ["Queue", "Sentinel", "get_gpu_usage", "step"])
def test_documented_signature_is_that_of_the_code(name: str) -> None:
    documented = re.search(rf"`{name}\(([^)`]*)\)`", PAGE)
    assert documented is not None
    names = [parameter.partition("=")[0].strip() for parameter in documented[1].split(",")]
    assert names == list(inspect.signature(getattr(stoker, name)).parameters)


def signature(name: str, method: typing.Callable[..., object]) -> str:
    """`name(first, second, **options)`, without defaults."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    written = [f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name for one in parameters]
    return f"{name}({', '.join(written)})"
