"""The store: all operations on the queue, the same on every database."""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, get_args

import msgspec

from stoker.errors import StokerError
from stoker.queue.attempts import Attempts
from stoker.queue.code.blobs import Blobs
from stoker.queue.driver import FOR_PEOPLE, ChangeListener, Driver, NotifyThrottle, Parameters, Row
from stoker.queue.fields import JobSpec
from stoker.queue.groups import Groups
from stoker.queue.jobs import Jobs, check_submission, insert, known_origins, new_id, ready_among, until_free
from stoker.queue.logs import Logs
from stoker.queue.model import HEARD_WITHIN, GpuUse, NotifyUrl, Usage, View, Worker
from stoker.queue.table import Table, clean_text, json_text, notify_of, strict_job_of

# Sent events are remembered for two months; no process looks further back.
KEPT_SECONDS: Final = 60 * 86400.0
SECONDS_BETWEEN_FORGETTING: Final = 3600.0
# The usage of each GPU is kept for a month.
KEPT_MINUTES: Final = 31 * 24 * 60
# Up to this many GPUs of a machine are read one by one by key: the planner lacks statistics of the newest minutes, and
# would read all machines. Only a cluster has more, with GPUs per job.
MOST_GPUS: Final = 256
# The limit of workers considered per machine.
MOST_WORKERS: Final = 50
# A thousand problems of the same kind have one cause, so few are named.
MOST_NAMED: Final = 5

GPU_USES: Final[tuple[GpuUse, ...]] = get_args(GpuUse)
CONTRADICTIONS: Final = (
    (
        "running without attempt",
        "marked as running, but no attempt at them runs",
    ),
    ("attempts without job", "the jobs of attempts that run, but are not marked as running"),
    ("wrongly blocked", "waiting for other jobs without need, or not although they must"),
    ("wrongly capped", "started by a cap that their group does not have, or not by the one that it has"),
    ("in no known state", "in a state that this Stoker does not know"),
)


class Store(Table):
    """A connection to the queue, for one thread."""

    def __init__(self, driver: Driver) -> None:
        throttle = NotifyThrottle()
        super().__init__(driver, throttle)
        self.jobs = Jobs(driver, throttle)
        self.attempts = Attempts(driver, throttle)
        self.workers = Workers(driver, throttle)
        self.logs = Logs(driver, throttle)
        self.blobs = Blobs(driver, throttle)
        self.usage = UsageTable(driver, throttle)
        self.notices = Notices(driver, throttle)
        self.feeds = Feeds(driver, throttle)
        self.groups = Groups(driver, throttle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._throttle.flush_due() is not None:
            self._send_deferred(limited=False)
        self._driver.close()

    @property
    def place(self) -> str:
        """The queue's address, for people."""
        return self._driver.place

    def shared_address(self) -> str | None:
        """The complete address with its password, for other machines; None for a local file."""
        return self._driver.shared_address()

    def pause(self, paused: bool = True) -> None:
        """Pauses or resumes claims; running jobs continue."""
        self._change(lambda: self._driver.fetch("pause queue", {"paused": int(paused)}))

    def paused(self) -> bool:
        return bool(self._driver.fetch("paused", {})[0][0])

    def clock(self) -> float:
        """The database's clock, which decides leases."""
        return float(self._driver.fetch("clock", {})[0][0])

    def check(self) -> list[str]:
        """The problems of the queue, one sentence each."""
        return problems(self._driver)

    def listen(self, *, as_worker: bool = False) -> ChangeListener:
        """Listens to changes by other processes. `as_worker`: only to those that concern workers."""
        return self._driver.listen(as_worker=as_worker)

    def flush_due(self) -> float | None:
        """Seconds until `flush` is due; None if nothing is deferred."""
        return self._throttle.flush_due()

    def flush(self) -> None:
        """Sends a due notification, if the database can be reached."""
        if self._throttle.flush_due() == 0.0:
            self._send_deferred(limited=True)

    def _send_deferred(self, *, limited: bool) -> None:
        changes = self._throttle.with_deferred(FOR_PEOPLE)
        with contextlib.suppress(StokerError):
            if not self._driver.notify(changes, limited=limited):
                self._throttle.refused()
                return
        self._throttle.sent()


class PeriodicTask:
    """Is due at the first call, and then once per interval."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._next: float | None = None

    def is_due(self) -> bool:
        now = self._clock()
        if self._next is not None and now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Workers(Table):
    """The workers of the queue."""

    def heartbeat(self, worker: str, host: str, view: View) -> None:
        """Records a worker's heartbeat with its report."""
        self._driver.fetch("heartbeat", {"worker": worker, "host": host, "view": json_text(view)})

    def farewell(self, worker: str, *, removed: bool = False) -> None:
        """Records the exit of a worker, or the removal of its machine. Its attempts continue under its id."""

        def work() -> None:
            for (view,) in self._driver.fetch("view of worker", {"worker": worker}):
                left = msgspec.structs.replace(msgspec.json.decode(view, type=View), left=True, removed=removed)
                self._driver.fetch("farewell", {"worker": worker, "view": json_text(left)})

        self._driver.transaction(work)
        kept: Parameters = {"worker": worker, "jobs": "[]"}
        self._throttled_change(lambda: self._driver.fetch("keep no more", kept))

    def count(self) -> int:
        """The number of live workers."""
        return int(self._driver.fetch("count workers", {"age": HEARD_WITHIN})[0][0])

    def all(self) -> list[Worker]:
        return [
            Worker(
                id=name,
                host=host,
                view=msgspec.json.decode(view, type=View),
                started=started,
                seen=seen,
                paused=bool(paused),
            )
            for name, host, view, started, seen, paused in self._driver.fetch("workers", {})
        ]

    def of_host(self, host: str) -> list[str]:
        """The ids of a machine's recent workers, newest first."""
        wanted: Parameters = {"host": clean_text(host), "most": MOST_WORKERS}
        return [row[0] for row in self._driver.fetch("workers of host", wanted)]

    def pause(self, worker: str, paused: bool = True) -> bool:
        """Pauses or resumes a worker's claims. False if there is no such worker."""
        parameters: Parameters = {"worker": clean_text(worker), "paused": int(paused)}
        return self._changed(lambda: self._driver.fetch("pause worker", parameters)) != []


class UsageTable(Table):
    """The usage of GPUs: one row per GPU and minute, for charts and GPU-hours."""

    def __init__(self, driver: Driver, throttle: NotifyThrottle) -> None:
        super().__init__(driver, throttle)
        self._cleanup = PeriodicTask(SECONDS_BETWEEN_FORGETTING)

    def write(self, rows: Sequence[Usage]) -> None:
        if not rows:
            return
        # Sorted, so that two processes with the same rows do not deadlock.
        written = [_row(usage) for usage in sorted(rows, key=lambda usage: (usage.host, usage.gpu, usage.minute))]
        self._driver.transaction(lambda: self._driver.many("write usage", written))
        if self._cleanup.is_due():
            self._driver.fetch("forget usage", {"minutes": KEPT_MINUTES})

    def read(
        self,
        since_minute: int,
        host: str | None = None,
        gpu: str | None = None,
        *,
        until_minute: int = 2**31 - 1,
        step: int = 1,
    ) -> list[Usage]:
        """Rows by machine, GPU and time. `step`: minutes per row, aligned to multiples of it.

        A value is unknown only if it is unknown in all minutes of the row.
        """
        if host is not None and gpu is None:
            gpus = self._gpus_of(host)
            if len(gpus) <= MOST_GPUS:
                span = (since_minute, until_minute, step)
                return [row for one in gpus for row in self._read("usage_of_gpu_of_host", *span, host=host, gpu=one)]
            return self._read("usage_of_host", since_minute, until_minute, step, host=host)
        if host is not None and gpu is not None:
            return self._read("usage_of_gpu_of_host", since_minute, until_minute, step, host=host, gpu=gpu)
        if gpu is not None:
            return self._read("usage_of_gpu", since_minute, until_minute, step, gpu=gpu)
        return self._read("usage_of_all", since_minute, until_minute, step)

    def _gpus_of(self, host: str) -> list[str]:
        """The GPUs of a machine that have rows, at most one more than `MOST_GPUS`."""
        wanted: Parameters = {"host": clean_text(host), "most": MOST_GPUS + 1}
        return [row[0] for row in self._driver.fetch("gpus of host", wanted)]

    def _read(self, which: str, since: int, until: int, step: int, **key: str) -> list[Usage]:
        parameters: dict[str, str | int | float | None] = {name: clean_text(text) for name, text in key.items()}
        parameters |= {"since": since, "until": until}
        statements = ["usage", which, "usage_order"]
        if step > 1:
            parameters["step"] = step
            statements = ["usage_means", which, "usage_by_step", "usage_order"]
        rows = self._driver.fetch_text(" ".join(map(self._driver.sql, statements)), parameters)
        return [_usage_of(row, step) for row in rows]

    def totals(self, since_minute: int) -> dict[GpuUse, float]:
        (sums,) = self._driver.fetch("usage totals", {"since": since_minute})
        return dict(zip(GPU_USES, map(float, sums), strict=True))


def _row(usage: Usage) -> Parameters:
    spans: dict[str, float] = {state: float(usage.seconds.get(state, 0.0)) for state in GPU_USES}
    return {
        "host": usage.host,
        "gpu": usage.gpu,
        "minute": usage.minute,
        **spans,
        "utilization": usage.utilization,
        "memory": usage.memory,
        "power": usage.power,
    }


def _usage_of(row: Row, step: int) -> Usage:
    host, gpu, number, *spans, utilization, utilization_peak, memory, memory_peak, power, power_peak = row
    return Usage(
        host=host,
        gpu=gpu,
        minute=number * step,
        seconds={state: seconds for state, seconds in zip(GPU_USES, spans, strict=True) if seconds},
        utilization=_at_most(utilization, utilization_peak),
        memory=None if memory is None else round(_at_most(memory, memory_peak)),
        power=_at_most(power, power_peak),
        utilization_peak=utilization_peak,
        memory_peak=memory_peak,
        power_peak=power_peak,
    )


def _at_most(mean: Any, peak: Any) -> Any:
    """The mean, limited to the peak, which rounding may exceed."""
    return mean if mean is None or peak is None else min(mean, peak)


class Notices(Table):
    """Keys of sent events, so that only one process sends each, and notification URLs of the page."""

    def __init__(self, driver: Driver, throttle: NotifyThrottle) -> None:
        super().__init__(driver, throttle)
        self._cleanup = PeriodicTask(SECONDS_BETWEEN_FORGETTING)

    def note_once(self, key: str) -> bool:
        if self._cleanup.is_due():
            self._driver.fetch("forget notices", {"age": KEPT_SECONDS})
        return bool(self._driver.fetch("write notice", {"name": clean_text(key)}))

    def forget_note(self, key: str) -> bool:
        return bool(self._driver.fetch("delete notice", {"name": clean_text(key)}))

    def is_anyone_to_notify(self) -> bool:
        """True if any notification is set on the page, in a job or in a group."""
        return bool(self._driver.fetch("is anyone to notify", {})[0][0])

    def urls(self) -> list[NotifyUrl]:
        """The notification URLs of the page, oldest first."""
        return [
            NotifyUrl(id=name, url=url, name=called, events=notify_of(events), added=added)
            for name, url, called, events, added in self._driver.fetch("notify urls", {})
        ]

    def add_url(self, url: str, name: str, events: Sequence[str]) -> str | None:
        """Adds a URL and returns its id; None if it exists already."""
        parameters: Parameters = {"id": new_id(), "url": url, "name": clean_text(name), "events": json_text(events)}
        rows = self._change(lambda: self._driver.fetch("add notify url", parameters), FOR_PEOPLE)
        return rows[0][0] if rows else None

    def set_events(self, name: str, events: Sequence[str]) -> bool:
        parameters: Parameters = {"id": clean_text(name), "events": json_text(events)}
        return bool(self._change(lambda: self._driver.fetch("set notify events", parameters), FOR_PEOPLE))

    def remove_url(self, name: str) -> bool:
        return bool(self._change(lambda: self._driver.fetch("remove notify url", {"id": clean_text(name)}), FOR_PEOPLE))


class Feeds(Table):
    """The memory of feeds, updated in the transaction that submits their jobs."""

    def memory(self, feed: str) -> tuple[int, str]:
        """Version and text of a feed's memory; version 0 before the first read."""
        rows = self._driver.fetch("read feed", {"name": feed})
        return (rows[0][0], rows[0][1]) if rows else (0, "")

    def take(self, feed: str, version: int, memory: str, jobs: Sequence[JobSpec]) -> bool:
        """Submits jobs, which have their ids, and replaces the feed's memory, in one transaction.

        False, without any change, if another process has changed the memory since `version`.
        """
        check_submission(jobs)
        parameters: Parameters = {"name": feed, "version": version, "memory": memory}

        def work() -> bool:
            if not self._driver.fetch("write feed" if version else "begin feed", parameters):
                return False
            if jobs:
                insert(self._driver, jobs)
            return True

        return until_free(self._driver, lambda: self._change(work, ready_among(jobs)))

    def known_origins(self, origins: Sequence[str]) -> set[str]:
        """The origins that are, or once were, jobs."""
        return set(known_origins(self._driver, origins))


def problems(driver: Driver) -> list[str]:
    """The problems of a queue, one sentence each. In a damaged file nothing else is checked."""
    if damage := driver.damage():
        return [f"the file is damaged: {line}" for line in damage[:MOST_NAMED]]
    return [*_contradictions(driver), *_unreadable(driver), *_cycles(driver)]


def _contradictions(driver: Driver) -> Iterable[str]:
    for statement, what in CONTRADICTIONS:
        ids = [row[0] for row in driver.fetch(statement, {})]
        if ids:
            yield f"{_listed(ids)} are {what}"


def _unreadable(driver: Driver) -> Iterable[str]:
    for row in driver.fetch("unfinished jobs", {}):
        try:
            strict_job_of(row)
        except msgspec.MsgspecError as error:
            yield f"the job {row[0]} cannot be read ({error}): `stoker cancel {row[0]}` removes it from the queue"


def _cycles(driver: Driver) -> Iterable[str]:
    from graphlib import CycleError, TopologicalSorter

    graph: dict[str, list[str]] = {}
    for job, needs in driver.fetch("open dependencies", {}):
        graph.setdefault(job, []).append(needs)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"jobs wait for each other in a cycle: {' before '.join(error.args[1])}"


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return f"the jobs {', '.join(ids[:MOST_NAMED])}{more}"
