"""`stoker wait`: wait until jobs have ended."""

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import click

from stoker.cli.options.common import DURATION
from stoker.cli.options.queue import SLOW_POLL, Listener, opened, patiently, queue_option
from stoker.cli.options.selection import JobName, TagName
from stoker.cli.output import json_option, note, print_json
from stoker.cli.tables.jobs import job_json
from stoker.errors import BadInputError, QueueAwayError, StokerError
from stoker.queue.model import ENDED
from stoker.status.forecast import why
from stoker.status.job_text import job_title
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Job, Store

# As in GNU timeout.
_TIMED_OUT: Final = 124
# Reasons that need attention, reported once.
_STUCK: Final = frozenset({"held", "never", "paused", "no worker", "workers paused", "too large"})
_MOST_NAMES: Final = 4


@click.command("wait")
@click.argument("jobs", nargs=-1, type=JobName(), metavar="[JOB]...")
@click.option("--tag", type=TagName(), metavar="TAG", help="All jobs that now have this tag, including ended ones.")
@click.option("--all", "everything", is_flag=True, help="All jobs that have not ended yet.")
@click.option("--timeout", type=DURATION, metavar="DURATION", help="Give up after this long, with code 124.")
@json_option("Print the jobs as a JSON list at the end.")
@queue_option
def wait_command(
    jobs: tuple[str, ...],
    tag: str | None,
    everything: bool,
    timeout: float | None,
    as_json: bool,
    queue_url: str | None,
) -> int:
    """Wait until each JOB has ended.

    JOB is an id, the beginning of an id, or the name of a job or group. The exit code is 0 if all succeeded, 1 if some
    did not, 124 after --timeout.
    """
    if bool(jobs) + (tag is not None) + everything != 1:
        raise BadInputError("which jobs? Write their ids or names, or --tag TAG, or --all")
    deadline = None if timeout is None else time.monotonic() + timeout
    with opened(queue_url) as store:
        wait = _Wait(store, _selected(store, jobs, tag, everything), deadline)
        in_time = wait.until_all_ended()
        if as_json:
            print_json([job_json(job) for job in wait.jobs.values()])
    if not in_time:
        raise StokerError(wait.who_is_left(timeout or 0.0), exit_code=_TIMED_OUT)
    if problem := wait.who_did_not_succeed():
        raise StokerError(problem)
    return 0


def _selected(store: "Store", words: tuple[str, ...], tag: str | None, everything: bool) -> list["Job"]:
    if words:
        return list({job.id: job for word in words for job in store.jobs.named(word)}.values())
    if everything:
        return [
            job for state in ("queued", "held", "running") for job in store.jobs.find(states=[state], limit=2**31 - 1)
        ]
    found = store.jobs.find(tag=tag, limit=2**31 - 1)
    if not found:
        raise BadInputError(f"there is no job with the tag {tag!r} in {store.place}: `stoker list` shows them")
    return found


class _Wait:
    """Waits for one job after the other, so each costs one query at its end."""

    def __init__(self, store: "Store", jobs: list["Job"], deadline: float | None) -> None:
        self._store = store
        self._deadline = deadline
        self.jobs = {job.id: job for job in jobs}
        self._gone: list[str] = []
        self._left = deque(self.jobs)
        self._noted: set[tuple[str, str]] = set()

    def until_all_ended(self) -> bool:
        """False if the deadline passed first."""
        with Listener(self._store) as listener, contextlib.suppress(QueueAwayError):
            while self._left:
                while self._left and self._has_ended(self._left[0]):
                    self._left.popleft()
                self._say_what_is_stuck()
                left = SLOW_POLL if self._deadline is None else self._deadline - time.monotonic()
                if left <= 0:
                    self._left = deque(name for name in self._left if not self._has_ended(name))
                    break
                if self._left:
                    listener.wait(min(SLOW_POLL, left))
        return not self._left

    def _has_ended(self, name: str) -> bool:
        try:
            self.jobs[name] = patiently(lambda: self._store.jobs.get(name), self._deadline)
        except BadInputError:
            self._gone.append(name)
            return True
        return self.jobs[name].state in ENDED

    def _say_what_is_stuck(self) -> None:
        if not self._left or self.jobs[self._left[0]].state == "running":
            return
        job = self.jobs[self._left[0]]
        reason = patiently(lambda: why(self._store, job), self._deadline)
        if reason.kind in _STUCK and (job.id, reason.kind) not in self._noted:
            self._noted.add((job.id, reason.kind))
            note(f"job {job_title(job)}: {reason.reason}")

    def who_is_left(self, timeout: float) -> str:
        names = [f"{job_title(self.jobs[name])}: {self.jobs[name].state}" for name in self._left]
        return f"{_count(len(names), len(self.jobs))} had not ended after {format_duration(timeout)}: {_some(names)}"

    def who_did_not_succeed(self) -> str:
        """Empty if all succeeded."""
        bad = [
            f"{job_title(job)} {_became(job, deleted=name in self._gone)}"
            for name, job in self.jobs.items()
            if job.state != "succeeded" or name in self._gone
        ]
        return f"{_count(len(bad), len(self.jobs))} did not succeed: {_some(bad)}" if bad else ""


def _became(job: "Job", *, deleted: bool) -> str:
    if deleted:
        return "was deleted from the queue"
    if job.state == "cancelled":
        return "was cancelled"
    return "failed" if job.exit_code is None else f"failed with code {job.exit_code}"


def _count(some: int, of: int) -> str:
    return f"{some} of {of} jobs" if of > 1 else "the job"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
