"""Polls the queue for events and passes them through the throttle to the senders."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from stoker.actions.notify import AppriseChannel
from stoker.errors import StokerError
from stoker.notifications.events import Event, EventDetector
from stoker.notifications.senders import RETRY_DELAYS, Message, Sender, compose
from stoker.notifications.throttle import Throttle, release
from stoker.notifications.watch import QueueWatch
from stoker.queue.store import Store
from stoker.settings import Notifications
from stoker.units import parse_duration

_RETRY_AFTER: Final = 5.0
# Senders for URLs of a job or of the page end after this long without a message.
_IDLE_FOR: Final = 600.0


class Notifier:
    """Sends each event once, even if several processes run a notifier. Run `Notifier(settings.notify, link, open_store,
    log).run(stop)` in a thread. Besides the URLs of the settings it uses those of the page and of jobs, which are in
    the queue.
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
        kinds = settings.events if settings.urls else ()
        self._detector = EventDetector(kinds, parse_duration(settings.unknown_after), settings.urls)
        self._watch = QueueWatch(with_successes="succeeded" in kinds)
        self._throttle = Throttle()
        self._channels = channels_of(settings)
        self._retry_delays = retry_delays
        self._senders = [Sender(channel, log, retry_delays) for channel in self._channels]
        self._others: dict[str, tuple[Sender, AppriseChannel]] = {}
        """Senders for URLs of the page and of jobs."""
        self._invalid: set[str] = set()
        """Other URLs that failed, which was logged."""
        self._last_error = ""
        """The last logged error; empty when it is over."""

    def run(self, stop: threading.Event) -> None:
        """Runs until `stop` is set; retries while the queue is unreachable."""
        for sender in self._senders:
            sender.start()
        try:
            while not stop.is_set():
                try:
                    with self._open() as store:
                        self._poll_until(store, stop)
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

    def _poll_until(self, store: Store, stop: threading.Event) -> None:
        changes = store.listen()
        try:
            while not stop.is_set():
                # Most queues without URLs in the settings have no URLs at all.
                if self._senders or store.notices.is_anyone_to_notify():
                    self._poll(store)
                self._last_error = ""
                self._watch.wait(changes, stop)
        finally:
            changes.close()

    def _poll(self, store: Store) -> None:
        state = self._watch.read(store)
        self._throttle.add(self._detector.detect(state))
        for batch in self._throttle.due(state.now, store.notices):
            message = compose(batch.kind, batch.events, self._link, prefix=batch.prefix)
            for sender in self._senders_of(batch.to):
                sender.send(message)
        self._drop_idle()

    def _senders_of(self, url: str) -> list[Sender]:
        if not url:
            return self._senders
        if url not in self._others and url not in self._invalid:
            channel = AppriseChannel(url)
            try:
                channel.prepare("a URL of a job or of the page")
            except StokerError as error:
                self._invalid.add(url)
                channel.close()
                self._log(str(error))
                return []
            sender = Sender(channel, self._log, self._retry_delays)
            sender.start()
            self._others[url] = sender, channel
        return [self._others[url][0]] if url in self._others else []

    def _drop_idle(self) -> None:
        for url, (sender, channel) in list(self._others.items()):
            if sender.idle_since is not None and time.monotonic() - sender.idle_since > _IDLE_FOR:
                del self._others[url]
                sender.stop()
                channel.close()

    def _shut_down(self) -> None:
        """Releases events that were not sent: another process may send them."""
        undelivered = [sender.stop() for sender in self._senders]
        others = [sender.stop() for sender, _channel in self._others.values()]
        for channel in (*self._channels, *(channel for _sender, channel in self._others.values())):
            channel.close()
        events = [
            *self._throttle.unsent(),
            *_sent_by_nobody(undelivered),
            *(event for messages in others for message in messages for event in message.events),
        ]
        if not events:
            return
        try:
            with self._open() as store:
                release(events, store.notices)
        except StokerError as error:
            self._log(f"{len(events)} events were not sent: {error}")


def channels_of(settings: Notifications) -> list[AppriseChannel]:
    """One prepared sender per URL."""
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
