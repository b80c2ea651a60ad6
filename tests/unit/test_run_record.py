"""The record of a run: lookup, atomic writes, pruning, and detection of dead supervisors."""

import os
import time
from pathlib import Path

import pytest

from stoker.errors import BadInputError, StokerError
from stoker.procfs import boot_id, read_stat
from stoker.rules.idle import IdlePolicy
from stoker.rules.registry import stored_form
from stoker.runs.processes.reaper_process import OrphanStop
from stoker.runs.record import MOST_RECORDS, OLDEST_RECORD, Record, Records, Snooze, Spec, Status, in_a_word, summary_of
from stoker.runs.run import record_orphan_stop


def a_spec(record: Record, *, alive: bool = False, started: float | None = None) -> Spec:
    ticks = read_stat("/proc/self/stat").started
    return Spec(
        id=record.id,
        command=("python", "train.py"),
        directory="/home/alice",
        host="box",
        user="alice",
        boot=boot_id(),
        supervisor=os.getpid(),
        supervisor_started=ticks if alive else ticks + 1,
        started=time.time() if started is None else started,
        policy=stored_form([IdlePolicy()], whole=True),
        rule="all GPUs below 1% for 30m",
        gpus="job",
        dry_run=False,
    )


def written(records: Records, *, alive: bool = False, started: float | None = None) -> Record:
    record = records.create()
    record.write_spec(a_spec(record, alive=alive, started=started))
    return record


def test_record_survives_a_round_trip(tmp_path: Path) -> None:
    record = written(Records(tmp_path))
    record.write_status(Status(state="ended", ending="idle", exit_code=124, reason="GPU 0 stayed below 1% for 30m."))
    again = Records(tmp_path).find(record.id)
    assert again.spec() == a_spec(record, started=again.spec().started)
    assert (again.status().ending, again.status().exit_code) == ("idle", 124)


def test_run_is_found_by_a_unique_prefix_of_its_id(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for name in ("ab12cd34", "ab99ff00"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        record = Record(tmp_path / "runs" / name)
        record.write_spec(a_spec(record))
    assert records.find("ab1").id == "ab12cd34"
    with pytest.raises(BadInputError, match="fits 2 runs"):
        records.find("ab")
    with pytest.raises(BadInputError, match="no run 'ff'"):
        records.find("ff")


def test_run_with_a_dead_supervisor_is_lost_even_if_its_pid_is_reused(tmp_path: Path) -> None:
    records = Records(tmp_path)
    lost, living = written(records), written(records, alive=True)
    for record in (lost, living):
        record.write_status(Status(state="running", verdict="busy"))
    assert in_a_word(summary_of(lost)) == "lost"
    assert in_a_word(summary_of(living)) == "busy"


def test_snooze_ends_at_its_time(tmp_path: Path) -> None:
    record = written(Records(tmp_path), alive=True)
    record.write_status(Status(state="running", verdict="waiting"))
    record.write_snooze(Snooze(time.monotonic() + 60, time.time() + 60, "alice"))
    assert in_a_word(summary_of(record)) == "snoozed"
    record.write_snooze(Snooze(time.monotonic() - 1, time.time() - 1, "alice"))
    assert record.snooze() is None


def test_pruning_removes_old_and_excess_records_but_no_live_one(tmp_path: Path) -> None:
    records = Records(tmp_path)
    living = written(records, alive=True, started=time.time() - 2 * OLDEST_RECORD)
    old = written(records, started=time.time() - 2 * OLDEST_RECORD)
    many = [written(records) for _ in range(MOST_RECORDS + 3)]
    for age, record in enumerate([*reversed(many), old, living]):
        os.utime(record.directory, (time.time() - age, time.time() - age))
    records.prune()
    left = {record.id for record in records.newest_first()}
    assert living.id in left
    assert old.id not in left
    assert {record.id for record in many[3:]} <= left
    assert not {record.id for record in many[:3]} & left


def test_partially_written_status_is_tolerated(tmp_path: Path) -> None:
    record = written(Records(tmp_path))
    (record.directory / "status.json").write_text('{"state": "run')
    assert record.status().state == "starting"


def test_unwritable_directory_is_one_message_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StokerError, match="STOKER_HOME names another place") as caught:
        Records(tmp_path / "file").create()
    assert caught.value.exit_code == 125


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        (Status(state="starting"), "exited"),
        (Status(state="running"), "exited"),
        (Status(state="stopping"), "supervisor killed"),
    ],
)
def test_job_that_ended_by_itself_before_its_supervisor_was_killed_counts(
    tmp_path: Path, status: Status, ending: str
) -> None:
    record = written(Records(tmp_path))
    record.write_status(status)
    record_orphan_stop(OrphanStop(0, (), "there was nothing to stop", str(record.directory), ended_before=True))
    assert (record.status().state, record.status().ending, record.status().exit_code) == ("ended", ending, 0)
