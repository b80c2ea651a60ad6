"""What is known of an attempt beyond its outcome: read from its record, and told to the queue for all to read."""

from typing import Any, Final

import msgspec

from stoker.errors import StokerError
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError
from stoker.queue.model import AttemptDetails
from stoker.worker.attempt_spec import AttemptRecord

# A report is a few pages. One of a job with thousands of processes is whole on the machine that ran it.
LONGEST_REPORT: Final = 256 * 1024
_CUT: Final = "\n\n… (the rest is on the machine that ran it)\n"


def finding_of(record: AttemptRecord) -> AttemptDetails | None:
    """What the record of an attempt that has ended tells; None when there is nothing to say."""
    cause, report, fit = record.status().ending or "", _report(record), _fit(record)
    if not report and not fit and cause in ("", "by itself"):
        return None
    return AttemptDetails(cause=cause, report=report, fit=fit)


def tell_finding(store: Store, record: AttemptRecord, attempt: str) -> None:
    """Of an attempt that has ended, and whose outcome the queue has."""
    _tell(store, attempt, finding_of(record))


def tell_fit(store: Store, record: AttemptRecord, attempt: str) -> bool:
    """While it runs: whether a size was found, and the queue has been told how."""
    fit = _fit(record)
    if fit:
        _tell(store, attempt, AttemptDetails(fit=fit))
    return bool(fit)


def _tell(store: Store, attempt: str, finding: AttemptDetails | None) -> None:
    """Nothing waits for it. A queue that is away is told when it is back, one that refuses it is not asked again."""
    if finding is None:
        return
    try:
        store.write_finding(attempt, finding)
    except QueueAwayError:
        raise
    except CollisionError:
        return  # the job was cleaned away meanwhile
    except StokerError:
        return  # it is in the record, on the machine that ran it


def _report(record: AttemptRecord) -> str:
    try:
        with record.report.open("rb") as file:
            body = file.read(LONGEST_REPORT + 1)
    except OSError:
        return ""
    if len(body) <= LONGEST_REPORT:
        return body.decode(errors="replace")
    return body[: LONGEST_REPORT - len(_CUT.encode())].decode(errors="ignore") + _CUT


def _fit(record: AttemptRecord) -> dict[str, Any]:
    fitted = record.fit()
    return {} if fitted is None else dict(msgspec.to_builtins(fitted))
