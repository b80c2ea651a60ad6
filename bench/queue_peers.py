"""Other queues on PostgreSQL: `DRAIN` takes and finishes jobs that carry nothing, `SERVE` runs a program for each.

Each is called as its documentation says, one job at a time.
"""

import asyncio
import importlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any
from uuid import uuid4

WARM_UP = 20
ENTRYPOINT = "nothing"


def prepare_ours(url: str, count: int) -> None:
    from stoker.queue import JobSpec, init_queue

    with init_queue(url) as queue:
        queue.jobs.submit([JobSpec(command=("true",), gpus=0)] * count)


def drain_ours(url: str) -> None:
    from stoker.queue import JobSpec, open_queue
    from stoker.queue.attempts import ClaimRequest
    from stoker.queue.fields import shape_of

    claim = ClaimRequest(shape=shape_of(JobSpec(command="", gpus=0)), worker="w", lease=60.0)
    with open_queue(url) as queue:

        def one() -> bool:
            claimed = queue.attempts.take_head(claim)
            return claimed is not None and queue.attempts.finish(claimed.attempt.id, "succeeded", 0)

        _timed(one)


def drain_as_a_worker(url: str) -> None:
    """As a worker does: it claims the next job of a shape with the outcome of the one before."""
    from stoker.queue import JobSpec, open_queue
    from stoker.queue.attempts import ClaimRequest
    from stoker.queue.fields import shape_of

    claim = ClaimRequest(shape=shape_of(JobSpec(command="", gpus=0)), worker="w", lease=60.0)
    with open_queue(url) as queue:
        claimed = queue.attempts.take_head(claim)

        def one() -> bool:
            nonlocal claimed
            if claimed is None:
                return False
            done = queue.attempts.complete(claimed.attempt.id, "succeeded", 0, claim=claim)
            claimed = done.claimed
            return done.accepted

        _timed(one)


def prepare_procrastinate(url: str, count: int) -> None:
    async def prepare() -> None:
        from procrastinate import App, PsycopgConnector
        from procrastinate.jobs import Job

        async with App(connector=PsycopgConnector(conninfo=url)).open_async() as app:
            await app.schema_manager.apply_schema_async()
            job = Job(id=None, queue="default", lock=None, queueing_lock=None, task_name=ENTRYPOINT, task_kwargs={})
            await app.job_manager.batch_defer_jobs_async([job] * count)

    asyncio.run(prepare())


def drain_procrastinate(url: str) -> None:
    async def drain() -> None:
        from procrastinate import App, PsycopgConnector
        from procrastinate.jobs import Status

        connector = PsycopgConnector(conninfo=url, min_size=1, max_size=1)
        async with App(connector=connector).open_async() as app:
            worker = await app.job_manager.register_worker()

            async def one() -> bool:
                job = await app.job_manager.fetch_job(queues=None, worker_id=worker)
                if job is None:
                    return False
                await app.job_manager.finish_job(job, Status.SUCCEEDED, delete_job=False)
                return True

            await _timed_async(one)

    asyncio.run(drain())


def prepare_pgqueuer(url: str, count: int) -> None:
    async def prepare(queries: Any) -> None:
        await queries.install()
        await queries.enqueue([ENTRYPOINT] * count, [None] * count, [0] * count)

    asyncio.run(_with_pgqueuer(url, prepare))


def drain_pgqueuer(url: str) -> None:
    async def drain(queries: Any) -> None:
        from pgqueuer.ports.repository import EntrypointExecutionParameter

        entrypoints = {ENTRYPOINT: EntrypointExecutionParameter(concurrency_limit=0)}
        manager = uuid4()

        async def one() -> bool:
            jobs = await queries.dequeue(
                batch_size=1,
                entrypoints=entrypoints,
                queue_manager_id=manager,
                global_concurrency_limit=None,
                heartbeat_timeout=timedelta(seconds=60),
            )
            if jobs:
                await queries.log_jobs([(jobs[0], "successful", None)])
            return bool(jobs)

        await _timed_async(one)

    asyncio.run(_with_pgqueuer(url, drain))


def serve_procrastinate(url: str, command: list[str]) -> None:
    """A worker that runs the command for each job until none is left."""

    async def serve() -> None:
        from procrastinate import App, PsycopgConnector

        app = App(connector=PsycopgConnector(conninfo=url))

        @app.task(name=ENTRYPOINT)
        async def run() -> None:
            subprocess.run(command, check=True)

        async with app.open_async():
            await app.run_worker_async(concurrency=1, wait=False)

    asyncio.run(serve())


def serve_pgqueuer(url: str, command: list[str]) -> None:
    async def serve(queries: Any) -> None:
        from pgqueuer.qm import QueueManager
        from pgqueuer.types import QueueExecutionMode

        manager = QueueManager(queries)

        @manager.entrypoint(ENTRYPOINT)
        async def run(_job: object) -> None:
            subprocess.run(command, check=True)

        await manager.run(batch_size=1, max_concurrent_tasks=2, mode=QueueExecutionMode.drain)

    asyncio.run(_with_pgqueuer(url, serve))


async def _with_pgqueuer(url: str, use: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    from pgqueuer.queries import Queries

    if pgqueuer_driver() == "asyncpg":
        from pgqueuer.db import AsyncpgDriver

        connection = await importlib.import_module("asyncpg").connect(url)
        try:
            await use(Queries(AsyncpgDriver(connection)))
        finally:
            await connection.close()
        return
    import psycopg
    from pgqueuer.db import PsycopgDriver

    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await use(Queries(PsycopgDriver(connection)))


def pgqueuer_driver() -> str:
    """The faster one of those that are installed."""
    return "asyncpg" if importlib.util.find_spec("asyncpg") else "psycopg"


def _timed(one: Callable[[], bool]) -> None:
    for _ in range(WARM_UP):
        assert one()
    print("ready", flush=True)
    sys.stdin.readline()
    done = 0
    while one():
        done += 1
    print(done, time.monotonic(), flush=True)


async def _timed_async(one: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(WARM_UP):
        assert await one()
    print("ready", flush=True)
    sys.stdin.readline()
    done = 0
    while await one():
        done += 1
    print(done, time.monotonic(), flush=True)


PREPARE = {
    "ours": prepare_ours,
    "ours, as a worker": prepare_ours,
    "procrastinate": prepare_procrastinate,
    "pgqueuer": prepare_pgqueuer,
}
DRAIN = {
    "ours": drain_ours,
    "ours, as a worker": drain_as_a_worker,
    "procrastinate": drain_procrastinate,
    "pgqueuer": drain_pgqueuer,
}
SERVE = {"procrastinate": serve_procrastinate, "pgqueuer": serve_pgqueuer}
