"""Messages to NOTIFY_SOCKET, and the generated unit."""

import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.actions.systemd import ServiceManager, quoted, unit_text


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)
        self.address = address

    def received(self) -> list[str]:
        messages: list[str] = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    there = Manager(str(tmp_path / "notify") if request.param == "path" else f"@stoker-test-{os.getpid()}")
    yield there
    there.close()


def test_readiness_status_and_stopping_are_sent(manager: Manager) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": manager.address})
    service.ready("watching 2 GPUs")
    service.status("busy: GPU 0 was at 80%")
    service.status("busy: GPU 0 was at 80%")
    service.status("two\nlines")
    service.stopping()
    assert manager.received() == [
        "READY=1\nSTATUS=watching 2 GPUs",
        "STATUS=busy: GPU 0 was at 80%",
        "STATUS=two lines",
        "STOPPING=1",
    ]


def test_watchdog_is_pinged_twice_per_interval(manager: Manager) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "20000000"})
    assert service.keep_alive(100.0) == 110.0
    assert manager.received() == ["WATCHDOG=1"]
    assert service.keep_alive(105.0) == 110.0
    assert manager.received() == []
    assert service.keep_alive(110.5) == 120.5
    assert manager.received() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "variables", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}]
)
def test_watchdog_of_another_process_is_not_pinged(manager: Manager, variables: dict[str, str]) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": manager.address, **variables})
    assert service.keep_alive(100.0) is None
    assert manager.received() == []


def test_watchdog_of_this_process_is_pinged(manager: Manager) -> None:
    mine = {"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    assert ServiceManager({"NOTIFY_SOCKET": manager.address, **mine}).keep_alive(0.0) == 1.0


@pytest.mark.parametrize("address", ["", "relative", "/there/is/no/such/socket", "vsock:2:1234"])
def test_missing_socket_is_ignored(address: str) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000"})
    service.ready("watching")
    service.status("busy")
    service.keep_alive(1.0)
    service.stopping()


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--for", "--for"),
        ("/opt/stoker/bin/stoker", "/opt/stoker/bin/stoker"),
        ("stop 4242", '"stop 4242"'),
        ("", '""'),
        ("50%", '"50%%"'),
        ("echo $HOME", '"echo $$HOME"'),
        ("$HOME", '"$$HOME"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("it's", '"it\'s"'),
        ("a\\b", '"a\\\\b"'),
        ("two\nlines", '"two\\nlines"'),
        (";", '";"'),
    ],
)
def test_arguments_reach_the_program_unchanged(word: str, written: str) -> None:
    assert quoted(word) == written


def test_unit_notifies_has_a_watchdog_and_is_not_restarted_after_acting() -> None:
    command = ["/opt/stoker", "watch", "--below", "5%", "--then", "exec echo $STOKER_REASON"]
    lines = unit_text("Stoker: 100% sure", command, {"STOKER_GPUS": "sim:2@/a b$c"}, 124).splitlines()
    assert "Description=Stoker: 100%% sure" in lines
    assert "Type=notify" in lines
    assert "WatchdogSec=60" in lines
    assert "Restart=on-failure" in lines
    assert "SuccessExitStatus=124 143" in lines
    assert "RestartPreventExitStatus=2" in lines
    assert 'Environment="STOKER_GPUS=sim:2@/a b$c"' in lines
    [start] = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    assert shlex.split(start.replace("%%", "%").replace("$$", "$")) == command


@pytest.mark.parametrize(("code", "codes"), [(0, "143"), (143, "143"), (7, "7 143")])
def test_chosen_exit_code_counts_as_success(code: int, codes: str) -> None:
    assert f"SuccessExitStatus={codes}\n" in unit_text("Stoker", ["/opt/stoker"], {}, code)
