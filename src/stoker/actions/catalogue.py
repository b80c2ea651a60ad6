"""The actions that can be asked for, by what a person types: `ACTION [ARGUMENT]`."""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from stoker.actions.action import Action, Facts
from stoker.errors import BadInputError

# As long as Slurm and torchrun give a job: most programs write a checkpoint in that time.
DEFAULT_GRACE: Final = 30.0
# A command that tells somebody or calls a cloud's API takes seconds; one that hangs must not hold up a shutdown.
DEFAULT_EXEC_TIMEOUT: Final = 60.0


class ActionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What actions need beside their argument."""

    grace: float = DEFAULT_GRACE
    exec_timeout: float = DEFAULT_EXEC_TIMEOUT
    environment: Mapping[str, str]
    root: str = "/"
    """Below which the machine's files are looked for."""


def action_settings(environment: Mapping[str, str] = os.environ, **changes: float) -> ActionSettings:
    return ActionSettings(environment=environment, root=environment.get("STOKER_ROOT", "/"), **changes)


# Typed as two words, the second one is meant for the first: `--then stop 4242`.
WITH_ARGUMENT: Final = frozenset({"stop", "exec", "notify"})


def parse_action(text: str, means: ActionSettings) -> Action:
    """The action that `stop 4242`, `shutdown` or `exec 'COMMAND'` asks for."""
    name, _, argument = text.strip().partition(" ")
    maker = _MAKERS.get(name.lower())
    if maker is None:
        # Only the first word is repeated: what follows may be a URL with a secret in it.
        shown = name.split(":")[0]
        raise BadInputError(f"--then: {shown!r} is not an action: use {ACTION_FORMS}")
    return maker(argument.strip(), means)


def check_actions(texts: Iterable[str]) -> None:
    """Raises `BadInputError` for the first text that is not an action."""
    for text in texts:
        parse_action(text, ActionSettings(environment={}))


def _stop(argument: str, means: ActionSettings) -> Action:
    from stoker.actions.stop import Stop

    if not (argument.isascii() and argument.isdigit() and 0 < len(argument) < 10 and int(argument) > 0):
        raise BadInputError(f"--then: 'stop' needs the pid of a process, as in 'stop 4242', not {argument!r}")
    return Stop(int(argument), grace=means.grace)


def _exit(argument: str, _means: ActionSettings) -> Action:
    _refuse("exit", argument)
    return Exit()


def _shutdown(argument: str, means: ActionSettings) -> Action:
    from stoker.actions.power import Power

    _refuse("shutdown", argument)
    return Power("shutdown", environment=means.environment, root=means.root)


def _reboot(argument: str, means: ActionSettings) -> Action:
    from stoker.actions.power import Power

    _refuse("reboot", argument)
    return Power("reboot", environment=means.environment, root=means.root)


def _determined(argument: str, means: ActionSettings) -> Action:
    from stoker.actions.determined import Determined

    _refuse("determined", argument)
    return Determined(means.environment)


def _exec(argument: str, means: ActionSettings) -> Action:
    from stoker.actions.command import Command

    if not argument:
        raise BadInputError("--then: 'exec' needs a command, as in \"exec 'echo idle'\"")
    return Command(_unquoted(argument), timeout=means.exec_timeout, environment=means.environment)


def _notify(argument: str, _means: ActionSettings) -> Action:
    from stoker.actions.notify import Notify

    if not argument:
        raise BadInputError("--then: 'notify' needs a URL, as in 'notify ntfy://ntfy.example.org/gpus'")
    return Notify(argument)


def _unquoted(line: str) -> str:
    """A line that is quoted as a whole without the quotes: no program has a whole command line for its name."""
    try:
        words = shlex.split(line)
    except ValueError:
        return line
    return words[0] if len(words) == 1 and line[0] in "'\"" else line


def _refuse(name: str, argument: str) -> None:
    if argument:
        raise BadInputError(f"--then: {name!r} takes no argument, and {argument!r} was given")


_MAKERS: Final[dict[str, Callable[[str, ActionSettings], Action]]] = {
    "stop": _stop,
    "exit": _exit,
    "shutdown": _shutdown,
    "reboot": _reboot,
    "determined": _determined,
    "exec": _exec,
    "notify": _notify,
}
ACTION_FORMS: Final = "'stop PID', exit, shutdown, reboot, determined, \"exec 'COMMAND'\" or 'notify URL'"


class Exit(Action):
    """Nothing to do but end, which the watcher does after its last action."""

    patience = 1.0

    def describe(self) -> str:
        return "exit"

    def prepare(self) -> tuple[str, ...]:
        return ()

    def act(self, facts: Facts) -> None:
        """The watcher ends by itself."""
