"""What a worker does in each round, with a stand-in for the queue and for the machine."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest

from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempt_spec import AttemptRecord, AttemptSpec
from stoker.engines.local.fork_server import ForkServer
from stoker.engines.local.messages import ShimChannel
from stoker.engines.local.running_attempt import RunningAttempt
from stoker.engines.local.shim_pool import ShimPool
from stoker.engines.options import WorkerOptions
from stoker.errors import StokerError
from stoker.gpus.model import Look
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.queue import Store, View
from stoker.queue.model import Requests, Snoozed
from stoker.runs.record import Snooze
from stoker.worker import loop
from stoker.worker.loop import WorkerLoop
from stoker.worker.scheduling import Scheduler
from tests.support.looks import a_gpu, a_look

OWN = Snooze(until=1e12, wall=1e12, by="the job")


class Stage:
    """A worker in the middle of its work, and what it tells."""

    def __init__(self, directory: Path) -> None:
        self.told: list[str] = []
        self.store = Mock(spec=Store)
        self.store.log_requests.return_value = []
        self.prober = Mock(spec=Prober)
        self.prober.answer.return_value = None
        self._directory = directory
        self._crew = Mock(spec=ShimPool, engaged={})
        self._crew.running.return_value = self._crew.attend.return_value = []
        self.home = Mock(spec=WorkerIdentity, host="here", worker="w", directory=directory)
        self.loop = WorkerLoop(WorkerOptions(), self.home, self._crew, self.prober, self.told.append)
        placing = Mock(spec=Scheduler)
        placing.polls_now.return_value = False
        placing.why.return_value = {}
        placing.kept_gpus.return_value = {}
        self.loop._placing = placing
        self.loop._store, self.loop._found = self.store, True

    def engage(self, attempt: str) -> RunningAttempt:
        (self._directory / attempt).mkdir()
        assigned = Mock(spec=AttemptSpec, attempt=attempt, job=f"job of {attempt}", started=0.0, log_limit=1000)
        assigned.fitting = None
        running_attempt = RunningAttempt(AttemptRecord(self._directory / attempt), cast(AttemptSpec, assigned), None)
        self._crew.engaged[attempt] = running_attempt
        return running_attempt

    def one_round(self) -> int:
        """The whole worker, which is asked to end after one round."""
        asked = patch.object(self.loop, "_asked_to_end", side_effect=[False, True])
        with asked, patch.object(self.loop, "_wait", return_value=set()):
            return self.loop.run()

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
    with contextlib.suppress(OSError):  # it has ended
        stage.loop._signals.close()


def no_space(*_arguments: Any, **_options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("seconds", [600.0, 0.0])
def test_a_snooze_that_cannot_be_written_is_told_of_once_and_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    record = stage.engage("a").record
    record.write_snooze(OWN)
    requests = {"a": Snoozed(seconds=seconds, by="alice", until=seconds and 1600.0)}
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "replace", no_space)
        trouble.setattr(Path, "unlink", no_space)
        for _ in range(2):
            stage.loop._snooze(requests)
    (said,) = stage.told
    assert said.endswith("No space left on device")
    assert record.snooze() == OWN
    stage.loop._snooze(requests)
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


def test_a_full_disk_that_keeps_the_queue_away_is_tidied(stage: Stage) -> None:
    stage.loop._placing.place.side_effect = StokerError("the queue cannot be written: database or disk is full")  # type: ignore[attr-defined]  # a mock
    assert stage.one_round() == 0
    assert stage.home.tidy.called


def test_cgroups_of_killed_supervisors_are_removed_when_a_worker_ends(stage: Stage, tmp_path: Path) -> None:
    abandoned = tmp_path / f"stoker-{2**22}-1-0"  # no kernel gives out such a pid
    stage.loop._crew.dismiss.side_effect = abandoned.mkdir  # type: ignore[attr-defined]  # a mock
    with patch("stoker.runs.processes.cgroup.own_cgroup", return_value=tmp_path):
        assert stage.one_round() == 0
    assert not abandoned.exists()


@pytest.mark.parametrize("trouble", ["hear", "queue", "tidy"])
def test_a_machine_without_descriptors_does_not_end_its_worker(stage: Stage, trouble: str) -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    if trouble == "hear":
        stage.prober.ask.side_effect = error
        stage.loop._premises._lookout.postpone(0.0)
    elif trouble == "queue":
        stage.store.flush.side_effect = error
    else:
        stage.home.tidy.side_effect = error
    assert stage.one_round() == 0
    assert any("Too many open files" in said for said in stage.told)


def test_a_process_for_jobs_that_never_gets_ready_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that somebody stopped."""
    monkeypatch.setattr("stoker.engines.local.shim_pool._PATIENCE", 0.05)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arrivals, sign = socket.socketpair()
    nursery = Mock(spec=ForkServer, expected=0)
    nursery.fileno.return_value = arrivals.fileno()
    nursery.receive.side_effect = lambda: ShimChannel(mine) if arrivals.recv(1) else None
    arrivals.setblocking(False)
    sign.send(b"1")
    crew = ShimPool(nursery)
    with its, arrivals, sign:
        with pytest.raises(StokerError, match="no process for it came up"):
            crew.take()
        assert its.recv(1) == b"", "it is let go"


def test_queue_that_opens_but_is_damaged_is_told_of_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "open_queue", lambda _url: stage.store)
    stage.store.running.return_value = []
    stage.store.flush_due.return_value = None
    stage.store.requests.return_value = Requests()
    pauses = []
    stage.engage("runs")
    stage.store.renew.side_effect = StokerError("the queue is damaged")
    for _ in range(4):
        stage.loop._renew_at = stage.loop._away_until = 0.0
        stage.loop._ask_queue()
        pauses.append(stage.loop._pause)
    stage.store.renew.side_effect = None
    assert stage.told == ["the queue is damaged; jobs go on, and it is tried again"]
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    stage.store.renew.return_value = {"runs": False}
    stage.loop._away_until = 0.0
    stage.loop._ask_queue()
    assert stage.told[1:] == ["the queue is back"]
    assert stage.loop._pause == 0.5
