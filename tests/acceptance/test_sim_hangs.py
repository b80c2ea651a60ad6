"""`stoker sim train --hang`: what each hang shows in the GPUs, the processes and the output."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.cli.verbs.sim import HANGS
from stoker.gpus.model import DeviceHealth, Look, Reading, Unknown, known
from stoker.gpus.sim import SimMachine, SimulatedSource
from stoker.gpus.sim.ranks import HANGS as KINDS
from stoker.gpus.sim.source import IDLE_WATTS, LIMIT_WATTS
from tests.support.command import stoker
from tests.support.waiting import wait_for

Train = Callable[..., "Training"]


class Training:
    """A training in the background, its output, and its GPUs."""

    def __init__(self, output: Path, *options: str) -> None:
        self.output = output
        self.source = SimulatedSource(SimMachine.of_environment(os.environ))
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                ["stoker", "sim", "train", "--step", "20ms", "--hang-after", "3", *options], stdout=file, stderr=file
            )

    def lines(self) -> list[str]:
        return self.output.read_text().splitlines()

    def hung(self) -> Look:
        """A look that lies in the hang as a whole."""
        wait_for(lambda: any(line.startswith("step 3/") for line in self.lines()), named="the last step")
        source = self.source

        def settled() -> Look | None:
            time.sleep(0.4)
            look = source.look()
            return look if all(_is_steady(reading) for reading in look.readings) else None

        wait_for(settled, named="the hang")
        return source.look()

    def ranks(self) -> list[int]:
        look = self.source.look()
        return [process.pid for r in look.readings if known(r.processes) for process in r.processes]


def _is_steady(reading: Reading) -> bool:
    used = reading.utilization
    return not known(used) or used.mean in (0.0, 1.0)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    monkeypatch.setenv("STOKER_GPUS", f"sim:2@{tmp_path / 'gpus'}")
    started: list[Training] = []

    def begin(*options: str) -> Training:
        started.append(Training(tmp_path / "output", *options))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()
        one.source.close()


def assert_spins(reading: Reading) -> None:
    """100 % at little power while the memory is still: what a collective that waits looks like."""
    assert known(reading.utilization)
    assert reading.utilization.mean == 1.0
    assert known(reading.memory_activity)
    assert reading.memory_activity.peak == 0.0
    assert known(reading.power)
    assert IDLE_WATTS < reading.power < 0.25 * LIMIT_WATTS


def seconds_on_cpu(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def test_every_kind_is_offered() -> None:
    assert HANGS == KINDS


def test_training_with_ranks_runs_to_its_end(train: Train) -> None:
    training = train("--ranks", "2", "--epochs", "1", "--steps", "60")

    def both_work() -> Look | None:
        look = training.source.look()
        return look if all(known(r.utilization) and r.utilization.peak > 0.5 for r in look.readings) else None

    working = wait_for(both_work, named="work on both GPUs")
    assert all(known(reading.memory_activity) and reading.memory_activity.peak > 0.2 for reading in working.readings)
    assert training.process.wait(60) == 0
    assert training.lines()[-1].startswith("step 60/60 loss=")


def test_nccl_hang_spins_on_every_rank(train: Train) -> None:
    training = train("--hang", "nccl")
    for reading in training.hung().readings:
        assert_spins(reading)
    first, second = training.ranks()
    lines = training.lines()
    before = seconds_on_cpu(first) + seconds_on_cpu(second)
    wait_for(lambda: seconds_on_cpu(first) + seconds_on_cpu(second) > before + 0.2, named="CPU time of the ranks")
    assert training.lines() == lines
    assert lines[-1].startswith("step 3/600 loss=")
    environment = Path(f"/proc/{second}/environ").read_bytes().split(b"\0")
    assert {b"RANK=1", b"WORLD_SIZE=2"} <= set(environment)


def test_loader_hang_leaves_the_gpus_idle_and_the_processes_asleep(train: Train) -> None:
    training = train("--hang", "loader")
    look = training.hung()
    assert [known(r.utilization) and r.utilization.peak for r in look.readings] == [0.0, 0.0]
    first, _second = training.ranks()
    before = seconds_on_cpu(first)
    time.sleep(0.3)
    assert seconds_on_cpu(first) - before < 0.1


def test_livelock_prints_heartbeats_and_no_steps(train: Train) -> None:
    training = train("--hang", "livelock")
    look = training.hung()
    for reading in look.readings:
        assert known(reading.memory_activity)
        assert reading.memory_activity.peak == 0.0
        assert known(reading.power)
        assert reading.power > 0.3 * LIMIT_WATTS
    count = len(training.lines())
    wait_for(lambda: len(training.lines()) > count + 1, named="two more heartbeats")
    assert all(line.startswith("heartbeat") for line in training.lines()[count:])


def test_dead_rank_is_gone_and_the_others_wait(train: Train) -> None:
    training = train("--hang", "rank-dead")
    first, second = training.hung().readings
    assert_spins(first)
    assert second.processes == ()
    assert training.process.poll() is None


def test_lost_gpu_is_unknown_with_its_xid_and_the_others_wait(train: Train) -> None:
    training = train("--hang", "gpu-lost")
    first, second = training.hung().readings
    assert_spins(first)
    why = Unknown("GPU is lost")
    assert second.utilization == why
    assert second.health == DeviceHealth((79,), why, why, why)
    assert stoker("sim", "fault", "--clear").out == "removed: GPU 1: lost\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_launcher(train: Train, number: signal.Signals) -> None:
    training = train("--hang", "nccl")
    training.hung()
    training.process.send_signal(number)
    wait_for(lambda: not training.ranks(), named="the end of the ranks")
    assert training.process.wait(60) == (143 if number == signal.SIGTERM else -number)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--hang", "rank-dead", "--ranks", "1"], "a hang of the kind rank-dead needs at least 2 ranks"),
        (["--ranks", "3"], "3 ranks need a GPU each, and 2 are visible"),
        (["--hang", "nccl", "--fail-at", "2"], "--fail-at and --hang-at need a training of one process"),
    ],
)
def test_impossible_training_is_refused(train: Train, options: list[str], reason: str) -> None:
    refused = stoker("sim", "train", *options)
    assert refused.code == 2
    assert reason in refused.err
