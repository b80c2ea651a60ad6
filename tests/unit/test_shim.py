"""The shim and its lease, with a mock of the processes of the job."""

import contextlib
import os
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

from stoker.engines.attempt import AttemptResult, lease_clock
from stoker.engines.local import shim
from stoker.engines.local.capacity import ResourceRequest
from stoker.engines.local.record import (
    AttemptProcesses,
    LeaseRenewed,
    LocalAttemptRecord,
    LocalAttemptSpec,
    ResultRecorded,
    ShimChannel,
    StopAttempt,
)
from stoker.procfs import Identity
from stoker.queue.model import Outcome
from stoker.runs.plan import Plan
from stoker.runs.processes.reaper import Reaper
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.syscalls import BootTimer
from stoker.runs.record import Status
from tests.support.waiting import wait_for

LEASE = 600.0


def attempt_spec_of(**changes: Any) -> LocalAttemptSpec:
    plain = LocalAttemptSpec(
        attempt="a",
        job="j",
        number=1,
        queue="/nowhere/queue.db",
        host="here",
        boot="this",
        processes=AttemptProcesses(Identity(1, 1), Identity(1, 1)),
        request=ResourceRequest(job="j", gpus=0, order=0),
        plan=Plan(command=("true",), grace=30.0),
        environment={},
        lease=LEASE,
        lease_until=lease_clock() + LEASE,
        log_limit=1000,
        started=time.time(),
    )
    return msgspec.structs.replace(plain, **changes)


class Harness:
    """A shim, and the worker's end of its connection."""

    def __init__(self, directory: Path, attempt_spec: LocalAttemptSpec) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker = ShimChannel(mine)
        self.reaper = Mock(spec=Reaper, job=None, status=None, empty=True, containment="", cgroup=None, reported=False)
        self.reaper.owns.return_value = False
        self._signals = SignalStream([signal.SIGUSR2])
        self._timer = BootTimer()
        record = LocalAttemptRecord(directory)
        self.execution = shim.LocalExecution(
            record, attempt_spec, ShimChannel(its), self._signals, self.reaper, self._timer, os.environ
        )
        self.execution.own(attempt_spec.lease_until)

    def close(self) -> None:
        self.execution._lose_worker()
        self.worker.close()
        self._signals.close()
        self._timer.close()


@pytest.fixture
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    with contextlib.closing(Harness(tmp_path, attempt_spec_of(**getattr(request, "param", {})))) as harness:
        yield harness


def outcome(harness: Harness) -> Outcome:
    said = harness.worker.receive()
    assert isinstance(said, AttemptResult)
    return said.outcome


@pytest.mark.parametrize("harness", [{"lease_until": 0.0}], indirect=True)
def test_job_whose_lease_ended_during_its_preparation_is_not_started(harness: Harness) -> None:
    harness.worker.send(ResultRecorded())
    harness.execution.run()
    assert outcome(harness) == "lost"
    harness.reaper.start.assert_not_called()


@pytest.mark.parametrize("harness", [{"lease_until": 0.0}], indirect=True)
def test_renewed_lease_lets_the_job_start(harness: Harness) -> None:
    harness.worker.send(LeaseRenewed(lease_clock() + LEASE))
    harness.execution._check_before_start()


@pytest.mark.parametrize("harness", [{"lease": 2.0, "plan": Plan(command=("true",), grace=0.1)}], indirect=True)
def test_outcome_ignored_by_a_suspended_worker_is_delivered_before_the_lease_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[float] = []

    def send(self: shim.LocalExecution) -> None:
        sent.append(lease_clock())
        self._recorded = True

    monkeypatch.setattr(shim.LocalExecution, "_send_delivery", send)
    ends = lease_clock() + 2.0
    harness.execution._hold_until(ends)
    harness.execution.on_ended(Status(state="ended", ending="exited", exit_code=0))
    harness.execution.wait_until_recorded()
    assert outcome(harness) == "succeeded"
    assert sent[0] < ends


def test_job_gets_no_grace_beyond_its_lease(harness: Harness) -> None:
    controller = harness.execution
    assert controller.max_grace() > 500.0
    # The machine slept for longer than the lease.
    controller._hold_until(lease_clock() - 5.0)
    order = controller.poll()
    assert order is not None
    assert (order.ending, controller.max_grace()) == ("lease", 0.0)


def test_job_released_by_the_queue_gets_no_grace(harness: Harness) -> None:
    harness.worker.send(StopAttempt("lease", "The queue had given the job up."))
    order = harness.execution.poll()
    assert order is not None
    assert (order.ending, harness.execution.max_grace()) == ("lease", 0.0)


def test_shim_wakes_up_to_stop_its_job(harness: Harness) -> None:
    attempt_spec = harness.execution._attempt_spec
    harness.execution._hold_until(lease_clock() + attempt_spec.stop_before_end + 0.2)
    assert select.select([harness.execution.fileno()], [], [], 30.0)[0]
    assert wait_for(harness.execution.poll).ending == "lease"
