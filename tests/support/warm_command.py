"""`stoker` without its start: a process that has imported the command line forks for each command.

Most of what a short command takes is the start of Python and its imports, and the tests type thousands of them. A fork
has descriptors, environment, directory and exit separately, so its visible behaviour is the same.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import stoker.cli
import stoker.feeds
import stoker.fill
import stoker.fit
import stoker.logs
import stoker.notifications
import stoker.queue
import stoker.remote
import stoker.status

# These end by themselves and start nothing that stays. What other verbs start may be found by its parent, its command
# line or the environment that it was started with, which in a fork are those of the server.
VERBS: Final = frozenset(
    [
        "cancel",
        "clean",
        "edit",
        "feed",
        "fit",
        "hold",
        "list",
        "logs",
        "machines",
        "move",
        "pause",
        "queue",
        "release",
        "replay",
        "resume",
        "retry",
        "runs",
        "show",
        "sim",
        "snooze",
        "submit",
        "tokens",
        "wait",
        "why",
    ]
)
STATUS: Final = (("fill", "status"), ("fill", "--check"))
# What Python or the loader reads only at the start of a program.
AT_START: Final = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_")
# Of a request, in bytes.
LARGEST: Final = 2**17


class ServerGoneError(Exception):
    """The server died before it started the command."""


class WarmCommand:
    """The server, and this side of its socket. Any thread may ask."""

    def __init__(self) -> None:
        self._at_start = _read_at_start(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[theirs.fileno()],
                # Nothing of the test that needs it first: processes are found by environment and group.
                env={name: value for name, value in os.environ.items() if not name.startswith("STOKER_")},
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self._server.poll() is None

    def close(self) -> None:
        self._socket.close()
        self._server.wait()

    def can_run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a forked command behaves the same."""
        return (
            (arguments[0] in VERBS or arguments[:2] in STATUS or (arguments[-1] == "--help" and "--" not in arguments))
            and _read_at_start(environment) == self._at_start
            and len(_request(arguments, environment)) < LARGEST
        )

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        pipes = [os.pipe() for _ in range(3)]
        # The directory by its descriptor: it may have been removed.
        their_ends = [*(theirs for _, theirs in pipes), os.open(".", os.O_PATH)]
        with contextlib.ExitStack() as ours:
            try:
                out, err, status = (ours.enter_context(os.fdopen(mine, "rb", buffering=0)) for mine, _ in pipes)
                socket.send_fds(self._socket, [_request(arguments, environment)], their_ends)
            except BrokenPipeError:
                raise ServerGoneError from None
            finally:
                for theirs in their_ends:
                    os.close(theirs)
            if not (started := status.read(16)):
                raise ServerGoneError
            pid = int(started)
            said = {out: b"", err: b""}
            ends = time.monotonic() + timeout
            with selectors.DefaultSelector() as ready:
                for stream in said:
                    ready.register(stream, selectors.EVENT_READ, stream)
                while ready.get_map():
                    for key, _ in (found := ready.select(max(0.0, ends - time.monotonic()))):
                        said[key.data] += (piece := key.data.read(2**16))
                        if not piece:
                            ready.unregister(key.data)
                    if not found and time.monotonic() >= ends:
                        os.kill(pid, signal.SIGKILL)
                        raise subprocess.TimeoutExpired(["stoker", *arguments], timeout, said[out], said[err])
            code = int(status.read(16))
        return subprocess.CompletedProcess(["stoker", *arguments], code, _text(said[out]), _text(said[err]))


def _request(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    return json.dumps([[*arguments], {**environment}, int(umask.split()[1], 8)]).encode()


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(AT_START)}


def _text(said: bytes) -> str:
    return said.decode().replace("\r\n", "\n").replace("\r", "\n")


class Server:
    """Forks for each request, and sends the exit code of each fork to the requester."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, int] = {}
        self._ended, wake = socket.socketpair()
        self._wake = wake
        for end in (self._ended, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())

    def serve(self) -> list[str] | None:
        """In the server None, when nobody asks any more; in a fork the arguments of its command."""
        with selectors.DefaultSelector() as ready:
            for stream in (self._requests, self._ended):
                ready.register(stream, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._ended:
                        self._report()
                        continue
                    request, descriptors, _, _ = socket.recv_fds(self._requests, LARGEST, 4)
                    if not request:
                        return None
                    out, err, status, directory = descriptors
                    if pid := os.fork():
                        with contextlib.suppress(BrokenPipeError):  # who asked is gone
                            os.write(status, f"{pid:<16}".encode())
                        self._running[pid] = status
                        for descriptor in (out, err, directory):
                            os.close(descriptor)
                        continue
                    os.dup2(out, 1)
                    os.dup2(err, 2)
                    os.fchdir(directory)
                    for descriptor in (*descriptors, *self._running.values()):
                        os.close(descriptor)
                    return self._become(*json.loads(request))

    def _report(self) -> None:
        self._ended.recv(2**16)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                status = self._running.pop(found[0])
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, f"{os.waitstatus_to_exitcode(found[1]):<16}".encode())
                os.close(status)

    def _become(self, arguments: list[str], environment: dict[str, str], umask: int) -> list[str]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (self._requests, self._ended, self._wake):
            ours.close()
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        os.umask(umask)
        return arguments


def main() -> None:
    packages = (
        stoker.cli,
        stoker.feeds,
        stoker.fill,
        stoker.fit,
        stoker.queue,
        stoker.status,
        stoker.logs,
        stoker.remote,
    )
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for library in ("gspread", "psycopg", "rich.console"):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(library)
    gc.freeze()
    arguments = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if arguments is not None:
        sys.argv = [str(Path(sys.executable).with_name("stoker")), *arguments]
        os._exit(_code_of_command())


def _code_of_command() -> int:
    """Without what Python does at its end: it takes apart all that the server imported."""
    code: object = 0
    try:
        stoker.cli.main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as Python does
        code = 1
        traceback.print_exc()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
