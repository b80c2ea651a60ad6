"""`stoker up`: page, worker and queue in one command; with simulated GPUs and jobs on a machine without a GPU."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click

from stoker.backoff import Backoff
from stoker.cli.options.common import open_prober
from stoker.cli.options.engine import WorkerCommand, engine_option, typed_worker_options
from stoker.cli.options.queue import opened_or_created, queue_option, queue_url_of
from stoker.cli.output import log
from stoker.cli.verbs.serve import PAGE_OPTIONS, notifying, page_config, page_options, run_page, until_signalled
from stoker.engines import LOCAL
from stoker.errors import BadInputError, StokerError
from stoker.paths import open_privately, private_directory, state_home
from stoker.runs.processes.syscalls import set_parent_death_signal
from stoker.settings import load_settings
from stoker.streams import OUTPUT, emit

if TYPE_CHECKING:
    from stoker.queue import JobSpec, Store
    from stoker.web.config import Config

_NOTHING: Final = nullcontext()


@click.command("up", cls=WorkerCommand)
@page_options
@queue_option
@engine_option
@click.option("--demo/--no-demo", default=None, help="Use simulated GPUs and jobs [if there is no GPU].")
def up_command(queue_url: str | None, engine: str | None, demo: bool | None, **rest: Any) -> int:
    """Start the page, a worker, and a queue in a file on this machine. The worker uses this machine's GPUs, or with
    --engine slurm a cluster. Without a GPU, a cluster or a queue, it starts a demo: simulated GPUs and jobs in a
    separate queue. Ctrl-C ends page and worker; jobs continue, and the next `stoker up` takes them over. The jobs of a
    demo end with it.
    """
    page = {name: rest[name] for name in PAGE_OPTIONS}
    typed = typed_worker_options(click.get_current_context())
    engine = engine or load_settings().engine
    if demo and queue_url is not None:
        raise BadInputError("--demo uses a separate queue: leave out --demo, or --queue")
    if demo and engine != LOCAL:
        raise BadInputError(f"--demo simulates GPUs of this machine: leave out --demo, or use --engine {LOCAL}")
    with until_signalled():
        if demo is None:
            demo = engine == LOCAL and not typed and queue_url_of(queue_url) is None and not _has_gpus()
        if demo:
            _run_demo(page, state_home() / "demo")
        else:
            _run(page, queue_url, [f"--engine={engine}", *typed])
    return 0


def _run(page: Mapping[str, Any], queue_url: str | None, options: list[str]) -> None:
    opened_or_created(queue_url).close()
    # Not as an argument: the address may contain a password, and every user can see arguments.
    environment = os.environ if queue_url is None else {**os.environ, "STOKER_QUEUE": queue_url}
    config = page_config(page, queue_url_of(queue_url), state_home())
    _serve(config, options, environment, around=notifying(config))


def _run_demo(page: Mapping[str, Any], home: Path) -> None:
    from stoker.queue import init_queue

    emit(OUTPUT, "These GPUs are simulated: none of this is real work. `stoker up --no-demo` starts without a demo.\n")
    queue = str(home / "queue.db")
    init_queue(queue).close()
    environment = {
        **os.environ,
        "STOKER_HOME": str(home),
        "STOKER_GPUS": f"sim:4@{home / 'gpus'}",
        "STOKER_QUEUE": queue,
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    # No notifications: people would mistake the jobs for real ones.
    options = [f"--engine={LOCAL}", "--grace=5s"]
    _serve(page_config(page, queue, home, notifies=False), options, environment, meanwhile=demonstration(queue))


def _serve(
    config: "Config",
    options: list[str],
    environment: Mapping[str, str],
    *,
    around: AbstractContextManager[None] = _NOTHING,
    meanwhile: AbstractContextManager[None] = _NOTHING,
) -> None:
    """Runs page and worker; `around` starts before the worker, `meanwhile` ends before it."""
    from stoker.web.config import listening_socket

    listener = listening_socket(config)
    log_file = config.home / "work.log"
    with around, WorkerProcess(options, environment, log_file) as worker, meanwhile:
        emit(OUTPUT, f"The worker has started; the page and {log_file} show what it does\n")
        try:
            run_page(config, listener)
        finally:
            if worker.refusal is not None:
                raise BadInputError(worker.refusal)


def _has_gpus() -> bool:
    """Whether there is a GPU. A driver that does not answer counts as a GPU: it is no reason to show a demo."""
    from stoker.gpus.source import AbsentError

    with open_prober(None, None) as prober, contextlib.suppress(AbsentError):
        prober.look()
        return True
    return False


# A worker that ends sooner than this could not start; its last line has the reason.
_SHORT_LIFE: Final = 10.0
# With these codes the next start would fail too: invalid options, or no Slurm although requested.
_REFUSED: Final = 2
# A worker stops within a second or two, unless its database hangs.
_WORKER_STOPS_WITHIN: Final = 15.0
_LONGEST_LOG: Final = 8 * 2**20
_LONGEST_LINE: Final = 2000


class WorkerProcess:
    """`stoker work` as a child process, restarted when it ends, and ended with this process. Its output goes to a
    file."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        self._command = [sys.executable, "-P", "-m", "stoker.cli", "work", *options]
        self._environment = dict(environment)
        self._ending = threading.Event()
        self.refusal: str | None = None
        """Why the worker could not start; this process then ends."""
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
        with _appended(self._output) as output:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C goes to the page, which then ends the worker
                preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509 - two system calls, and no thread holds a lock of theirs
            )

    def _keep(self) -> None:
        backoff, reported = Backoff(5.0, 60.0), False
        while True:
            began = time.monotonic()
            if self._ending.is_set():
                self._process.terminate()  # the page ended during the start of the worker
            code = self._process.wait()
            if self._ending.is_set():
                return
            if code == _REFUSED:
                self.refusal = self._last_line().removeprefix("stoker: ") or "the worker did not start"
                # Repeated: an extension module may swallow the handler's exception during its import.
                while not self._ending.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                    self._ending.wait(3.0)
                return
            if time.monotonic() - began >= _SHORT_LIFE:
                reported = False
                backoff.reset()
                log(f"the worker ended with code {code}{self._why()}; starting it again")
            elif not reported:
                reported = True
                log(f"the worker ended with code {code} right after its start{self._why()}; trying again")
            if self._ending.wait(backoff.next()):
                return
            self._process = self._started()

    def _why(self) -> str:
        said = self._last_line()
        return f" ({said})" if said else ""

    def _last_line(self) -> str:
        try:
            lines = self._output.read_bytes()[-_LONGEST_LINE:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[int]:
    """The log file, readable only by its owner; a long one is rotated."""
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
    """If the page is killed, its worker ends too, so the next `stoker up` can start its own."""
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)


# With fewer waiting jobs the next sweep is submitted, so the GPUs are still busy in an hour.
_FEWEST_WAITING: Final = 3
_BETWEEN_LOOKS: Final = 5.0
_END_WITHIN: Final = 15.0


def _train(*options: object) -> str:
    return shlex.join([sys.executable, "-P", "-m", "stoker.cli", "sim", "train", *map(str, options)])


def _job(name: str, *options: object, **asked: Any) -> "JobSpec":
    from stoker.queue import JobSpec

    return JobSpec(**{"command": _train(*options), "name": name, "directory": "/", "submitter": "demo", **asked})


def _first_jobs() -> "list[JobSpec]":
    """One job of each kind: long, hung, failing, with batch-size search, and a sweep."""
    quick_to_judge = {"window": 30.0, "below": 0.05, "after": 5.0, "every": 1.0}
    fitted = ("--epochs", 2, "--steps", 300, "--memory", "3GiB", "--per-example", "96MiB")
    return [
        _job("resnet50 baseline", "--epochs", 6, "--steps", 600, "--memory", "11GiB", tags=("vision",)),
        _job("stuck all-reduce", "--hang-at", 60, "--memory", "16GiB", tags=("debug",), policy=quick_to_judge),
        _job("exploding gradient", "--fail-at", 120, "--lr", "3", tags=("debug",)),
        _job("gpt2 as large as fits", *fitted, tags=("gpt2",), fit=_fit(_train(*fitted))),
        _job("two-GPU finetune", "--epochs", 2, "--steps", 300, "--memory", "18GiB", gpus=2, priority=1),
        *_sweep(0),
        _job("ablation for later", "--epochs", 1, hold=True),
    ]


def _fit(command: str) -> dict[str, Any]:
    from stoker.cli.options.job import fit_of

    return fit_of("--probe-time 8s --flat-for 2s --refit", 2, [command], None, 1)


def _sweep(number: int) -> "list[JobSpec]":
    return [
        _job(
            f"nanogpt run {number} lr={lr}",
            *("--epochs", 2, "--steps", 250 + 50 * at, "--lr", lr),
            tags=("nanogpt",),
            group=f"nanogpt run {number}",
        )
        for at, lr in enumerate(("3e-3", "1e-3", "3e-4", "1e-4"))
    ]


@contextlib.contextmanager
def demonstration(queue: str | None) -> Iterator[None]:
    """Keeps the demo's queue filled; cancels its jobs at the end."""
    from stoker.queue import open_queue

    with open_queue(queue) as store:
        _clear(store)
        store.jobs.submit(_first_jobs())
    ending = threading.Event()
    thread = threading.Thread(target=_feed, args=(queue, ending), name="demo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_END_WITHIN)
        with contextlib.suppress(StokerError), open_queue(queue) as store:
            _clear(store)
            _wait_until_nothing_runs(store)


def _feed(queue: str | None, ending: threading.Event) -> None:
    from stoker.queue import open_queue

    number = 1
    while not ending.wait(_BETWEEN_LOOKS):
        with contextlib.suppress(StokerError), open_queue(queue) as store:
            if store.jobs.counts().get("queued", 0) < _FEWEST_WAITING:
                store.jobs.submit(_sweep(number))
                number += 1


def _clear(store: "Store") -> None:
    unfinished = store.jobs.find(states=["queued", "held", "running"], limit=100_000)
    store.jobs.cancel(job.id for job in unfinished)
    store.jobs.clean(0.0)


def _wait_until_nothing_runs(store: "Store") -> None:
    ends = time.monotonic() + _END_WITHIN
    while store.attempts.running() and time.monotonic() < ends:
        time.sleep(0.1)
