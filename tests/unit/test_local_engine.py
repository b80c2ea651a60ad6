"""The local engine with mocks of its processes: what it reports, and what it waits for."""

import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from stoker.engines.engine import WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local import engine as module
from stoker.engines.local.attempts import LocalAttempt
from stoker.engines.local.engine import LocalEngine, LocalOptions
from stoker.engines.local.record import AttemptProcesses, ShimChannel, ShimReady
from stoker.engines.local.shims import SPARE, ForkServer, ShimPool
from stoker.errors import StokerError
from stoker.gpus.model import Look
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.procfs import Identity
from stoker.queue import View
from tests.support.looks import a_gpu, a_look


class Harness:
    def __init__(self, directory: Path, fork_server: Mock) -> None:
        self.fork_server = fork_server
        self.prober = Mock(spec=Prober)
        self.prober.spec = "auto"
        self.prober.answer.return_value = None
        self.engine = LocalEngine(WorkerOptions(), LocalOptions(), Mock())
        self.engine._prober = self.prober
        self.engine.open(Mock(spec=WorkerIdentity, host="here", boot="b", worker="w", directory=directory))

    def report_after(self, look: Look | Exception) -> View:
        self.prober.answer.side_effect = [look]
        self.engine._machine._sampler.postpone(0.0)
        self.engine.step(())
        return self.engine.report()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    fork_server = Mock(spec=ForkServer, expected=2)
    fork_server.fileno.return_value = -1
    with patch.object(module, "ForkServer", return_value=fork_server):
        yield Harness(tmp_path, fork_server)


def test_lost_gpus_are_a_problem_and_absent_gpus_are_not(harness: Harness) -> None:
    absent = AbsentError("no GPU was found")
    view = harness.report_after(absent)
    assert (view.absent, view.problem, view.gpus) == (True, None, ())
    view = harness.report_after(a_look(0.0))
    assert (view.absent, view.problem) == (False, None)
    assert [gpu.uuid for gpu in view.gpus] == [a_gpu(0).uuid]
    view = harness.report_after(absent)
    assert (view.absent, view.problem) == (False, "no GPU was found")
    assert view.gpus[0].unread_since is not None


def test_cgroups_of_killed_supervisors_are_removed_at_close(harness: Harness, tmp_path: Path) -> None:
    abandoned = tmp_path / f"stoker-{2**22}-1-0"  # no kernel gives out such a pid
    harness.fork_server.close.side_effect = abandoned.mkdir
    with patch("stoker.runs.processes.cgroup.own_cgroup", return_value=tmp_path):
        harness.engine.close()
    assert not abandoned.exists()


def test_shim_that_never_gets_ready_is_waited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a suspended shim."""
    monkeypatch.setattr("stoker.engines.local.shims._PATIENCE", 0.05)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arrivals, sign = socket.socketpair()
    fork_server = Mock(spec=ForkServer, expected=0)
    fork_server.fileno.return_value = arrivals.fileno()
    fork_server.receive.side_effect = lambda: ShimChannel(mine) if arrivals.recv(1) else None
    arrivals.setblocking(False)
    sign.send(b"1")
    shims = ShimPool(fork_server)
    with its, arrivals, sign:
        with pytest.raises(StokerError, match="no process for it came up"):
            shims.take()
        assert its.recv(1) == b"", "its connection is closed"


def test_shims_of_jobs_that_are_about_to_start_are_ordered_ahead() -> None:
    fork_server = Mock(spec=ForkServer, expected=0)

    def order() -> None:
        fork_server.expected += 1

    fork_server.order.side_effect = order
    shims = ShimPool(fork_server)
    shims.replenish()
    assert fork_server.expected == SPARE
    shims.prepare(10)
    assert fork_server.expected == 10
    shims.prepare(1000)
    assert 10 < fork_server.expected < 100, "other workers may take the jobs"
    fork_server.expected = 0  # they came
    shims.prepare(0)
    assert fork_server.expected == SPARE


def test_no_shim_is_forked_while_others_are_about_to_be_free() -> None:
    """A fork costs as much processor time as several short jobs."""
    fork_server = Mock(spec=ForkServer, expected=0)
    shims = ShimPool(fork_server)
    for name in range(SPARE):
        shims.attempts[str(name)] = Mock(spec=LocalAttempt, result=Mock(), channel=Mock(), ended_at=time.monotonic())
    shims.replenish()
    assert not fork_server.order.called
    for attempt in shims.attempts.values():
        attempt.ended_at -= 3600.0  # it has code to remove
    shims.replenish()
    assert fork_server.order.call_count == SPARE


def test_shim_that_is_free_again_is_taken_instead_of_a_new_one() -> None:
    fork_server = Mock(spec=ForkServer, expected=0)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arrivals, sign = socket.socketpair()
    fork_server.fileno.return_value = arrivals.fileno()
    shims, channel = ShimPool(fork_server), ShimChannel(mine)
    attempt = Mock(spec=LocalAttempt, result=Mock(), channel=channel, ended_at=time.monotonic(), recorded=True)
    shims.attempts["1"] = attempt
    processes = AttemptProcesses(Identity(1, 1), Identity(2, 2))
    with arrivals, sign, its:
        assert ShimChannel(its).send(ShimReady(processes))
        assert shims.take() == (channel, processes)
        assert attempt.channel is None
        channel.close()


def test_shims_that_are_too_many_are_closed_some_time_after_the_last_start() -> None:
    fork_server = Mock(spec=ForkServer, expected=0)
    shims = ShimPool(fork_server)
    idle = [Mock(spec=ShimChannel, open=True) for _ in range(SPARE * 2 + 3)]
    for channel in idle:
        channel.receive.return_value = None
        shims._idle[channel] = AttemptProcesses(Identity(1, 1), Identity(2, 2))
    shims.take()
    shims.replenish()
    assert len(shims._idle) == len(idle) - 1
    assert shims.due() < math.inf, "the worker wakes up for it"
    shims._taken_at -= 3600.0
    shims.replenish()
    assert len(shims._idle) == SPARE * 2
    assert shims.due() == math.inf
