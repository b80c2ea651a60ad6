"""Since when GPUs do what they do, by one clock: workers tell it by their own, which may be minutes off."""

from collections.abc import Iterator, Sequence

import msgspec

from stoker.status.model import GpuCard, Machine


class Sightings:
    """What a worker dates began between the first look that found it and the look before that one.

    What was there at the first look of all is taken as it is told."""

    def __init__(self) -> None:
        self._looked: dict[str, float] = {}
        """When each machine was last found to be there, by its worker's id."""
        self._dates: dict[str, dict[tuple[str, float], float]] = {}
        """By worker: when what it dates so on a GPU began, by the database's clock."""

    def dated(self, machines: Sequence[Machine], now: float) -> tuple[Machine, ...]:
        """The same by the database's clock, as is `now`."""
        dated = tuple(self._machine(machine, now) if machine.there else machine for machine in machines)
        kept = {machine.worker for machine in machines}
        self._looked = {worker: at for worker, at in self._looked.items() if worker in kept}
        self._dates = {worker: dates for worker, dates in self._dates.items() if worker in kept}
        return dated

    def _machine(self, machine: Machine, now: float) -> Machine:
        known, before = self._dates.get(machine.worker, {}), self._looked.get(machine.worker)
        dates = {
            (card.uuid, told): known.get((card.uuid, told), told if before is None else min(max(told, before), now))
            for card in machine.gpus
            for told in _told(card)
        }
        self._dates[machine.worker], self._looked[machine.worker] = dates, now
        return msgspec.structs.replace(machine, gpus=tuple(_card(card, dates) for card in machine.gpus))


def _told(card: GpuCard) -> Iterator[float]:
    if card.since is not None:
        yield card.since
    if card.unread_since is not None:
        yield card.unread_since


def _card(card: GpuCard, dates: dict[tuple[str, float], float]) -> GpuCard:
    return msgspec.structs.replace(
        card,
        since=None if card.since is None else dates[card.uuid, card.since],
        unread_since=None if card.unread_since is None else dates[card.uuid, card.unread_since],
    )
