"""AMD and Intel GPUs, read from what their kernel drivers show in /sys and /proc: no library, no command."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from stoker.gpus import plausible
from stoker.gpus.cards import (
    Card,
    busy_now,
    find_cards,
    first_number,
    introduce,
    memory_total,
    memory_used,
    monitors_of,
    nodes_of,
    state_of,
)
from stoker.gpus.fdinfo import (
    NEEDS_TWO_LOOKS,
    ROCM_UNCOUNTED,
    SURELY_BUSY,
    Client,
    EngineCounters,
    EngineUse,
    OpenDevice,
    Survey,
    busiest,
    survey,
)
from stoker.gpus.model import (
    NOT_SUPPORTED,
    Gpu,
    Look,
    Maybe,
    Process,
    Reading,
    Unknown,
    Utilization,
    known,
)
from stoker.gpus.processes import ProcessCache

ASLEEP: Final = "the GPU is asleep"


class _Sensors(NamedTuple):
    """What a card's hardware monitors measure."""

    power: Maybe[float]
    limit: Maybe[float]
    energy: Maybe[float]
    temperature: Maybe[float]


class _Used(NamedTuple):
    """What the processes did on one card."""

    busy: EngineUse
    processes: Maybe[tuple[Process, ...]]


def open_source(root: Path) -> "DrmSource":
    """Opens what is under `root`, which stands for `/`; `AbsentError` when no AMD or Intel GPU is there."""
    return DrmSource(root)


class DrmSource:
    """Reads the GPUs that were there when it was opened, in the order of their PCI addresses."""

    name = "drm"

    def __init__(self, root: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._monotonic = monotonic
        self._cards = find_cards(root)
        self._gpus = introduce(self._cards)
        self._people = ProcessCache(root, pids_from="proc")
        self._ledger = EngineCounters()
        self._joules: dict[str, tuple[float, float]] = {}
        """By card: when its energy counter was last read, and what it said."""
        self._last: float | None = None

    def look(self) -> Look:
        at, wall = self._monotonic(), time.time()
        span = 0.0 if self._last is None else max(0.0, at - self._last)
        self._last = at
        self._people.refresh()
        states = {card.address: state_of(card) for card in self._cards}
        nodes = {node: card.address for card in self._cards for node in nodes_of(card)}
        if "awake" in states.values():
            seen = survey(self._root, {node for node in nodes if states[nodes[node]] == "asleep"})
        else:
            seen = Survey((), frozenset(), None)
        holdings = _by_card(seen.holdings, nodes)
        readings = []
        for card, gpu in zip(self._cards, self._gpus, strict=True):
            state = states[card.address]
            if isinstance(state, Unknown):
                self._ledger.forget(card.address)
                self._joules.pop(card.address, None)
                readings.append(Reading.unknown(gpu.uuid, state.reason, span=span))
            elif state == "asleep":
                self._joules.pop(card.address, None)
                readings.append(_sleeping(card, gpu, span))
            else:
                used = self._used(card, gpu, holdings.get(card.address, []), seen, span)
                readings.append(self._read(card, gpu, used, at, span))
        note = f"Not every process on the GPUs may be listed: {seen.unseen}." if seen.unseen else None
        return Look(self.name, at, wall, self._gpus, tuple(readings), note=note)

    def close(self) -> None:
        self._people.close()

    def _read(self, card: Card, gpu: Gpu, used: _Used, at: float, span: float) -> Reading:
        total = memory_total(card)
        sensors = self._sensors(card, at)
        return Reading(
            gpu.uuid,
            span,
            _utilization(card, used.busy),
            memory_used(card, total),
            total,
            sensors.power,
            sensors.limit,
            sensors.energy,
            sensors.temperature,
            used.processes,
            Unknown(NOT_SUPPORTED),
        )

    def _used(self, card: Card, gpu: Gpu, holdings: list[OpenDevice], seen: Survey, span: float) -> _Used:
        clients, owners = _distinct(holdings)
        began = self._ledger.began(card.address) and span > 0
        work = self._ledger.work(card.address, clients, span)
        busy = busiest(work.values(), seen.unseen if began else NEEDS_TWO_LOOKS)
        if not holdings and seen.unseen is not None:
            return _Used(busy, Unknown(seen.unseen))
        own: dict[int, list[str]] = {}
        for name, pid in owners.items():
            own.setdefault(pid, []).append(name)
        processes: dict[int, Process] = {}
        for holding in holdings:
            pid = holding.pid
            memory: Maybe[int]
            share: Maybe[float]
            if pid in processes:
                continue
            if pid in own:
                memory = _sum((clients[name].memory for name in own[pid]), gpu.memory)
                gap = ROCM_UNCOUNTED if pid in seen.rocm else None
                share = busiest((work[name] for name in own[pid]), gap).told()
            else:
                memory = share = Unknown(f"counted with process {owners[_name(holding)]}, which shares it")
            processes[pid] = self._people.process(pid, memory, share)
        return _Used(busy, tuple(processes.values()))

    def _sensors(self, card: Card, at: float) -> _Sensors:
        monitors = monitors_of(card)
        energy = _energy(monitors)
        # amdgpu calls the limit a cap, i915 and xe a maximum; xe has no temperature number one.
        limit = first_number(monitors, "power1_cap", "power1_max")
        heat = first_number(monitors, "temp1_input", "temp2_input")
        return _Sensors(
            self._power(card, monitors, energy, at),
            plausible.watts(limit / 1e6) if known(limit) else limit,
            energy,
            plausible.celsius(heat / 1e3) if known(heat) else heat,
        )

    def _power(self, card: Card, monitors: list[Path], energy: Maybe[float], at: float) -> Maybe[float]:
        """The mean over the span from the energy counter, which misses nothing; else what the driver says."""
        before = self._joules.pop(card.address, None)
        mean: Maybe[float] = Unknown(NEEDS_TWO_LOOKS)
        if known(energy):
            self._joules[card.address] = (at, energy)
            if before is not None and at > before[0]:
                mean = _watts_between(before, (at, energy))
            if known(mean):
                return mean
        measured = first_number(monitors, "power1_average", "power1_input")
        if known(measured):
            return plausible.watts(measured / 1e6)
        return mean if known(energy) else measured


def _utilization(card: Card, engines: EngineUse) -> Maybe[Utilization]:
    if card.vendor == "amd":
        share = busy_now(card)
        # That figure is of this instant; a burst between looks shows only in the engines' counters, which in
        # turn know nothing of ROCm, so that on their own they are a lower bound.
        if known(share):
            share = max(share, engines.share)
        elif engines.share >= SURELY_BUSY:
            share = engines.share
        return Utilization(share, share, 1) if known(share) else share
    share = engines.told()
    return Utilization(share, share, 0) if known(share) else share


def _sleeping(card: Card, gpu: Gpu, span: float) -> Reading:
    """A GPU that its driver has switched off does nothing, and it is let sleep on."""
    why = Unknown(ASLEEP)
    # amdgpu keeps these two in the driver's own books: asking for them does not wake the board.
    total = memory_total(card)
    used = memory_used(card, total)
    idle = Utilization(0.0, 0.0, 1)
    return Reading(gpu.uuid, span, idle, used, total, why, why, why, why, (), Unknown(NOT_SUPPORTED))


def _by_card(holdings: Iterable[OpenDevice], nodes: dict[str, str]) -> dict[str, list[OpenDevice]]:
    """The holdings by the PCI address of their card: as fdinfo says, else by the name of the node."""
    cards: dict[str, list[OpenDevice]] = {}
    for holding in holdings:
        address = holding.client.pdev or nodes.get(holding.node)
        if address is not None:
            cards.setdefault(address, []).append(holding)
    return cards


def _name(holding: OpenDevice) -> str:
    """What makes a client one and the same however often its file is open."""
    return holding.client.id or f"{holding.pid} on {holding.node}"


def _distinct(holdings: Iterable[OpenDevice]) -> tuple[dict[str, Client], dict[str, int]]:
    """Each client once, and the process it is counted with: the lowest pid of those that share it."""
    clients: dict[str, Client] = {}
    owners: dict[str, int] = {}
    for holding in holdings:
        name = _name(holding)
        if name not in clients:
            clients[name], owners[name] = holding.client, holding.pid
    return clients, owners


def _sum(amounts: Iterable[Maybe[int]], most: Maybe[int]) -> Maybe[int]:
    total = 0
    for amount in amounts:
        if not known(amount):
            return amount
        total += amount
    return plausible.memory_used(total, most)


def _energy(monitors: list[Path]) -> Maybe[float]:
    microjoules = first_number(monitors, "energy1_input")
    if not known(microjoules):
        return microjoules
    if microjoules < 0:
        return Unknown(f"the driver reported {microjoules} µJ, which cannot be")
    return microjoules / 1e6


def _watts_between(before: tuple[float, float], now: tuple[float, float]) -> Maybe[float]:
    if now[1] < before[1]:
        return Unknown("the energy counter went backwards")
    return plausible.watts((now[1] - before[1]) / (now[0] - before[0]))
