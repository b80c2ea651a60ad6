"""Jobs that wait: the model, and the store in SQLite or PostgreSQL through one code path."""

from stoker.errors import StokerError
from stoker.queue import schema
from stoker.queue.address import Address, PostgresAddress, SqliteAddress, queue_address
from stoker.queue.changes import ChangeListener
from stoker.queue.driver import Driver, QueueAwayError
from stoker.queue.entry import new_id
from stoker.queue.fields import JobSpec, State
from stoker.queue.model import (
    HEARD_WITHIN,
    Attempt,
    AttemptDetails,
    GpuUse,
    Job,
    Outcome,
    Place,
    Requests,
    Side,
    Snoozed,
    Usage,
    View,
    Worker,
    WorkerGpu,
)
from stoker.queue.store import Cancellation, Store

__all__ = [
    "HEARD_WITHIN",
    "Address",
    "Attempt",
    "AttemptDetails",
    "Cancellation",
    "ChangeListener",
    "GpuUse",
    "Job",
    "JobSpec",
    "NewJob",
    "Outcome",
    "Place",
    "PostgresAddress",
    "QueueAwayError",
    "Requests",
    "Side",
    "Snoozed",
    "SqliteAddress",
    "State",
    "Store",
    "Usage",
    "View",
    "Worker",
    "WorkerGpu",
    "init_queue",
    "new_id",
    "open_queue",
    "queue_address",
    "queue_version",
    "warm_up",
]


def open_queue(url: str | None = None, patience: float | None = None) -> Store:
    """The queue that is there, brought up to date when it is of an older version.

    `patience`: after so many seconds without an answer a database counts as away. Only PostgreSQL can hang for longer.
    """
    address = queue_address(url)
    driver = _driver(address, patience)
    try:
        version = driver.version()
        if version is None:
            creator = "the first `stoker submit`" if isinstance(address, SqliteAddress) else "`stoker queue init`"
            raise StokerError(f"there is no queue at {driver.place}: {creator} creates it")
        _bring_up_to_date(driver, version)
    except BaseException:
        driver.close()
        raise
    return Store(driver)


def warm_up(url: str | None) -> None:
    """Loads all that opening this queue takes, so that it can be opened after Stoker's files were replaced."""
    _driver(queue_address(url)).close()


def init_queue(url: str | None = None) -> Store:
    """The queue there, created when there is none."""
    driver = _driver(queue_address(url))
    try:
        version = driver.version()
        if version is None:
            driver.create()
        _bring_up_to_date(driver, version or 0)
    except BaseException:
        driver.close()
        raise
    return Store(driver)


def queue_version(url: str | None = None) -> tuple[int | None, int]:
    """The version of the queue there, None where there is none, and the one that this Stoker makes of it."""
    driver = _driver(queue_address(url))
    try:
        return driver.version(), schema.VERSION
    finally:
        driver.close()


def _bring_up_to_date(driver: Driver, version: int) -> None:
    if version > schema.VERSION and driver.oldest() > schema.VERSION:
        raise StokerError(
            f"the queue {driver.place} is of version {version}, and this Stoker knows none after {schema.VERSION}: "
            "upgrade Stoker here"
        )
    if version < schema.VERSION:
        driver.migrate()


def _driver(address: Address, patience: float | None = None) -> Driver:
    if isinstance(address, SqliteAddress):
        from stoker.queue.sqlite import SqliteDriver

        return SqliteDriver(address.path)
    from stoker.queue.postgres import PostgresDriver

    return PostgresDriver(address, patience)
