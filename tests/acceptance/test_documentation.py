"""The tutorial and the how-tos, typed as they are written."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import Block, Command, PageShell, blocks, commands, missing, pages
from tests.support.waiting import kill_all

PAGES = [
    page
    for page in pages("tutorial.md", "how-to")
    if any(block.language == "console" and not block.note.startswith("not run") for block in blocks(page))
]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[PageShell]:
    shell = PageShell(tmp_path)
    yield shell
    shell.close()
    mark = f"HOME={shell.home}".encode()

    def left() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if mark in variables:
                    found.append(int(entry.name))
        return found

    kill_all(left)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_do_what_it_says(page: Path, shell: PageShell) -> None:
    for block in blocks(page):
        if block.note.startswith("not run"):
            continue
        if block.title is not None:
            shell.write(block.title, block.lines)
        elif block.language == "console":
            _type(block, shell)


def _type(block: Block, shell: PageShell) -> None:
    typed = list(commands(block))
    if block.note == "another terminal":
        for command in typed:
            shell.start(command)
        return
    for command, following in zip(typed, [*typed[1:], Command("", "", ())], strict=True):
        code, said = shell.type(command)
        shown = f"{command.place}: $ {command.text}\n{said}"
        assert code == 0 or following.text == "echo $?", f"exit code {code}: {shown}"
        assert "Traceback" not in said, shown
        lost = missing(command.expected, said)
        assert lost is None, f"did not print {lost!r}: {shown}"
