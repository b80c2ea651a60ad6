"""Events of device nodes: they come soon and name the GPU."""

import os
import select
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stoker.inotify import OVERFLOWED, FileEvent, Inotify
from stoker.presence.device_events import DeviceEvents
from tests.support.node_holders import NUMBERS, NodeHolders, as_nobody, make_node, needs_root, node_holders, place

__all__ = ["node_holders", "place"]


@pytest.fixture
def nodes(place: Path) -> dict[str, tuple[Path, ...]]:
    return {
        f"GPU-{letter}": (make_node(place / f"dev/{letter}", number),)
        for letter, number in zip("ab", NUMBERS, strict=True)
    }


@pytest.fixture
def events(nodes: dict[str, tuple[Path, ...]]) -> Iterator[DeviceEvents]:
    with closing(DeviceEvents(nodes)) as events:
        yield events


def rings(events: DeviceEvents, within: float = 60.0) -> frozenset[str]:
    return events.changed() if select.select([events.fileno()], [], [], within)[0] else frozenset()


def complaint(events: DeviceEvents) -> str | None:
    return events.why_not


def test_opening_and_closing_a_node_cause_an_event_for_its_gpu(
    events: DeviceEvents, nodes: dict[str, tuple[Path, ...]]
) -> None:
    assert complaint(events) is None
    assert rings(events, 0) == frozenset()
    with nodes["GPU-b"][0].open("rb"):
        assert rings(events) == {"GPU-b"}
        assert rings(events, 0) == frozenset()
    assert rings(events) == {"GPU-b"}
    nodes["GPU-a"][0].open("rb").close()
    nodes["GPU-b"][0].open("rb").close()
    assert rings(events) == {"GPU-a", "GPU-b"}
    assert rings(events, 0) == frozenset()


def test_open_by_another_process_causes_an_event_within_milliseconds(
    events: DeviceEvents, nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    code = """
import os, sys, time
print("ready", flush=True)
for _ in sys.stdin:
    at = time.monotonic()
    os.close(os.open(sys.argv[1], os.O_RDONLY))
    print(at, flush=True)
"""
    holder = node_holders.python(code, nodes["GPU-a"][0])
    assert holder.stdin is not None
    assert holder.stdout is not None
    delays = []
    for _ in range(21):
        holder.stdin.write("go\n")
        holder.stdin.flush()
        assert rings(events) == {"GPU-a"}
        noticed = time.monotonic()
        delays.append(noticed - float(holder.stdout.readline()))
        events.changed()
    # Far above what it takes, far below what a look every few seconds would. Of the quicker ones: on a busy machine
    # one of the two processes often has to wait for the other.
    assert sorted(delays)[5] < 0.05


def test_mig_slices_of_one_gpu_cause_events_together(place: Path) -> None:
    node = make_node(place / "shared", NUMBERS[0])
    with closing(DeviceEvents({"MIG-1": (node,), "MIG-2": (node,), "GPU-none": ()})) as events:
        node.open("rb").close()
        assert rings(events) == {"MIG-1", "MIG-2"}


def test_recreated_node_causes_an_event_and_is_watched(
    events: DeviceEvents, nodes: dict[str, tuple[Path, ...]]
) -> None:
    (node,) = nodes["GPU-a"]
    for _ in range(3):
        node.unlink()
        make_node(node, NUMBERS[0])
        assert rings(events) == {"GPU-a"}
        events.changed()
        node.open("rb").close()
        assert rings(events) == {"GPU-a"}


def test_missing_node_is_reported_and_watched_once_it_exists(place: Path) -> None:
    node = place / "nvidia0"
    with closing(DeviceEvents({"GPU-a": (node,)})) as events:
        assert complaint(events) == f"{node} is not there"
        assert events.fileno() >= 0
        make_node(place / "other", NUMBERS[0])
        assert rings(events) == frozenset()
        make_node(place / "moved", NUMBERS[0]).rename(node)
        assert rings(events) == {"GPU-a"}
        assert complaint(events) is None
        node.open("rb").close()
        assert rings(events) == {"GPU-a"}


@needs_root
def test_unreadable_node_is_reported(place: Path) -> None:
    node = make_node(place / "card0", NUMBERS[0], mode=0o600)
    code = 'print(DeviceEvents({"GPU-a": (Path(sys.argv[1]),)}).why_not)'
    assert as_nobody(code, node) == f"{node} may not be read by this user\n"


def test_missing_nodes_or_directory_leave_nothing_to_wait_for(place: Path) -> None:
    for nodes in ({"GPU-a": ()}, {"GPU-a": (place / "no/such/directory",)}):
        with closing(DeviceEvents(nodes)) as events:
            assert events.fileno() == -1
            assert events.why_not is not None
            assert events.changed() == frozenset()


def test_exhausted_inotify_limit_is_reported(
    nodes: dict[str, tuple[Path, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted(Inotify):
        def __init__(self) -> None:
            super().__init__()
            self.close()

    monkeypatch.setattr("stoker.presence.device_events.Inotify", Exhausted)
    with closing(DeviceEvents(nodes)) as events:
        assert events.fileno() == -1
        assert "max_user_instances" in (events.why_not or "")
        assert events.changed() == frozenset()


def test_event_queue_overflow_causes_an_event_for_every_gpu(
    events: DeviceEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events._events, "read", lambda: [FileEvent(-1, OVERFLOWED, "")])
    assert events.changed() == {"GPU-a", "GPU-b"}


def test_closed_events_report_nothing(nodes: dict[str, tuple[Path, ...]]) -> None:
    events = DeviceEvents(nodes)
    descriptor = events.fileno()
    events.close()
    assert events.fileno() == -1
    assert events.changed() == frozenset()
    with pytest.raises(OSError):
        os.fstat(descriptor)
