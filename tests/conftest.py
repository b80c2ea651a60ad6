"""Fixtures that several tiers share."""

import compileall
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support.deep import examples
from tests.support.mock_nvml import MockMachine
from tests.support.slurm_cluster import cluster, slurm_cluster
from tests.support.waiting import wait_for

__all__ = ["cluster", "slurm_cluster"]

# No example is wrong because the machine was busy with something else.
settings.register_profile(
    "patient", settings(), max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Also where Python is told to keep no bytecode: pytest would rewrite the assertions of all tests in each process anew.
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="Rewrite tests/snapshots.")


def pytest_configure(config: pytest.Config) -> None:
    """Where Python does not do that itself, each of thousands of commands would compile all that was changed lately."""
    if "PYTHONDONTWRITEBYTECODE" in os.environ and not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)


@pytest.fixture(autouse=True, scope="session")
def _signals_as_in_a_terminal() -> None:
    """What nohup or a shell's `&` started ignores some signals, and so would every command that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _a_machine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what belongs to the person who runs it."""
    for variable in [name for name in os.environ if name.startswith(("STOKER_", "CUDA_", "MOCK_NVML"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker-home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # The commands of this installation, before any other of the same name.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockMachine]:
    """A machine with two NVIDIA GPUs, which every process started from here sees."""
    machine = MockMachine.create(tmp_path / "nvml-state", gpus=2)
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    yield machine
    machine.clear_faults()  # helpers that hang in it must be able to leave


@pytest.fixture(autouse=True, scope="session")
def _no_helper_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A shared helper outlives the process that started it, and must end when it has no clients."""
    yield
    here = str(tmp_path_factory.getbasetemp())
    wait_for(lambda: not _helpers_of(here), deadline=20.0, named=f"the end of all helpers ({_helpers_of(here)})")


def _helpers_of(directory: str) -> list[int]:
    """The GPU helpers that this process or a command in this directory started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_helper = process.name() == "stoker-gpus" and process.status() != psutil.STATUS_ZOMBIE
            if is_helper and (process.ppid() == os.getpid() or directory in str(process.environ())):
                found.append(process.pid)
    return found
