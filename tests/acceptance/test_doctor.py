"""`stoker doctor` as typed."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.command import stoker, stoker_command
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    spec = f"sim:2@{tmp_path / 'gpus'}"
    monkeypatch.setenv("STOKER_GPUS", spec)
    return spec


def test_machine_with_all_signals_is_well(gpus: str) -> None:
    done = stoker("doctor")
    assert (done.code, done.err) == (0, "")
    assert "readings  sim, simulated GPUs" in done.out
    assert "queue     none yet" in done.out
    assert "GPU 1: Simulated" in done.out
    assert done.out.endswith("all is well\n")
    answer = stoker("doctor", "--json").json()
    assert answer["problems"] == 0
    assert [one["name"] for one in answer["checks"]] == ["readings", "cgroup", "py-spy", "queue"]
    assert answer["gpus"][0]["signals"]["memory activity"] == "yes"


def test_missing_signal_is_a_problem(gpus: str) -> None:
    assert stoker("sim", "fault", "unsupported", "utilization", "--gpu", "1").code == 0
    done = stoker("doctor")
    assert done.code == 1
    assert "!   utilization is unknown" in done.out
    assert done.out.endswith("1 problem\n")


def test_driver_of_nvidia_gpus_is_read(nvidia: MockMachine) -> None:
    done = stoker("doctor")
    assert "readings  nvml, " in done.out
    assert "GPU 1: " in done.out


def test_unreachable_queue_is_a_problem(gpus: str, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database")
    done = stoker("doctor", "--queue", str(tmp_path / "notes.db"))
    assert done.code == 1
    assert "! queue     cannot be used: " in done.out


def test_machine_without_gpus_is_refused(tmp_path: Path) -> None:
    done = stoker("doctor", environment={"STOKER_GPUS": "auto", "STOKER_ROOT": str(tmp_path), "PATH": str(tmp_path)})
    assert done.code == 1
    assert done.err.startswith("stoker: there is no GPU to judge by: ")
    assert done.err.count("\n") == 1


# The hang test


def ranks_of(spec: str) -> list[int]:
    """The ranks on this simulated machine that live."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"stoker.gpus.sim.ranks" in words and spec.partition("@")[2].encode() in words:
            found.append(int(process.name))
    return found


def test_hang_is_measured_and_leaves_nothing(gpus: str) -> None:
    done = stoker("doctor", "--hang-test", "--yes", "--for", "6s")
    assert done.code == 0, done.err
    assert ranks_of(gpus) == []
    assert done.out.startswith("### What the counters show in a hang\n")
    assert "- the stalled rule finds this hang" in done.out
    assert "| counter | rank 0 works | rank 0 hangs | rank 1 works | rank 1 hangs |" in done.out
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in done.out.splitlines()}
    works, hangs = rows["utilization"][:2]
    assert (works.startswith("93"), hangs.startswith("100")) == (True, True)
    assert rows["memory activity"][1].startswith("0.0%")
    for private in (socket.gethostname(), "SIM-", "GPU-", gpus.partition("@")[2]):
        assert private not in done.out


def test_hang_is_measured_as_json(gpus: str) -> None:
    answer = stoker("doctor", "--hang-test", "--yes", "--for", "6s", "--json").json()
    assert answer["found_by_the_stalled_rule"] is True
    power = next(one for one in answer["counters"] if one["name"] == "power")
    assert power["working"][0]["median"] > power["hung"][0]["median"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_doctor(gpus: str, number: signal.Signals) -> None:
    doctor = subprocess.Popen(
        [stoker_command(), "doctor", "--hang-test", "--yes", "--for", "10m"],
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: len(ranks_of(gpus)) == 2, named="two ranks")
    finally:
        doctor.send_signal(number)
        doctor.wait()
    wait_for(lambda: not ranks_of(gpus), named="the end of the ranks")


def test_hang_needs_two_free_gpus(gpus: str) -> None:
    load = subprocess.Popen([stoker_command(), "sim", "load", "--gpu", "0"], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: stoker("gpus", "--json").json()[0]["processes"], named="the load")
        done = stoker("doctor", "--hang-test", "--yes")
    finally:
        load.terminate()
        load.wait()
    assert (done.code, done.out) == (1, "")
    assert "a hang needs 2 GPUs that nobody uses, and 1 are free here" in done.err


def test_hang_needs_torch(nvidia: MockMachine) -> None:
    done = stoker("doctor", "--hang-test", "--yes")
    assert (done.code, done.out) == (1, "")
    assert "the hang test needs PyTorch" in done.err
    assert done.err.count("\n") == 1


def test_hang_is_not_started_without_consent(gpus: str) -> None:
    done = stoker("doctor", "--hang-test")
    assert done.code != 0
    assert "Two processes will use GPU 0 and GPU 1" in done.err
    assert ranks_of(gpus) == []


def test_length_of_the_hang_is_limited(gpus: str) -> None:
    done = stoker("doctor", "--hang-test", "--yes", "--for", "1s")
    assert (done.code, "a hang test takes 5s to 1h" in done.err) == (2, True)
