"""Many processes that claim the same jobs, and the check that each job ran once."""

import collections
import os
import select
import subprocess
import sys
import time
import traceback
from pathlib import Path

from stoker.queue import JobSpec, Store, open_queue
from stoker.queue.attempts import ClaimRequest
from stoker.queue.fields import shape_of

LEASE = 600.0
BATCH = 400


def crowd(queue: Store, url: str, processes: int, seconds: float, directory: Path) -> int:
    """The number of jobs done while jobs are submitted for `seconds`. Fails when one was claimed twice or lost."""
    program = (
        "import sys; from tests.support.queue_contention import lead; lead(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, url, str(processes), str(directory)], stdin=subprocess.PIPE
    ) as leader:
        assert leader.stdin is not None
        try:
            ids = _feed(queue, seconds)
            # End of input means that no more jobs follow.
            leader.stdin.close()
            assert leader.wait(timeout=seconds + 100) == 0
        finally:
            leader.terminate()
    taken = [job for number in range(processes) for job in (directory / f"w{number}").read_text().split()]
    _balance(queue, ids, taken)
    return len(ids)


def _feed(queue: Store, seconds: float) -> list[str]:
    ids = queue.jobs.submit([JobSpec(command="x", gpus=0)] * BATCH)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if queue.jobs.counts().get("queued", 0) < BATCH:
            ids += queue.jobs.submit([JobSpec(command="x", gpus=0)] * BATCH)
        else:
            time.sleep(0.01)
    return ids


def lead(url: str, processes: int, directory: str) -> None:
    """Forks them from one process that has imported everything, which is most of what starting sixteen would take."""
    open_queue(url).close()
    for number in range(processes):
        if os.fork() == 0:
            try:
                _take_part(url, f"w{number}", Path(directory))
            except BaseException:  # noqa: BLE001 - it must not go on as the test that it was forked from
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in range(processes)))


def _take_part(url: str, name: str, directory: Path) -> None:
    """One of them: claims in every way, finishes, and leaves a list of the jobs that it had."""
    had: list[str] = []
    no_more = False
    claim = ClaimRequest(shape=shape_of(JobSpec(command="", gpus=0)), worker=name, lease=LEASE)
    with open_queue(url) as queue:
        attempts = queue.attempts
        while True:
            first = [job.id for job in attempts.heads().jobs[:4]] if len(had) % 4 < 2 else []
            match len(had) % 4:
                case 0:
                    attempt = next(filter(None, (attempts.claim([job], name, [], LEASE) for job in first)), None)
                case 1:
                    attempt = attempts.claim(first, name, [], LEASE)
                case _:
                    attempt = None
            if attempt is None and (claimed := attempts.take_head(claim)) is not None:
                attempt = claimed.attempt
            if attempt is not None:
                # Every other time the next one is claimed with the outcome of this one.
                done = attempts.complete(attempt.id, "succeeded", 0, claim=claim if len(had) % 2 else None)
                had.append(attempt.job)
                if done.claimed is not None:
                    assert attempts.finish(done.claimed.attempt.id, "succeeded", 0)
                    had.append(done.claimed.job.id)
                assert done.accepted
            elif no_more:
                break
            else:
                no_more = bool(select.select([sys.stdin], [], [], 0.005)[0])
    (directory / name).write_text("\n".join(had))


def _balance(queue: Store, ids: list[str], taken: list[str]) -> None:
    twice = [job for job, times in collections.Counter(taken).items() if times > 1]
    assert not twice, f"taken twice: {twice[:5]}"
    assert sorted(taken) == sorted(ids), f"{len(ids)} were submitted and {len(taken)} taken"
    assert queue.jobs.counts() == {"succeeded": len(ids)}
    assert {job.attempts for job in queue.jobs.find(limit=len(ids))} == {1}
    assert queue.attempts.running() == []
    assert queue.check() == []
