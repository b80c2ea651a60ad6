"""Reads states of the queue, from which events are derived, after changes."""

import contextlib
import select
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.notifications.events import MAX_AGE, QueueState, awaits_cause
from stoker.queue.driver import ChangeListener
from stoker.queue.model import ENDED, Attempt, AttemptDetails, Job
from stoker.queue.store import Store

# Heartbeats do not count as changes: lost workers and unknown GPUs are found by polling.
_POLL_EVERY: Final = 5.0
# Minimum interval, regardless of changes.
_MIN_POLL_INTERVAL: Final = 1.0
# Reaction time to a stop.
_STEP: Final = 0.25
# A slow transaction may commit an end from before the last poll.
_OVERLAP: Final = 60.0
# An attempt that has no recorded cause after this time never gets one.
_CAUSE_WITHIN: Final = 30.0
_FIRST_PAGE: Final = 200


class QueueWatch:
    """Changes in the queue since the last read."""

    def __init__(self, *, with_successes: bool) -> None:
        """`with_successes`: of all jobs, not only of jobs with `--notify`."""
        self._with_successes = with_successes
        self._polled: float | None = None
        self._running: dict[str, Attempt] = {}
        self._awaiting_cause: dict[str, tuple[str, float]] = {}
        """Jobs of attempts that have ended without a known cause, and since when."""
        self._is_soon = False
        """Whether a cause may arrive soon."""

    def read(self, store: Store) -> QueueState:
        """The newest state. After an error, the next state includes the contents of the failed one."""
        now = store.clock()
        oldest = now - MAX_AGE
        running = store.attempts.running()
        jobs = {job.id: job for job in store.jobs.find(states=["running"], limit=2**31 - 1)} if running else {}
        # Read before the ended jobs: if no job is left, the last one is among them.
        unfinished = bool(running or jobs) or any(
            store.jobs.find(states=[state], limit=1) for state in ("queued", "held")
        )
        urls = store.notices.urls()
        with_successes = self._with_successes or any("succeeded" in one.events for one in urls)
        since = oldest if self._polled is None else max(oldest, self._polled - _OVERLAP)
        ended = _recently_ended(store, since, with_successes=with_successes)
        self._track_ended(running, now)
        causes = store.attempts.causes(
            {job.attempt for job in ended if job.attempt is not None} | self._awaiting_cause.keys()
        )
        state = QueueState(
            now=now,
            ended=ended,
            done=store.groups.done_since(since),
            retried=self._retried(store, causes, {job.id for job in ended}),
            causes=causes,
            unfinished=unfinished,
            workers=store.workers.all(),
            running=[(attempt, jobs[attempt.job]) for attempt in running if attempt.job in jobs],
            urls=urls,
        )
        self._polled = state.now
        self._is_soon = bool(self._awaiting_cause) or any(awaits_cause(job, state) for job in state.ended)
        return state

    def _track_ended(self, running: Sequence[Attempt], now: float) -> None:
        """Finds ended attempts of retried jobs, which are not among the ended jobs."""
        found = {attempt.id: attempt for attempt in running}
        self._awaiting_cause |= {
            attempt.id: (attempt.job, now) for attempt in self._running.values() if attempt.id not in found
        }
        self._awaiting_cause = {
            name: (job, since)
            for name, (job, since) in self._awaiting_cause.items()
            if now - since < _CAUSE_WITHIN and name not in found
        }
        self._running = found

    def _retried(self, store: Store, causes: dict[str, AttemptDetails], ended: set[str]) -> dict[str, Job]:
        retried: dict[str, Job] = {}
        for name, (job, _since) in list(self._awaiting_cause.items()):
            if job in ended:
                del self._awaiting_cause[name]
            elif causes.get(name):
                del self._awaiting_cause[name]
                attempt = store.attempts.get(name) if causes[name].rule else None
                if attempt is not None:
                    with contextlib.suppress(BadInputError):  # It was removed from the queue.
                        found = store.jobs.get(job)
                        if found.state not in ENDED:
                            # The attempt has the reason; the job may run again.
                            retried[name] = msgspec.structs.replace(found, reason=attempt.reason)
        return retried

    def wait(self, changes: ChangeListener, stop: threading.Event) -> None:
        """Waits for a change or the next poll, but at least the minimum interval."""
        longest = _MIN_POLL_INTERVAL if self._is_soon else _POLL_EVERY
        begun = time.monotonic()
        changed = False
        while not stop.is_set():
            passed = time.monotonic() - begun
            if passed >= (_MIN_POLL_INTERVAL if changed else longest):
                return
            number = -1 if changed else changes.fileno()
            if number < 0:
                stop.wait(_STEP)
                changed = changes.poll() is not None or changed
                continue
            waiting = select.poll()
            waiting.register(number, select.POLLIN)
            waiting.poll(_STEP * 1000)
            changed = changes.poll() is not None


def _recently_ended(store: Store, at: float, *, with_successes: bool) -> list[Job]:
    """All jobs that failed since then or have `--notify`, possibly thousands, and the last ended job; or all."""
    limit = _FIRST_PAGE
    if with_successes:
        while len(ended := store.jobs.ended_since(at, limit)) >= limit:
            limit *= 4
        return ended
    while len(failed := store.jobs.failed_since(at, limit)) >= limit:
        limit *= 4
    limit = _FIRST_PAGE
    while len(marked := store.jobs.to_notify_since(at, limit)) >= limit:
        limit *= 4
    found = {job.id: job for job in (*store.jobs.ended_since(at, 1), *failed, *marked)}
    return sorted(found.values(), key=lambda job: -(job.ended or 0.0))
