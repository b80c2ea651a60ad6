"""Where a job is or was, in words for a cell of a sheet: `GPU 0 on lab1`."""

from collections.abc import Mapping, Sequence

from stoker.queue import Attempt, Job, Store, Worker


class GpuWords:
    """Remembers what it found out: an attempt keeps its GPUs."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def of(self, jobs: Sequence[Job], store: Store) -> Mapping[str, str]:
        """Words for each of the jobs that has been somewhere."""
        started = [
            (job, job.attempt) for job in jobs if job.attempt is not None and job.state not in ("queued", "held")
        ]
        if unknown := [name for _, name in started if name not in self._words]:
            workers = store.workers.all()
            for name in unknown:
                attempt = store.attempts.get(name)
                self._words[name] = words(attempt, workers) if attempt is not None else ""
        return {job.id: self._words[name] for job, name in started}


def words(attempt: Attempt, workers: Sequence[Worker]) -> str:
    """`GPU 0 and 1 on lab1`; only the machine for a job without GPUs, a part of the uuid where no worker knows it."""
    indices = {gpu.uuid: str(gpu.index) for worker in workers for gpu in worker.view.gpus}
    hosts = [worker.host for worker in workers if worker.id == attempt.worker]
    place = f" on {hosts[0]}" if hosts else ""
    if not attempt.gpus:
        return hosts[0] if hosts else "no GPU"
    return "GPU " + " and ".join(indices.get(uuid, uuid.removeprefix("GPU-")[:8]) for uuid in attempt.gpus) + place
