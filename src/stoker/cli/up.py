"""`stoker up`: the page, a worker for this machine's GPUs, and a queue in a file, in one command."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.page_options import page_config, page_options, run_page, until_signalled
from stoker.cli.queue_options import opened_or_created, queue_option, queue_url_of
from stoker.cli.telling import tell
from stoker.errors import BadInputError
from stoker.paths import state_home
from stoker.settings import load_settings
from stoker.streams import OUTPUT, emit
from stoker.units import parse_duration

if TYPE_CHECKING:
    from stoker.web.config import Config


@click.command("up")
@page_options
@queue_option
@click.option("--demo/--no-demo", default=None, help="On simulated GPUs at simulated work [when there is no GPU].")
def command(page: dict[str, Any], queue_url: str | None, demo: bool | None) -> int:
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
    from stoker.cli.notifying import notifying

    opened_or_created(queue_url).close()
    # Not as an argument: an address may hold a password, and arguments are seen by everybody.
    environment = os.environ if queue_url is None else {**os.environ, "STOKER_QUEUE": queue_url}
    config = page_config(page, queue_url_of(queue_url), state_home())
    _serve(config, [], environment, around=notifying(config, tell))


def _run_demo(page: Mapping[str, Any], home: Path) -> None:
    from stoker.cli.demo_jobs import demonstration
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
    from stoker.cli.worker_process import WorkerProcess
    from stoker.web.listening import listening_socket

    listener = listening_socket(config)
    log = config.home / "work.log"
    with around or nullcontext(), WorkerProcess(options, environment, log, tell), meanwhile or nullcontext():
        emit(OUTPUT, f"The worker is at work; what it does is on the page, and in {log}\n")
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
