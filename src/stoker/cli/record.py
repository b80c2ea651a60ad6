"""`stoker record`: readings over time to a file, for replay and for questions asked later."""

import contextlib
import signal
import sys
from pathlib import Path

import click

from stoker.cli.gpus import looks_of
from stoker.cli.options import DURATION, SteadyRhythm, open_prober, source_options
from stoker.gpus.recording import RecordingWriter
from stoker.gpus.spawn import forked
from stoker.units import format_duration


@click.command("record")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--every", type=DURATION, default="5s", metavar="DURATION", help="Time between looks [5s].")
@click.option("--for", "duration", type=DURATION, metavar="DURATION", help="Stop by itself after this long.")
@source_options
def command(file: Path, every: float, duration: float | None, source: str | None, deadline: float | None) -> int:
    """Append readings of all GPUs to FILE until Ctrl-C. What is in the file survives a crash at any moment."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    looks = 0
    with open_prober(source, deadline, start=forked) as prober:
        first = prober.look()
        with contextlib.closing(RecordingWriter(file)) as writer, contextlib.suppress(KeyboardInterrupt):
            sys.stderr.write(f"stoker: recording {len(first.gpus)} GPU(s) to {file}, every {format_duration(every)}\n")
            for look in looks_of(prober, first, "all", SteadyRhythm(every, duration)):
                writer.append(look)
                looks += 1
    sys.stderr.write(f"stoker: recorded {looks} look(s) to {file}\n")
    return 0
