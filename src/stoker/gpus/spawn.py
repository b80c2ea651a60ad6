"""Starts the helper process. It imports next to nothing, because the command line starts it before everything else.

`spawned` starts a new interpreter, which is safe in any program, also with threads and open CUDA devices. `forked`
shares the memory of its parent, which must have one thread and no open devices.
"""

import os
import sys

PROGRAM = "from stoker.gpus.helper import main; main()"


class Helper:
    """A started helper: its pid, the source that it reads, and the pipes to it."""

    __slots__ = ("pid", "replies", "requests", "spec")

    def __init__(self, spec: str, pid: int, requests: int, replies: int) -> None:
        self.spec = spec
        self.pid = pid
        self.requests = requests
        self.replies = replies


def spawned(spec: str, root: str) -> Helper:
    """A helper in a new interpreter and a new session, which a terminal does not signal."""
    request_end, requests, replies, reply_end = _two_pipes()
    quiet = () if os.environ.get("STOKER_DEBUG") else ((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-c", PROGRAM, spec, root],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, request_end, 0), (os.POSIX_SPAWN_DUP2, reply_end, 1), *quiet],
            setsid=True,
            setsigmask=(),
        )
    except OSError:
        os.close(requests)
        os.close(replies)
        raise
    finally:
        os.close(request_end)
        os.close(reply_end)
    return Helper(spec, pid, requests, replies)


def forked(spec: str, root: str) -> Helper:
    """A helper as a fork of this process."""
    request_end, requests, replies, reply_end = _two_pipes()
    import gc

    # A collection in either process would copy the shared pages.
    gc.freeze()
    try:
        pid = os.fork()
    except OSError:
        for descriptor in (request_end, requests, replies, reply_end):
            os.close(descriptor)
        raise
    if pid == 0:
        _become_helper(request_end, reply_end, spec, root)
    os.close(request_end)
    os.close(reply_end)
    return Helper(spec, pid, requests, replies)


def _two_pipes() -> tuple[int, int, int, int]:
    request_end, requests = os.pipe()
    try:
        return (request_end, requests, *os.pipe())
    except OSError:
        os.close(request_end)
        os.close(requests)
        raise


def _become_helper(request_end: int, reply_end: int, spec: str, root: str) -> None:
    """Never returns: the child must not continue as its parent."""
    code = 1
    try:
        import signal

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(request_end, 0)
        os.dup2(reply_end, 1)
        if not os.environ.get("STOKER_DEBUG"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        from stoker.gpus.helper import serve

        serve(spec, root)
        code = 0
    finally:
        os._exit(code)
