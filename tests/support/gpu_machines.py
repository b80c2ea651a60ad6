"""A machine per GPU source on which the source finds GPUs, for the conformance suite."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fake_drm import FakeMachine
from tests.support.fake_nvidia_smi import FakeNvidiaSmi, gpu_line
from tests.support.mock_nvml import MockMachine


class GpuMachine(NamedTuple):
    """What a conformance test needs to know of a machine and to do to it."""

    spec: str
    root: Path
    gpus: int
    break_driver: Callable[[], None]
    """From now on nothing can be read."""
    repair: Callable[[], None]


def nvml_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    machine = MockMachine.create(directory / "nvml", gpus=2)
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    root = directory / "root"
    return GpuMachine("nvml", root, 2, break_driver=lambda: machine.fault("*", code=999), repair=machine.clear_faults)


def nvidia_smi_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    command = FakeNvidiaSmi(directory / "bin")
    monkeypatch.setenv("PATH", command.path)
    return GpuMachine(
        "nvidia-smi",
        directory / "root",
        2,
        break_driver=lambda: command.lists_gpus(code=255, errors="Unknown Error\n"),
        repair=lambda: command.lists_gpus(gpu_line(0), gpu_line(1)),
    )


def drm_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    machine = FakeMachine(directory / "root")
    machine.amd(0)
    machine.intel(1)
    drm = machine.root / "sys/class/drm"
    hidden = drm.with_name("hidden")
    return GpuMachine(
        "drm",
        machine.root,
        2,
        break_driver=partial(_rename, drm, hidden),
        repair=partial(_rename, hidden, drm),
    )


def _rename(old: Path, new: Path) -> None:
    old.rename(new)


def sim_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    monkeypatch.setenv("STOKER_SIM_DIR", str(directory / "sim"))
    loads = directory / "sim/2x24GiB/loads"
    loads.mkdir(parents=True)

    def break_driver() -> None:
        (loads.parent / "faults.json").write_text("not JSON")

    return GpuMachine("sim:2x24GiB", directory / "root", 2, break_driver, (loads.parent / "faults.json").unlink)


MACHINES: dict[str, Callable[[Path, pytest.MonkeyPatch], GpuMachine]] = {
    "nvml": nvml_machine,
    "nvidia-smi": nvidia_smi_machine,
    "drm": drm_machine,
    "sim": sim_machine,
}
