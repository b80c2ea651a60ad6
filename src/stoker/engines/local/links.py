"""Chooses GPUs by topology: as close to each other as possible, while leaving other free GPUs well connected.

Pure. An unknown link counts as the slowest.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

from stoker.engines.local.capacity import GpuState
from stoker.gpus.model import LINKS

# Up to this many sets are compared exhaustively: every subset of eight GPUs, and of ten.
_MOST_SETS: Final = 300
_UNKNOWN: Final = len(LINKS)
# Losing a link between NUMA nodes costs later jobs nothing.
_SYSTEM: Final = LINKS.index("system")

Slowness = tuple[int, ...]
"""The number of pairs per kind of link, slowest kind first. A smaller value means better connected."""
Penalty = tuple[int, ...]


class Topology:
    """The links between the GPUs of a machine."""

    def __init__(self, gpus: Iterable[GpuState]) -> None:
        self._links: dict[str, dict[str, int]] = {
            gpu.uuid: {other: LINKS.index(link) for other, link in gpu.links} for gpu in gpus if gpu.links
        }

    @property
    def is_known(self) -> bool:
        return bool(self._links)

    def best_set(
        self, ordered: Sequence[str], count: int, free: Collection[str], penalties: Mapping[str, Penalty]
    ) -> list[str]:
        """The best connected `count` of these GPUs. `ordered` is in order of preference.

        Ties go to the smallest penalties, then to the set that leaves the most links between free GPUs, then to
        preference.
        """
        place = {uuid: number for number, uuid in enumerate(ordered)}

        def badness(chosen: Sequence[str]) -> tuple[Slowness, Penalty, Slowness, list[int]]:
            penalty = tuple(map(sum, zip(*(penalties[uuid] for uuid in chosen), strict=True)))
            return self.slowness(chosen), penalty, self._cut(chosen, free), sorted(place[uuid] for uuid in chosen)

        best = min(self._sets(ordered, count), key=badness)
        return sorted(best, key=place.__getitem__)

    def slowness(self, chosen: Sequence[str]) -> Slowness:
        """The slowness of a set. The slowest link decides, since a collective waits for it."""
        counts = [0] * (_UNKNOWN + 1)
        for first, second in combinations(chosen, 2):
            counts[_UNKNOWN - self._distance(first, second)] += 1
        return tuple(counts)

    def _distance(self, first: str, second: str) -> int:
        return self._links.get(first, {}).get(second, _UNKNOWN)

    def _cut(self, chosen: Collection[str], free: Collection[str]) -> Slowness:
        """The number of links between free GPUs that later jobs lose, fastest kind first."""
        counts = [0] * _SYSTEM
        for uuid in chosen:
            if uuid in free:
                for other, distance in self._links.get(uuid, {}).items():
                    if distance < _SYSTEM and other in free and other not in chosen:
                        counts[distance] += 1
        return tuple(counts)

    def _sets(self, ordered: Sequence[str], count: int) -> Iterable[tuple[str, ...]]:
        """The sets to compare: all, or if too many, the neighbours of each GPU and one with the best slowest link.


        Neighbours form the best sets if closeness is transitive, as on a switch. Direct links need not be transitive.
        """
        if math.comb(len(ordered), count) <= _MOST_SETS:
            return combinations(ordered, count)
        found = [tuple(self._nearest(seed, ordered, count)) for seed in ordered]
        slowest = min(max(self._distance(*pair) for pair in combinations(one, 2)) for one in found)
        for distance in range(slowest):
            if (closer := self._within(distance, [], ordered, count)) is not None:
                return [*found, tuple(closer)]
        return found

    def _nearest(self, seed: str, ordered: Sequence[str], count: int) -> list[str]:
        chosen = [seed]
        slowness = {uuid: [0] * (_UNKNOWN + 1) for uuid in ordered if uuid != seed}
        while len(chosen) < count:
            for uuid, counts in slowness.items():
                counts[_UNKNOWN - self._distance(chosen[-1], uuid)] += 1
            chosen.append(min(slowness, key=slowness.__getitem__))
            del slowness[chosen[-1]]
        return chosen

    def _within(self, distance: int, chosen: list[str], ordered: Sequence[str], count: int) -> list[str] | None:
        """The first set without a slower link; None if there is none."""
        if len(chosen) == count:
            return chosen
        for number, uuid in enumerate(ordered):
            near = [other for other in ordered[number + 1 :] if self._distance(uuid, other) <= distance]
            if len(chosen) + 1 + len(near) >= count:
                found = self._within(distance, [*chosen, uuid], near, count)
                if found is not None:
                    return found
        return None
