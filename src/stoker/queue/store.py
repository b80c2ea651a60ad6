"""The store of the queue: every operation on it, each one short transaction, the same on both databases."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.queue.driver import CollisionError, Driver, Parameters, Row
from stoker.queue.ending import consequence
from stoker.queue.model import (
    ENDED,
    ID,
    Asked,
    Attempt,
    Job,
    NewJob,
    Order,
    Outcome,
    Place,
    State,
    Worker,
    check,
)

# Enough for the last screens of a training's output; the whole of it is in the worker's file.
LOG_TAIL: Final = 64 * 1024
# Ids are drawn from four thousand million: a second draw is rare, a third is not seen.
MOST_DRAWS: Final = 20

T = TypeVar("T")


class Cancellation(msgspec.Struct, frozen=True):
    """What a request to cancel did."""

    cancelled: list[str]
    """Jobs that had not started: they are cancelled."""
    asked: list[str]
    """Jobs that run: their supervisors are asked to stop them, and say when it is done."""


class Store:
    """The queue, seen through one connection; one thread uses it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._driver.close()

    @property
    def place(self) -> str:
        """Where the queue is, for people."""
        return self._driver.place

    # Getting in

    def submit(self, jobs: Sequence[NewJob]) -> list[str]:
        """The ids of the jobs, in their order. All are accepted, or none."""
        for job in jobs:
            check(job)
            if job.id is not None and not ID.fullmatch(job.id):
                raise BadInputError(f"{job.id!r} cannot be the id of a job: eight hexadecimal digits can")
        _refuse_cycles(jobs)
        for _draw in range(MOST_DRAWS):
            try:
                return self._change(lambda: self._insert(jobs))
            except CollisionError:
                continue  # another one has just taken an id or an origin of these: look again
        raise StokerError(f"no free ids were found in {self.place}: `stoker queue check` looks at it")

    def _insert(self, jobs: Sequence[NewJob]) -> list[str]:
        known = self._known_origins(jobs)
        fresh = [job for job in jobs if job.origin is None or job.origin not in known]
        ids = iter(self._free_ids(fresh))
        positions = iter(self._driver.positions(len(fresh)) if fresh else [])
        rows, dependencies, tags, answer = [], [], [], []
        for job in jobs:
            if job.origin is not None and job.origin in known:
                answer.append(known[job.origin])
                continue
            name = next(ids)
            if job.origin is not None:
                known[job.origin] = name
            answer.append(name)
            state = "held" if job.held else "queued"
            rows.append({"id": name, "origin": job.origin, "state": state, "position": next(positions)} | _columns(job))
            dependencies += _dependencies(name, job)
            tags += [{"tag": tag, "job": name} for tag in dict.fromkeys(job.tags)]
        self._must_exist({str(row["needs"]) for row in dependencies} - set(answer))
        self._driver.many("insert job", rows)
        self._driver.many("insert dependency", dependencies)
        self._driver.many("insert tag", tags)
        return answer

    def _known_origins(self, jobs: Sequence[NewJob]) -> dict[str, str]:
        origins = [job.origin for job in jobs if job.origin is not None]
        if not origins:
            return {}
        return dict(self._driver.fetch("taken origins", {"origins": _json(origins)}))

    def _free_ids(self, jobs: Sequence[NewJob]) -> list[str]:
        chosen = [job.id for job in jobs if job.id is not None]
        if len(set(chosen)) < len(chosen):
            raise BadInputError("two jobs of one submission were given the same id: each needs its own")
        if taken := self._taken(chosen):
            raise BadInputError(f"there is a job {min(taken)} already: an id can be given once")
        drawn: list[str] = []
        seen = set(chosen)
        while missing := len(jobs) - len(chosen) - len(drawn):
            candidates = {new_id() for _ in range(missing)} - seen
            seen |= candidates
            drawn += candidates - self._taken(candidates)
        free = iter(drawn)
        return [job.id if job.id is not None else next(free) for job in jobs]

    def _taken(self, ids: Iterable[str]) -> set[str]:
        wanted = list(ids)
        return {name for (name,) in self._driver.fetch("taken ids", {"ids": _json(wanted)})} if wanted else set()

    def _must_exist(self, needed: set[str]) -> None:
        if missing := needed - self._taken(needed):
            raise BadInputError(f"a job cannot come after {min(missing)}: there is no such job in {self.place}")

    # Being worked on

    def ready(self, limit: int = 100) -> list[Job]:
        """The jobs that could start now, in the order in which they should."""
        return [_job(row) for row in self._driver.fetch("ready", {"limit": limit})]

    def claim(self, job: str, worker: str, gpus: Sequence[str], lease_seconds: float) -> Attempt | None:
        """The right to run this job until the lease ends; None when another has it or it need not run now."""
        return self._driver.transaction(lambda: self._claimed("claim", {"job": job}, worker, gpus, lease_seconds))

    def claim_next(self, worker: str, gpus: Sequence[str], lease_seconds: float) -> Attempt | None:
        """The right to run the next ready job that wants exactly as many GPUs."""
        wanted = {"wanted": len(gpus)}
        return self._driver.transaction(lambda: self._claimed("claim next", wanted, worker, gpus, lease_seconds))

    def _claimed(
        self, statement: str, which: Mapping[str, str | int], worker: str, gpus: Sequence[str], lease: float
    ) -> Attempt | None:
        self._sweep()
        attempt = os.urandom(16).hex()
        claimed = self._driver.fetch(statement, {**which, "attempt": attempt, "worker": worker})
        if not claimed:
            return None
        ((job, number),) = claimed
        ((started, expires),) = self._driver.fetch(
            "insert attempt",
            {
                "attempt": attempt,
                "job": job,
                "worker": worker,
                "number": number,
                "gpus": _json(list(gpus)),
                "lease": float(lease),
            },
        )
        return Attempt(
            id=attempt,
            job=job,
            worker=worker,
            number=number,
            gpus=tuple(gpus),
            started=started,
            lease_expires=expires,
        )

    def sweep(self) -> int:
        """Gives away what was held by expired leases; how many there were. Every claim does it too."""
        return self._driver.transaction(self._sweep)

    def _sweep(self) -> int:
        expired = self._driver.fetch("expired attempts", {})
        for (attempt,) in expired:
            self._end(attempt, "lost", None, "")
        if expired:
            self._driver.announce()
        return len(expired)

    def renew(self, attempts: Iterable[str], worker: str, lease_seconds: float) -> set[str]:
        """Those of the attempts that are still this worker's, for so much longer."""
        parameters: Parameters = {"attempts": _json(list(attempts)), "worker": worker, "lease": float(lease_seconds)}
        return {name for (name,) in self._driver.fetch("renew", parameters)}

    def adopt(self, attempts: Iterable[str], worker: str, lease_seconds: float) -> set[str]:
        """Those of the attempts that still run become this worker's: it found them when it started."""
        parameters: Parameters = {"attempts": _json(list(attempts)), "worker": worker, "lease": float(lease_seconds)}
        return {name for (name,) in self._driver.fetch("adopt", parameters)}

    def to_be_cancelled(self, worker: str) -> set[str]:
        """Those of this worker's attempts that somebody wants stopped."""
        return {name for (name,) in self._driver.fetch("to be cancelled", {"worker": worker})}

    def finish(self, attempt: str, outcome: Outcome, exit_code: int | None = None, sentence: str = "") -> bool:
        """Writes the outcome of an attempt. False, and nothing is changed, when it has one already."""
        return self._change(lambda: self._end(attempt, outcome, exit_code, _text(sentence)))

    def _end(self, attempt: str, outcome: Outcome, exit_code: int | None, sentence: str) -> bool:
        parameters: Parameters = {"attempt": attempt, "outcome": outcome, "exit_code": exit_code, "sentence": sentence}
        ended = self._driver.fetch("end attempt", parameters)
        if not ended:
            return False
        which = {"job": ended[0][0], "attempt": attempt}
        (row,) = self._driver.fetch("job of attempt", which)
        losses = self._driver.fetch("losses", {"job": which["job"]})[0][0] if outcome == "lost" else 0
        becomes = consequence(_job(row), outcome, sentence, losses)
        self._driver.fetch("end job", {**which, "exit_code": exit_code, **msgspec.structs.asdict(becomes)})
        return True

    def write_log(self, attempt: str, text: str) -> bool:
        """Keeps the end of an attempt's output where every machine can read it."""
        return bool(self._driver.fetch("write log", {"attempt": attempt, "tail": _tail(text)}))

    def log(self, attempt: str) -> str:
        rows = self._driver.fetch("read log", {"attempt": attempt})
        return str(rows[0][0]) if rows else ""

    def set_link(self, attempt: str, link: str) -> bool:
        """Keeps the address of the page where the job's figures are; an earlier attempt's is refused."""
        return self._changed(lambda: self._driver.fetch("set link", {"attempt": attempt, "link": _text(link)})) != []

    # Being steered

    def cancel(self, ids: Iterable[str]) -> Cancellation:
        rows = self._change(lambda: self._driver.fetch("cancel", {"ids": _json(list(ids))}))
        return Cancellation(
            cancelled=[name for name, state in rows if state == "cancelled"],
            asked=[name for name, state in rows if state == "running"],
        )

    def hold(self, ids: Iterable[str]) -> list[str]:
        """Those that were queued and now wait for a release."""
        return self._changed(lambda: self._driver.fetch("hold", {"ids": _json(list(ids))}))

    def release(self, ids: Iterable[str]) -> list[str]:
        return self._changed(lambda: self._driver.fetch("release", {"ids": _json(list(ids))}))

    def retry(self, ids: Iterable[str]) -> list[str]:
        """Those that had ended, or waited for a retry, and may now start at once."""
        return self._changed(lambda: self._driver.fetch("retry", {"ids": _json(list(ids))}))

    def set_priority(self, ids: Iterable[str], priority: int) -> list[str]:
        check(Asked(command="-", priority=priority))
        parameters: Parameters = {"ids": _json(list(ids)), "priority": priority}
        return self._changed(lambda: self._driver.fetch("set priority", parameters))

    def edit(self, job: str, changes: Mapping[str, object]) -> Job:
        """Changes what was asked for, by the names of the fields of `Asked`, unless it runs."""
        if unknown := set(changes) - set(Asked.__struct_fields__):
            raise BadInputError(f"a job has no {min(unknown)!r} that could be edited")
        return self._change(lambda: self._edited(job, changes))

    def _edited(self, name: str, changes: Mapping[str, object]) -> Job:
        rows = self._driver.fetch("job to change", {"id": name})
        if not rows:
            raise BadInputError(f"there is no job {name!r} in {self.place}")
        job = _job(rows[0])
        if job.state == "running":
            raise BadInputError(f"job {name} is running: it can be edited when it has ended, or cancelled")
        now = {field: getattr(job, field) for field in Asked.__struct_fields__}
        try:
            asked = msgspec.convert({**now, **changes}, Asked)
        except msgspec.ValidationError as error:
            raise BadInputError(f"job {name} cannot be edited so: {error}") from None
        check(asked)
        self._depend(name, asked)
        self._driver.fetch("delete tags", {"job": name})
        self._driver.many("insert tag", [{"tag": tag, "job": name} for tag in dict.fromkeys(asked.tags)])
        left = asked.retries if asked.retries != job.retries else job.retries_left
        self._driver.fetch("edit", {"id": name, **_columns(asked), "retries_left": left})
        return _job(self._driver.fetch("one job", {"id": name})[0])

    def _depend(self, name: str, asked: Asked) -> None:
        needed = {*asked.after, *asked.after_any}
        self._must_exist(needed)
        self._driver.fetch("delete dependencies", {"job": name})
        through = self._driver.fetch("needed by needs", {"needs": _json(sorted(needed)), "job": name})
        if name in needed or through:
            raise BadInputError(f"job {name} would wait for itself: the jobs it is to come after come after it")
        self._driver.many("insert dependency", _dependencies(name, asked))

    def move(self, ids: Sequence[str], place: Place) -> list[str]:
        """Those that wait, and were moved among the waiting jobs of their priority; they keep their order."""
        return self._change(lambda: self._moved(ids, place))

    def _moved(self, ids: Sequence[str], place: Place) -> list[str]:
        self._driver.fetch("lock queue", {})
        found = []
        for name in dict.fromkeys(ids):
            found += [(-priority, at, name) for priority, at in self._driver.fetch("waiting job", {"id": name})]
        # What goes in this direction starts at this end, so that none of them passes another.
        found.sort(reverse=place in {"first", "down"})
        names = [name for _priority, _at, name in found]
        for name in names:
            self._step(name, place, names)
        return names

    def _step(self, name: str, place: Place, together: Sequence[str]) -> None:
        match place:
            case "first":
                ((first,),) = self._driver.fetch("first position", {})
                self._driver.fetch("set position", {"id": name, "position": first - 1.0})
            case "last":
                (last,) = self._driver.positions(1)
                self._driver.fetch("set position", {"id": name, "position": last})
            case "up":
                self._swap("the one before", name, together)
            case "down":
                self._swap("the one behind", name, together)

    def _swap(self, neighbour: str, name: str, together: Sequence[str]) -> None:
        ((priority, at),) = self._driver.fetch("waiting job", {"id": name})
        for other, there in self._driver.fetch(neighbour, {"priority": priority, "position": at}):
            if other not in together:
                self._driver.fetch("set position", {"id": other, "position": at})
                self._driver.fetch("set position", {"id": name, "position": there})

    def pause(self) -> None:
        """Nothing is claimed until `resume`; what runs goes on."""
        self._change(lambda: self._driver.fetch("pause queue", {"paused": 1}))

    def resume(self) -> None:
        self._change(lambda: self._driver.fetch("pause queue", {"paused": 0}))

    def paused(self) -> bool:
        return bool(self._driver.fetch("paused", {})[0][0])

    def clean(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """Forgets jobs that ended so many seconds ago and that no unfinished job comes after; how many."""
        parameters: Parameters = {
            "states": _json([state for state in states if state in ENDED]),
            "age": float(older_than),
        }
        forgotten = 0
        while some := self._change(lambda: self._driver.fetch("clean", parameters)):
            forgotten += len(some)
        self._driver.fetch("clean workers", {"age": float(older_than)})
        return forgotten

    # Being looked at

    def job(self, text: str) -> Job:
        """The job with this id, this name, or the only one whose id begins so."""
        if ID.fullmatch(text) and (rows := self._driver.fetch("one job", {"id": text})):
            return _job(rows[0])
        found = self._driver.fetch("jobs by name", {"name": _text(text)}) or self._by_prefix(text)
        if not found:
            raise BadInputError(f"there is no job {text!r} in {self.place}: `stoker list` shows them")
        if len(found) > 1:
            some = ", ".join(row[0] for row in found[:4])
            raise BadInputError(
                f"{text!r} fits several jobs ({some}{' …' if len(found) > 4 else ''}): write more of it"
            )
        return _job(found[0])

    def _by_prefix(self, text: str) -> list[Row]:
        if not text or not text.isascii() or not text.isalnum():
            return []
        # "g" is behind every hexadecimal digit.
        return self._driver.fetch("jobs by prefix", {"prefix": text, "beyond": text + "g"})

    def jobs(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        order: Order = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Job]:
        conditions, parameters = [], dict[str, str | int | float | None](limit=limit, offset=offset)
        if len(states) == 1:
            conditions.append("in this state")
            parameters["state"] = states[0]
        elif states:
            conditions.append("in these states")
            parameters["states"] = _json(list(states))
        if tag is not None:
            conditions.append("with this tag")
            parameters["tag"] = _text(tag)
        sql = self._driver.sql("all jobs")
        if conditions:
            sql += " WHERE " + " AND ".join(self._driver.sql(name) for name in conditions)
        sql += " " + self._driver.sql("newest first" if order == "newest" else "in order")
        return [_job(row) for row in self._driver.fetch_text(sql, parameters)]

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state that any is in."""
        return dict(self._driver.fetch("counts", {}))

    def unfulfilled(self, job: str) -> dict[str, State]:
        """The jobs that this one still waits for, and their states."""
        return dict(self._driver.fetch("unfulfilled", {"job": job}))

    def next_wake(self) -> float | None:
        """When the next retry may start, in seconds since the epoch by the database's clock."""
        wake: float | None = self._driver.fetch("next wake", {})[0][0]
        return wake

    def clock(self) -> float:
        """The database's clock, which decides leases."""
        return float(self._driver.fetch("clock", {})[0][0])

    def attempt(self, attempt: str) -> Attempt | None:
        rows = self._driver.fetch("attempt", {"attempt": attempt})
        return _attempt(rows[0]) if rows else None

    def attempts(self, job: str) -> list[Attempt]:
        return [_attempt(row) for row in self._driver.fetch("attempts of job", {"job": job})]

    def running(self) -> list[Attempt]:
        """All attempts that have no outcome yet."""
        return [_attempt(row) for row in self._driver.fetch("running attempts", {})]

    def changes(self) -> object:
        """A token that differs from the last one when the queue was changed in between."""
        return self._driver.changes()

    # Workers

    def heartbeat(self, worker: str, host: str, gpus: str) -> None:
        """Says that a worker is alive, and what its GPUs are."""
        self._driver.fetch("heartbeat", {"worker": worker, "host": host, "gpus": gpus})

    def workers(self) -> list[Worker]:
        return [
            Worker(id=name, host=host, gpus=gpus, started=started, seen=seen, paused=bool(paused))
            for name, host, gpus, started, seen, paused in self._driver.fetch("workers", {})
        ]

    def pause_worker(self, worker: str) -> bool:
        """It claims nothing until `resume_worker`. False when there is no such worker."""
        return self._changed(lambda: self._driver.fetch("pause worker", {"worker": worker, "paused": 1})) != []

    def resume_worker(self, worker: str) -> bool:
        return self._changed(lambda: self._driver.fetch("pause worker", {"worker": worker, "paused": 0})) != []

    def _change(self, work: Callable[[], T]) -> T:
        """Does it in one transaction and wakes who waits."""

        def announced() -> T:
            answer = work()
            if answer:
                self._driver.announce()
            return answer

        return self._driver.transaction(announced)

    def _changed(self, work: Callable[[], list[Row]]) -> list[str]:
        return [row[0] for row in self._change(work)]


def new_id() -> str:
    """Eight hexadecimal digits."""
    return os.urandom(4).hex()


def _columns(asked: Asked) -> dict[str, str | int | float | None]:
    """What of a job has a column of its own, and all of it in `spec`."""
    wanted = {name: getattr(asked, name) for name in Asked.__struct_fields__}
    return {
        "name": asked.name,
        "priority": asked.priority,
        "gpus": asked.gpus,
        "retries": asked.retries,
        "spec": _json(wanted),
    }


def _dependencies(job: str, asked: Asked) -> list[dict[str, str]]:
    kinds = [("success", asked.after), ("any", asked.after_any)]
    return [{"job": job, "needs": needs, "kind": kind} for kind, ids in kinds for needs in dict.fromkeys(ids)]


def _refuse_cycles(jobs: Sequence[NewJob]) -> None:
    """Jobs of one submission may name each other; older ones cannot name these."""
    graph = {job.id: [*job.after, *job.after_any] for job in jobs if job.id is not None}
    if not any(graph.values()):
        return
    from graphlib import CycleError, TopologicalSorter

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise BadInputError(f"jobs wait for each other in a circle: {' after '.join(error.args[1])}") from None


def _json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        raise BadInputError("a job's words must be text in UTF-8: these are not") from None


def _text(text: str) -> str:
    """What every database takes as text."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _tail(text: str) -> str:
    data = _text(text[-LOG_TAIL:]).encode()
    return data[-LOG_TAIL:].decode(errors="ignore")


def _job(row: Row) -> Job:
    names = "id spec priority state position submitted started ended not_before retries_left attempts attempt exit_code"
    fields: dict[str, Any] = dict(
        zip((*names.split(), "sentence", "link", "cancel_requested", "origin"), row, strict=True)
    )
    return msgspec.convert(msgspec.json.decode(fields.pop("spec")) | fields, Job)


def _attempt(row: Row) -> Attempt:
    name, job, worker, number, gpus, *rest = row
    started, expires, ended, outcome, exit_code, sentence = rest
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
        sentence=sentence,
    )
