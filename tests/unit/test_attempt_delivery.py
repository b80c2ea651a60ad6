"""Delivery of attempt details, fits and snoozes between worker, supervisor and queue."""

from pathlib import Path
from typing import cast
from unittest.mock import Mock

import msgspec
import pytest

from stoker.engines.attempt import AppliedSnooze
from stoker.engines.delivery import LogTail, details_of, write_details, write_fit
from stoker.engines.local.attempts import LocalAttempt
from stoker.engines.local.record import LocalAttemptRecord, LocalAttemptSpec
from stoker.errors import StokerError
from stoker.fit.model import Fitted, ProbeOutcome
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError, Driver, NotifyThrottle
from stoker.queue.logs import Logs
from stoker.queue.model import LONGEST_REPORT, AttemptDetails, Snoozed
from stoker.runs.record import Ending, Snooze, Status

FITTED = Fitted(
    size=200,
    fixed=2e9,
    slope=1e8,
    predicted=22 * 10**9,
    limit=23 * 10**9,
    observations=(ProbeOutcome(size=8, outcome="fits", peak=3 * 10**9),),
)


class Queue:
    """Stores details, or raises the given error."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.kept: list[tuple[str, AttemptDetails]] = []
        self._trouble = trouble
        self.attempts = self.logs = self

    def write_details(self, attempt: str, details: AttemptDetails) -> bool:
        if self._trouble is not None:
            raise self._trouble
        self.kept.append((attempt, details))
        return True

    def write(self, _attempt: str, _text: str, **_: bool) -> bool:
        if self._trouble is not None:
            raise self._trouble
        return True


@pytest.fixture
def record(tmp_path: Path) -> LocalAttemptRecord:
    return LocalAttemptRecord(tmp_path)


def ended(record: LocalAttemptRecord, ending: Ending, rule: str = "") -> None:
    record.write_status(Status(state="ended", ending=ending, rule=rule, exit_code=0))


def test_job_that_exited_has_no_details(record: LocalAttemptRecord) -> None:
    ended(record, "exited")
    assert details_of(record) is None


def test_attempt_without_a_record_has_no_details(record: LocalAttemptRecord) -> None:
    assert details_of(record) is None


def test_details_of_a_stopped_job_have_cause_and_report(record: LocalAttemptRecord) -> None:
    ended(record, "idle", rule="idle")
    record.write_report("# Stopped: its GPU was idle – for long\n")
    assert details_of(record) == AttemptDetails(
        cause="idle", rule="idle", report="# Stopped: its GPU was idle – for long\n"
    )


def test_too_long_report_is_cut_with_a_note(record: LocalAttemptRecord) -> None:
    ended(record, "idle", rule="idle")
    record.write_report("é" * LONGEST_REPORT)
    found = details_of(record)
    assert found is not None
    assert len(found.report.encode()) <= LONGEST_REPORT
    assert found.report.startswith("éé")
    assert found.report.endswith("é\n\n… (the rest is on the machine that ran it)\n")


def test_fit_is_written_while_the_job_runs_and_with_its_end(record: LocalAttemptRecord) -> None:
    queue = Queue()
    assert not write_fit(cast(Store, queue), record, "attempt")
    record.write_fit(FITTED)
    assert write_fit(cast(Store, queue), record, "attempt")
    ended(record, "exited")
    write_details(cast(Store, queue), record, "attempt")
    (_, first), (_, last) = queue.kept
    assert (first.cause, first.fit["size"]) == ("", 200)
    assert last.cause == "exited"
    assert last.fit["observations"][0]["peak"] == 3 * 10**9


@pytest.mark.parametrize("has_output", [False, True])
def test_fit_of_a_running_job_is_written_once(record: LocalAttemptRecord, has_output: bool) -> None:
    queue = Queue()
    excerpt = LogTail(record, cast(LocalAttemptSpec, _Fitted()))
    if has_output:
        record.output.write_text("trains\n")
    excerpt.deliver(cast(Store, queue))
    assert queue.kept == []
    record.write_fit(FITTED)
    excerpt.deliver(cast(Store, queue))
    excerpt.deliver(cast(Store, queue))
    assert [(attempt, details.fit["size"]) for attempt, details in queue.kept] == [("attempt", 200)]


def test_details_are_retried_during_an_outage_and_dropped_when_refused(
    record: LocalAttemptRecord,
) -> None:
    ended(record, "idle")
    write_details(cast(Store, Queue(StokerError("the disk of the database is full"))), record, "attempt")
    with pytest.raises(QueueAwayError):
        write_details(cast(Store, Queue(QueueAwayError("the queue cannot be reached"))), record, "attempt")


def test_job_cleaned_during_delivery_is_not_an_error(record: LocalAttemptRecord) -> None:
    ended(record, "idle")
    record.output.write_text("trains\n")
    queue = cast(Store, Queue(CollisionError("violates a foreign key")))
    write_details(queue, record, "attempt")
    LogTail(record, cast(LocalAttemptSpec, _Assigned())).deliver(queue)


def test_logs_that_end_together_are_written_although_one_job_is_cleaned() -> None:
    written: list[str] = []
    driver = Mock(spec=Driver)
    driver.transaction.side_effect = CollisionError("violates a foreign key")

    def fetch(_statement: str, row: dict[str, str]) -> list[tuple[str]]:
        if row["attempt"] == "cleaned":
            raise CollisionError("violates a foreign key")
        written.append(row["attempt"])
        return [(row["attempt"],)]

    driver.fetch.side_effect = fetch
    Logs(driver, NotifyThrottle()).write_last({"first": "", "cleaned": "", "last": "the end\n"})
    assert written == ["first", "last"]


def test_non_text_file_counts_as_missing(record: LocalAttemptRecord) -> None:
    record.write_fit(msgspec.structs.replace(FITTED, note="mangled"))
    record.write_snooze(Snooze(until=1e12, wall=1e12, by="mangled"))
    record.write_applied_snooze(AppliedSnooze(1600.0, "mangled"))
    (record.directory / "attempt.json").write_text('{"attempt": "mangled"}')
    assert (record.fit(), record.snooze(), record.applied_snooze()) != (None, None, None)
    for file in record.directory.glob("*.json"):
        file.write_bytes(file.read_bytes().replace(b"mangled", b"\xff"))
    assert (record.fit(), record.attempt_spec(), record.applied_snooze(), record.snooze()) == (None, None, None, None)


class TestSnooze:
    @pytest.fixture
    def running_attempt(self, record: LocalAttemptRecord) -> LocalAttempt:
        return worker(record)

    def test_snooze_is_written_for_the_supervisor_only_when_it_is_new(
        self, record: LocalAttemptRecord, running_attempt: LocalAttempt
    ) -> None:
        assert running_attempt.apply_snooze(Snoozed(seconds=600.0, by="alice", until=1600.0))
        first = record.snooze()
        assert first is not None
        assert first.by == "alice"
        assert first.until - first.wall < 0
        # Also when the clock of the database is set.
        assert not running_attempt.apply_snooze(Snoozed(seconds=99.5, by="alice", until=1600.0))
        assert record.snooze() == first
        assert running_attempt.apply_snooze(Snoozed(seconds=1200.0, by="alice", until=2200.0))
        longer = record.snooze()
        assert longer is not None
        assert longer.until > first.until + 590

    def test_snooze_can_be_ended(self, record: LocalAttemptRecord, running_attempt: LocalAttempt) -> None:
        running_attempt.apply_snooze(Snoozed(seconds=600.0, by="alice", until=1600.0))
        assert running_attempt.apply_snooze(Snoozed(seconds=0.0, by="bob"))
        assert record.snooze() is None
        assert not running_attempt.apply_snooze(Snoozed(seconds=0.0, by="bob"))

    def test_snooze_of_an_earlier_worker_is_ended_but_not_a_later_one_of_the_job(
        self, record: LocalAttemptRecord, running_attempt: LocalAttempt
    ) -> None:
        own = Snooze(until=1e12, wall=1e12, by="the job")
        record.write_snooze(own)
        assert running_attempt.apply_snooze(Snoozed(seconds=0.0, by="alice"))
        assert record.snooze() is None
        record.write_snooze(own)
        assert not running_attempt.apply_snooze(Snoozed(seconds=0.0, by="alice"))
        assert record.snooze() == own

    @pytest.mark.parametrize(
        "wish",
        [Snoozed(seconds=600.0, by="alice", until=1600.0), Snoozed(seconds=0.0, by="alice")],
        ids=["rest", "end"],
    )
    def test_snooze_of_the_job_survives_a_restart_of_the_worker(
        self, record: LocalAttemptRecord, wish: Snoozed
    ) -> None:
        worker(record).apply_snooze(wish)
        own = Snooze(until=1e12, wall=1e12, by="the job")
        record.write_snooze(own)
        assert not worker(record).apply_snooze(wish)
        assert record.snooze() == own


def worker(record: LocalAttemptRecord) -> LocalAttempt:
    """The attempt as a restarted worker sees it."""
    return LocalAttempt(record, cast(LocalAttemptSpec, _Assigned()), None)


class _Assigned:
    """The fields of an assignment that delivery reads."""

    attempt, job, log_limit, started = "attempt", "job", 1000, 0.0
    fitting: object = None


class _Fitted(_Assigned):
    fitting = "it is"
