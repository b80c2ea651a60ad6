"""The actions by name: `ACTION [ARGUMENT]`. A new action is one module and one line of the table."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from stoker.actions.action import Action, Facts
from stoker.errors import BadInputError

# The default of Slurm and torchrun: most programs write a checkpoint in this time.
DEFAULT_GRACE: Final = 30.0
# Sending a message or calling a cloud API takes seconds; a hung command must not delay a shutdown.
DEFAULT_EXEC_TIMEOUT: Final = 60.0


class ActionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of actions besides their argument."""

    grace: float = DEFAULT_GRACE
    exec_timeout: float = DEFAULT_EXEC_TIMEOUT
    environment: Mapping[str, str]


def parse_action(text: str, settings: ActionSettings) -> Action:
    """The action that `stop 4242`, `shutdown` or `exec 'COMMAND'` asks for."""
    name, _, argument = text.strip().partition(" ")
    found = _ACTIONS.get(name.lower())
    if found is None:
        # Quote only the first word: the rest may be a URL that contains a secret.
        shown = name.split(":")[0]
        raise BadInputError(f"--then: {shown!r} is not an action: use {ACTION_FORMS}")
    if not found.argument and argument.strip():
        raise BadInputError(f"--then: {name!r} takes no argument, and {argument.strip()!r} was given")
    return found.create(argument.strip(), settings)


def check_actions(texts: Iterable[str]) -> None:
    """Raises `BadInputError` for the first text that is not an action."""
    for text in texts:
        parse_action(text, ActionSettings(environment={}))


class Exit(Action):
    """Does nothing: the watcher ends after its last action."""

    patience = 1.0
    affects = "nothing"

    def describe(self) -> str:
        return "exit"

    def act(self, facts: Facts) -> None:
        pass


def _stop(argument: str, settings: ActionSettings) -> Action:
    from stoker.actions.stop import Stop

    if not (argument.isascii() and argument.isdigit() and 0 < len(argument) < 10 and int(argument) > 0):
        raise BadInputError(f"--then: 'stop' needs the pid of a process, as in 'stop 4242', not {argument!r}")
    return Stop(int(argument), grace=settings.grace)


def _power(what: Literal["shutdown", "reboot"], settings: ActionSettings) -> Action:
    from stoker.actions.power import Power

    return Power(what, settings.environment)


def _determined(_argument: str, settings: ActionSettings) -> Action:
    from stoker.actions.determined import Determined

    return Determined(settings.environment)


def _exec(argument: str, settings: ActionSettings) -> Action:
    from stoker.actions.command import Exec

    if not argument:
        raise BadInputError("--then: 'exec' needs a command, as in \"exec 'echo idle'\"")
    return Exec(_unquoted(argument), timeout=settings.exec_timeout, environment=settings.environment)


def _notify(argument: str, _settings: ActionSettings) -> Action:
    from stoker.actions.notify import Notify

    if not argument:
        raise BadInputError("--then: 'notify' needs a URL, as in 'notify ntfy://ntfy.example.org/gpus'")
    return Notify(argument)


def _unquoted(line: str) -> str:
    """The line without quotes around the whole of it, which would make it the name of one program."""
    try:
        words = shlex.split(line)
    except ValueError:
        return line
    return words[0] if len(words) == 1 and line[0] in "'\"" else line


class _ActionType(NamedTuple):
    create: Callable[[str, ActionSettings], Action]
    argument: str = ""
    """The argument after the name, for help; empty if there is none."""


_ACTIONS: Final = {
    "stop": _ActionType(_stop, "PID"),
    "exit": _ActionType(lambda _argument, _settings: Exit()),
    "shutdown": _ActionType(lambda _argument, settings: _power("shutdown", settings)),
    "reboot": _ActionType(lambda _argument, settings: _power("reboot", settings)),
    "determined": _ActionType(_determined),
    "exec": _ActionType(_exec, "'COMMAND'"),
    "notify": _ActionType(_notify, "URL"),
}
# Typed as two words, the second belongs to the first: `--then stop 4242`.
WITH_ARGUMENT: Final = frozenset(name for name, found in _ACTIONS.items() if found.argument)


def _form(name: str, argument: str) -> str:
    quote = '"' if "'" in argument else "'"
    return f"{quote}{name} {argument}{quote}" if argument else name


ACTION_FORMS: Final = ", ".join(_form(name, found.argument) for name, found in _ACTIONS.items())
