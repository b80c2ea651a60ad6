"""What was told to people already, so that of many processes only one tells it."""

from typing import Final

from stoker.queue.driver import Driver
from stoker.queue.periodic import PeriodicTask
from stoker.queue.rows import clean_text

# Nothing that people are told of is two months old when it is found.
KEPT_SECONDS: Final = 60 * 86400.0
SECONDS_BETWEEN_FORGETTING: Final = 3600.0


class Notices:
    """Names of what was told, each with the time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._cleanup = PeriodicTask(SECONDS_BETWEEN_FORGETTING)

    def note_once(self, key: str) -> bool:
        if self._cleanup.is_due():
            self._driver.fetch("forget notices", {"age": KEPT_SECONDS})
        return bool(self._driver.fetch("write notice", {"name": clean_text(key)}))

    def forget_note(self, key: str) -> bool:
        return bool(self._driver.fetch("delete notice", {"name": clean_text(key)}))
