"""What a worker does in each round, with a stand-in for the queue and for the machine."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from stoker.gpus.model import Look
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.queue import Store, View
from stoker.queue.model import Snoozed
from stoker.runs.record import Snooze
from stoker.worker.assignment import Assignment, AttemptRecord
from stoker.worker.crew import Crew
from stoker.worker.engagement import Engagement
from stoker.worker.home import Home
from stoker.worker.loop import WorkerLoop
from stoker.worker.orders import Orders
from stoker.worker.placing import Placing
from tests.support.looks import a_gpu, a_look

OWN = Snooze(until=1e12, wall=1e12, by="the job")


class Stage:
    """A worker in the middle of its work, and what it tells."""

    def __init__(self, directory: Path) -> None:
        self.told: list[str] = []
        self.store = Mock(spec=Store)
        self.store.wanted_outputs.return_value = []
        self.prober = Mock(spec=Prober)
        self._directory = directory
        self._crew = Mock(spec=Crew, engaged={})
        self._crew.running.return_value = []
        home = Mock(spec=Home, host="here", worker="w", directory=directory)
        self.loop = WorkerLoop(Orders(), home, self._crew, self.prober, self.told.append)
        placing = Mock(spec=Placing)
        placing.polls_now.return_value = False
        placing.why.return_value = {}
        placing.kept_gpus.return_value = {}
        self.loop._placing = placing
        self.loop._store, self.loop._found = self.store, True

    def engage(self, attempt: str) -> Engagement:
        (self._directory / attempt).mkdir()
        assigned = Mock(spec=Assignment, attempt=attempt, job=f"job of {attempt}", started=0.0, log_limit=1000)
        assigned.fitting = None
        engagement = Engagement(AttemptRecord(self._directory / attempt), cast(Assignment, assigned), None)
        self._crew.engaged[attempt] = engagement
        return engagement

    def told_after(self, look: Look | Exception) -> View:
        """What the queue is told of the machine after this."""
        self.prober.answer.side_effect = [look]
        self.loop._premises._lookout.postpone(0.0)
        self.loop._premises.watch(wanted=False)
        self.loop._heartbeat_at = 0.0
        self.loop._say_hello(cast(Store, self.store))
        view: View = self.store.heartbeat.call_args.args[2]
        return view


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.loop._signals.close()


def no_space(*_arguments: Any, **_options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("seconds", [600.0, 0.0])
def test_a_snooze_that_cannot_be_written_is_told_of_once_and_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    record = stage.engage("a").record
    record.write_snooze(OWN)
    wishes = {"a": Snoozed(seconds=seconds, by="alice", until=seconds and 1600.0)}
    with monkeypatch.context() as trouble:
        for change in ("replace", "unlink"):
            trouble.setattr(Path, change, no_space)
        for _ in range(2):
            stage.loop._snooze(wishes)
    (said,) = stage.told
    assert said.endswith("No space left on device")
    assert record.snooze() == OWN
    stage.loop._snooze(wishes)
    found = record.snooze()
    assert (None if found is None else found.by) == ("alice" if seconds else None)
    assert len(stage.told) == 2


def test_leases_are_renewed_before_anything_is_written_that_may_take_long(stage: Stage) -> None:
    stage.engage("runs")
    over = stage.engage("over")
    over.recorded = True
    over.record.output.write_text("the last of it")
    stage.store.renew.return_value = {"runs": False}
    stage.loop._ask_queue()
    calls = [call[0] for call in stage.store.method_calls]
    assert calls.index("renew") < calls.index("write_log")


def test_a_machine_without_gpus_has_no_problem_and_one_whose_gpus_are_gone_has(stage: Stage) -> None:
    absent = AbsentError("no GPU was found")
    view = stage.told_after(absent)
    assert (view.absent, view.problem, view.gpus) == (True, None, ())
    view = stage.told_after(a_look(0.0))
    assert (view.absent, view.problem) == (False, None)
    assert [gpu.uuid for gpu in view.gpus] == [a_gpu(0).uuid]
    view = stage.told_after(absent)
    assert (view.absent, view.problem) == (False, "no GPU was found")
    assert view.gpus[0].unread_since is not None
