"""How many wrong tokens are answered: few from one address, not many from all together."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

# A person who mistypes has ten tries, and one more every half minute.
_TRIES: Final = 10
_SECONDS_PER_TRY: Final = 30.0
# From all addresses together: nobody needs that, and a botnet gains nothing by more.
_TRIES_OF_ALL: Final = 200
_SECONDS_PER_TRY_OF_ALL: Final = 1.0
# Addresses that are remembered; the one that was quiet for longest is forgotten.
_MOST_ADDRESSES: Final = 4096


class Bucket(msgspec.Struct):
    """Fills with every failure and leaks at a steady rate."""

    size: int
    seconds_per_drop: float
    level: float = 0.0
    at: float = 0.0

    def add(self, now: float) -> None:
        # Not much beyond the brim: who keeps knocking still gets in again soon after they stop.
        self.level = min(self.now(now) + 1, self.size + 1)
        self.at = now

    def now(self, now: float) -> float:
        return max(0.0, self.level - (now - self.at) / self.seconds_per_drop)

    def seconds_until_room(self, now: float) -> float:
        return max(0.0, (self.now(now) - (self.size - 1)) * self.seconds_per_drop)


class TooManyFailuresError(Exception):
    """Wrong tokens are not answered for this many whole seconds."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many wrong tokens: try again in {seconds} s")
        self.seconds = seconds


class FailureThrottle:
    """Counts wrong tokens by address. A right token is never asked about: nobody can lock its owner out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all = Bucket(_TRIES_OF_ALL, _SECONDS_PER_TRY_OF_ALL)
        self._by_address: OrderedDict[str, Bucket] = OrderedDict()

    def failed(self, address: str) -> None:
        """Counts a wrong token. Raises TooManyError when there were too many before it, from there or from everywhere.

        What is refused that way still counts for everywhere, but not for its address, which has its next try in time.
        """
        now = self._clock()
        everybody = self._all.seconds_until_room(now)
        self._all.add(now)
        bucket = self._by_address.pop(address, None) or Bucket(_TRIES, _SECONDS_PER_TRY)
        self._by_address[address] = bucket
        while len(self._by_address) > _MOST_ADDRESSES:
            self._by_address.popitem(last=False)
        wait = bucket.seconds_until_room(now)
        if wait == 0:
            bucket.add(now)
        if wait or everybody:
            raise TooManyFailuresError(math.ceil(max(wait, everybody)))
