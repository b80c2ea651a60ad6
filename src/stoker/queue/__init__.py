"""Jobs that wait: the model, and the store in SQLite or PostgreSQL through one code path."""

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

# Imported when they are used: the supervisor of a job needs a few of this package's modules, and no database.
_PLACES: Final = {
    "driver": ("Address", "ChangeListener", "queue_address"),
    "fields": ("JobSpec", "State"),
    "jobs": ("Cancellation", "new_id"),
    "store": ("Store",),
}
_PLACE_OF: Final = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACE_OF.get(name, 'model')}"), name)
    globals()[name] = value
    return value


def open_queue(url: str | None = None, timeout: float | None = None) -> "Store":
    """The queue that is there. After `timeout` seconds without an answer a database counts as away."""
    from stoker.queue.driver import queue_address

    return _opened(queue_address(url), timeout, create=False)


def init_queue(url: str | None = None) -> "Store":
    """The queue there, created when there is none."""
    from stoker.queue.driver import queue_address

    return _opened(queue_address(url), None, create=True)


def open_or_create(url: str | None = None) -> "Store":
    """For what submits: a file is created when it is not there, a database must have been prepared."""
    from stoker.queue.driver import queue_address

    address = queue_address(url)
    return _opened(address, None, create=address.database.is_file)


def warm_up(url: str | None) -> None:
    """Loads all that opening this queue takes, so that it can be opened after Stoker's files were replaced."""
    from stoker.queue import store  # noqa: F401 - it is used when the queue is opened
    from stoker.queue.driver import queue_address

    queue_address(url).connect().close()


def prepare_types() -> None:
    """Prepares the decoding of all records that are loaded, for a process in which several threads read queues.

    Where two threads are the first to decode a type at the same time, msgspec (0.22) follows a null pointer.
    """
    import msgspec

    from stoker.queue import store  # noqa: F401 - its types are among them

    kinds = [msgspec.Struct]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("stoker."):
            # Some are never decoded: they hold what JSON cannot, or types that only the type checker imports.
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
