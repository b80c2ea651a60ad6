"""How a feed lives through a queue, a network or a Google that is away: it waits and tries again, and tells it once."""

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from stoker.errors import StokerError
from stoker.feeds.voice import Voice

# Most outages are a dropped connection: the first try again comes soon.
FIRST_PAUSE: Final = 0.5
# Google's quotas are per minute: whoever waits so long finds a fresh one.
LONGEST_PAUSE: Final = 64.0

T = TypeVar("T")


class Patience:
    """Waits out the errors in `away`; all others end the feed."""

    def __init__(
        self,
        voice: Voice,
        *away: type[StokerError],
        longest: float = LONGEST_PAUSE,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._voice = voice
        self._away = away
        self._longest = longest
        self._sleep = sleep
        self._chance = chance

    def also(self, *away: type[StokerError]) -> None:
        """From now on these are waited out too."""
        self._away = (*self._away, *away)

    def until_done(self, step: Callable[[], T]) -> T:
        pause = FIRST_PAUSE
        told = False
        while True:
            try:
                answer = step()
            except self._away as error:
                if not told:
                    self._voice.say(f"{error} (waiting, and trying again)")
                told = True
                # Several feeders that were stopped by the same thing must not all come back at the same moment.
                self._sleep(pause * (1.0 + self._chance()) / 2)
                pause = min(2 * pause, self._longest)
                continue
            if told:
                self._voice.say("it works again: going on")
            return answer
