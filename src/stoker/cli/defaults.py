"""Options that a person set in `stoker.toml`, as defaults of the command line: `[run]`, `[watch]`."""

import os
from typing import Any, Final

import click

from stoker.errors import BadInputError
from stoker.settings import load_settings
from stoker.settings_path import config_path

CONFIGURABLE: Final = ("run", "watch")


def defaults_from_file(verb: str, command: click.Command) -> dict[str, Any]:
    """What the file says of this verb, by the names that the command's function has for it."""
    parameters = {
        option.removeprefix("--"): parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--")
    }
    found: dict[str, Any] = {}
    for key, value in getattr(load_settings(), verb).items():
        name = parameters.get(key.replace("_", "-"))
        if name is None:
            import difflib

            near = difflib.get_close_matches(key, parameters, n=1)
            hint = f": did you mean {near[0]!r}?" if near else f": it takes what `stoker {verb} --help` lists"
            raise BadInputError(
                f"mistake in the configuration file {config_path(os.environ)}: [{verb}] has no {key!r}{hint}"
            )
        found[name] = value
    return found
