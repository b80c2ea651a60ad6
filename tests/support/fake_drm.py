"""A machine with AMD and Intel GPUs made of plain files: the /sys and /proc that their drivers would show."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.gpus.drm import DrmSource
from stoker.gpus.model import Maybe, Process, Reading, Unknown, Utilization, known

INITIAL_PID_NAMESPACE = "pid:[4026531836]"


class Clock:
    """Monotonic time that moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeCard:
    """One card: `write` sets what a file of its device directory says."""

    def __init__(self, machine: "FakeMachine", number: int, address: str, vendor: str, device: str) -> None:
        self.number = number
        self.address = address
        self.node = f"renderD{128 + number}"
        self.device = machine.root / "sys/devices/pci0000:00" / address
        self.device.mkdir(parents=True)
        self.entry = machine.root / f"sys/class/drm/card{number}"
        self.entry.mkdir(parents=True)
        (self.entry / "device").symlink_to(self.device)
        (self.device / "drm" / f"card{number}").mkdir(parents=True)
        (self.device / "drm" / self.node).mkdir()
        self.write("vendor", vendor)
        self.write("device", device)
        self.write("uevent", f"DRIVER=some\nPCI_ID={vendor[2:]}:{device[2:]}\nPCI_SLOT_NAME={address}")
        self.write("power/runtime_status", "active")

    def write(self, name: str, value: object) -> None:
        path = self.device / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    def remove(self, name: str) -> None:
        (self.device / name).unlink()

    def unplug(self) -> None:
        shutil.rmtree(self.device)
        shutil.rmtree(self.entry)


class FakeMachine:
    """The root directory of the machine; process 1 is always there, as on every Linux."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/class/drm").mkdir(parents=True)
        self.process(1, "init")

    def amd(self, number: int = 0, address: str = "0000:03:00.0", **files: object) -> FakeCard:
        card = FakeCard(self, number, address, "0x1002", "0x744c")
        defaults = {"gpu_busy_percent": 0, "mem_info_vram_used": 2**30, "mem_info_vram_total": 16 * 2**30}
        for name, value in (defaults | files).items():
            card.write(name, value)
        return card

    def intel(self, number: int = 0, address: str = "0000:00:02.0") -> FakeCard:
        return FakeCard(self, number, address, "0x8086", "0x56a0")

    def process(self, pid: int, name: str = "python") -> None:
        directory = self.root / f"proc/{pid}"
        (directory / "fd").mkdir(parents=True)
        (directory / "fdinfo").mkdir()
        rest = " ".join(["S", *["0"] * 18, str(pid * 10), *["0"] * 30])
        (directory / "stat").write_text(f"{pid} ({name}) {rest}\n")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / f"proc/{pid}")

    def hold(self, pid: int, descriptor: int, target: str, fdinfo: str = "") -> Path:
        """Process `pid` has `target` open, or still has it: fdinfo is what the kernel says of it now."""
        if not (self.root / f"proc/{pid}").exists():
            self.process(pid)
        link = self.root / f"proc/{pid}/fd/{descriptor}"
        if not link.is_symlink():
            link.symlink_to(target)
        info = self.root / f"proc/{pid}/fdinfo/{descriptor}"
        info.write_text(fdinfo)
        return info

    def client(self, pid: int, card: FakeCard, client: int | str, descriptor: int = 3, /, **keys: object) -> Path:
        """Process `pid` is a client of the card; `engine_render="5 ns"` becomes `drm-engine-render: 5 ns`."""
        return self.hold(pid, descriptor, f"/dev/dri/{card.node}", fdinfo(card, client, **keys))

    def in_container(self) -> None:
        (self.root / "proc/self/ns").mkdir(parents=True)
        (self.root / "proc/self/ns/pid").symlink_to("pid:[4026532999]")

    def on_the_host(self) -> None:
        (self.root / "proc/self/ns").mkdir(parents=True)
        (self.root / "proc/self/ns/pid").symlink_to(INITIAL_PID_NAMESPACE)


def fdinfo(card: FakeCard, client: int | str, **keys: object) -> str:
    lines = ["pos:\t0", "flags:\t02100002", f"drm-driver:\t{keys.pop('driver', 'i915')}"]
    lines += [f"drm-pdev:\t{card.address}", f"drm-client-id:\t{client}"]
    lines += [f"drm-{key.replace('_', '-')}:\t{value}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


class Refusals:
    """Paths for which the kernel answers with an error: what root cannot provoke on plain files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._errors: dict[str, int] = {}
        for name in ("open", "scandir", "listdir"):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name)))

    def refuse(self, path: Path, error: int) -> None:
        self._errors[str(path)] = error

    def allow(self, path: Path) -> None:
        del self._errors[str(path)]

    def _guarded(self, real: Any) -> Any:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            error = self._errors.get(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
            if error is not None:
                raise OSError(error, os.strerror(error), str(path))
            return real(path, *args, **kwargs)

        return call


class Opened:
    """The names of the watched files that have been opened so far."""

    def __init__(self, inotify: int, names: dict[int, str]) -> None:
        self._inotify = inotify
        self._names = names

    def names(self) -> set[str]:
        try:
            events = os.read(self._inotify, 2**16)
        except BlockingIOError:
            return set()
        found = set()
        while events:
            watch, length = int.from_bytes(events[:4], "little"), int.from_bytes(events[12:16], "little")
            found.add(self._names[watch])
            events = events[16 + length :]
        return found


@contextmanager
def watching_opens(*paths: Path) -> Iterator[Opened]:
    """Has the kernel report each opening of these files."""
    libc = ctypes.CDLL(None, use_errno=True)
    inotify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if inotify < 0:
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
    try:
        in_open = 0x20
        names = {libc.inotify_add_watch(inotify, bytes(path), in_open): path.name for path in paths}
        assert -1 not in names, "a file to watch is not there"
        yield Opened(inotify, names)
    finally:
        os.close(inotify)


def source_of(machine: FakeMachine, clock: Clock) -> DrmSource:
    return DrmSource(machine.root, monotonic=clock)


def first_reading(machine: FakeMachine, clock: Clock) -> Reading:
    return source_of(machine, clock).look().readings[0]


def next_reading(source: DrmSource, clock: Clock, seconds: float = 10.0) -> Reading:
    """Of the first GPU, after some time has passed."""
    clock.advance(seconds)
    return source.look().readings[0]


def reason(value: object) -> str:
    assert isinstance(value, Unknown), f"{value!r} is known"
    return value.reason


def peak(reading: Reading) -> float:
    assert isinstance(reading.utilization, Utilization), reading.utilization
    return reading.utilization.peak


def processes(reading: Reading) -> dict[int, Process]:
    assert known(reading.processes), reading.processes
    return {process.pid: process for process in reading.processes}


def close_to(value: Maybe[float], expected: float) -> bool:
    return known(value) and value == pytest.approx(expected)
