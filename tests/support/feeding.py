"""Feeders as real processes, and the resulting queue."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from stoker.queue import Job, Outcome, Store, init_queue
from tests.support.command import stoker_command

# 2 GiB plus 100 MiB for each example of the batch: on a card of 24 GiB, 200 fit below a margin of 10 %.
# As a probe it goes on until enough of it was seen, however long that takes.
TRAINER = """\
#!/bin/sh
size=8
for word in "$@"; do case $word in --batch_size=*) size=${word#*=} ;; esac; done
echo "trains: $*"
echo "tracks: $STOKER_JOB_ID in $WANDB_RUN_ID, ${WANDB_MODE:-online}, probe ${STOKER_PROBE:-no}"
lasts=600s
if [ -z "$STOKER_FIT_PROBE" ]; then size=$((size + ${MORE:-0})) lasts=0.1s; fi
exec STOKER sim load --gpu 0 --memory $((2048 + size * 100))MiB --for $lasts
"""


def write_trainer(directory: Path, waits_for: Path | None = None) -> Path:
    """The program of the queue's lines: `train --batch_size=N` on GPU 0. `waits_for`: a file that ends the real run."""
    path = directory / "train"
    text = TRAINER.replace("STOKER sim", f"{stoker_command()} sim")
    if waits_for is not None:
        text = text.replace(" lasts=0.1s", f" lasts=0.1s; until [ -e {waits_for} ]; do sleep 0.1; done")
    path.write_text(text)
    path.chmod(0o755)
    return path


class Feeder:
    """A `stoker feed …` that runs until stopped; its output is in files."""

    def __init__(self, directory: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        directory.mkdir()
        self._out, self._err = directory / "out", directory / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [stoker_command(), "feed", *arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def taken(self) -> list[str]:
        """The commands that it said it took."""
        # The last line may be being written.
        return [line.split("  ", 1)[1] for line in self.out.split("\n")[:-1]]

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=60)


class Feeders:
    """All feeders of a test; they end with it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[Feeder] = []

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Feeder:
        feeder = Feeder(self._directory / f"feeder-{len(self._all)}", *arguments, environment=environment)
        self._all.append(feeder)
        return feeder

    def close(self) -> None:
        for feeder in self._all:
            feeder.end(signal.SIGKILL)
            assert "Traceback" not in feeder.err, feeder.err


class Queue:
    """The queue that the feeders of a test feed."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self.opened():
            pass

    def opened(self) -> Store:
        return init_queue(self.url)

    def jobs(self) -> list[Job]:
        """In the order in which they would start."""
        with self.opened() as store:
            return store.jobs.find(order="queue", limit=100_000)

    def commands(self) -> list[str]:
        return [str(job.command) for job in self.jobs()]

    def counted(self) -> Counter[str]:
        return Counter(self.commands())

    def run(self, command: str, outcome: Outcome, *, link: str = "", gpus: tuple[str, ...] = ()) -> str:
        """Runs the job with this command as a worker would; its id."""
        (job,) = [job for job in self.jobs() if job.command == command and job.state == "queued"]
        with self.opened() as store:
            attempt = store.attempts.claim([job.id], "w", gpus, 600.0)
            assert attempt is not None
            if link:
                store.jobs.set_link(attempt.id, link)
            assert store.attempts.finish(attempt.id, outcome, 0 if outcome == "succeeded" else 1)
        return job.id
