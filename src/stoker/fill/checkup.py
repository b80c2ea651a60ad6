"""Checks a configuration against this machine: its GPUs, paths, programs and users."""

import os
import pwd
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.fill.config import Background, FillConfig, GpuChoice, WatchedGpus
from stoker.fill.config_files import FillConfigError
from stoker.gpus.model import Gpu
from stoker.gpus.visible import select_gpus
from stoker.paths import is_directory, is_there

_NUMBERS: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# More GPUs than any machine has: a range beyond is a slip of the finger, and not worth counting through.
_MOST_GPUS: Final = 1024


def check(config: FillConfig, gpus: Sequence[Gpu] | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Everything that would go wrong here; `gpus` is None where they cannot be read."""
    choices = _GpuChoices(config, gpus)
    found = [*choices.absent(), *choices.overlapping(), *choices.unwatched()]
    for program in config.programs:
        found += _paths(program)
        found += _command(program, environment)
    return [f"{config.source}: {problem}" for problem in found]


def checked(read: Callable[[], FillConfig], gpus: Sequence[Gpu] | None) -> FillConfig:
    """The configuration that `read` reads; `FillConfigError` with all mistakes in the file and on this machine."""
    problems: list[str] = []
    try:
        config = read()
    except FillConfigError as error:
        if error.valid_part is None:
            raise
        config = error.valid_part
        problems += error.problems
    problems += check(config, gpus)
    if problems:
        raise FillConfigError(problems, config)
    return config


def hints(config: FillConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What is probably a mistake, but no reason not to start."""
    found = []
    for user in config.terminals.whitelist:
        try:
            pwd.getpwnam(user)
        except KeyError:
            found.append(f"whitelist: there is no user {user!r} on this machine: the name has no effect")
    if not shutil.which("cuda-checkpoint", path=environment.get("PATH")):
        found += [
            f"{program.name} preempt: cuda-checkpoint is not installed: the program is stopped instead"
            for program in config.programs
            if program.preempt == "checkpoint"
        ]
    return [f"{config.source}: {hint}" for hint in found]


class _GpuChoices:
    """Which section names which GPUs: by uuid where the machine's GPUs are known, else as typed."""

    def __init__(self, config: FillConfig, gpus: Sequence[Gpu] | None) -> None:
        self._config = config
        self._gpus = gpus
        self._labels = {gpu.uuid: str(gpu.index) for gpu in gpus or ()}

    def absent(self) -> Iterator[str]:
        if self._gpus is None:
            return
        owners: list[WatchedGpus | Background] = [*self._config.watched, *self._config.programs]
        for owner in owners:
            for entry in _entries(owner.gpus):
                try:
                    select_gpus(self._gpus, entry)
                except BadInputError as error:
                    yield f"{owner.name} gpus: {error}"

    def overlapping(self) -> Iterator[str]:
        for number, later in enumerate(self._config.programs):
            for earlier in self._config.programs[:number]:
                both = self._both(later.gpus, earlier.gpus)
                if both:
                    yield f"{later.name} gpus: {earlier.name} has {both} already: give each GPU to one program only"

    def unwatched(self) -> Iterator[str]:
        watched: set[str] = set()
        for each in self._config.watched:
            meant = self._meant(each.gpus)
            if meant is None:
                return
            watched |= meant
        for program in self._config.programs if self._config.watched else ():
            wanted = self._meant(program.gpus)
            # Without the machine's list, a number may well be one of the uuids that are watched.
            comparable = self._gpus is not None or all(map(str.isdecimal, (*(wanted or ()), *watched)))
            if wanted is not None and comparable and not wanted <= watched:
                missing = self._named(wanted - watched)
                yield f"{program.name} gpus: {missing} is not watched: name it in a section of watched GPUs too"

    def _both(self, one: GpuChoice, other: GpuChoice) -> str:
        """The GPUs in both; empty where there are none, or where it is unknown."""
        first, second = self._meant(one), self._meant(other)
        if first is None and second is None:
            return "every GPU"
        if first is None or second is None:
            return self._named(first or second or set())
        return self._named(first & second)

    def _meant(self, choice: GpuChoice) -> set[str] | None:
        """uuids, or numbers and uuids as typed; None means all."""
        if self._gpus is not None:
            # One by one: of a range that goes too far, the GPUs that are there count.
            return {uuid for entry in _entries(choice) for single in _singles(entry) for uuid in self._there(single)}
        return None if choice == "all" else {single for entry in choice for single in _singles(entry)}

    def _there(self, entry: str) -> set[str]:
        try:
            return {gpu.uuid for gpu in select_gpus(self._gpus or (), entry)}
        except BadInputError:
            return set()

    def _named(self, gpus: set[str]) -> str:
        labels = sorted((self._labels.get(gpu, gpu) for gpu in gpus), key=lambda label: (len(label), label))
        return f"GPU {', '.join(labels)}" if labels else ""


def _entries(choice: GpuChoice) -> tuple[str, ...]:
    return ("all",) if choice == "all" else choice


def _singles(entry: str) -> Iterator[str]:
    numbers = _NUMBERS.fullmatch(entry)
    if not numbers:
        yield entry.lower()
    else:
        first = int(numbers[1])
        yield from map(str, range(first, min(int(numbers[2] or first), first + _MOST_GPUS) + 1))


def _paths(program: Background) -> Iterator[str]:
    if program.directory is not None and (wrong := _wrong_directory(Path(program.directory))):
        yield f"{program.name} dir: {wrong}"
    if program.log is not None and (wrong := _wrong_log(Path(program.log))):
        yield f"{program.name} log: {wrong}"


def _wrong_directory(path: Path) -> str | None:
    if not is_there(path):
        return f"the directory {path} does not exist: create it, or write another"
    if not is_directory(path):
        return f"{path} is not a directory: write the directory that the program is to run in"
    if not os.access(path, os.X_OK):
        return f"you may not enter the directory {path}: allow it, or write another"
    return None


def _wrong_log(path: Path) -> str | None:
    if is_directory(path):
        return f"{path} is a directory: write the name of a file in it"
    if is_there(path):
        return None if os.access(path, os.W_OK) else f"you may not write to {path}: allow it, or write another file"
    if not is_directory(path.parent):
        return f"the directory {path.parent} does not exist: create it, or write another file"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"you may not create files in {path.parent}: allow it, or write another file"
    return None


def _command(program: Background, environment: Mapping[str, str]) -> Iterator[str]:
    word = program.command[0]
    wrong: str | None = None
    if "/" in word:
        # The program is looked for from where it is to run.
        path = Path(program.directory or ".") / Path(word)
        if not is_there(path):
            wrong = f"{path} does not exist: install it, or correct the path"
        elif is_directory(path) or not os.access(path, os.X_OK):
            wrong = f"{path} is not a program that can be run: make it one with chmod +x, or correct the path"
    elif not shutil.which(word, path=program.environment.get("PATH", environment.get("PATH"))):
        wrong = f"no program {word!r} is found on PATH: install it, or write its whole path"
    if wrong:
        yield f"{program.name} cmd: {wrong}"
