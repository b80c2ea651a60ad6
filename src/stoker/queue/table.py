"""The base of the store's tables: changes that notify listeners, and conversion of rows to jobs and attempts."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_args

import msgspec

from stoker.actions.subscription import OF_GROUP, parse_subscription
from stoker.errors import BadInputError
from stoker.queue.commands import pattern_of
from stoker.queue.driver import EVERYTHING, FOR_PEOPLE, Changes, Driver, NotifyThrottle, Row
from stoker.queue.fields import JobSpec, State, shape_of
from stoker.queue.model import Attempt, Job, KeptGpus

T = TypeVar("T")

# The last screens of output; the worker's file has the whole log.
LOG_TAIL: Final = 64 * 1024
JOB_COLUMNS: Final = (
    *("id", "spec", "priority", "state", "position", "submitted", "started", "ended", "not_before", "retries_left"),
    *("attempts", "attempt", "exit_code", "reason", "link", "cancel_requested", "origin"),
    *("at_most", "notify", "group_notify", "kept"),
)


# Created once, for up to a hundred thousand rows.
_SPEC: Final = msgspec.json.Decoder(dict[str, Any])
# The cap belongs to the group; it and `notify` may change while a job runs.
_IN_SPEC: Final = tuple(name for name in JobSpec.__struct_fields__ if name not in {"id", "origin", "at_most", "notify"})


def columns(asked: JobSpec) -> dict[str, str | int | float | None]:
    """The columns of a job: all fields in `spec`, and separate columns for those that statements use."""
    wanted = {name: getattr(asked, name) for name in _IN_SPEC}
    return {
        "name": asked.name,
        "group": asked.group,
        "notify": notify_text(asked.notify)[0],
        "priority": asked.priority,
        "shape": shape_of(asked),
        "pattern": pattern_of(asked.command, asked.gpus),
        "retries": asked.retries,
        "begin": asked.begin or 0.0,
        "spec": json_text(wanted),
    }


def notify_text(entries: Sequence[str]) -> tuple[str, str]:
    """The stored entries of `notify`: the job's, and those for the end of its group."""
    if not entries:
        return "", ""
    found = [parse_subscription(entry) for entry in dict.fromkeys(entries)]
    own = [str(one) for one in found if one.when != OF_GROUP]
    group = [str(one) for one in found if one.when == OF_GROUP]
    return (json_text(own) if own else ""), (json_text(group) if group else "")


def notify_of(text: str | None) -> tuple[str, ...]:
    return msgspec.json.decode(text, type=tuple[str, ...]) if text else ()


def dependencies(job: str, asked: JobSpec) -> list[dict[str, str]]:
    kinds = [("success", asked.after), ("any", asked.after_any)]
    return [{"job": job, "needs": needs, "kind": kind} for kind, ids in kinds for needs in dict.fromkeys(ids)]


def json_text(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"the fields of a job must be text in UTF-8, and this is not: {error.object!r}") from None


def clean_text(text: str) -> str:
    """The text without characters that a database refuses."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def literal(state: State) -> str:
    """A state as an SQL literal."""
    if state not in get_args(State):
        raise BadInputError(f"{state!r} is not a state of a job")
    return f"'{state}'"


def tail_of(text: str) -> str:
    data = clean_text(text[-LOG_TAIL:]).encode()
    return data[-LOG_TAIL:].decode(errors="ignore")


def job_of(row: Row) -> Job:
    """The job in a row of `{job}`. A job with an unreadable spec has no command, and never starts."""
    try:
        return strict_job_of(row)
    except msgspec.MsgspecError:
        at = JOB_COLUMNS.index("spec")
        return strict_job_of((*row[:at], '{"command": []}', *row[at + 1 :]))


def strict_job_of(row: Row) -> Job:
    """Like `job_of`, but raises MsgspecError for an unreadable spec."""
    fields: dict[str, Any] = dict(zip(JOB_COLUMNS, row, strict=True))
    asked = _SPEC.decode(fields.pop("spec"))
    asked.update(fields)
    if asked["kept"] is not None:
        asked["kept"] = kept_of(asked["kept"])
    asked["notify"] = notify_of(asked["notify"]) + notify_of(asked.pop("group_notify"))
    return msgspec.convert(asked, Job)


def kept_of(text: str) -> KeptGpus:
    return msgspec.convert(dict(zip(KeptGpus.__struct_fields__, msgspec.json.decode(text), strict=True)), KeptGpus)


def attempt_of(row: Row) -> Attempt:
    name, job, worker, number, gpus, *rest = row
    started, expires, ended, outcome, exit_code, reason, pending, where = rest
    return Attempt(
        id=name,
        job=job,
        worker=worker,
        number=number,
        gpus=msgspec.json.decode(gpus, type=tuple[str, ...]),
        started=started,
        lease_expires=expires,
        ended=ended,
        outcome=outcome,
        exit_code=exit_code,
        reason=reason,
        pending=bool(pending),
        where=where,
    )


class Table:
    """A group of the store's operations. Each is one short transaction."""

    def __init__(self, driver: Driver, throttle: NotifyThrottle) -> None:
        self._driver = driver
        self._throttle = throttle

    def _throttled_change(self, work: Callable[[], T], changes: Changes | Callable[[T], Changes] = EVERYTHING) -> T:
        """Like `_change`, for changes many times a second by a worker, whose loop calls `flush`."""
        return self._change(work, changes, at_once=self._throttle.may_send(), limited=True)

    def _change(
        self,
        work: Callable[[], T],
        changes: Changes | Callable[[T], Changes] = EVERYTHING,
        *,
        at_once: bool = True,
        limited: bool = False,
    ) -> T:
        """Runs a change in one transaction. If its answer is not empty, notifies listeners, now or with `flush`."""
        of_answer = changes if callable(changes) else lambda _answer: changes
        notified = False

        def changed() -> T:
            nonlocal notified
            answer = work()
            if answer and at_once:
                notified = self._driver.notify(self._throttle.with_deferred(of_answer(answer)), limited=limited)
            return answer

        answer = self._driver.transaction(changed)
        if answer and notified:
            self._throttle.sent()
        elif answer:
            self._throttle.defer(of_answer(answer))
            if at_once:
                self._throttle.refused()
        return answer

    def _rung(self, change: Callable[[int], list[Row]], place: int) -> list[Row]:
        """Runs a single-statement change that itself notifies people if `ring` is 1. `place`: the column of `rung`."""
        due = self._throttle.may_send() and self._throttle.flush_due() is None
        rows = change(int(due))
        if rows and due and rows[0][place] is not None:
            self._throttle.sent()
        elif rows:
            self._throttle.defer(FOR_PEOPLE)
            if due:
                self._throttle.refused()
        return rows

    def _changed(self, work: Callable[[], list[Row]], changes: Changes = EVERYTHING) -> list[str]:
        """Like `_change`, but returns the first column of the answer."""
        return [row[0] for row in self._change(work, changes)]
