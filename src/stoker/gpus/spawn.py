"""Starts the helper process. It imports almost nothing, because the command line uses it before everything else.

`spawned` starts a new interpreter, which is safe in any program, even with threads and open CUDA devices. `forked`
shares the memory of its parent, which must be single-threaded and have no open devices.
"""

import os
import sys

# The module `socket` takes 5 ms to import.
from _socket import AF_UNIX, SOCK_STREAM, socketpair
from collections.abc import Callable

Start = Callable[[str, str, int], int]
"""`spawned` or `forked`."""

PROGRAM = "from stoker.gpus.helper import main; main()"


class Helper:
    """A started or joined helper: its pid, its source, and the connection to it."""

    __slots__ = ("connection", "is_shared", "pid", "spec")

    def __init__(self, spec: str, pid: int, connection: int, *, is_shared: bool = False) -> None:
        self.spec = spec
        self.pid = pid
        self.connection = connection
        self.is_shared = is_shared
        """It also serves other processes, so this process must not end it."""


def private_helper(spec: str, root: str, start: Start) -> Helper:
    """Starts a helper for this process alone."""
    mine, its = socketpair(AF_UNIX, SOCK_STREAM)
    try:
        pid = start(spec, root, its.fileno())
    except OSError:
        mine.close()
        raise
    finally:
        its.close()
    return Helper(spec, pid, mine.detach())


def spawned(spec: str, root: str, connection: int) -> int:
    """Starts a helper in a new interpreter and session, out of reach of terminal signals. Returns its pid.

    `connection` becomes its standard input: a connected or listening socket.
    """
    outputs = (1,) if os.environ.get("STOKER_DEBUG") else (1, 2)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-c", PROGRAM, spec, root],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, connection, 0),
            *((os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_WRONLY, 0) for output in outputs),
        ],
        setsid=True,
        setsigmask=(),
    )


def forked(spec: str, root: str, connection: int) -> int:
    """Forks a helper from this process. Returns its pid."""
    import gc

    # Garbage collection in either process would copy the shared pages.
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        _become_helper(spec, root, connection)
    return pid


def _become_helper(spec: str, root: str, connection: int) -> None:
    """Never returns: the child must not continue as its parent."""
    code = 1
    try:
        import signal

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(connection, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if not os.environ.get("STOKER_DEBUG"):
            os.dup2(null, 2)
        from stoker.gpus.helper import serve

        serve(spec, root)
        code = 0
    finally:
        os._exit(code)
