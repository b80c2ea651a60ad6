"""What each GPU did, minute by minute: what charts and sums of GPU-hours are made of."""

from collections.abc import Sequence
from typing import Final, get_args

from stoker.queue.driver import Driver, Parameters
from stoker.queue.model import GpuUse, Usage
from stoker.queue.periodic import PeriodicTask
from stoker.queue.rows import clean_text

# A month, and the day on which somebody looks back at it.
KEPT_MINUTES: Final = 31 * 24 * 60
# Rows grow old by the minute; once an hour is often enough to look for them.
SECONDS_BETWEEN_FORGETTING: Final = 3600.0

GPU_USES: Final[tuple[GpuUse, ...]] = get_args(GpuUse)


class UsageTable:
    """One row for each GPU and minute."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._cleanup = PeriodicTask(SECONDS_BETWEEN_FORGETTING)

    def write(self, rows: Sequence[Usage]) -> None:
        if not rows:
            return
        # In one order, so that two who write the same rows wait for each other instead of both.
        written = [_row(usage) for usage in sorted(rows, key=lambda usage: (usage.host, usage.gpu, usage.minute))]
        self._driver.transaction(lambda: self._driver.many("write usage", written))
        if self._cleanup.is_due():
            self._driver.fetch("forget usage", {"minutes": KEPT_MINUTES})

    def read(self, since_minute: int, host: str | None, gpu: str | None) -> list[Usage]:
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
