"""`stoker work`: run the queue's jobs on this machine's GPUs."""

import click

from stoker.cli.options.common import DURATION, FRACTION, MEMORY, log, source_options
from stoker.cli.options.queue import queue_option, queue_url_of
from stoker.settings import load_settings
from stoker.units import parse_duration


@click.command("work")
@queue_option
@click.option("--gpus", metavar="GPUS", default="all", help="Use only these: 0,2 or uuids [all].")
@click.option(
    "--free-below", type=FRACTION, default="50%", metavar="PERCENT", help="A GPU that works more is somebody's [50%]."
)
@click.option(
    "--slots-per-gpu",
    type=click.IntRange(1, 64),
    default=1,
    metavar="K",
    help="So many jobs on one GPU at a time, whether or not they said --share [1].",
)
@click.option(
    "--cpu-jobs", type=click.IntRange(0, 1024), default=4, metavar="N", help="So many jobs without a GPU at a time [4]."
)
@click.option(
    "--lease",
    type=DURATION,
    default="10m",
    metavar="DURATION",
    help="Jobs of a machine that is not heard of for so long are given to others [10m].",
)
@click.option("--grace", type=DURATION, default="30s", metavar="DURATION", help="From SIGTERM to SIGKILL [30s].")
@click.option(
    "--log-limit", type=MEMORY, default="64MiB", metavar="SIZE", help="Keep so much of a job's output [64MiB]."
)
@click.option("--until-empty", is_flag=True, help="End when nothing is left that could start here.")
@click.option(
    "--fill",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Fill GPUs that no job needs, as `stoker fill` does [stoker.toml].",
)
@source_options
def work_command(
    queue_url: str | None,
    gpus: str,
    free_below: float,
    slots_per_gpu: int,
    cpu_jobs: int,
    lease: float,
    grace: float,
    log_limit: int,
    until_empty: bool,
    fill: str | None,
    source: str | None,
    deadline: float | None,
) -> int:
    """Run the queue's jobs on this machine's GPUs, each when there is room for it.

    Ctrl-C ends the worker, not the jobs: the next `stoker work` finds them again.
    """
    from stoker.cli.options.queue import opened_or_created
    from stoker.engines.local.capacity import PlacementOptions
    from stoker.engines.options import WorkerOptions

    settings = load_settings()
    orders = WorkerOptions(
        queue=queue_url_of(queue_url),
        gpus=gpus,
        rules=PlacementOptions(free_below=free_below, slots_per_gpu=slots_per_gpu, cpu_jobs=cpu_jobs),
        lease=lease,
        grace=grace,
        log_limit=log_limit,
        source=source or settings.gpus,
        deadline=deadline or parse_duration(settings.deadline),
        until_empty=until_empty,
    )
    orders.check()
    from stoker.worker.startup import work

    wanted = None
    if fill is not None:
        from stoker.cli.verbs.fill import checked_fill

        wanted = checked_fill(fill or None, orders.source, orders.deadline)
    return work(orders, log, lambda: opened_or_created(queue_url).close(), wanted)
