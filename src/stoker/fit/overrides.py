"""How a batch size goes into a command: as an argument, as a variable, or where the command has a place for it."""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.queue.commands import filled, mentioned

Command = str | tuple[str, ...]
"""Text for a shell, or words that need none."""

DEFAULT_ARGUMENT: Final = "--batch_size={}"
_PLACES: Final = ("batch_size", "accumulate")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What is put into a command to run it at some size, and what more for a probe."""

    argument: str | None = None
    """`--batch_size={}`: appended with the size in the braces. None: that, unless the size has another way in."""
    variable: str | None = None
    """The environment variable that carries the size."""
    probe_arguments: str = ""
    """Appended to probes only, after everything else, so that they win."""

    def check(self, command: Command, effective: int | None) -> None:
        """Refuses what would not reach the command."""
        ways = [
            name
            for name, is_there in (
                ("--batch-arg", self.argument is not None),
                ("--batch-env", self.variable is not None),
                ("{batch_size} in the command", "batch_size" in _mentioned(command)),
            )
            if is_there
        ]
        if len(ways) > 1:
            raise BadInputError(f"the size would go in twice, by {ways[0]} and by {ways[1]}: leave one of them out")
        if self.argument is not None and "{}" not in self.argument and "batch_size" not in _mentioned(self.argument):
            raise BadInputError(
                f"--batch-arg {self.argument!r} has no {{}} for the size: write it like --batch_size={{}}"
            )
        if self.variable is not None and not _VARIABLE.fullmatch(self.variable):
            raise BadInputError(
                f"--batch-env {self.variable!r} is not the name of a variable: write it like BATCH_SIZE"
            )
        for option, text in (("--batch-arg", self.argument or ""), ("--probe-args", self.probe_arguments)):
            _words(option, text)
        texts = (command, self.argument or "", self.probe_arguments)
        if effective is None and any("accumulate" in _mentioned(text) for text in texts):
            raise BadInputError("{accumulate} needs --effective: how large is the batch to be in all?")

    def real(self, command: Command, size: int, accumulate: int | None, name: str | None = None) -> Command:
        """The command at this size; `name` stands for `{id}`, where that is not the command's own."""
        fill = _filler(size, accumulate, name)
        appended: list[str] = []
        if self.variable is None and "batch_size" not in _mentioned(command):
            argument = (self.argument or DEFAULT_ARGUMENT).replace("{}", str(size))
            appended = [fill(word) for word in _words("--batch-arg", argument)]
        return _with(_mapped(fill, command), appended)

    def probe(self, command: Command, size: int, accumulate: int | None, name: str | None = None) -> Command:
        """The command at this size as a probe runs it."""
        fill = _filler(size, accumulate, name)
        more = [fill(word) for word in _words("--probe-args", self.probe_arguments)]
        return _with(self.real(command, size, accumulate, name), more)

    def environment(self, environment: Mapping[str, str], size: int) -> dict[str, str]:
        """The environment that goes with it."""
        return {**environment, **({} if self.variable is None else {self.variable: str(size)})}


def argv(command: Command) -> tuple[str, ...]:
    """What is executed."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else command


def in_words(command: Command) -> str:
    """As a person would type it."""
    return command if isinstance(command, str) else shlex.join(command)


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInputError(f"{option} {text!r} cannot be split into words: {str(error).lower()}") from None


def _with(command: Command, words: list[str]) -> Command:
    if isinstance(command, str):
        return " ".join([command.rstrip(), *map(shlex.quote, words)])
    return (*command, *words)


def _mapped(fill: Callable[[str], str], command: Command) -> Command:
    return fill(command) if isinstance(command, str) else tuple(map(fill, command))


def _filler(size: int, accumulate: int | None, name: str | None) -> Callable[[str], str]:
    values = {"batch_size": str(size), "accumulate": str(accumulate)} | ({} if name is None else {"id": name})
    return lambda text: filled(text, values)


def _mentioned(command: Command) -> set[str]:
    words = (command,) if isinstance(command, str) else command
    return {name for word in words for name in mentioned(word, _PLACES)}
