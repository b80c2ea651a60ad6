"""What is known of attempts beyond their outcomes: why each ended, its report, and how it was fitted."""

from collections.abc import Iterable
from typing import Final

import msgspec

from stoker.queue.driver import Driver
from stoker.queue.model import AttemptDetails, EndCause
from stoker.queue.rows import clean_text, json_text

# Many times a report with the stacks of a large program; it begins with what matters.
LONGEST_REPORT: Final = 256 * 1024
# A details is written with the outcome, a moment before or after it; that it is by so much is not seen.
SECONDS_APART: Final = 3600.0


class AttemptDetailsTable:
    """They are in a table of their own: an attempt of which there is nothing to say costs nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def write(self, attempt: str, details: AttemptDetails) -> bool:
        parameters = {
            "attempt": attempt,
            "cause": clean_text(details.cause),
            "rule": clean_text(details.rule),
            "report": clean_text(details.report[:LONGEST_REPORT]),
            "fit": json_text(details.fit),
        }
        return bool(self._driver.fetch("write attempt details", parameters))

    def read(self, attempt: str) -> AttemptDetails | None:
        for cause, rule, report, fit in self._driver.fetch("attempt details", {"attempt": attempt}):
            return AttemptDetails(cause=cause, rule=rule, report=report, fit=msgspec.json.decode(fit))
        return None

    def causes(self, attempts: Iterable[str]) -> dict[str, EndCause]:
        wanted = list(attempts)
        rows = self._driver.fetch("causes", {"attempts": json_text(wanted)}) if wanted else []
        return {attempt: EndCause(cause, rule) for attempt, cause, rule in rows}

    def rule_stops(self, since: float) -> list[tuple[float, int]]:
        rows = self._driver.fetch("stops by rule", {"since": float(since), "written": float(since) - SECONDS_APART})
        return [(ended, len(msgspec.json.decode(gpus, type=tuple[str, ...]))) for ended, gpus in rows]
