"""`stoker up`: the page, a worker for this machine's GPUs, and a queue in a file, in one command."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click

from stoker.cli.options.common import log
from stoker.cli.options.page import page_config, page_options, run_page, until_signalled
from stoker.cli.options.queue import opened_or_created, queue_option, queue_url_of
from stoker.errors import BadInputError, StokerError
from stoker.paths import open_privately, private_directory, state_home
from stoker.runs.processes.syscalls import hear_of_death_of_parent
from stoker.settings import load_settings
from stoker.streams import OUTPUT, emit
from stoker.units import parse_duration

if TYPE_CHECKING:
    from stoker.web.config import Config


@click.command("up")
@page_options
@queue_option
@click.option("--demo/--no-demo", default=None, help="On simulated GPUs at simulated work [when there is no GPU].")
def up_command(page: dict[str, Any], queue_url: str | None, demo: bool | None) -> int:
    """Start all of Stoker on this machine: the page, a worker for its GPUs, and a queue in a file.

    Where there is no GPU, and no queue was named, it is a demo on simulated ones with a queue of its own. Ctrl-C ends
    page and worker; jobs go on, and the next `stoker up` finds them again. Those of a demo end with it.
    """
    if demo and queue_url is not None:
        raise BadInputError("--demo has a queue of its own: leave out --demo, or --queue")
    with until_signalled():
        if demo is None:
            demo = queue_url_of(queue_url) is None and not _has_gpus()
        if demo:
            _run_demo(page, state_home() / "demo")
        else:
            _run(page, queue_url)
    return 0


def _run(page: Mapping[str, Any], queue_url: str | None) -> None:

    opened_or_created(queue_url).close()
    # Not as an argument: an address may hold a password, and arguments are seen by everybody.
    environment = os.environ if queue_url is None else {**os.environ, "STOKER_QUEUE": queue_url}
    config = page_config(page, queue_url_of(queue_url), state_home())
    _serve(config, [], environment, around=notifying(config, log))


def _run_demo(page: Mapping[str, Any], home: Path) -> None:
    from stoker.cli.verbs.demo import demonstration
    from stoker.queue import init_queue

    emit(OUTPUT, "These GPUs are simulated: nothing that you see is real work. `stoker up --no-demo` does without.\n")
    queue = str(home / "queue.db")
    init_queue(queue).close()
    environment = {
        **os.environ,
        "STOKER_HOME": str(home),
        "STOKER_GPUS": f"sim:4@{home / 'gpus'}",
        "STOKER_QUEUE": queue,
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    # Nobody is told what happens here: it would reach people's phones as if it were real.
    _serve(page_config(page, queue, home), ["--grace", "5s"], environment, meanwhile=demonstration(queue))


def _serve(
    config: "Config",
    options: list[str],
    environment: Mapping[str, str],
    *,
    around: AbstractContextManager[None] | None = None,
    meanwhile: AbstractContextManager[None] | None = None,
) -> None:
    """The page and the worker; `around` begins before the worker does, and `meanwhile` ends before."""
    from stoker.web.config import listening_socket

    listener = listening_socket(config)
    log_file = config.home / "work.log"
    with around or nullcontext(), WorkerProcess(options, environment, log_file, log), meanwhile or nullcontext():
        emit(OUTPUT, f"The worker is at work; what it does is on the page, and in {log_file}\n")
        run_page(config, listener)


def _has_gpus() -> bool:
    """Whether there is anything to work on. A driver that does not answer is no reason to show a demo instead."""
    from stoker.gpus.prober import Prober
    from stoker.gpus.source import AbsentError

    settings = load_settings()
    with Prober(settings.gpus, deadline=parse_duration(settings.deadline)) as prober:
        try:
            prober.look()
        except AbsentError:
            return False
    return True


@click.command("serve")
@page_options
@queue_option
def serve_command(page: dict[str, Any], queue_url: str | None) -> int:
    """Serve the page: everything that these verbs do, from a phone or another machine.

    It runs nothing by itself: `stoker work` runs jobs, here or elsewhere; `stoker up` is both in one. Whoever has its
    link can submit jobs, and so run commands as you.
    """

    config = page_config(page, queue_url_of(queue_url))
    from stoker.web.config import listening_socket

    listener = listening_socket(config)
    opened_or_created(queue_url).close()

    with until_signalled(), notifying(config, log):
        run_page(config, listener)
    return 0


# It leaves within a second, unless a message is just being sent.
_NOTIFIER_STOPS_WITHIN: Final = 10.0


@contextmanager
def notifying(config: "Config", tell: Callable[[str], None]) -> Iterator[None]:
    """While the page is served. A URL that cannot work is told before that."""
    wanted = load_settings().notify
    if not wanted.urls:
        yield
        return
    from stoker.notifications.notifier import Notifier
    from stoker.queue import open_queue

    # Whoever asked for any free port cannot be sent a link to it before there is one.
    link = "" if config.port == 0 and not config.url else config.address()
    crier = Notifier(wanted, link, lambda: open_queue(config.queue), tell)
    stop = threading.Event()
    thread = threading.Thread(target=crier.run, args=(stop,), name="crier", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_NOTIFIER_STOPS_WITHIN)


# One that lived shorter than this could not do its work, and says why itself.
_SHORT_LIFE: Final = 10.0
# It may do better soon (the one before it has not left yet), or when somebody has mended what is wrong: after each time
# that it does not, twice as much time is left to that.
_FIRST_PAUSE: Final = 5.0
_LAST_PAUSE: Final = 60.0
# A worker leaves within a second or two, unless its database hangs.
_WORKER_STOPS_WITHIN: Final = 15.0
_LONGEST_LOG: Final = 8 * 2**20
_LONGEST_WORDS: Final = 2000


class WorkerProcess:
    """`stoker work` until this process ends, whichever way it ends."""

    def __init__(
        self, options: Sequence[str], environment: Mapping[str, str], log: Path, tell: Callable[[str], None]
    ) -> None:
        """What the worker says goes to `log`; `tell` is given what a person at the terminal should know."""
        self._log = log
        self._command = [sys.executable, "-P", "-m", "stoker.cli", "work", *options]
        self._environment = dict(environment)
        self._tell = tell
        self._ending = threading.Event()
        self._process = self._started()
        self._thread = threading.Thread(target=self._keep, name="worker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        self._thread.join(_WORKER_STOPS_WITHIN)

    def _started(self) -> "subprocess.Popen[bytes]":
        parent = os.getpid()
        with _appended(self._log) as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the page, which tells the worker when it is time
                preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509 - two system calls, and no thread holds a lock of theirs
            )

    def _keep(self) -> None:
        pause, trouble_told = _FIRST_PAUSE, False
        while True:
            began = time.monotonic()
            if self._ending.is_set():
                self._process.terminate()  # the end came while it was being started
            code = self._process.wait()
            if self._ending.is_set():
                return
            if time.monotonic() - began >= _SHORT_LIFE:
                pause, trouble_told = _FIRST_PAUSE, False
                self._tell(f"the worker ended with code {code}{self._last_words()}, and is started again")
            elif not trouble_told:
                trouble_told = True
                said = self._last_words()
                self._tell(f"the worker ended with code {code} soon after its start{said}: it is tried again")
            if self._ending.wait(pause):
                return
            pause = min(pause * 2, _LAST_PAUSE)
            self._process = self._started()

    def _last_words(self) -> str:
        """Why, as it said itself."""
        try:
            lines = self._log.read_bytes()[-_LONGEST_WORDS:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({said})" if said else ""


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[int]:
    """The log, for its owner alone; begun anew when it has become long."""
    try:
        private_directory(path.parent)
        if path.exists() and path.stat().st_size > _LONGEST_LOG:
            path.replace(path.with_name(f"{path.name}.1"))
        file = open_privately(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise StokerError(f"the worker's log {path} cannot be written: {error.strerror}") from None
    try:
        yield file
    finally:
        os.close(file)


def _die_with(parent: int) -> None:
    """If the page is killed, its worker leaves too, and the next `stoker up` can have its own."""
    hear_of_death_of_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)


# A few weeks of a busy page; the oldest part is dropped.
_SIZE: Final = 8 * 2**20
_KEPT: Final = 2


class PrivateLog(RotatingFileHandler):
    def __init__(self, path: Path, form: str, size: int = _SIZE) -> None:
        """OSError when it cannot be written."""
        super().__init__(path, maxBytes=size, backupCount=_KEPT, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(form))

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=open_privately)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A full disk is no reason not to answer, nor to write on the terminal."""
