"""Mistakes in a configuration that show only on the machine."""

import os
from pathlib import Path

import pytest

from stoker.fill.checkup import check, checked, hints
from stoker.fill.config import FillConfig
from stoker.fill.config_files import FillConfigError, read_ini
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
    return [
        problem.removeprefix(f"{config.source}: ").replace(str(directory), "HERE") for problem in check(config, gpus)
    ]


@pytest.mark.parametrize("text", [ONE_FOR_ALL, ONE_FOR_EACH])
def test_published_files_are_valid_on_a_machine_with_two_gpus(tmp_path: Path, text: str) -> None:
    miner = tmp_path / "miner-run"
    miner.touch(mode=0o755)
    assert check(config_of(tmp_path, text), TWO, {"PATH": str(tmp_path)}) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            WATCH + "[process-0]\ncmd=true\ngpus=0,2\n",
            "process-0 gpus: there is no GPU 2 here: this machine has 0, 1",
        ),
        (
            "[gpu-0]\ngpus=0-7\n[process-0]\ncmd=true\ngpus=0\n",
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
            "[gpu-0]\ngpus=0\n[process-0]\ncmd=true\ngpus=0-1\n",
            "process-0 gpus: GPU 1 is not watched: name it in a section of watched GPUs too",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ndir=HERE/nowhere\n",
            "process-0 dir: the directory HERE/nowhere does not exist: create it, or write another",
        ),
        (
            WATCH + "[process-0]\ncmd=true\ndir=HERE/gpu_mon.conf\n",
            "process-0 dir: HERE/gpu_mon.conf is not a directory: write the directory that the program is to run in",
        ),
        (
            WATCH + "[process-0]\nlog=HERE/nowhere/log\ncmd=true\n",
            "process-0 log: the directory HERE/nowhere does not exist: create it, or write another file",
        ),
        (
            WATCH + "[process-0]\nlog=HERE\ncmd=true\n",
            "process-0 log: HERE is a directory: write the name of a file in it",
        ),
        (
            WATCH + "[process-0]\ncmd=no-such-program --now\n",
            "process-0 cmd: no program 'no-such-program' is found on PATH: install it, or write its whole path",
        ),
        (
            WATCH + "[process-0]\ncmd=./run\ndir=HERE\n",
            "process-0 cmd: HERE/run does not exist: install it, or correct the path",
        ),
        (
            WATCH + "[process-0]\ncmd=HERE/gpu_mon.conf\n",
            (
                "process-0 cmd: HERE/gpu_mon.conf is not a program that can be run: "
                "make it one with chmod +x, or correct the path"
            ),
        ),
    ],
)
def test_mistake_on_this_machine_is_reported_with_a_remedy(tmp_path: Path, text: str, problem: str) -> None:
    assert found(tmp_path, text) == [problem]


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("HERE/new.log", "process-0 log: you may not create files in HERE: allow it, or write another file"),
        ("HERE/old.log", "process-0 log: you may not write to HERE/old.log: allow it, or write another file"),
    ],
)
def test_unwritable_log_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, sentence: str) -> None:
    (tmp_path / "old.log").touch()
    access = os.access
    # Root may write everywhere, so file modes have no effect.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    assert found(tmp_path, WATCH + f"[process-0]\ncmd=true\nlog={log}\n") == [sentence]


def test_overlapping_programs_are_found_without_knowing_the_gpus(tmp_path: Path) -> None:
    text = WATCH + "[process-0]\ncmd=true\ngpus=0-2\n[process-1]\ncmd=true\ngpus=2,3\n[process-2]\ncmd=true\n"
    assert [problem.partition(" already")[0] for problem in found(tmp_path, text, None)] == [
        "process-1 gpus: process-0 has GPU 2",
        "process-2 gpus: process-0 has GPU 0, 1, 2",
        "process-2 gpus: process-1 has GPU 2, 3",
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
    text = WATCH + "[process-0]\ncmd=true\npreempt=checkpoint\n[tty]\nwhitelist=root,nobody-of-that-name\n"
    config = config_of(tmp_path, text)
    assert check(config, TWO) == []
    assert hints(config, {"PATH": str(tmp_path)}) == [
        f"{config.source}: whitelist: there is no user 'nobody-of-that-name' on this machine: the name has no effect",
        f"{config.source}: process-0 preempt: cuda-checkpoint is not installed: the program is stopped instead",
    ]


def test_mistakes_of_the_file_and_of_the_machine_are_reported_together(tmp_path: Path) -> None:
    text = WATCH + "[process-0]\ncmd=no-such-program\nnice=99\ndir=HERE/nowhere\n"
    with pytest.raises(FillConfigError) as caught:
        checked(lambda: config_of(tmp_path, text), TWO)
    assert [problem.split()[2].rstrip(":") for problem in caught.value.problems] == ["nice", "dir", "cmd"]
    with pytest.raises(FillConfigError, match="does not exist"):
        checked(lambda: read_ini(tmp_path / "nowhere.conf"), TWO)
    assert checked(lambda: config_of(tmp_path, WATCH + "[process-0]\ncmd=true\n"), TWO).programs
