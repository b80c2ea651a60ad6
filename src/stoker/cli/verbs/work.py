"""`stoker work`: run the queue's jobs with an engine."""

from typing import Any

import click

from stoker.cli.options.engine import WorkerCommand, engine_option
from stoker.cli.options.queue import opened_or_created, queue_option, queue_url_of
from stoker.cli.output import log
from stoker.settings import load_settings


@click.command("work", cls=WorkerCommand)
@queue_option
@engine_option
@click.option("--until-empty", is_flag=True, help="Exit when no remaining job could start here.")
def work_command(
    queue_url: str | None,
    engine: str | None,
    lease: float,
    grace: float,
    log_limit: int,
    label: tuple[str, ...] | None,
    until_empty: bool,
    **engine_options: Any,
) -> int:
    """Run the queue's jobs as GPUs become free, on this machine or as jobs of a Slurm cluster. Ctrl-C ends the worker,
    not the jobs: the next `stoker work` takes them over.
    """
    from stoker.engines.engine import WorkerOptions
    from stoker.worker.loop import work

    options = WorkerOptions(
        engine=engine or load_settings().engine,
        queue=queue_url_of(queue_url),
        lease=lease,
        grace=grace,
        log_limit=log_limit,
        until_empty=until_empty,
        labels=label or (),
    )
    options.check()
    return work(options, engine_options, log, lambda: opened_or_created(queue_url).close())
