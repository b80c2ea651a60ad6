"""What workers report: heartbeats, views of their machines, and the use of each GPU minute by minute."""

import time
from collections.abc import Callable, Sequence
from typing import Final, get_args

import msgspec

from stoker.queue.driver import Driver, NotifyThrottle, Parameters
from stoker.queue.model import (
    GpuUse,
    Usage,
    View,
    Worker,
)
from stoker.queue.table import Table, clean_text, json_text

# A month and a day.
KEPT_MINUTES: Final = 31 * 24 * 60
SECONDS_BETWEEN_FORGETTING: Final = 3600.0

GPU_USES: Final[tuple[GpuUse, ...]] = get_args(GpuUse)


class PeriodicTask:
    """Due at the first call, and then once in this many seconds."""

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
    """The processes that own machines' GPUs."""

    def heartbeat(self, worker: str, host: str, view: View) -> None:
        """Records that a worker is alive, and what it sees of its machine."""
        self._driver.fetch("heartbeat", {"worker": worker, "host": host, "view": json_text(view)})

    def farewell(self, worker: str) -> None:
        """Records that a worker has left. Its attempts go on and keep its name."""

        def work() -> None:
            for (view,) in self._driver.fetch("view of worker", {"worker": worker}):
                left = msgspec.structs.replace(msgspec.json.decode(view, type=View), left=True)
                self._driver.fetch("farewell", {"worker": worker, "view": json_text(left)})

        self._driver.transaction(work)
        kept: Parameters = {"worker": worker, "jobs": "[]"}
        self._throttled_change(lambda: self._driver.fetch("keep no more", kept))

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

    def pause(self, worker: str, paused: bool = True) -> bool:
        """While it is paused it claims nothing. False when there is no such worker."""
        parameters: Parameters = {"worker": clean_text(worker), "paused": int(paused)}
        return self._changed(lambda: self._driver.fetch("pause worker", parameters)) != []


class UsageTable(Table):
    """What each GPU did: one row for each GPU and minute, for charts and GPU-hours."""

    def __init__(self, driver: Driver, throttle: NotifyThrottle) -> None:
        super().__init__(driver, throttle)
        self._cleanup = PeriodicTask(SECONDS_BETWEEN_FORGETTING)

    def write(self, rows: Sequence[Usage]) -> None:
        if not rows:
            return
        # In one order, so that two processes that write the same rows do not deadlock.
        written = [_row(usage) for usage in sorted(rows, key=lambda usage: (usage.host, usage.gpu, usage.minute))]
        self._driver.transaction(lambda: self._driver.many("write usage", written))
        if self._cleanup.is_due():
            self._driver.fetch("forget usage", {"minutes": KEPT_MINUTES})

    def read(self, since_minute: int, host: str | None = None, gpu: str | None = None) -> list[Usage]:
        parameters = dict[str, str | int | float | None](since=since_minute)
        sql = [self._driver.sql("usage"), self._driver.sql("usage_since")]
        if host is not None:
            parameters["host"] = clean_text(host)
            sql.append(self._driver.sql("usage_of_host"))
        if gpu is not None:
            parameters["gpu"] = clean_text(gpu)
            sql.append(self._driver.sql("usage_of_gpu"))
        sql.append(self._driver.sql("usage_order"))
        rows = self._driver.fetch_text(" ".join(sql), parameters)
        return [
            Usage(
                host=machine,
                gpu=uuid,
                minute=minute,
                seconds={state: seconds for state, seconds in zip(GPU_USES, spans, strict=True) if seconds},
                utilization=utilization,
                memory=memory,
            )
            for machine, uuid, minute, *spans, utilization, memory in rows
        ]

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
    }
