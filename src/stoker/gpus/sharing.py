"""A shared helper for all processes of a user that read the same GPUs in the same way.

It listens on an abstract Unix socket, which needs no directory, leaves no file behind, and can be bound by one process
only. The name covers everything that affects readings, and the version, so that only equal processes share a helper.
The name is not secret, so each side asks the kernel for the user of the other.

Like `spawn`, this module imports almost nothing.
"""

import errno
import os
import sys
import time
from _blake2 import blake2b
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket
from typing import Literal

from stoker.gpus.spawn import Helper, Start
from stoker.version import __version__

Sharing = Literal["no", "join", "start"]
"""The use of a shared helper: never, only an existing one, or also by starting one."""

# The protocol version, which changes with every message format.
PROTOCOL = 3
# Variables that affect the readings of a source. Sources that are not listed are not shared.
VARIABLES = {
    "nvml": ("LD_LIBRARY_PATH", "LD_PRELOAD"),
    "nvidia-smi": ("LD_LIBRARY_PATH", "LD_PRELOAD"),
    "drm": (),
    "sim": ("STOKER_HOME", "STOKER_SIM_DIR", "XDG_STATE_HOME", "HOME"),
}
_AUTOMATIC = ("nvml", "nvidia-smi", "drm")
_PROGRAM = "nvidia-smi"
# A container has its own pids, files, users or clock, but may share the network namespace of abstract sockets.
_NAMESPACES = ("pid", "mnt", "user", "time")
# Stoker stops all processes of a job, including a helper for others.
_IN_RUN = ("STOKER_RUN", "STOKER_JOB_ID", "STOKER_FILL", "STOKER_PROBE")
# In an allocation of a scheduler, other GPUs are readable.
_IN_ALLOCATION = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# All jobs of a machine may connect at once.
BACKLOG = 4096
# Another process has bound the name without listening yet, or its helper is about to end.
_TRIES = 10
_BETWEEN_TRIES = 0.005
_CREDENTIALS = 12

_started: set[int] = set()
"""Shared helpers started by this process whose end it has not seen."""


def shared_helper(spec: str, root: str, start: Start, sharing: Sharing) -> Helper | None:
    """A connection to the shared helper; None if this process must start its own."""
    name = None if sharing == "no" else _name(spec, root)
    if name is None:
        return None
    try:
        return _shared_helper(name, spec, root, start, sharing)
    except OSError:
        return None  # a sandbox without such sockets; a lack of resources shows again at the next step


def _shared_helper(name: bytes, spec: str, root: str, start: Start, sharing: Sharing) -> Helper | None:
    may_start = sharing == "start" and not any(variable in os.environ for variable in _IN_RUN)
    for _ in range(_TRIES):
        connection = socket(AF_UNIX, SOCK_STREAM)
        try:
            if _connects(connection, name):
                if peer_user(connection) != os.geteuid():
                    return None
                return Helper(spec, _peer(connection)[0], connection.detach(), is_shared=True)
            if not may_start:
                return None
            pid = _start(name, spec, root, start, connection)
            if pid is not None:
                return Helper(spec, pid, connection.detach(), is_shared=True)
        finally:
            connection.close()
        time.sleep(_BETWEEN_TRIES)
    return None


def _start(name: bytes, spec: str, root: str, start: Start, connection: socket) -> int | None:
    """Starts the helper and connects to it; None if another process is about to do so."""
    listener = socket(AF_UNIX, SOCK_STREAM)
    try:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        listener.listen(BACKLOG)
        # Connected before there is a helper, so that this process is served first.
        connection.connect(name)
        pid = start(spec, root, listener.fileno())
        _started.add(pid)
        return pid
    finally:
        listener.close()


def _connects(connection: socket, name: bytes) -> bool:
    """Connects without blocking: the kernel accepts even if the helper is blocked in the driver."""
    connection.setblocking(False)
    try:
        connection.connect(name)
    except (ConnectionRefusedError, BlockingIOError):
        return False
    return True


def peer_user(connection: socket) -> int:
    return _peer(connection)[1]


def _peer(connection: socket) -> tuple[int, int]:
    """Pid and user of the peer, according to the kernel."""
    credentials = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIALS)
    return int.from_bytes(credentials[:4], sys.byteorder), int.from_bytes(credentials[4:8], sys.byteorder)


def started_here() -> tuple[int, ...]:
    """Shared helpers that are children of this process, and do not belong to a supervised job."""
    for pid in list(_started):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                _started.discard(pid)
        except ChildProcessError:
            _started.discard(pid)
    return tuple(_started)


def _name(spec: str, root: str) -> bytes | None:
    """The name of the socket; None if nothing is shared."""
    environment = os.environ
    sources = _AUTOMATIC if spec == "auto" else (spec.partition(":")[0],)
    directory = spec.partition("@")[2]
    if (
        environment.get("STOKER_DEBUG")  # which shows what the helper prints
        or any(variable in environment for variable in _IN_ALLOCATION)
        or not all(source in VARIABLES for source in sources)
        or _has_outside_source()
        or (directory and not directory.startswith("/"))
    ):
        return None
    facts = [__version__, str(PROTOCOL), str(os.geteuid()), spec, os.path.abspath(root)]  # noqa: PTH100 - see above
    facts += [f"{name}={environment.get(name)}" for source in sources for name in VARIABLES[source]]
    if _PROGRAM in sources:
        facts.append(_path_of(_PROGRAM))
    try:
        facts += [os.readlink(f"/proc/self/ns/{namespace}") for namespace in _NAMESPACES]  # noqa: PTH115
    except OSError:
        return None
    digest = blake2b("\0".join(facts).encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return f"\0stoker-gpus:{os.geteuid()}:{digest}".encode()


def _has_outside_source() -> bool:
    registry = sys.modules.get("stoker.gpus.source")
    return registry is not None and registry.has_outside_source()


def _path_of(program: str) -> str:
    """The path of a program, the only relevant part of PATH, which differs from shell to shell."""
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, program)  # noqa: PTH118
        if os.access(path, os.X_OK):
            return path
    return ""
