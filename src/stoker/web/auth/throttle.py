"""Rate limits for wrong tokens: per address, and for all addresses together."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

# Ten tries for mistyped tokens, and one more every half minute.
_TRIES: Final = 10
_SECONDS_PER_TRY: Final = 30.0
# From all addresses together, against distributed guessing.
_TRIES_OF_ALL: Final = 200
_SECONDS_PER_TRY_OF_ALL: Final = 1.0
# The address with the oldest failure is dropped.
_MAX_ADDRESSES: Final = 4096


class Bucket(msgspec.Struct):
    """A leaky bucket of failures."""

    size: int
    seconds_per_drop: float
    level: float = 0.0
    at: float = 0.0

    def add(self, now: float) -> None:
        # Capped just above its size, so that a client that stops trying is soon allowed again.
        self.level = min(self.now(now) + 1, self.size + 1)
        self.at = now

    def now(self, now: float) -> float:
        return max(0.0, self.level - (now - self.at) / self.seconds_per_drop)

    def seconds_until_room(self, now: float) -> float:
        return max(0.0, (self.now(now) - (self.size - 1)) * self.seconds_per_drop)


class TooManyFailuresError(Exception):
    """Wrong tokens are refused for this number of seconds."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many wrong tokens: try again in {seconds} s")
        self.seconds = seconds


class FailureThrottle:
    """Counts wrong tokens by address. Valid tokens are not counted: nobody can lock their owner out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all = Bucket(_TRIES_OF_ALL, _SECONDS_PER_TRY_OF_ALL)
        self._by_address: OrderedDict[str, Bucket] = OrderedDict()

    def failed(self, address: str) -> None:
        """Counts a wrong token; TooManyFailuresError if its address or all addresses reached the limit before.

        A refused try counts only for all addresses, so that its address is allowed the next try in time.
        """
        now = self._clock()
        wait_for_all = self._all.seconds_until_room(now)
        self._all.add(now)
        bucket = self._by_address.pop(address, None) or Bucket(_TRIES, _SECONDS_PER_TRY)
        self._by_address[address] = bucket
        while len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        wait = bucket.seconds_until_room(now)
        if wait == 0:
            bucket.add(now)
        if wait or wait_for_all:
            raise TooManyFailuresError(math.ceil(max(wait, wait_for_all)))
