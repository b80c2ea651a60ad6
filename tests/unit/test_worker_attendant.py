"""What an attendant does about its lease, with a stand-in for the processes of the job."""

import contextlib
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from stoker.engines.local import shim as attendant
from stoker.engines.local.attempt_spec import AttemptProcesses, AttemptRecord, AttemptSpec, now
from stoker.engines.local.capacity import ResourceRequest
from stoker.engines.local.messages import AttemptResult, LeaseRenewed, ResultRecorded, ShimChannel, StopAttempt
from stoker.queue.model import Outcome
from stoker.runs.plan import Plan
from stoker.runs.processes.reaper import Reaper
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.syscalls import BootTimer
from stoker.runs.record import Status
from tests.support.waiting import wait_for

LEASE = 600.0


def assigned(**changes: Any) -> AttemptSpec:
    plain = AttemptSpec(
        attempt="a",
        job="j",
        number=1,
        queue="/nowhere/queue.db",
        host="here",
        boot="this",
        keepers=AttemptProcesses((1, 1), (1, 1)),
        want=ResourceRequest(job="j", gpus=0, order=0),
        plan=Plan(command=("true",), grace=30.0),
        environment={},
        lease=LEASE,
        lease_until=now() + LEASE,
        log_limit=1000,
        started=time.time(),
    )
    return msgspec.structs.replace(plain, **changes)


class Stage:
    """An attendant with its worker at the other end of a line."""

    def __init__(self, directory: Path, attempt_spec: AttemptSpec) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker = ShimChannel(mine)
        self.reaper = Mock(spec=Reaper, job=None, status=None, empty=True, containment="")
        self.reaper.owns.return_value = False
        self._signals = SignalStream([signal.SIGUSR2])
        self._timer = BootTimer()
        record = AttemptRecord(directory)
        self.attendance = attendant._Attendance(
            record, attempt_spec, ShimChannel(its), self._signals, self.reaper, self._timer
        )

    def close(self) -> None:
        self.attendance._lose_worker()
        self.worker.close()
        self._signals.close()
        self._timer.close()


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    with contextlib.closing(Stage(tmp_path, assigned(**getattr(request, "param", {})))) as stage:
        yield stage


def outcome(stage: Stage) -> Outcome:
    said = stage.worker.receive()
    assert isinstance(said, AttemptResult)
    return said.outcome


@pytest.mark.parametrize("stage", [{"lease_until": 0.0}], indirect=True)
def test_job_whose_lease_ended_during_its_preparation_is_not_started(stage: Stage) -> None:
    stage.worker.send(ResultRecorded())
    stage.attendance.run()
    assert outcome(stage) == "lost"
    stage.reaper.start.assert_not_called()


@pytest.mark.parametrize("stage", [{"lease_until": 0.0}], indirect=True)
def test_lease_that_the_worker_renewed_meanwhile_lets_the_job_start(stage: Stage) -> None:
    stage.worker.send(LeaseRenewed(now() + LEASE))
    stage.attendance._heed_before_start()


@pytest.mark.parametrize("stage", [{"lease": 2.0, "plan": Plan(command=("true",), grace=0.1)}], indirect=True)
def test_outcome_that_a_stopped_worker_does_not_take_is_brought_before_the_lease_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[float] = []

    def send(self: attendant._Attendance) -> None:
        sent.append(now())
        self._recorded = True

    monkeypatch.setattr(attendant._Attendance, "_send_errand", send)
    ends = now() + 2.0
    stage.attendance._hold_until(ends)
    stage.attendance.on_ended(Status(state="ended", ending="by itself", exit_code=0))
    stage.attendance._wait_until_recorded()
    assert outcome(stage) == "succeeded"
    assert sent[0] < ends


def test_job_gets_no_grace_beyond_its_lease(stage: Stage) -> None:
    controller = stage.attendance
    assert controller.max_grace() > 500.0
    # The machine slept for longer than the lease.
    controller._hold_until(now() - 5.0)
    order = controller.poll()
    assert order is not None
    assert (order.ending, controller.max_grace()) == ("lease", 0.0)


def test_job_that_the_queue_gave_up_gets_no_grace(stage: Stage) -> None:
    stage.worker.send(StopAttempt("lease", "The queue had given the job up."))
    order = stage.attendance.poll()
    assert order is not None
    assert (order.ending, stage.attendance.max_grace()) == ("lease", 0.0)


def test_attendant_wakes_up_when_it_has_to_stop_its_job(stage: Stage) -> None:
    attempt_spec = stage.attendance._attempt_spec
    stage.attendance._hold_until(now() + attempt_spec.stop_before_end + 0.2)
    assert select.select([stage.attendance.fileno()], [], [], 30.0)[0]
    assert wait_for(stage.attendance.poll).ending == "lease"
