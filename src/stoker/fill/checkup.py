"""What of a configuration can be wrong on this machine only: its GPUs, paths, programs and people."""

import os
import pwd
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.fill.config import Background, FillConfig, GpuChoice, WatchedGpus
from stoker.fill.mistakes import Mistake, Mistakes, in_order
from stoker.gpus.model import Gpu
from stoker.gpus.visible import select_gpus
from stoker.paths import is_directory, is_there

_NUMBERS: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# More GPUs than any machine has: a range beyond is a slip of the finger, and not worth counting through.
_MOST_GPUS: Final = 1024


def check(config: FillConfig, gpus: Sequence[Gpu] | None, environment: Mapping[str, str] = os.environ) -> list[Mistake]:
    """Everything that would go wrong here. Without knowing the GPUs, only what no GPU could put right."""
    claims = _Claims(config, gpus)
    found = [*claims.absent(), *claims.overlapping(), *claims.unwatched()]
    for program in config.programs:
        found += _paths(config, program)
        found += _command(config, program, environment)
    return in_order(found)


def checked(read: Callable[[], FillConfig], gpus: Sequence[Gpu] | None) -> FillConfig:
    """The configuration that `read` reads; `Mistakes` with all that is wrong, in the file and on this machine."""
    try:
        config = read()
        mistakes = check(config, gpus)
    except Mistakes as wrong:
        if wrong.understood is None:
            raise
        config = wrong.understood
        mistakes = in_order([*wrong.mistakes, *check(config, gpus)])
    if mistakes:
        raise Mistakes(mistakes, config)
    return config


def hints(config: FillConfig, environment: Mapping[str, str] = os.environ) -> list[Mistake]:
    """What is strange, but no reason not to start."""
    found = []
    for user in config.terminals.whitelist:
        try:
            pwd.getpwnam(user)
        except KeyError:
            sentence = f"whitelist: there is no user {user!r} on this machine: the name has no effect"
            found.append(Mistake(config.where("tty", "whitelist"), sentence))
    for program in config.programs:
        if program.preempt == "checkpoint" and not shutil.which("cuda-checkpoint", path=environment.get("PATH")):
            sentence = f"{program.name} preempt: cuda-checkpoint is not installed: the program will be stopped instead"
            found.append(Mistake(config.where(program.name, "preempt"), sentence))
    return in_order(found)


class _Claims:
    """Who wants which GPUs: by uuid where the machine's are known, else by what was typed."""

    def __init__(self, config: FillConfig, gpus: Sequence[Gpu] | None) -> None:
        self._config = config
        self._gpus = gpus
        self._labels = {gpu.uuid: str(gpu.index) for gpu in gpus or ()}

    def absent(self) -> Iterator[Mistake]:
        if self._gpus is None:
            return
        owners: list[WatchedGpus | Background] = [*self._config.watched, *self._config.programs]
        for owner in owners:
            for entry in _entries(owner.gpus):
                try:
                    select_gpus(self._gpus, entry)
                except BadInputError as error:
                    yield self._about(owner, str(error))

    def overlapping(self) -> Iterator[Mistake]:
        for number, later in enumerate(self._config.programs):
            for earlier in self._config.programs[:number]:
                both = self._both(later.gpus, earlier.gpus)
                if both:
                    line = self._config.where(earlier.name, "gpus").rpartition(":")[2]
                    remedy = "give each GPU to one program only"
                    yield self._about(later, f"{earlier.name} has {both} already, in line {line}: {remedy}")

    def unwatched(self) -> Iterator[Mistake]:
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
                yield self._about(program, f"nobody would watch {missing}: name it in a section of watched GPUs too")

    def _both(self, one: GpuChoice, other: GpuChoice) -> str:
        """The GPUs in both, in words; empty where there are none, or none that could be told."""
        first, second = self._meant(one), self._meant(other)
        if first is None and second is None:
            return "every GPU"
        if first is None or second is None:
            return self._named(first or second or set())
        return self._named(first & second)

    def _meant(self, choice: GpuChoice) -> set[str] | None:
        """uuids, or numbers and uuids as typed; None is all of them, however many there are."""
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

    def _about(self, owner: WatchedGpus | Background, sentence: str) -> Mistake:
        return Mistake(self._config.where(owner.name, "gpus"), f"{owner.name} gpus: {sentence}")


def _entries(choice: GpuChoice) -> tuple[str, ...]:
    return ("all",) if choice == "all" else choice


def _singles(entry: str) -> Iterator[str]:
    numbers = _NUMBERS.fullmatch(entry)
    if not numbers:
        yield entry.lower()
    else:
        first = int(numbers[1])
        yield from map(str, range(first, min(int(numbers[2] or first), first + _MOST_GPUS) + 1))


def _paths(config: FillConfig, program: Background) -> Iterator[Mistake]:
    if program.directory is not None and (wrong := _wrong_directory(Path(program.directory))):
        yield Mistake(config.where(program.name, "directory"), f"{program.name} dir: {wrong}")
    if program.log is not None and (wrong := _wrong_log(Path(program.log))):
        yield Mistake(config.where(program.name, "log"), f"{program.name} log: {wrong}")


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


def _command(config: FillConfig, program: Background, environment: Mapping[str, str]) -> Iterator[Mistake]:
    word = program.command[0]
    wrong: str | None = None
    if "/" in word:
        # The program is looked for from where it is to run.
        path = Path(program.directory or ".") / Path(word)
        if not is_there(path):
            wrong = f"{path} does not exist: install it, or mend the path"
        elif is_directory(path) or not os.access(path, os.X_OK):
            wrong = f"{path} is not a program that can be run: make it one with chmod +x, or mend the path"
    elif not shutil.which(word, path=program.environment.get("PATH", environment.get("PATH"))):
        wrong = f"no program {word!r} is found on PATH: install it, or write its whole path"
    if wrong:
        yield Mistake(config.where(program.name, "command"), f"{program.name} cmd: {wrong}")
