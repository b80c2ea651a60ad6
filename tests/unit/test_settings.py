"""Settings: one sentence per mistake in stoker.toml, with its file, section and key."""

import tomllib
from pathlib import Path

import click
import pytest

from stoker.cli.app import stoker
from stoker.cli.options.common import option_defaults
from stoker.errors import BadInputError
from stoker.settings import load_settings, settings_of


def test_sections_are_converted() -> None:
    settings = settings_of(
        tomllib.loads('deadline = "2s"\n[web]\nport = 0\ncert = "~/page.pem"\nnames = ["box"]\n[run]\nfor = "20m"\n')
    )
    assert (settings.web.port, settings.web.names) == (0, ("box",))
    assert settings.web.cert == Path("~/page.pem").expanduser()
    assert settings.run == {"for": "20m"}
    assert settings.fill is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpus = 4", "gpus: expected `str`, got `int`"),
        ("gpu = 4", "has no key 'gpu': did you mean 'gpus'?"),
        ('deadline = "soon"', "deadline: 'soon' is not a duration: write it like 90s, 5m or 1h30m"),
        ('deadline = "0s"', "deadline: '0s' must be greater than zero"),
        ("run = 1", "run: expected `object`, got `int`"),
        ('[work]\npartition = "gpu"', "work: expected `object`, got `str`"),
        ("[web]\nprot = 0", "[web] has no key 'prot': did you mean 'port'?"),
        ("[web]\nport = 70000", "[web] port: expected `int` <= 65535"),
        ("[web]\ncert = 1", "[web] cert: expected `str`, got `int`"),
        ('[web]\nqueue = "x.db"', "[web] has no key 'queue': use host, port,"),
        ('[web]\nurl = "box"', "[web] url: 'box' is not an address: write it like https://stoker.example.org"),
        ('[notify]\nevents = ["lost"]', "[notify] events: there is no event 'lost': use failed, stopped"),
        ('[notify]\nunknown-after = "x"', "[notify] unknown-after: 'x' is not a duration"),
        ('[notify]\nurl = "x"', "[notify] has no key 'url': did you mean 'urls'?"),
        ("[notify]\nurls = [1]", "[notify] urls[0]: expected `str`, got `int`"),
    ],
)
def test_mistake_is_reported_with_file_section_and_key(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "stoker.toml"
    file.write_text(text)
    with pytest.raises(BadInputError) as refused:
        load_settings(file, {})
    assert str(refused.value).startswith(f"error in the configuration file {file}: {sentence}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"fro": "20m"}, "[run] has no key 'fro': did you mean 'for'?"),
        ({"for": "long"}, "[run] for: 'long' is not a duration"),
        ({"for": True}, "[run] for: True is not text"),
        ({"dry-run": "yes"}, "[run] dry-run: 'yes' is neither true nor false"),
        ({"idle": "maybe"}, "[run] idle: 'maybe' is not one of 'on', 'off'"),
        ({"idle-exit-code": 300}, "[run] idle-exit-code: 300 is not in the range"),
        ({"then": {"a": 1}}, "[run] then: {'a': 1} is not text or a list of text"),
    ],
)
def test_option_in_the_file_is_checked_as_on_the_command_line(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInputError) as refused:
        defaults(table)
    assert f"stoker.toml: {sentence}" in str(refused.value)


def test_options_in_the_file_become_defaults() -> None:
    found = defaults({"for": "20m", "grace": 5, "dry_run": True, "then": "exit"})
    assert found == {"window": "20m", "grace": "5", "dry_run": True, "then": ["exit"]}


def defaults(table: dict[str, object]) -> dict[str, object]:
    with click.Context(stoker) as context:
        command = stoker.get_command(context, "run")
        assert command is not None
        return option_defaults("run", table, command.params)
