"""The tutorial and the how-tos, typed as they are written, and the JSON that the reference describes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import stoker
from tests.support.pages import (
    TRAINER,
    Block,
    Command,
    PageShell,
    blocks,
    commands,
    missing,
    names_in_tables,
    pages,
    section,
)
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import kill_all, wait_for

PAGES = [
    page
    for page in pages("tutorial.md", "how-to")
    if any(block.language == "console" and not block.note.startswith("not run") for block in blocks(page))
]


# Pages for people who have a cluster.
ON_A_CLUSTER = {"slurm", "slurm-admin"}


@pytest.fixture
def shell(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PageShell]:
    cluster: SlurmCluster | None = None
    if request.node.callspec.params["page"].stem in ON_A_CLUSTER:
        cluster = request.getfixturevalue("cluster")
        cluster.configure(["PartitionName=gpu Nodes=ALL PriorityTier=10 State=UP PreemptMode=off"])
    shell = PageShell(tmp_path)
    yield shell
    if cluster is not None:
        # Cancelled jobs, before their worker ends. What is left after that is a mistake of the page.
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not cluster.active_jobs(), deadline=20.0)
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
def test_commands_of_a_page_print_what_it_shows(page: Path, shell: PageShell) -> None:
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


def test_json_has_the_documented_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_GPUS", "sim:2")
    assert stoker("submit", "--name", "base", "--", "true").code == 0
    assert stoker("record", "week.readings", "--every", "100ms", "--for", "300ms").code == 0
    assert stoker("run", "--", "true").code == 0
    assert stoker("tokens", "add", "--viewer", "--name", "anna", "--url", "http://gpu-box").code == 0
    printed = {
        "stoker gpus": stoker("gpus", "--json").json()[0],
        "stoker runs": stoker("runs", "--json").json()[0],
        "Jobs": stoker("list", "--json").json()[0],
        "stoker show": stoker("show", "base", "--json").json(),
        "stoker why": stoker("why", "base", "--json").json(),
        "stoker logs": stoker("logs", "base", "--json").json(),
        "Changing jobs": stoker("hold", "base", "--json").json(),
        "stoker queue check": stoker("queue", "check", "--json").json(),
        "stoker top": stoker("top", "--json").json(),
        "stoker fill status": stoker("fill", "status", "--json").json(),
        "stoker fit": stoker("fit", "--json", "--flat-for", "100ms", "--", sys.executable, str(TRAINER)).json(),
        "stoker replay": stoker("replay", "week.readings", "--for", "200ms", "--json").json(),
        "stoker sim status": stoker("sim", "status", "--json").json(),
        "stoker tokens": stoker("tokens", "--json").json()[0],
    }
    differences = {
        heading: difference
        for heading, found in printed.items()
        if (difference := sorted(names_in_tables(section("json.md", heading)) ^ set(found)))
    }
    assert differences == {}
