"""Probes of a fit: real processes on simulated GPUs, watched, ended early, and gone afterwards."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from stoker.fit.probe import Probe
from stoker.gpus.sim import SimMachine
from stoker.gpus.sim.faults import add_fault, clear_faults, parse_fault
from stoker.runs.processes.reaper import Failed
from tests.support import fit_runner, sim_trainer
from tests.support.waiting import wait_for

GIB = 2**30
MIB = 2**20
TRAINER = (sys.executable, sim_trainer.__file__)
# A trainer that would go on for minutes.
LONG = ("--steps", "100000")
# It holds all its memory before its first step, and goes on until a look has seen that, however late.
SHOWN = {"until": r"^step 0\b"}
# The size is both the first and the largest, so one probe is all.
ONCE = {"base": 8, "most": 8}


@pytest.fixture(autouse=True)
def _two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:2x24GiB")
    (tmp_path / "stoker-home").mkdir()


@pytest.fixture
def neighbour() -> "Iterator[subprocess.Popen[str]]":
    """Another process with 8 GiB on GPU 0."""
    with subprocess.Popen(["stoker", "sim", "load", "--memory", "8GiB"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def fit(*command: str, **asked: Any) -> Any:
    request = {"command": [*TRAINER, *command], "deadline": 60.0, **asked}
    words = [sys.executable, fit_runner.__file__, json.dumps(request)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout)


def fit_what_is_shown(*command: str, **asked: Any) -> Any:
    return fit(*LONG, *command, limits=SHOWN, **asked)


def only_probe(answer: Any) -> Any:
    assert "error" not in answer, answer
    (probe,) = answer["fitted"]["observations"]
    return probe


def first_in_time(tries: Iterator[Any], is_in_time: Callable[[Any], bool]) -> Any:
    """Of tries that leave the trainer more time each, the first that left it enough: on a quiet machine the first."""
    late = []
    for answer in tries:
        if is_in_time(answer):
            return answer
        late.append(answer)
    raise AssertionError(f"the trainer never came to it in time: {late}")


def seen(answer: Any) -> bool:
    """Whether a look came while the trainer held its memory."""
    return "was never seen to use" not in answer.get("error", "")


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def written(file: Path) -> bool:
    """Whether the trainer came to leave a process behind."""
    return file.exists() and file.read_text() != ""


def break_driver(kind: str, field: str) -> None:
    machine = SimMachine.of_environment(os.environ)
    add_fault(machine, parse_fault(kind, field, None, machine.clock(), None))


def test_largest_size_is_found_in_three_runs() -> None:
    answer = fit_what_is_shown()
    # 24 GiB less a tenth are 22118 MiB: 200 batches of 100 MiB and the fixed 2048 fit, 208 do not.
    assert answer["fitted"]["size"] == 200
    assert [probe["size"] for probe in answer["fitted"]["observations"]][-1] == 200
    assert len(answer["fitted"]["observations"]) == 3
    assert answer["fitted"]["predicted"] == (2048 + 200 * 100) * MIB


def test_memory_of_other_processes_is_neither_counted_nor_available(neighbour: "subprocess.Popen[str]") -> None:
    answer = fit_what_is_shown()
    assert answer["fitted"]["observations"][0]["peak"] == (2048 + 8 * 100) * MIB
    assert answer["fitted"]["limit"] == int(16 * GIB * 0.9)
    assert answer["fitted"]["size"] == 120
    assert neighbour.poll() is None


def test_probe_that_exceeds_its_memory_share_is_stopped_at_once() -> None:
    answer = fit_what_is_shown(most_memory=6 * GIB, search_options={"base": 64})
    assert any("64: stopped after" in line and "for others" in line for line in answer["messages"])
    assert (answer["fitted"]["size"], answer["fitted"]["limit"]) == (32, int(6 * GIB * 0.9))


def test_memory_difference_is_used_and_reported_without_a_process_list(
    neighbour: "subprocess.Popen[str]",
) -> None:
    break_driver("unsupported", "processes")
    answer = fit_what_is_shown()
    assert (answer["fitted"]["size"], answer["fitted"]["observations"][0]["peak"]) == (120, (2048 + 8 * 100) * MIB)
    assert "the driver does not report memory per process" in answer["fitted"]["note"]
    assert neighbour.poll() is None


def test_fullest_of_several_gpus_counts() -> None:
    answer = fit_what_is_shown("--gpus", "2", search_options=ONCE)
    assert only_probe(answer)["peak"] == (2048 + 1024 + 8 * 100) * MIB
    assert answer["gpus"] == [0, 1]


def test_size_is_fitted_to_the_gpu_visible_to_the_command(
    neighbour: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    answer = fit_what_is_shown(search_options=ONCE)
    assert (answer["fitted"]["limit"], answer["gpus"]) == (int(24 * GIB * 0.9), [1])
    assert neighbour.poll() is None


def test_probe_ends_after_several_steps_with_stable_memory() -> None:
    probe = only_probe(fit(*LONG, "--state", "512", "--step-time", "0.2", search_options=ONCE))
    # What the optimizer took at the second step is in it.
    assert (probe["peak"], probe["settled"]) == ((2048 + 8 * 100 + 512) * MIB, True)
    assert 1.0 <= probe["seconds"] < 30


def test_probe_without_steps_ends_after_a_time_with_stable_memory() -> None:
    probe = only_probe(fit(*LONG, "--silent", search_options=ONCE, limits={"flat_for": 0.5}))
    assert probe["settled"]
    assert 0.5 <= probe["seconds"] < 30


def test_probe_ends_when_its_output_shows_running_steps() -> None:
    probe = only_probe(
        fit(*LONG, "--step-time", "0.1", search_options=ONCE, limits={"until": r"^step 2\b", "flat_for": 0.01})
    )
    assert probe["settled"]
    assert 0.3 <= probe["seconds"] < 30


def test_probe_that_times_out_is_reported_as_incomplete() -> None:
    limits = ({"seconds": seconds, "flat_for": 600} for seconds in (0.7, 4, 16))
    tries = (fit(*LONG, "--silent", search_options=ONCE, limits=limit) for limit in limits)
    probe = only_probe(first_in_time(tries, seen))
    assert (probe["outcome"], probe["settled"]) == ("fits", False)


@pytest.mark.parametrize(
    ("steps", "limits"),
    [((8, 80, 400), {"until": "^a line that it never prints"}), ((100000,), {})],
    ids=["ends by itself", "is ended"],
)
def test_descendants_of_a_probe_are_stopped(steps: tuple[int, ...], limits: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "left"
    tries = (fit("--leave", str(file), "--steps", str(count), search_options=ONCE, limits=limits) for count in steps)
    only_probe(first_in_time(tries, seen))
    assert not lives(int(file.read_text()))


def test_fitter_stops_on_request_and_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "left"
    command = (*LONG, "--silent", "--leave", str(file))
    limits = {"seconds": 90, "flat_for": 600}
    tries = (fit(*command, stop_after=calls, limits=limits) for calls in (5, 40, 160))
    answer = first_in_time(tries, lambda _answer: written(file))
    assert answer["error"] == "the search is to end"
    assert not lives(int(file.read_text()))


def test_hanging_driver_ends_the_probe_with_a_message(tmp_path: Path) -> None:
    file = tmp_path / "left"

    def hung(deadline: float) -> Any:
        clear_faults(SimMachine.of_environment(os.environ))
        return fit(*LONG, "--leave", str(file), "--silent", hang_after=5, deadline=deadline)

    answer = first_in_time(map(hung, (3.1, 8.1, 24.1)), lambda _answer: written(file))
    assert answer["kind"] == "ProbeFailedError"
    expected = r"the memory of the probe could not be watched: the driver did not answer in \d+\.1 s"
    assert re.fullmatch(expected, answer["error"])
    assert not lives(int(file.read_text()))


def test_killed_fitter_leaves_no_probe_running(tmp_path: Path) -> None:
    file = tmp_path / "left"
    request = {"command": [*TRAINER, *LONG, "--silent", "--leave", str(file)]}
    with subprocess.Popen([sys.executable, fit_runner.__file__, json.dumps(request)], stdout=subprocess.PIPE) as fitter:
        wait_for(lambda: file.exists() and file.read_text())
        fitter.kill()
    left = int(file.read_text())
    wait_for(lambda: not lives(left), named="the end of what the probe started")


@pytest.mark.parametrize("fails", ["1", "137"])
def test_failure_without_an_out_of_memory_message_counts_as_too_large(fails: str) -> None:
    # Neither the base nor the size after it fits: 8 does.
    answer = fit_what_is_shown("--slope", "1600", "--fails", fails, search_options={"base": 16})
    assert answer["fitted"]["size"] == 8
    assert "a batch of 16 failed with code" in answer["fitted"]["note"]
    assert "probably for lack of memory" in answer["fitted"]["note"]


def test_first_failure_is_reported_when_every_size_fails() -> None:
    answer = fit("--slope", "100000", "--fails", "3:it is broken")
    assert "the probe at batch size 8 failed with code 3" in answer["error"]
    assert "it is broken" in answer["error"]


def test_out_of_memory_lowers_the_bound_and_the_search_continues() -> None:
    # The base takes 27 GiB, so sizes below it are tried.
    answer = fit_what_is_shown("--slope", "1600", search_options={"base": 16})
    assert answer["fitted"]["observations"][0]["outcome"] == "oom"
    assert answer["fitted"]["size"] == 8


def test_failed_fork_does_not_count_as_a_failed_probe() -> None:
    """A queued job then goes back to the queue."""
    failed = Failed(errno.EAGAIN, 125, "no more processes are allowed here", transient=True)
    with pytest.raises(OSError, match="no more processes"):
        Probe.on_start_failed(Mock(spec=Probe, _command=("train",)), failed)
