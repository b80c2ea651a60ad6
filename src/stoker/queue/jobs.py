"""Submitting, editing, steering and deleting jobs."""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from stoker.errors import BadInputError, InvalidFieldsError, StokerError
from stoker.queue.code.archive import Blob
from stoker.queue.code.blobs import refer_to_blobs, write_blobs
from stoker.queue.commands import check_command
from stoker.queue.driver import EVERYTHING, FOR_PEOPLE, Changes, CollisionError, Driver, Parameters, Ready, Row
from stoker.queue.fields import FIELDS, JobSpec, State, check, editable, shape_of, spec_of, values_of
from stoker.queue.groups import in_new_group, join_groups, set_cap, set_notify_of_groups
from stoker.queue.listing import JobReader, forgettable, seen
from stoker.queue.model import ENDED, HEARD_WITHIN, Failure, Job, Place, Side
from stoker.queue.provenance import checkout_of
from stoker.queue.search import numbered, texts, trigrams
from stoker.queue.table import clean_text, columns, dependencies, job_of, json_text, notify_of, notify_text
from stoker.schedule import following, moment_text, next_time

T = TypeVar("T")

# Ids are drawn from four billion, so a second draw is rare.
MOST_DRAWS: Final = 20


class Cancellation(msgspec.Struct, frozen=True):
    """The effect of a cancellation."""

    cancelled: list[str]
    """Waiting jobs, now cancelled."""
    asked: list[str]
    """Running jobs, which are now being stopped."""


class Jobs(JobReader):
    """Changes to jobs."""

    def submit(self, jobs: Sequence[JobSpec], blobs: Sequence[Blob] = (), new_group: str = "") -> list[str]:
        """Submits all jobs or none, and returns their ids in order. `blobs`: content that they refer to.

        `new_group`: the name of a new group for jobs without one.
        """
        check_submission(jobs)

        def work() -> list[str]:
            _refuse_past_deadlines(self._driver, jobs)
            return insert(self._driver, in_new_group(self._driver, jobs, new_group), blobs)

        return until_free(self._driver, lambda: self._change(work, ready_among(jobs)))

    def cancel(self, ids: Iterable[str]) -> Cancellation:
        wanted = json_text(list(ids))

        def work() -> list[Row]:
            # A running job may still succeed, but no longer recurs.
            self._driver.fetch("end recurrences", {"ids": wanted})
            return self._driver.fetch("cancel", {"ids": wanted})

        rows = self._change(work, _cancelled)
        return Cancellation(
            cancelled=[name for name, state, _worker in rows if state == "cancelled"],
            asked=[name for name, state, _worker in rows if state == "running"],
        )

    def hold(self, ids: Iterable[str]) -> list[str]:
        """Holds queued jobs, and returns their ids."""
        return self._changed(lambda: self._driver.fetch("hold", {"ids": json_text(list(ids))}))

    def release(self, ids: Iterable[str]) -> list[str]:
        return self._changed(lambda: self._driver.fetch("release", {"ids": json_text(list(ids))}))

    def retry(self, ids: Iterable[str]) -> list[str]:
        """Queues ended jobs again, and ends the delay of retries. Returns the ids of both."""
        return self._changed(lambda: self._driver.fetch("retry", {"ids": json_text(list(ids))}))

    def reinstate(self, ids: Iterable[str]) -> list[str]:
        """Holds cancelled jobs, and returns their ids: the undo of cancelling held jobs."""

        def work() -> list[Row]:
            rows = self._driver.fetch("reinstate", {"ids": json_text(list(ids))})
            for (name,) in rows:
                (row,) = self._driver.fetch("one job", {"id": name})
                self._driver.many("insert schedule", _schedule(name, job_of(row)))
            return rows

        return self._changed(work)

    def edit(self, job: str, changes: Mapping[str, object]) -> Job:
        """Edits fields of `JobSpec` by name. A running job allows only some of them."""
        done = self.edit_many({job: changes})
        found = self.get(job)
        if not done:
            raise BadInputError(f"job {job} is running: it can be edited when it has ended, or cancelled")
        return found

    def edit_many(self, changes: Mapping[str, Mapping[str, object]]) -> list[str]:
        """Edits several jobs, and returns their ids. An invalid edit refuses all; running jobs may be left out."""
        return self._change(lambda: self._edited(changes))

    def _edited(self, changes: Mapping[str, Mapping[str, object]]) -> list[str]:
        rows = self._driver.fetch("jobs to change", {"ids": json_text(list(changes))})
        found = [job for job in map(job_of, rows) if _may_edit(job, changes[job.id])]
        edits = [(job, self._retimed(job, edited(job, changes[job.id]))) for job in found]
        _refuse_past_deadlines(self._driver, [asked for job, asked in edits if asked.deadline != job.deadline])
        # Built before any write, since it refuses invalid text.
        edited_rows: list[Parameters] = [
            {
                "id": job.id,
                **columns(asked),
                # A new number of retries starts over.
                "retries_left": asked.retries if asked.retries != job.retries else job.retries_left,
                "begins": int(asked.begin != job.begin),
            }
            for job, asked in edits
        ]
        for job, asked in edits:
            if (asked.after, asked.after_any) != (job.after, job.after_any):
                self._depend(job.id, asked)
        retagged = [(job.id, asked) for job, asked in edits if asked.tags != job.tags]
        self._driver.many("delete tags", [{"job": name} for name, _asked in retagged])
        self._driver.many(
            "insert tag", [{"tag": tag, "job": name} for name, asked in retagged for tag in dict.fromkeys(asked.tags)]
        )
        regrouped = [(job, asked) for job, asked in edits if (asked.group, asked.at_most) != (job.group, job.at_most)]
        join_groups(self._driver, (asked for _job, asked in regrouped))
        for job, asked in regrouped:
            if asked.at_most is None and asked.group == job.group:
                set_cap(self._driver, job.group, None)
        set_notify_of_groups(self._driver, edits)
        self._driver.many("edit", edited_rows)
        _write_texts(self._driver, "change text", ((job.id, asked) for job, asked in edits))
        rescheduled = [
            (job, asked) for job, asked in edits if (asked.deadline, asked.every) != (job.deadline, job.every)
        ]
        self._driver.many("delete schedule", [{"job": job.id} for job, _asked in rescheduled])
        # An edit does not run an ended job again.
        waiting = [(job.id, asked) for job, asked in rescheduled if job.state not in ENDED]
        self._driver.many("insert schedule", [row for name, asked in waiting for row in _schedule(name, asked)])
        return [job.id for job in found]

    def _retimed(self, job: Job, asked: JobSpec) -> JobSpec:
        """Sets the begin to the first time of a changed recurrence."""
        if asked.every in {None, job.every} or asked.begin != job.begin:
            return asked
        return _with_first_times(self._driver, [msgspec.structs.replace(asked, begin=None)])[0]

    def _depend(self, name: str, asked: JobSpec) -> None:
        # Without the lock, two simultaneous edits could create a cycle.
        self._driver.fetch("lock queue", {})
        needed = {*asked.after, *asked.after_any}
        must_exist(self._driver, needed)
        self._driver.fetch("delete dependencies", {"job": name})
        through = self._driver.fetch("needed by needs", {"needs": json_text(sorted(needed)), "job": name})
        if name in needed or through:
            raise BadInputError(
                f"job {name} would wait for itself: jobs that it is to come after already come after it"
            )
        self._driver.many("insert dependency", dependencies(name, asked))

    def move(self, ids: Sequence[str], place: Place) -> list[str]:
        """Moves waiting jobs within their priority, keeping their order. Returns their ids."""
        return self._change(lambda: moved(self._driver, ids, place))

    def move_beside(self, ids: Sequence[str], neighbour: str, side: Side) -> list[str]:
        """Moves waiting jobs next to another, keeping their order, with its priority. Returns their ids."""
        return self._change(lambda: moved_beside(self._driver, ids, neighbour, side))

    def put_back(self, positions: Mapping[str, float]) -> list[str]:
        """Gives waiting jobs these positions, and returns their ids: the undo of a move."""

        def work() -> list[str]:
            names = _in_order(_waiting(self._driver), list(positions))
            self._driver.many("set position", [{"id": name, "position": float(positions[name])} for name in names])
            return names

        return self._change(work)

    def tag(self, ids: Sequence[str], tag: str, *, remove: bool = False) -> list[str]:
        """Adds or removes a tag of jobs in any state. Returns the ids of changed jobs."""

        def work() -> list[str]:
            rows = map(job_of, self._driver.fetch("jobs to change", {"ids": json_text(list(ids))}))
            changed = [
                (job.id, edited(job, {"tags": _tags(job.tags, tag, remove)}))
                for job in rows
                if (tag in job.tags) == remove
            ]
            self._driver.many("set spec", [{"id": name, "spec": columns(asked)["spec"]} for name, asked in changed])
            self._driver.many("delete tags", [{"job": name} for name, _asked in changed])
            added = [{"tag": one, "job": name} for name, asked in changed for one in dict.fromkeys(asked.tags)]
            self._driver.many("insert tag", added)
            _write_texts(self._driver, "change text", changed)
            return [name for name, _asked in changed]

        return self._change(work, FOR_PEOPLE)

    def keep(
        self, job: str, worker: str, gpus: Sequence[str], starts_in: float | None, instead_of: str | None = None
    ) -> bool:
        """Reserves GPUs of this worker for a waiting job. `gpus`: those that are ready. Only one machine may reserve.

        False if a worker other than `instead_of` has a reservation, or if the job no longer waits. The reservation ends
        when the job starts or is edited, and when the worker ends.
        """
        parameters: Parameters = {
            "job": job,
            "worker": worker,
            "gpus": json_text(list(gpus)),
            "seconds": -1.0 if starts_in is None else max(0.0, float(starts_in)),
            "instead_of": instead_of or worker,
        }
        # Other workers learn of it when they try to reserve GPUs for the same job.
        return self._rung(lambda ring: self._driver.at_once("keep", {**parameters, "ring": ring}), 1) != []

    def keep_no_more(self, worker: str, but: Iterable[str] = ()) -> None:
        """Ends the reservations of this worker, except for these jobs."""
        parameters: Parameters = {"worker": worker, "jobs": json_text(list(but))}
        self._throttled_change(lambda: self._driver.fetch("keep no more", parameters))

    def keep_for_the_dead_no_more(self) -> None:
        """Ends the reservations of dead workers."""
        self._throttled_change(lambda: self._driver.fetch("keep for the dead no more", {}))

    def set_link(self, attempt: str, link: str) -> bool:
        """Stores the link from the attempt's output, unless the attempt is outdated."""
        return (
            self._changed(
                lambda: self._driver.fetch("set link", {"attempt": attempt, "link": clean_text(link)}), FOR_PEOPLE
            )
            != []
        )

    def clean(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """Deletes jobs that ended `older_than` seconds ago, unless an unfinished job depends on them.

        Returns their number. `Blobs.forget_unused` then deletes their blobs.
        """
        parameters = forgettable(older_than, states)
        forgotten = 0
        while some := self._change(lambda: self._forget(parameters), FOR_PEOPLE):
            forgotten += len(some)
        # A live worker's row stays, with its pause.
        self._driver.fetch("clean workers", {"age": max(float(older_than), HEARD_WITHIN)})
        self._driver.fetch("clean groups", {})
        return forgotten

    def _forget(self, which: Parameters) -> list[Row]:
        """Deletes some of them. Their origins are kept, so that a line of a file does not become a job again."""
        rows = self._driver.fetch("clean", which)
        kept = [{"job": name, "origin": origin} for name, origin in rows if origin is not None]
        self._driver.many("remember origin", kept)
        return rows

    def dismiss_failures(self, kind: Failure, until: float) -> float:
        """Dismisses failures up to this time, and returns the previous time."""

        def work() -> float:
            rows = self._driver.fetch("seen failures", {"seen": seen(kind)})
            self._driver.fetch("see failures", {"seen": seen(kind), "until": float(until)})
            return float(rows[0][0]) if rows else 0.0

        return self._driver.transaction(work)


def _tags(tags: Sequence[str], tag: str, remove: bool) -> tuple[str, ...]:
    return tuple(one for one in tags if one != tag) if remove else (*tags, tag)


def ready_among(jobs: Sequence[JobSpec]) -> Changes:
    """The changes that workers must learn when these jobs are submitted."""
    ready: dict[str, list[int]] = {}
    for job in jobs:
        if not job.hold:
            ready.setdefault(shape_of(job), []).append(job.priority)
    return Changes(ready={shape: Ready(max(found), len(found)) for shape, found in ready.items()})


def _cancelled(rows: Sequence[Row]) -> Changes:
    """The changes of a cancellation. Any worker may have reserved GPUs for a waiting job."""
    workers = frozenset(worker for _name, state, worker in rows if state == "running")
    return Changes(workers=workers) if all(row[1] == "running" for row in rows) else EVERYTHING


def until_free(driver: Driver, submit: Callable[[], T]) -> T:
    """Retries while another process takes the same id or origin."""
    for _draw in range(MOST_DRAWS):
        with contextlib.suppress(CollisionError):
            return submit()
    raise StokerError(f"no free ids were found in {driver.place}: `stoker queue check` looks at it")


def check_submission(jobs: Sequence[JobSpec]) -> None:
    """Raises for values outside their limits, and for cyclic dependencies."""
    for job in jobs:
        check(job)
    _refuse_cycles(jobs)


def _refuse_past_deadlines(driver: Driver, jobs: Iterable[JobSpec]) -> None:
    first = min((job.deadline for job in jobs if job.deadline is not None), default=math.inf)
    if first < math.inf and first <= float(driver.fetch("clock", {})[0][0]):
        raise InvalidFieldsError({"deadline": f"{moment_text(first)} has passed: choose a later time"})


def insert(driver: Driver, jobs: Sequence[JobSpec], blobs: Sequence[Blob] = ()) -> list[str]:
    """Inserts jobs, and returns their ids in order. An origin that is or was a job returns that job's id."""
    write_blobs(driver, blobs)
    jobs = _with_first_times(driver, jobs)
    known = known_origins(driver, [job.origin for job in jobs if job.origin is not None])
    fresh = [job for job in jobs if job.origin is None or job.origin not in known]
    ids = iter(_free_ids(driver, fresh))
    positions = iter(driver.positions(len(fresh)) if fresh else [])
    rows, needs, tags, answer = list[dict[str, str | int | float | None]](), list[dict[str, str]](), [], []
    added: list[tuple[str, JobSpec]] = []
    for job in jobs:
        if job.origin is not None and job.origin in known:
            answer.append(known[job.origin])
            continue
        name = next(ids)
        if job.origin is not None:
            known[job.origin] = name
        answer.append(name)
        added.append((name, job))
        state = "held" if job.hold else "queued"
        rows.append({"id": name, "origin": job.origin, "state": state, "position": next(positions)} | columns(job))
        needs += dependencies(name, job)
        tags += [{"tag": tag, "job": name} for tag in dict.fromkeys(job.tags)]
    must_exist(driver, {row["needs"] for row in needs} - set(answer))
    join_groups(driver, (job for _name, job in added))
    driver.many("insert job", rows)
    driver.many("insert dependency", needs)
    driver.many("insert tag", tags)
    _write_texts(driver, "insert text", added)
    driver.many("insert schedule", [row for name, job in added for row in _schedule(name, job)])
    refer_to_blobs(driver, added)
    return answer


def _write_texts(
    driver: Driver, statement: Literal["insert text", "change text"], jobs: Iterable[tuple[str, JobSpec]]
) -> None:
    """Writes the searchable texts of jobs, which are given with their ids."""
    has_grams = "grams" in driver.sql(statement)  # SQLite finds the trigrams itself
    rows: list[Parameters] = []
    for job, spec in jobs:
        found = texts(job, spec)
        grams = {"grams": numbered(trigrams(*found))} if has_grams else {}
        rows.append({"job": job, **found._asdict(), **grams})
    driver.many(statement, rows)


def _with_first_times(driver: Driver, jobs: Sequence[JobSpec]) -> Sequence[JobSpec]:
    """Recurring jobs without a begin get the first time of their recurrence."""
    if not any(job.every is not None and job.begin is None for job in jobs):
        return jobs
    ((now,),) = driver.fetch("clock", {})
    return [
        msgspec.structs.replace(job, begin=next_time(job.every, float(now)))
        if job.every is not None and job.begin is None
        else job
        for job in jobs
    ]


def _schedule(name: str, job: JobSpec) -> list[Parameters]:
    if job.deadline is None and job.every is None:
        return []
    return [{"job": name, "deadline": job.deadline or 0.0, "recurs": int(job.every is not None)}]


def end_scheduled(driver: Driver) -> list[str]:
    """Ends jobs that still wait at their deadline, and queues the next runs of recurring jobs. Returns the ids of both.

    Runs inside a transaction.
    """
    found: list[str] = []
    for (name,) in driver.fetch("past deadlines", {}):
        (row,) = driver.fetch("one job", {"id": name})
        job = job_of(row)
        begun = "was not running again" if job.attempts else "did not start"
        reason = f"it {begun} by its deadline, {moment_text(job.deadline or 0.0)}"
        found += [name for (name,) in driver.fetch("expire", {"job": name, "reason": reason})]
        driver.fetch("delete schedule", {"job": name})
    for (name,) in driver.fetch("recurring jobs", {}):
        (row,) = driver.fetch("one job", {"id": name})
        if (next_run := _next_run(driver, job_of(row))) is not None:
            found += insert(driver, [next_run])
        driver.fetch("delete schedule", {"job": name})
    return found


def _next_run(driver: Driver, job: Job) -> JobSpec | None:
    """The next run of a recurring job; None if it was cancelled, which ends the recurrence."""
    if job.state == "cancelled" or job.every is None:
        return None
    ((now,),) = driver.fetch("clock", {})
    started = job.started if job.started is not None else job.begin if job.begin is not None else float(now)
    begin = following(job.every, started, float(now))
    again = {"begin": begin, "after": (), "after_any": (), "hold": False, "id": "", "origin": None}
    return spec_of({**values_of(job), **again})


def known_origins(driver: Driver, origins: Sequence[str]) -> dict[str, str]:
    """The ids of jobs, existing or deleted, by origin."""
    return dict(driver.fetch("taken origins", {"origins": json_text(origins)})) if origins else {}


def _free_ids(driver: Driver, jobs: Sequence[JobSpec]) -> list[str]:
    chosen = [job.id for job in jobs if job.id]
    if len(set(chosen)) < len(chosen):
        raise BadInputError("two jobs of one submission were given the same id: each needs its own")
    if taken := _taken(driver, chosen):
        raise BadInputError(f"there is a job {min(taken)} already: an id can be given once")
    drawn: list[str] = []
    seen = set(chosen)
    while missing := len(jobs) - len(chosen) - len(drawn):
        candidates = {new_id() for _ in range(missing)} - seen
        seen |= candidates
        drawn += candidates - _taken(driver, candidates)
    free = iter(drawn)
    return [job.id or next(free) for job in jobs]


def _taken(driver: Driver, ids: Iterable[str]) -> set[str]:
    wanted = list(ids)
    return {name for (name,) in driver.fetch("taken ids", {"ids": json_text(wanted)})} if wanted else set()


def must_exist(driver: Driver, needed: set[str]) -> None:
    if missing := needed - _taken(driver, needed):
        raise BadInputError(f"a job cannot come after {min(missing)}: there is no such job in {driver.place}")


def new_id() -> str:
    """Eight hexadecimal digits."""
    return os.urandom(4).hex()


def _refuse_cycles(jobs: Sequence[JobSpec]) -> None:
    """Refuses cycles within one submission; older jobs cannot depend on new ones."""
    graph = {job.id: [*job.after, *job.after_any] for job in jobs if job.id}
    if not any(graph.values()):
        return
    from graphlib import CycleError, TopologicalSorter

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise BadInputError(f"jobs wait for each other in a cycle: {' after '.join(error.args[1])}") from None


def _may_edit(job: Job, changes: Mapping[str, object]) -> bool:
    return job.state != "running" or changes.keys() <= set(editable("running"))


def edited(job: Job, changes: Mapping[str, object]) -> JobSpec:
    """The spec with these changes. Raises for a field that cannot be edited and for an invalid value."""
    if unknown := set(changes) - set(editable()):
        raise BadInputError(f"a job has no field {min(unknown)!r} to edit")
    if "directory" in changes and job.snapshot and changes.get("snapshot", True):
        raise BadInputError(
            f"job {job.id} runs a snapshot of {job.directory}: --no-snapshot lets it run in another directory"
        )
    if changes.get("group", job.group) != job.group:
        # They belong to the group that it leaves.
        changes = {"at_most": None, "notify": notify_of(notify_text(job.notify)[0]), **changes}
    try:
        asked = spec_of({**values_of(job), **changes})
    except BadInputError as error:
        raise BadInputError(f"job {job.id} cannot be edited so: {error}") from None
    check(asked)
    return asked


def cloned(job: Job, changes: Mapping[str, object], submitter: str) -> JobSpec:
    """A copy of a job with these changes. It keeps the snapshot or commit of the job."""
    asked = check_changes(job, changes)
    if asked.pin and asked.directory != job.directory:
        raise BadInputError(
            f"job {job.id} runs a commit of {job.directory}: --no-pin lets its clone run in another directory"
        )
    if asked.pin or asked.snapshot:
        return msgspec.structs.replace(asked, submitter=submitter, hold=False)
    found = checkout_of(asked.directory)
    return msgspec.structs.replace(
        asked, submitter=submitter, hold=False, commit=found.commit, dirty=found.dirty, code=None
    )


def check_changes(job: Job, changes: Mapping[str, object]) -> JobSpec:
    """The spec with these changes. Also checks fields that `edited` does not."""
    asked = edited(job, changes)
    if "command" in changes:
        check_command(asked.command)
    for name in changes.keys() & {"environment", "policy"}:
        FIELDS[name].check(asked)
    return asked


def moved(driver: Driver, ids: Sequence[str], place: Place) -> list[str]:
    """Moves waiting jobs within their priority, and returns their ids."""
    waiting = _waiting(driver)
    names = _in_order(waiting, ids)
    places = _places(driver, waiting, names, place) if names else {}
    driver.many("set position", [{"id": name, "position": at} for name, at in places.items()])
    return names


def moved_beside(driver: Driver, ids: Sequence[str], neighbour: str, side: Side) -> list[str]:
    """Moves waiting jobs next to a neighbour, and returns their ids."""
    waiting = _waiting(driver)
    other = next((job for job in waiting if job.id == neighbour), None)
    if other is None:
        raise BadInputError(f"nothing can be put {side} {neighbour}: no such job waits in {driver.place}")
    if neighbour in ids:
        raise BadInputError(f"job {neighbour} cannot be put {side} itself: name another that waits")
    names = _in_order(waiting, ids)
    places = beside(waiting, names, other, side) if names else {}
    equal = {"priority": other.priority}
    driver.many("set place", [{"id": name, "position": at, **equal} for name, at in places.items()])
    return names


def _waiting(driver: Driver) -> list["Waiting"]:
    driver.fetch("lock queue", {})
    return [Waiting(*row) for row in driver.fetch("waiting jobs", {})]


def _in_order(waiting: Sequence["Waiting"], ids: Sequence[str]) -> list[str]:
    """The waiting jobs among these, in the order of the queue."""
    wanted = set(ids)
    return [job.id for job in waiting if job.id in wanted]


def _places(driver: Driver, waiting: Sequence["Waiting"], names: Sequence[str], place: Place) -> dict[str, float]:
    match place:
        case "first":
            first = min(job.position for job in waiting) - len(names)
            return {name: first + number for number, name in enumerate(names)}
        case "last":
            return dict(zip(names, driver.positions(len(names)), strict=True))
        case "up" | "down":
            return stepped(waiting, set(names), place)


class Waiting(NamedTuple):
    """A waiting job with its sort keys."""

    id: str
    priority: int
    position: float


def stepped(waiting: Sequence[Waiting], moving: Collection[str], way: Literal["up", "down"]) -> dict[str, float]:
    """The new positions after these jobs move one step up or down, for all jobs that change.

    `waiting` is sorted. Each passes one neighbour of its priority, but no other moving job.
    """
    order = list(waiting) if way == "up" else list(reversed(waiting))
    passed = list(order)
    for at in range(1, len(passed)):
        before, job = passed[at - 1], passed[at]
        if job.id in moving and before.id not in moving and before.priority == job.priority:
            passed[at - 1], passed[at] = job, before
    return {job.id: place.position for place, job in zip(order, passed, strict=True) if job.position != place.position}


def beside(waiting: Sequence[Waiting], moving: Sequence[str], neighbour: Waiting, side: Side) -> dict[str, float]:
    """The new positions after these jobs move next to a neighbour, for all jobs that change.

    `waiting` is sorted. Other jobs are renumbered only if no floating-point number is left between two positions.
    """
    others = [job for job in waiting if job.priority == neighbour.priority and job.id not in moving]
    at = others.index(neighbour) + (side == "after")
    # New submissions get integers above all positions.
    high = others[at].position if at < len(others) else math.floor(neighbour.position) + 1.0
    low = others[at - 1].position if at > 0 else neighbour.position - 1.0 - len(moving)
    step = (high - low) / (len(moving) + 1)
    places = {name: low + step * number for number, name in enumerate(moving, 1)}
    if all(one < other for one, other in pairwise([low, *places.values(), high])):
        return places
    order = [*(job.id for job in others[:at]), *moving, *(job.id for job in others[at:])]
    last = max(job.position for job in others)
    return {name: last - back for back, name in enumerate(reversed(order))}
