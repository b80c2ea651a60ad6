"""Holding jobs that another process starts or deletes at the same time."""

from pathlib import Path

import msgspec
import pytest

from stoker.cli.options.selection import Selection
from stoker.cli.verbs.steer import Request, steer
from stoker.queue import init_queue
from stoker.queue.steering import HOLD
from tests.support.queue_jobs import end, start, submit


def test_hold_of_a_job_that_just_started_or_was_deleted_reports_its_state(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "queue.db")
    with init_queue(url) as other:
        starts, goes, stays = submit(other, "starts", "goes", "stays")

        def too_late(store: object, ids: list[str]) -> dict[str, str]:
            start(other, starts)
            end(other, goes)
            other.jobs.clean(-1.0)
            return dict.fromkeys(other.jobs.hold(ids), "held")

        verb = msgspec.structs.replace(HOLD, apply=too_late)
        request = Request(Selection(everything=True), dry_run=False, as_json=False, queue_url=url)
        assert steer(verb, request) == 0
    result = capfd.readouterr()
    assert result.out == f"stays ({stays}): held\n"
    assert f"job starts ({starts}) was not held: it is running" in result.err
    assert f"job goes ({goes}) was not held: it has just been deleted" in result.err
