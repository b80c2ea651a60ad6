"""Notifications beside the page: `stoker serve` and `stoker up` tell people what happens, if somebody is to be told."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from stoker.settings import load_settings

if TYPE_CHECKING:
    from stoker.web.config import Config

# It leaves within a second, unless a message is just being sent.
_PATIENCE: Final = 10.0


@contextmanager
def notifying(config: "Config", tell: Callable[[str], None]) -> Iterator[None]:
    """While the page is served. A URL that cannot work is told before that."""
    wanted = load_settings().notify
    if not wanted.urls:
        yield
        return
    from stoker.notifications.notifier import Notifier
    from stoker.queue import open_queue

    # Whoever asked for any free port cannot be sent a link to it before there is one.
    link = "" if config.port == 0 and not config.url else config.address()
    crier = Notifier(wanted, link, lambda: open_queue(config.queue), tell)
    stop = threading.Event()
    thread = threading.Thread(target=crier.run, args=(stop,), name="crier", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PATIENCE)
