"""The network between a machine and its database, which a test can cut: a relay, or a network namespace."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.relay import relay_to


class NetworkLink(NamedTuple):
    """How a worker reaches the database, and how the connection is cut."""

    host: str
    port: int
    prefix: tuple[str, ...]
    """The program that puts a worker at that end."""
    cut: Callable[[], object]
    restore: Callable[[], object]


@contextlib.contextmanager
def relayed(socket: Path) -> Iterator[NetworkLink]:
    """A relay: works without root."""
    with relay_to(socket) as relay:
        yield NetworkLink("127.0.0.1", relay.port, (), relay.cut, relay.restore)


def has_namespaces() -> bool:
    """Whether network namespaces can be created: containers often forbid it, even to root."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    probe = ["unshare", "--net", "--mount", "ip", "link", "add", "probe-a", "type", "veth", "peer", "name", "probe-b"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def namespaced(socket: Path) -> Iterator[NetworkLink]:
    """A network namespace with one link to this machine; needs root."""
    number = os.getpid()
    name, ours, theirs = f"stoker-{number}", f"sk{number}a", f"sk{number}b"
    # Of the addresses that nobody routes; other tests of the same kind run at the same time.
    here, there = (f"10.213.{number // 60 % 250}.{number % 60 * 4 + place}" for place in (1, 2))
    _ip("netns", "del", name, check=False)  # of a run that was killed, with a process of the same number
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("addr", "add", f"{here}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        for words in (("addr", "add", f"{there}/30", "dev", theirs), ("link", "set", theirs, "up")):
            _ip("-n", name, *words)
        with relay_to(socket, here) as relay:
            yield NetworkLink(
                here,
                relay.port,
                ("nsenter", f"--net=/run/netns/{name}"),
                cut=lambda: _ip("link", "set", ours, "down"),
                restore=lambda: _ip("link", "set", ours, "up"),
            )
    finally:
        _ip("netns", "del", name)
        _ip("link", "del", ours, check=False)


def _ip(*words: str, check: bool = True) -> int:
    return subprocess.run(["ip", *words], check=check, capture_output=True).returncode
