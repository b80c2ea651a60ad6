"""Other users of a GPU, from the driver's list and the holders of its device node."""

import os
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from stoker.fill.other_users import WORKING, OtherUsers
from stoker.fill.slot import SlotView
from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown, Utilization
from stoker.presence.holders import DeviceHolder, Scan
from stoker.procfs import identify

GPU = "GPU-a"
IDLE = SlotView(True, "")
BUSY = Utilization(WORKING, WORKING, 1)
AT_REST = Utilization(0.0, 0.0, 6)


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    """A real process."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def started(pid: int) -> int:
    found = identify(pid)
    assert found is not None
    return found.started


def holder(pid: int, name: str = "python") -> DeviceHolder:
    return DeviceHolder(pid, started(pid), name, name, "alice")


def client(pid: int, name: str = "python") -> Process:
    return Process(pid, started(pid), name, "alice", 2**30, Unknown("not measured"))


def look(processes: Maybe[Sequence[Process]] = (), utilization: Maybe[Utilization] = AT_REST) -> Look:
    listed = processes if isinstance(processes, Unknown) else tuple(processes)
    gpu = Gpu(GPU, 0, "H100", "nvidia", 0, 80 * 2**30, "0000:65:00.0")
    reading = Reading.unknown(GPU, "not asked")
    fields = {name: getattr(reading, name) for name in Reading.__struct_fields__}
    return Look("test", 0.0, 0.0, (gpu,), (Reading(**fields | {"processes": listed, "utilization": utilization}),))


def view(
    seen: Look, *holders: DeviceHolder, own: Sequence[int] = (), ignore: Sequence[str] = (), occupied: bool = False
) -> SlotView:
    other_users = OtherUsers(lambda pid: pid in own, {GPU: ignore})
    other_users.looked(seen)
    other_users.scanned(Scan({GPU: holders}, 0))
    return other_users.views([GPU] if occupied else [])[GPU]


NOT_SUPPORTED = look(Unknown("not supported by this GPU"), Unknown("not supported by this GPU"))
LOST = look(Unknown("the GPU is lost"), Unknown("the GPU is lost"))


@pytest.mark.parametrize(
    ("seen", "has_node", "expected"),
    [
        (NOT_SUPPORTED, True, True),
        (NOT_SUPPORTED, False, None),
        (LOST, True, None),
        (look(utilization=BUSY), True, False),
    ],
)
def test_gpu_without_driver_values_is_idle_without_holders(
    stranger: "subprocess.Popen[bytes]", seen: Look, has_node: bool, expected: bool | None
) -> None:
    other_users = OtherUsers(lambda _pid: False, {}, holders_suffice=lambda _uuid: has_node)
    other_users.looked(seen)
    other_users.scanned(Scan({GPU: ()}, 0))
    assert other_users.views([])[GPU].idle is expected
    other_users.scanned(Scan({GPU: (holder(stranger.pid),)}, 0))
    assert other_users.views([])[GPU].idle is False


def test_gpu_without_users_is_idle() -> None:
    assert view(look()) == IDLE


def test_holder_of_the_device_node_is_another_user(stranger: "subprocess.Popen[bytes]") -> None:
    assert view(look(), holder(stranger.pid)) == SlotView(False, f"used by alice's python (pid {stranger.pid})")


def test_process_listed_by_the_driver_is_another_user(stranger: "subprocess.Popen[bytes]") -> None:
    seen = view(look([client(stranger.pid)]))
    assert seen.idle is False
    assert f"(pid {stranger.pid})" in seen.reason


def test_own_processes_are_not_other_users(stranger: "subprocess.Popen[bytes]") -> None:
    own = [os.getpid()]
    assert view(look([client(os.getpid())]), holder(os.getpid()), own=own, occupied=True) == IDLE
    assert view(look([client(os.getpid()), client(stranger.pid)]), own=own, occupied=True).idle is False


def test_ignored_process_is_not_another_user(stranger: "subprocess.Popen[bytes]") -> None:
    seen = look([client(stranger.pid, "watcher")])
    assert view(seen, holder(stranger.pid, "watcher"), ignore=["watch*"]) == IDLE
    assert view(seen, holder(stranger.pid, "watcher"), ignore=["watch"]).idle is False


class TestEndedProcess:
    """A scan is slightly old: a listed process may have ended since."""

    def test_own_process_is_still_own(self, stranger: "subprocess.Popen[bytes]") -> None:
        own = {stranger.pid}
        other_users = OtherUsers(own.__contains__, {})
        other_users.looked(look([client(stranger.pid)]))
        other_users.scanned(Scan({GPU: (holder(stranger.pid),)}, 0))
        # A process that has ended has no ancestors.
        own.clear()
        assert other_users.views([GPU])[GPU] == IDLE

    def test_process_ended_before_identification_is_not_counted(self, stranger: "subprocess.Popen[bytes]") -> None:
        seen, held = look([client(stranger.pid)]), holder(stranger.pid)
        stranger.kill()
        stranger.wait()
        assert view(seen, held, occupied=True) == IDLE

    def test_process_of_another_user_counts_until_the_next_scan(self, stranger: "subprocess.Popen[bytes]") -> None:
        other_users = OtherUsers(lambda _: False, {})
        other_users.looked(look())
        other_users.scanned(Scan({GPU: (holder(stranger.pid),)}, 0))
        stranger.kill()
        stranger.wait()
        assert other_users.views([])[GPU].idle is False
        other_users.scanned(Scan({GPU: ()}, 0))
        assert other_users.views([])[GPU] == IDLE


@pytest.mark.parametrize(
    "seen",
    [look(Unknown("the driver did not answer")), look(utilization=Unknown("the driver did not answer"))],
    ids=["processes", "utilization"],
)
@pytest.mark.parametrize("occupied", [True, False])
def test_unknown_is_neither_idle_nor_used(seen: Look, occupied: bool) -> None:
    assert view(seen, occupied=occupied) == SlotView(None, "the driver did not answer")


def test_holder_counts_without_an_answer_of_the_driver(stranger: "subprocess.Popen[bytes]") -> None:
    assert view(look(Unknown("the driver did not answer")), holder(stranger.pid)).idle is False


def test_busy_gpu_has_an_invisible_user() -> None:
    assert view(look(utilization=BUSY)) == SlotView(False, "5% busy with nobody seen there")
    assert view(look(utilization=BUSY), occupied=True) == IDLE


def test_process_of_another_namespace_is_own_only_on_gpus_with_an_own_process() -> None:
    outside = Process(4242, Unknown("outside"), Unknown("outside"), Unknown("outside"), 2**30, Unknown("outside"))
    assert view(look([outside])).idle is False
    assert view(look([outside]), occupied=True) == IDLE


def test_view_is_unknown_before_the_first_look_and_without_gpus() -> None:
    other_users = OtherUsers(lambda _: False, {})
    assert other_users.views([]) == {}
    other_users.looked(look())
    other_users.lost()
    assert other_users.views([]) == {}


def test_scan_returns_gpus_with_changed_holders(stranger: "subprocess.Popen[bytes]") -> None:
    other_users = OtherUsers(lambda _: False, {})
    there = Scan({GPU: (holder(stranger.pid),)}, 0)
    assert other_users.scanned(there) == {GPU}
    assert other_users.scanned(there) == set()
    assert other_users.scanned(Scan({GPU: ()}, 0)) == {GPU}
