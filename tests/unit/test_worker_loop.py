"""One round of the worker's loop, with mocks of queue and engine."""

import contextlib
import errno
import os
import random
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest

from stoker.engines.attempt import AttemptRecord, AttemptResult, AttemptSpec
from stoker.engines.engine import Engine, Found, RunningAttempt, Step, WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.errors import StokerError
from stoker.queue import Store, View
from stoker.queue.model import DeferredStart, Requests, Snoozed
from stoker.runs.record import Snooze
from stoker.worker import loop
from stoker.worker.loop import WorkerLoop
from stoker.worker.scheduler import Scheduler

OWN = Snooze(until=1e12, wall=1e12, by="the job")


class MockAttempt(RunningAttempt):
    is_settled = True
    stop = renewed = acknowledge = Mock()


class Harness:
    """A running worker, and its log messages."""

    def __init__(self, directory: Path) -> None:
        self.logged: list[str] = []
        self.store = Mock(spec=Store, **{group: Mock() for group in ("jobs", "attempts", "workers", "logs", "usage")})
        self.store.logs.stream_requests.return_value = []
        self._directory = directory
        self.engine = Mock(spec=Engine, attempts={}, lease=600.0)
        self.engine.find.return_value = Found([], True)
        self.engine.step.return_value = Step()
        self.engine.report.return_value = View()
        self.engine.usage.return_value = []
        self.home = Mock(spec=WorkerIdentity, host="here", key="k", worker="w", directory=directory)
        self.loop = WorkerLoop(WorkerOptions(), self.home, self.engine, self.logged.append)
        self.scheduler = Mock(spec=Scheduler, workers=1)
        self.scheduler.polls_now.return_value = False
        self.scheduler.why_paused.return_value = None
        self.annotated_before = 0
        self.scheduler.finish.side_effect = self._finish
        self.loop._scheduler = self.scheduler
        self.loop._store, self.loop._adopted = self.store, True

    def _finish(self, store: Mock, _attempt: RunningAttempt) -> bool:
        """How often starts were written before the outcome."""
        self.annotated_before = store.attempts.annotate.call_count
        return True

    def attempt(self, name: str) -> RunningAttempt:
        (self._directory / name).mkdir()
        spec = Mock(spec=AttemptSpec, attempt=name, job=f"job of {name}", started=0.0, log_limit=1000)
        spec.fitting = None
        attempt = MockAttempt(AttemptRecord(self._directory / name), cast(AttemptSpec, spec))
        self.engine.attempts[name] = attempt
        return attempt

    def one_round(self, readable: Collection[int] = ()) -> int:
        """The whole worker, which ends after one round."""
        asked = patch.object(self.loop, "_asked_to_end", side_effect=[False, True])
        with asked, patch.object(self.loop, "_wait", return_value=set(readable)):
            return self.loop.run()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    with contextlib.suppress(OSError):  # it has ended
        harness.loop._signals.close()


def no_space(*_arguments: Any, **_options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("seconds", [600.0, 0.0])
def test_failed_snooze_write_is_logged_once_and_retried(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    record = harness.attempt("a").record
    record.write_snooze(OWN)
    requests = {"a": Snoozed(seconds=seconds, by="alice", until=seconds and 1600.0)}
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "replace", no_space)
        trouble.setattr(Path, "unlink", no_space)
        for _ in range(2):
            harness.loop._snooze(requests)
    (said,) = harness.logged
    assert said.endswith("No space left on device")
    assert record.snooze() == OWN
    harness.loop._snooze(requests)
    found = record.snooze()
    assert (None if found is None else found.by) == ("alice" if seconds else None)
    assert len(harness.logged) == 2


def test_leases_are_renewed_before_slow_writes(harness: Harness) -> None:
    harness.attempt("runs")
    over = harness.attempt("over")
    over.recorded = True
    over.record.output.write_text("the last of it")
    harness.store.attempts.renew.return_value = {"runs": False}
    harness.loop._ask_queue()
    calls = [call[0] for call in harness.store.method_calls]
    assert calls.index("attempts.renew") < calls.index("logs.write")


def test_full_disk_that_blocks_the_queue_is_cleaned(harness: Harness) -> None:
    harness.scheduler.place.side_effect = StokerError("the queue cannot be written: database or disk is full")
    assert harness.one_round() == 0
    assert harness.home.tidy.called


@pytest.mark.parametrize(("readable", "seconds"), [((), 2.0), ((7,), 1.0)], ids=["quiet", "after-an-event"])
def test_report_is_made_again_sooner_after_an_event(
    harness: Harness, readable: tuple[int, ...], seconds: float
) -> None:
    harness.one_round(readable)
    harness.store.workers.heartbeat.assert_called_once()
    assert harness.loop._heartbeat_at - harness.loop._reported_at == pytest.approx(seconds)


@pytest.mark.parametrize(("workers", "longest"), [(1, 5.05), (1000, 55.0), (10_000, 65.0)])
def test_many_workers_take_turns_to_write_usage(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, workers: int, longest: float
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _low, high: high)
    harness.scheduler.workers = workers
    before = time.monotonic()
    harness.loop._write_usage(harness.store)
    assert before + longest <= harness.loop._usage_at <= time.monotonic() + longest


@pytest.mark.parametrize("trouble", ["engine", "queue", "tidy"])
def test_shortage_of_descriptors_does_not_end_the_worker(harness: Harness, trouble: str) -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    if trouble == "engine":
        harness.engine.step.side_effect = error
    elif trouble == "queue":
        harness.store.flush.side_effect = error
    else:
        harness.home.tidy.side_effect = error
    assert harness.one_round() == 0
    assert any("Too many open files" in said for said in harness.logged)


def test_damaged_queue_is_logged_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "open_queue", lambda _url: harness.store)
    harness.store.attempts.running.return_value = []
    harness.store.flush_due.return_value = None
    harness.store.attempts.requests.return_value = Requests()
    pauses = []
    harness.attempt("runs")
    harness.store.attempts.renew.side_effect = StokerError("the queue is damaged")
    for _ in range(4):
        harness.loop._renew_at = harness.loop._away_until = 0.0
        before = time.monotonic()
        harness.loop._ask_queue()
        pauses.append(round(harness.loop._away_until - before, 1))
    harness.store.attempts.renew.side_effect = None
    assert harness.logged == ["the queue is damaged; jobs continue, retrying"]
    for pause, expected in zip(pauses, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert expected * 0.5 - 0.1 <= pause <= expected * 1.5 + 0.3
    harness.store.attempts.renew.return_value = {"runs": False}
    harness.loop._away_until = 0.0
    harness.loop._ask_queue()
    assert harness.logged[1:] == ["the queue is back"]


def test_deferred_start_is_written_when_it_changes(harness: Harness) -> None:
    attempt = harness.attempt("a")
    annotate = harness.store.attempts.annotate
    harness.loop._write_deferred_starts(harness.store)
    annotate.assert_not_called()  # an attempt of this machine costs no statement

    attempt.pending, attempt.where = True, "Slurm job 4711"
    for _ in range(3):
        harness.loop._write_deferred_starts(harness.store)
    annotate.assert_called_once_with({"a": DeferredStart(True, "Slurm job 4711")})

    attempt.pending, attempt.where, attempt.began = False, "Slurm job 4711 on node1", 100.0
    for _ in range(3):
        harness.loop._write_deferred_starts(harness.store)
    annotate.assert_called_with({"a": DeferredStart(False, "Slurm job 4711 on node1", 100.0)})
    assert annotate.call_count == 2
    assert harness.logged == ["job of a: began as Slurm job 4711 on node1"]


def test_start_on_a_cluster_is_written_before_the_outcome(harness: Harness) -> None:
    attempt = harness.attempt("a")
    attempt.where, attempt.began, attempt.result = "Slurm job 7 on node1", 100.0, AttemptResult("succeeded", 0, "")
    harness.one_round()
    harness.scheduler.finish.assert_called_once_with(harness.store, attempt)
    assert harness.annotated_before == 1


def test_failed_write_of_a_deferred_start_is_repeated(harness: Harness) -> None:
    attempt = harness.attempt("a")
    attempt.pending = True
    harness.store.attempts.annotate.side_effect = [StokerError("away"), None]
    with pytest.raises(StokerError):
        harness.loop._write_deferred_starts(harness.store)
    harness.loop._write_deferred_starts(harness.store)
    assert harness.store.attempts.annotate.call_count == 2


def test_reasons_of_pending_jobs_are_reported_while_nothing_is_started(harness: Harness) -> None:
    harness.engine.report.return_value = View(waiting={"pending": "waits in Slurm's queue"})
    harness.scheduler.why_paused.return_value = {"queued": "waits until jobs can be started again"}
    harness.loop._send_heartbeat(harness.store)
    view = harness.store.workers.heartbeat.call_args.args[2]
    assert set(view.waiting) == {"pending", "queued"}
