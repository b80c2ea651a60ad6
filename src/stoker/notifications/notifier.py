"""Tells people what happened: looks at the queue, paces, and hands messages to couriers; in a thread of its own."""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from stoker.actions.messages import Channel
from stoker.errors import BadInputError, StokerError
from stoker.notifications.events import YOUNG, Event, News, Sight, is_unexplained
from stoker.notifications.message import Message, compose
from stoker.notifications.sender import PAUSES, Sender
from stoker.notifications.throttle import Throttle, give_back
from stoker.queue.changes import ChangeListener
from stoker.queue.model import ENDED, Attempt, Job
from stoker.queue.store import Store
from stoker.settings import Notifications
from stoker.units import parse_duration

# Heartbeats ring no bell: a worker that is gone and a GPU that is unknown are found by looking.
_LOOK_EVERY: Final = 5.0
# However often the bell rings.
_SECONDS_BETWEEN_LOOKS: Final = 1.0
# How soon it notices that it is to stop.
_STEP: Final = 0.25
# A transaction that was slow to commit tells of a time before the last look.
_OVERLAP: Final = 60.0
# A queue that is away is asked for so often.
_TRY_AGAIN: Final = 5.0
# An attempt that ended without a finding has none after so long.
_EXPLAINED_WITHIN: Final = 30.0
_FIRST_PAGE: Final = 200


class Notifier:
    """One per process; several processes tell each event once together.

    `Crier(settings.notify, link, open_store, say).run(stop)` in a thread is all there is to it.
    """

    def __init__(
        self,
        wanted: Notifications,
        link: str,
        open_store: Callable[[], Store],
        say: Callable[[str], None],
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        """Refuses a URL that cannot work. `link` is the page's address, unless the settings have one; `say` gets
        sentences for the log, from several threads, and none holds a URL. `open_store` is called in `run`."""
        self._open = open_store
        self._say = say
        self._link = wanted.link or link
        self._news = News(wanted.events, parse_duration(wanted.unknown_after))
        self._pacer = Throttle()
        self._channels = channels_of(wanted)
        self._couriers = [Sender(channel, say, pauses) for channel in self._channels]
        self._looked: float | None = None
        self._running: dict[str, Attempt] = {}
        self._unexplained: dict[str, tuple[str, float]] = {}
        """The jobs of attempts that no longer run, and since when."""
        self._complaint = ""
        """What was said last of why nobody can be told anything; empty once that is over."""

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set. A queue that is away is waited for."""
        for courier in self._couriers:
            courier.start()
        try:
            while not stop.is_set():
                try:
                    with self._open() as store:
                        self._watch(store, stop)
                except StokerError as error:
                    self._complain(str(error))
                    stop.wait(_TRY_AGAIN)
                except Exception as error:  # noqa: BLE001 - a mistake of ours must not silence it for ever
                    # Its words are not ours, and might hold an address with a password.
                    self._complain(f"internal error ({type(error).__name__})")
                    stop.wait(_TRY_AGAIN)
        finally:
            self._leave()

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._say(f"nobody can be told what happens: {why} (waiting, and trying again)")
        self._complaint = why

    def _watch(self, store: Store, stop: threading.Event) -> None:
        changes = store.listen()
        try:
            while not stop.is_set():
                soon = self._look(store)
                self._complaint = ""
                self._rest(changes, stop, _SECONDS_BETWEEN_LOOKS if soon else _LOOK_EVERY)
        finally:
            changes.close()

    def _look(self, store: Store) -> bool:
        """Whether more is about to be known."""
        sight = self._sight(store)
        self._pacer.add(self._news.of(sight))
        self._looked = sight.now
        for bundle in self._pacer.due(sight.now, store):
            message = compose(bundle.kind, bundle.events, self._link, following=bundle.following)
            for courier in self._couriers:
                courier.take(message)
        return bool(self._unexplained) or any(is_unexplained(job, sight) for job in sight.ended)

    def _sight(self, store: Store) -> Sight:
        now = store.clock()
        oldest = now - YOUNG
        running = store.running()
        jobs = {job.id: job for job in store.jobs(states=["running"], limit=2**31 - 1)} if running else {}
        # Asked before what has ended: if nothing is left, the last one is among those.
        unfinished = bool(running or jobs) or any(store.jobs(states=[state], limit=1) for state in ("queued", "held"))
        ended = _told_of(store, oldest if self._looked is None else max(oldest, self._looked - _OVERLAP))
        self._note_ends(running, now)
        causes = store.causes({job.attempt for job in ended if job.attempt is not None} | self._unexplained.keys())
        return Sight(
            now=now,
            ended=ended,
            retried=self._retried(store, causes, {job.id for job in ended}),
            causes=causes,
            unfinished=unfinished,
            workers=store.workers(),
            running=[(attempt, jobs[attempt.job]) for attempt in running if attempt.job in jobs],
        )

    def _note_ends(self, running: Sequence[Attempt], now: float) -> None:
        """A job that is tried again is not among those that ended: its attempt is missed among those that run."""
        found = {attempt.id: attempt for attempt in running}
        self._unexplained |= {
            attempt.id: (attempt.job, now) for attempt in self._running.values() if attempt.id not in found
        }
        self._unexplained = {
            name: (job, since)
            for name, (job, since) in self._unexplained.items()
            if now - since < _EXPLAINED_WITHIN and name not in found
        }
        self._running = found

    def _retried(self, store: Store, causes: dict[str, str], ended: set[str]) -> dict[str, Job]:
        retried: dict[str, Job] = {}
        for name, (job, _since) in list(self._unexplained.items()):
            if job in ended:
                del self._unexplained[name]
            elif causes.get(name):
                del self._unexplained[name]
                attempt = store.attempt(name) if causes[name] == "idle" else None
                if attempt is not None:
                    with contextlib.suppress(BadInputError):  # somebody has had it forgotten since
                        found = store.job(job)
                        if found.state not in ENDED:
                            # Why it was stopped is told by the attempt: the job may run again, and say nothing of it.
                            retried[name] = msgspec.structs.replace(found, sentence=attempt.reason)
        return retried

    def _rest(self, changes: ChangeListener, stop: threading.Event, longest: float) -> None:
        """Until the bell rings or it is time to look; the next look is not too soon in any case."""
        begun = time.monotonic()
        rang = False
        while not stop.is_set():
            passed = time.monotonic() - begun
            if passed >= (_SECONDS_BETWEEN_LOOKS if rang else longest):
                return
            number = -1 if rang else changes.fileno()
            if number < 0:
                stop.wait(_STEP)
                rang = changes.poll() or rang
                continue
            waiting = select.poll()
            waiting.register(number, select.POLLIN)
            waiting.poll(_STEP * 1000)
            rang = changes.poll()

    def _leave(self) -> None:
        """What nobody was told of may be told by the next one."""
        unbrought = [courier.leave() for courier in self._couriers]
        for channel in self._channels:
            channel.close()
        events = [*self._pacer.unsent(), *_told_to_nobody(unbrought)]
        if not events:
            return
        try:
            with self._open() as store:
                give_back(events, store)
        except StokerError as error:
            self._say(f"{len(events)} events were not told to anybody: {error}")


def channels_of(wanted: Notifications) -> list[Channel]:
    """One for each URL, ready to send."""
    channels = [Channel(url) for url in wanted.urls]
    for number, channel in enumerate(channels, 1):
        channel.prepare(f"[notify]: URL {number} of {len(channels)}")
    return channels


def _told_to_nobody(unbrought: Sequence[Sequence[Message]]) -> list[Event]:
    """What every courier still has."""
    first, *others = unbrought or [[]]
    return [
        event
        for message in first
        if all(any(message is one for one in messages) for messages in others)
        for event in message.events
    ]


def _told_of(store: Store, at: float) -> list[Job]:
    """All that failed since then, for thousands may in a minute; of the others only the last that ended."""
    limit = _FIRST_PAGE
    while len(failed := store.failed_since(at, limit)) >= limit:
        limit *= 4
    ids = {job.id for job in failed}
    return [*(job for job in store.ended_since(at, 1) if job.id not in ids), *failed]
