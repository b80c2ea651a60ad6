"""Polls the queue for events and passes them through the throttle to the senders."""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from stoker.actions.notify import AppriseChannel
from stoker.errors import BadInputError, StokerError
from stoker.notifications.events import MAX_AGE, Event, EventDetector, QueueState, awaits_cause
from stoker.notifications.senders import RETRY_DELAYS, Message, Sender, compose
from stoker.notifications.throttle import Throttle, release
from stoker.queue.driver import ChangeListener
from stoker.queue.model import ENDED, Attempt, AttemptDetails, Job
from stoker.queue.store import Store
from stoker.settings import Notifications
from stoker.units import parse_duration

# Heartbeats do not count as changes: lost workers and unknown GPUs are found by polling.
_POLL_EVERY: Final = 5.0
# However often the queue changes.
_MIN_POLL_INTERVAL: Final = 1.0
# How fast it reacts to a stop.
_STEP: Final = 0.25
# A slow transaction may commit an end from before the last poll.
_OVERLAP: Final = 60.0
_RETRY_AFTER: Final = 5.0
# An attempt without a recorded cause after this has none.
_CAUSE_WITHIN: Final = 30.0
_FIRST_PAGE: Final = 200


class Notifier:
    """Sends each event once, even if several processes run a notifier.

    `Notifier(settings.notify, link, open_store, log).run(stop)` in a thread is all there is to it.
    """

    def __init__(
        self,
        settings: Notifications,
        link: str,
        open_store: Callable[[], Store],
        log: Callable[[str], None],
        retry_delays: Sequence[float] = RETRY_DELAYS,
    ) -> None:
        """Raises BadInputError for an invalid URL. `link` is the page's address unless the settings have one. `log` is
        called from several threads, never with a URL."""
        self._open = open_store
        self._log = log
        self._link = settings.link or link
        self._kinds = frozenset(settings.events)
        self._detector = EventDetector(settings.events, parse_duration(settings.unknown_after))
        self._throttle = Throttle()
        self._channels = channels_of(settings)
        self._senders = [Sender(channel, log, retry_delays) for channel in self._channels]
        self._polled: float | None = None
        self._running: dict[str, Attempt] = {}
        self._awaiting_cause: dict[str, tuple[str, float]] = {}
        """Jobs of attempts that have ended without a known cause, and since when."""
        self._last_error = ""
        """The last error that was logged; empty once it is over."""

    def run(self, stop: threading.Event) -> None:
        """Runs until `stop` is set, and waits for a queue that is away."""
        for sender in self._senders:
            sender.start()
        try:
            while not stop.is_set():
                try:
                    with self._open() as store:
                        self._watch(store, stop)
                except StokerError as error:
                    self._report_error(str(error))
                    stop.wait(_RETRY_AFTER)
                except Exception as error:  # noqa: BLE001 - a bug must not end notifications
                    # Its message may contain an address with a password.
                    self._report_error(f"internal error ({type(error).__name__})")
                    stop.wait(_RETRY_AFTER)
        finally:
            self._shut_down()

    def _report_error(self, why: str) -> None:
        if why != self._last_error:
            self._log(f"notifications are not sent: {why} (trying again)")
        self._last_error = why

    def _watch(self, store: Store, stop: threading.Event) -> None:
        changes = store.listen()
        try:
            while not stop.is_set():
                soon = self._poll(store)
                self._last_error = ""
                self._wait(changes, stop, _MIN_POLL_INTERVAL if soon else _POLL_EVERY)
        finally:
            changes.close()

    def _poll(self, store: Store) -> bool:
        """Whether a cause is about to be known."""
        state = self._queue_state(store)
        self._throttle.add(self._detector.detect(state))
        self._polled = state.now
        for batch in self._throttle.due(state.now, store.notices):
            message = compose(batch.kind, batch.events, self._link, prefix=batch.prefix)
            for sender in self._senders:
                sender.send(message)
        return bool(self._awaiting_cause) or any(awaits_cause(job, state) for job in state.ended)

    def _queue_state(self, store: Store) -> QueueState:
        now = store.clock()
        oldest = now - MAX_AGE
        running = store.attempts.running()
        jobs = {job.id: job for job in store.jobs.find(states=["running"], limit=2**31 - 1)} if running else {}
        # Before the ended jobs: if nothing is left, the last job is among them.
        unfinished = bool(running or jobs) or any(
            store.jobs.find(states=[state], limit=1) for state in ("queued", "held")
        )
        since = oldest if self._polled is None else max(oldest, self._polled - _OVERLAP)
        ended = _recently_ended(store, since, with_successes="succeeded" in self._kinds)
        self._track_ended(running, now)
        causes = store.attempts.causes(
            {job.attempt for job in ended if job.attempt is not None} | self._awaiting_cause.keys()
        )
        return QueueState(
            now=now,
            ended=ended,
            done=store.groups.done_since(since) if "group-done" in self._kinds else (),
            retried=self._retried(store, causes, {job.id for job in ended}),
            causes=causes,
            unfinished=unfinished,
            workers=store.workers.all(),
            running=[(attempt, jobs[attempt.job]) for attempt in running if attempt.job in jobs],
        )

    def _track_ended(self, running: Sequence[Attempt], now: float) -> None:
        """Finds attempts of retried jobs, which are not among the ended jobs: they run no more."""
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

    def _wait(self, changes: ChangeListener, stop: threading.Event, longest: float) -> None:
        """Waits for a change or the next poll, but at least the minimum interval."""
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

    def _shut_down(self) -> None:
        """Releases events that were not sent: another process may send them."""
        undelivered = [sender.stop() for sender in self._senders]
        for channel in self._channels:
            channel.close()
        events = [*self._throttle.unsent(), *_sent_by_nobody(undelivered)]
        if not events:
            return
        try:
            with self._open() as store:
                release(events, store.notices)
        except StokerError as error:
            self._log(f"{len(events)} events were not sent: {error}")


def channels_of(settings: Notifications) -> list[AppriseChannel]:
    """One for each URL, prepared."""
    channels = [AppriseChannel(url) for url in settings.urls]
    for number, channel in enumerate(channels, 1):
        channel.prepare(f"[notify]: URL {number} of {len(channels)}")
    return channels


def _sent_by_nobody(undelivered: Sequence[Sequence[Message]]) -> list[Event]:
    """Events that every sender still has."""
    first, *others = undelivered or [[]]
    return [
        event
        for message in first
        if all(any(message is one for one in messages) for messages in others)
        for event in message.events
    ]


def _recently_ended(store: Store, at: float, *, with_successes: bool) -> list[Job]:
    """All jobs that failed since then, which may be thousands, and the last one that ended otherwise; or all."""
    limit = _FIRST_PAGE
    if with_successes:
        while len(ended := store.jobs.ended_since(at, limit)) >= limit:
            limit *= 4
        return ended
    while len(failed := store.jobs.failed_since(at, limit)) >= limit:
        limit *= 4
    ids = {job.id for job in failed}
    return [*(job for job in store.jobs.ended_since(at, 1) if job.id not in ids), *failed]
