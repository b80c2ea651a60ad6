"""The documentation as tests read it: pages, their fenced blocks, and a shell that runs the commands of a page.

In a block of commands, ```` ```console ````, lines that begin with `$ ` are typed; the lines after each are printed.
A block with `title="FILE"` is a file that exists from there on. A comment in the line before a block changes that:

    <!-- not run: REASON -->      the commands are only checked for verbs and options
    <!-- another terminal -->     the command goes on in the background until the page ends
"""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click

from stoker.cli.app import stoker
from stoker.cli.options.engine import WorkerCommand
from tests.support.waiting import wait_for

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
REFERENCE: Final = DOCS / "reference"
TRAINER: Final = Path(__file__).with_name("page_trainer.py")

_FENCE: Final = re.compile(r"^( *)(`{3,})([a-z]*)(?: +title=\"([^\"]+)\")? *$")
_COMMENT: Final = re.compile(r"^ *<!-- (not run: .+|another terminal) -->$")
_PUNCTUATION: Final = frozenset("();<>|&")
_LONGEST: Final = 60.0


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    title: str | None
    note: str
    """The comment before it, or nothing."""
    lines: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    place: str
    text: str
    expected: tuple[str, ...]


def pages(*folders: str) -> list[Path]:
    """All pages, or those of these folders."""
    found = sorted(DOCS.rglob("*.md"))
    return [page for page in found if not folders or page.relative_to(DOCS).parts[0] in folders]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        indent, ticks, language, title = fence.groups()
        end = next(later for later in range(number + 1, len(lines)) if lines[later].strip() == ticks)
        note = _COMMENT.match(lines[number - 1])
        inside = tuple(line.removeprefix(indent) for line in lines[number + 1 : end])
        yield Block(page, number + 1, language, title, note[1] if note else "", inside)
        number = end + 1


def commands(block: Block) -> Iterator[Command]:
    """What is typed in a block, each with what it prints."""
    lines = list(block.lines)
    number = 0
    while number < len(lines):
        first = number
        assert lines[number].startswith("$ "), f"{block.place}: a block of commands begins with `$ `"
        text = lines[number][2:]
        while text.endswith("\\"):
            number += 1
            text += "\n" + lines[number].removeprefix("> ")
        number += 1
        begin = number
        while number < len(lines) and not lines[number].startswith("$ "):
            number += 1
        expected = tuple(line for line in lines[begin:number] if line.strip())
        yield Command(f"{block.page.relative_to(ROOT)}:{block.line + 1 + first}", text, expected)


def names_in_tables(text: str, column: int = 0) -> set[str]:
    """What stands in backquotes in one column of the tables of a text."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[column])}


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one."""
    text = (REFERENCE / page).read_text()
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/reference/{page} has no heading {heading!r}"
    return found[1]


def stoker_words(text: str) -> Iterator[list[str]]:
    """The arguments of each `stoker` that a command line starts, also behind `--` of another one."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="".join(_PUNCTUATION))
    lexer.whitespace_split = True
    words = list(lexer)
    before = [";", *words]
    for start, word in enumerate(words):
        is_first = before[start] in ("--", "srun") or "=" in before[start] or set(before[start]) <= _PUNCTUATION
        if not (word.endswith("$(stoker") or (word == "stoker" and is_first)):
            continue
        arguments = []
        for argument in words[start + 1 :]:
            if set(argument) <= _PUNCTUATION:
                break
            arguments.append(argument)
        yield arguments


def check_usage(arguments: list[str]) -> None:
    """Raises click's error when there is no such verb or option."""
    command: click.Command = stoker
    context = click.Context(command, info_name="stoker", resilient_parsing=False)
    while True:
        if isinstance(command, WorkerCommand):
            command.choose_engine(context, arguments)
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
        if not isinstance(command, click.Group) or not rest:
            assert rest or values or isinstance(command, click.Command)
            return
        child = command.get_command(context, rest[0])
        if child is None:
            raise click.UsageError(f"there is no command {rest[0]!r}", context)
        command, arguments = child, rest[1:]
        context = click.Context(command, info_name=rest[0], parent=context)


class PageShell:
    """Bash, as a reader of one page has it: simulated GPUs, a home, a directory with a `train.py`."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "reader"
        self.directory = self.home / "project"
        self.directory.mkdir(parents=True)
        (self.directory / "train.py").write_text(TRAINER.read_text())
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "GIT_"))}
        environment |= {"HOME": str(self.home), "STOKER_GPUS": "sim:4", "STOKER_DEADLINE": "60s"}
        # Other tests may listen on the usual port.
        self.write("~/.config/stoker/stoker.toml", ("[web]", "port = 0"))
        self._logs = 0
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def write(self, name: str, lines: tuple[str, ...]) -> None:
        path = self.home / name.removeprefix("~/") if name.startswith("~/") else self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)

    def type(self, command: Command) -> tuple[int, str]:
        """Runs it to its end: the exit code, and what it printed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        end = f"@@@{time.monotonic_ns()}"
        # Its code stays what `$?` means in the next line.
        self._shell.stdin.write(f"{{ {command.text}\n}} </dev/null\n(c=$?; printf '\\n{end} %d\\n' $c; exit $c)\n")
        self._shell.stdin.flush()
        said: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(end):
                return int(line.split()[1]), "".join(said)
            said.append(line)
        raise AssertionError(f"{command.place}: the shell ended: {''.join(said)}")

    def start(self, command: Command) -> None:
        """Leaves it running, once it has printed what the page says."""
        self._logs += 1
        log = self.home / f"terminal-{self._logs}.txt"
        log.touch()
        self.type(command._replace(text=f"{command.text} >{log} 2>&1 &"))
        wait_for(lambda: missing(command.expected, log.read_text()) is None, named=f"{command.place}: {command.text}")

    def close(self) -> None:
        os.killpg(self._shell.pid, signal.SIGTERM)
        self._shell.communicate(timeout=_LONGEST)


def missing(expected: tuple[str, ...], said: str) -> str | None:
    """The first expected line that was not printed in its turn; numbers, ids, times and spaces may differ."""
    position = 0
    for line in expected:
        pattern = "".join(_loosely(piece) for piece in re.split(r"([0-9a-f]{8}|\d[\d.,:]*|\s+|…)", line.strip()))
        found = re.compile(pattern).search(said, position)
        if found is None:
            return line
        position = found.end()
    return None


def _loosely(piece: str) -> str:
    if piece == "…":
        return r".*"
    if piece.isspace():
        return r"\s+"
    if re.fullmatch(r"[0-9a-f]{8}", piece):
        return r"[0-9a-f]{8}"
    if re.match(r"\d", piece):
        return r"\d[\d.,:]*"
    return re.escape(piece)
