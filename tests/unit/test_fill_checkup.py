"""Mistakes in a configuration that show only on the machine."""

import os
from pathlib import Path

import pytest

from stoker.errors import BadInputError
from stoker.fill.config import FillConfig
from stoker.fill.config_files import check, hints, read_ini
from stoker.gpus.model import Gpu, Unknown
from tests.support.gpu_mon_conf import ONE_FOR_ALL, ONE_FOR_EACH

NOT_REPORTED = Unknown("not reported")
TWO = tuple(Gpu(f"GPU-{n}abc", n, "a GPU", "nvidia", n, 2**30, NOT_REPORTED) for n in (0, 1))
WATCH = "[gpu-all]\ngpus=ALL\n"


def config_of(directory: Path, text: str) -> FillConfig:
    path = directory / "gpu_mon.conf"
    path.write_text(text.replace("HERE", str(directory)))
    return read_ini(path)


def found(directory: Path, text: str, gpus: tuple[Gpu, ...] | None = TWO) -> list[str]:
    config = config_of(directory, text)
    try:
        check(config, gpus)
    except BadInputError as error:
        lines = str(error).splitlines()
        assert all(line.startswith(f"{config.source}: ") for line in lines)
        return [line.removeprefix(f"{config.source}: ").replace(str(directory), "HERE") for line in lines]
    return []


@pytest.mark.parametrize("text", [ONE_FOR_ALL, ONE_FOR_EACH])
def test_published_files_are_valid_on_a_machine_with_two_gpus(tmp_path: Path, text: str) -> None:
    miner = tmp_path / "miner-run"
    miner.touch(mode=0o755)
    check(config_of(tmp_path, text), TWO, {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            WATCH + "[process-0]\ncmd=true\ngpus=0,2\n",
            "process-0 gpus: there is no GPU 2 here: this machine has 0, 1",
        ),
        (
            WATCH + "[gpu-0]\ngpus=0-7\n[process-0]\ncmd=true\ngpus=0\n",
            "gpu-0 gpus: there is no GPU 2 here: this machine has 0, 1",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ngpus=ALL\n[process-1]\ncmd=true\ngpus=1\n",
            "process-1 gpus: process-0 has GPU 1 already: give each GPU to one program only",
        ),
        (
            WATCH + "[process-0]\ncmd=true\n[process-1]\ncmd=true\ngpus=GPU-0\n",
            "process-1 gpus: process-0 has GPU 0 already: give each GPU to one program only",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ngpus=3-1\n",
            "process-0 gpus: '3-1' runs backwards: write 1-3",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ngpus=\n",
            (
                "process-0 gpus: '' is no GPU here: write all, 0, 0,2, 0-3 or a uuid; "
                "this machine has 0 (GPU-0abc), 1 (GPU-1abc)"
            ),
        ),
        (
            "[gpu-0]\ngpus=0\n[process-0]\ncmd=true\ngpus=0-1\n",
            "process-0 gpus: GPU 1 is not watched: name it in a section of watched GPUs too",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ndir=HERE/nowhere\n",
            "process-0: HERE/nowhere is not a directory that you may enter: create it, or write another",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ndir=HERE/gpu_mon.conf\n",
            "process-0: HERE/gpu_mon.conf is not a directory that you may enter: create it, or write another",
        ),
        (
            WATCH + "[process-0]\nlog=HERE/nowhere/log\ncmd=true\n",
            "process-0: HERE/nowhere/log cannot be written: create its directory, allow it, or write another file",
        ),
        (
            WATCH + "[process-0]\nlog=HERE\ncmd=true\n",
            "process-0: HERE cannot be written: create its directory, allow it, or write another file",
        ),
        (
            WATCH + "[process-0]\ncmd=no-such-program --now\n",
            "process-0: no-such-program is not a program that can be run: install it, or correct the path",
        ),
        (
            WATCH + "[process-0]\ncmd=./run\ndir=HERE\n",
            "process-0: HERE/run is not a program that can be run: install it, or correct the path",
        ),
        (
            WATCH + "[process-0]\ncmd=HERE/gpu_mon.conf\n",
            "process-0: HERE/gpu_mon.conf is not a program that can be run: install it, or correct the path",
        ),
    ],
)
def test_mistake_on_this_machine_is_reported_with_a_remedy(tmp_path: Path, text: str, problem: str) -> None:
    assert found(tmp_path, text) == [problem]


@pytest.mark.parametrize("log", ["HERE/new.log", "HERE/old.log"])
def test_unwritable_log_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    (tmp_path / "old.log").touch()
    access = os.access
    # Root may write everywhere, so file modes have no effect.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    assert found(tmp_path, WATCH + f"[process-0]\ncmd=true\nlog={log}\n") == [
        f"process-0: {log} cannot be written: create its directory, allow it, or write another file"
    ]


def test_programs_on_different_gpus_do_not_overlap(tmp_path: Path) -> None:
    text = WATCH + "[process-0]\ncmd=true\ngpus=0\n[process-1]\ncmd=true\ngpus=GPU-1abc\n"
    assert found(tmp_path, text) == []
    assert found(tmp_path, text, None) == []


def test_program_is_found_in_its_working_directory_or_on_its_path(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/run").touch(mode=0o755)
    assert found(tmp_path, WATCH + "[process-0]\ncmd=bin/run\ndir=HERE\n") == []
    assert found(tmp_path, WATCH + "[process-0]\ncmd=run\nenvironment=PATH=HERE/bin\n") == []


def test_missing_user_is_a_warning(tmp_path: Path) -> None:
    text = WATCH + "[process-0]\ncmd=true\n[tty]\nwhitelist=root,nobody-of-that-name\n"
    config = config_of(tmp_path, text)
    check(config, TWO)
    assert list(hints(config)) == [
        f"{config.source}: whitelist: there is no user 'nobody-of-that-name' on this machine: the name has no effect",
    ]


def test_mistakes_on_the_machine_are_reported_together(tmp_path: Path) -> None:
    text = WATCH + "[process-0]\ncmd=no-such-program\ngpus=7\ndir=HERE/nowhere\n"
    assert len(found(tmp_path, text)) == 3
