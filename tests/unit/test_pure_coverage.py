"""Which modules `make coverage` holds above a floor, and when it fails. The measurement itself takes a minute."""

import tomllib
from pathlib import Path

import pytest

from tests.support.scripts import REPOSITORY, load_script

script = load_script("pure-coverage")


def test_every_pattern_matches_a_module_of_src() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pure-coverage"]
    script.pure_modules(settings["modules"], script.modules_below(REPOSITORY / "src"))
    assert 90 <= settings["floor"] <= 100


def test_pattern_matches_modules_wherever_they_are(tmp_path: Path) -> None:
    for name in ("app/__init__.py", "app/rules/__init__.py", "app/rules/idle.py", "app/a/b/placement.py", "app/io.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    modules = script.modules_below(tmp_path)
    assert list(script.pure_modules(["*.placement", "app.rules.*"], modules)) == ["app.a.b.placement", "app.rules.idle"]


def test_pattern_without_a_module_is_an_error() -> None:
    with pytest.raises(script.CoverageError, match=r"'\*\.placing' of \[tool\.pure-coverage\] matches no module"):
        script.pure_modules(["*.placing"], {"app.placement": Path("app/placement.py")})


def test_module_below_the_floor_is_named() -> None:
    assert script.below_floor({"a": 95.0, "b": 94.9, "c": 0.0}, 95) == ["b", "c"]
