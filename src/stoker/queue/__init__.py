"""The job queue: its model, and a store for SQLite and PostgreSQL with one code path."""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any, Final

from stoker.errors import QueueAwayError, StokerError

if TYPE_CHECKING:
    from stoker.queue.driver import Address, ChangeListener, queue_address
    from stoker.queue.fields import JobSpec, State
    from stoker.queue.jobs import Cancellation, new_id
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
    from stoker.queue.store import Store

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
    "Outcome",
    "Place",
    "QueueAwayError",
    "Requests",
    "Side",
    "Snoozed",
    "State",
    "Store",
    "Usage",
    "View",
    "Worker",
    "WorkerGpu",
    "init_queue",
    "new_id",
    "open_or_create",
    "open_queue",
    "prepare_types",
    "queue_address",
    "warm_up",
]

# Imported lazily: the supervisor of a job needs few of these modules, and no database.
_EXPORTS: Final = {
    "driver": ("Address", "ChangeListener", "queue_address"),
    "fields": ("JobSpec", "State"),
    "jobs": ("Cancellation", "new_id"),
    "store": ("Store",),
}
_MODULE_OF: Final = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'model')}"), name)
    globals()[name] = value
    return value


def open_queue(url: str | None = None, timeout: float | None = None) -> "Store":
    """Opens an existing queue. A database that does not answer within `timeout` seconds counts as away."""
    from stoker.queue.driver import queue_address

    return _opened(queue_address(url), timeout, create=False)


def init_queue(url: str | None = None) -> "Store":
    """Opens the queue, or creates it if there is none."""
    from stoker.queue.driver import queue_address

    return _opened(queue_address(url), None, create=True)


def open_or_create(url: str | None = None) -> "Store":
    """Opens the queue for a submission. A missing file is created; a database must have been initialized."""
    from stoker.queue.driver import queue_address

    address = queue_address(url)
    return _opened(address, None, create=address.database.is_file)


def warm_up(url: str | None) -> None:
    """Imports everything needed to open this queue, so that an upgrade of Stoker's files does not matter later."""
    from stoker.queue import store  # noqa: F401 - needed to open the queue
    from stoker.queue.driver import queue_address

    queue_address(url).connect().close()


def prepare_types() -> None:
    """Creates the decoders of all imported record types, for a process in which several threads read queues.

    msgspec 0.22 dereferences a null pointer if two threads decode a type for the first time simultaneously.
    """
    import msgspec

    from stoker.queue import store  # noqa: F401 - defines some of the types

    kinds = [msgspec.Struct]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("stoker."):
            # Some types are never decoded: their fields are not JSON, or imported only for the type checker.
            with contextlib.suppress(TypeError, NameError):
                msgspec.json.Decoder(kind)


def _opened(address: "Address", timeout: float | None, *, create: bool) -> "Store":
    from stoker.queue.driver import VERSION
    from stoker.queue.store import Store

    driver = address.connect(timeout)
    try:
        version = driver.version()
        if version is None and create:
            driver.create()
            version = driver.version()
        if version is None:
            creator = "the first `stoker submit`" if address.database.is_file else "`stoker queue init`"
            raise StokerError(f"there is no queue at {driver.place}: {creator} creates it")
        if version != VERSION:
            raise StokerError(
                f"the queue {driver.place} has version {version}, and this Stoker uses version {VERSION}: "
                "use the Stoker that created it, or another queue"
            )
    except BaseException:
        driver.close()
        raise
    return Store(driver)
