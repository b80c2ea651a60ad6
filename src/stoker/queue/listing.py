"""Looks up and lists jobs. No statement slows down with the number of ended jobs."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from stoker.errors import BadInputError
from stoker.queue.driver import Parameters, Row
from stoker.queue.explanation import Needs
from stoker.queue.field_kinds import ID
from stoker.queue.fields import State
from stoker.queue.model import ENDED, Failure, Job, NoSuchJobError, Order
from stoker.queue.search import EVERY_JOB, MOST_SORTED, NEWEST_FIRST, Mark, Query, SearchStatements, Sort
from stoker.queue.table import Table, clean_text, job_of, json_text, literal

GROUP_PREFIX: Final = "group:"
"""The prefix of an unambiguous group name."""

MOST_QUEUED: Final = 1000
"""As in the statement `unfinished counts`."""


class Matches(NamedTuple):
    """One page of the jobs that match a query."""

    jobs: list[Job]
    next: Mark | None = None
    """The start of the next page; None on the last page."""
    cut: bool = False
    """Too many jobs match to sort them: the list has only the newest."""


class JobReader(Table):
    """Queries for jobs."""

    def get(self, text: str) -> Job:
        """The job with this id, name or unique id prefix."""
        if ID.fullmatch(text) and (rows := self._driver.fetch("one job", {"id": text})):
            return job_of(rows[0])
        if members := self.members(text):
            if len(members) > 1:
                one = members[0].name or members[0].id
                raise BadInputError(
                    f"{text!r} is a group of {len(members)} jobs: write the id or name of one, like {one!r}"
                )
            return members[0]
        found = self._driver.fetch("jobs by name", {"name": clean_text(text)}) or self._by_prefix(text)
        if not found:
            raise NoSuchJobError(f"there is no job {text!r} in {self._driver.place}: `stoker list` shows them")
        if len(found) > 1:
            some = ", ".join(row[0] for row in found[:4])
            raise BadInputError(
                f"{text!r} fits several jobs ({some}{' …' if len(found) > 4 else ''}): write more of it"
            )
        return job_of(found[0])

    def members(self, text: str) -> list[Job]:
        """All jobs of the group with this name, or of `group:NAME`, in order; none if there is no such group.

        Raises if a job outside the group has the same name.
        """
        name = clean_text(text.removeprefix(GROUP_PREFIX))
        members = [job_of(row) for row in self._driver.fetch("jobs of group", {"group": name})] if name else []
        if not members or text.startswith(GROUP_PREFIX):
            return members
        for row in self._driver.fetch("jobs by name", {"name": name}):
            if (other := job_of(row)).group != name:
                raise BadInputError(
                    f"{text!r} is the name of job {other.id} and of a group of {_jobs(len(members))}: "
                    f"write {other.id}, or {GROUP_PREFIX}{name}"
                )
        return members

    def named(self, text: str) -> list[Job]:
        """The job that the text names, or all jobs of the group."""
        is_job = ID.fullmatch(text) and self._driver.fetch("one job", {"id": text})
        return (not is_job and self.members(text)) or [self.get(text)]

    def ids_of(self, words: Iterable[str]) -> tuple[str, ...]:
        """The distinct ids of all jobs that these words name."""
        return tuple(dict.fromkeys(job.id for word in words for job in self.named(word)))

    def _by_prefix(self, text: str) -> list[Row]:
        if not text or not text.isascii() or not text.isalnum():
            return []
        # "g" follows every hexadecimal digit.
        return self._driver.fetch("jobs by prefix", {"prefix": text, "beyond": text + "g"})

    def find(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        order: Order = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Job]:
        """The newest jobs, or the first in the order of the queue. Running jobs that are pending come last."""
        parameters = dict[str, str | int | float | None](limit=limit, offset=offset)
        if tag is None and order == "queue" and list(states) == ["queued"]:
            # With the state as a parameter, no database would use the index of queued jobs.
            sql = f"{self._driver.sql('in line')} {_limit(limit)} OFFSET {max(0, offset):d}"
            return [job_of(row) for row in self._driver.fetch_text(sql, {})]
        if tag is not None:
            parameters["tag"] = clean_text(tag)
        sql = self._driver.sql("all jobs" if tag is None else "tagged jobs")
        if states:
            # Literals tell the planner how many jobs have these states.
            sql += f" WHERE j.state IN ({', '.join(literal(state) for state in states)})"
        newest = "begun first" if list(states) == ["running"] else "newest first"
        sql += " " + self._driver.sql(newest if order == "newest" else "in order")
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def search(
        self, query: Query = EVERY_JOB, sort: Sort = NEWEST_FIRST, after: Mark | None = None, limit: int = 50
    ) -> "Matches":
        """One page of matching jobs. `after`: the mark of the previous page."""
        if sort.by != "submitted":
            return self._sorted(query, sort, after, limit)
        rows = self._found(query, after, descending=sort.descending, is_next=after is not None, limit=limit + 1)
        jobs = [job_of(row[:-1]) for row in rows[:limit]]
        return Matches(jobs, (jobs[-1].submitted, float(rows[limit - 1][-1])) if len(rows) > limit else None)

    def matching(self, query: Query) -> list[Job]:
        """All matching jobs, newest first."""
        return [job_of(row[:-1]) for row in self._found(query)]

    def with_ids(self, ids: Sequence[str]) -> list[Job]:
        """The existing jobs among these ids."""
        sql = f"SELECT {self._driver.sql('job')} FROM stoker_jobs j WHERE {self._driver.sql('chosen jobs')}"  # noqa: S608  # our own pieces
        return [job_of(row) for row in self._driver.fetch_text(sql, {"ids": json_text(list(ids))})]

    def _found(self, query: Query, after: Mark | None = None, columns: str = "job", **how: Any) -> list[Row]:
        """`how`: fields of `SearchStatements`."""

        def are_fewer(source: str, most: int) -> bool:
            sql = f"SELECT count(*) FROM (SELECT 1 FROM {source} LIMIT {most:d}) AS counted"  # noqa: S608  # our own pieces
            return bool(self._driver.fetch_text(sql, parameters)[0][0] < most)

        search = SearchStatements(query=query, sql=self._driver.sql, are_fewer=are_fewer, **how)
        parameters = search.parameters()
        for name, text in search.machines().items():
            workers = [worker for worker, host in self._driver.fetch("hosts", {}) if text in host.lower()]
            if not workers:
                return []
            parameters[name] = json_text(workers)
        if after is not None:
            if not all(isinstance(one, float) for one in after):
                raise BadInputError("the mark belongs to a list in another order")
            parameters |= {"submitted": after[0], "tie": after[1]}
        rows: list[Row] = []
        for sql in search.statements(self._driver.sql(columns)):
            rows = self._driver.fetch_text(sql, parameters)
            if search.limit is not None and len(rows) >= search.limit:
                break
        return rows

    def _sorted(self, query: Query, sort: Sort, after: Mark | None, limit: int) -> "Matches":
        found = [row[0] for row in self._found(query, columns="id of job", limit=MOST_SORTED + 1)]
        parameters: dict[str, str | int | float | bytes | None] = {"ids": json_text(found[:MOST_SORTED])}
        key, way, beyond = self._driver.sql(f"sort by {sort.by}"), *(("DESC", "<") if sort.descending else ("ASC", ">"))
        conditions = [self._driver.sql("chosen jobs")]
        if after is not None:
            if not isinstance(after[1], str) or isinstance(after[0], str) != (sort.by == "name"):
                raise BadInputError("the mark belongs to a list in another order")
            parameters |= {"sorted": after[0], "id": after[1]}
            conditions.append(
                f"({key}, j.id) {beyond} ({self._driver.sql('last sorted')}, {self._driver.sql('last id')})"
            )
        sql = f"SELECT {self._driver.sql('job')}, {key} FROM stoker_jobs j WHERE {' AND '.join(conditions)}"  # noqa: S608  # our own pieces
        rows = self._driver.fetch_text(f"{sql} ORDER BY {key} {way}, j.id {way} {_limit(limit + 1)}", parameters)
        jobs = [job_of(row[:-1]) for row in rows[:limit]]
        value = rows[limit - 1][-1] if len(rows) > limit else ""
        mark = (value if isinstance(value, str) else float(value), jobs[-1].id) if len(rows) > limit else None
        return Matches(jobs, mark, len(found) > MOST_SORTED)

    def ended_since(self, at: float, limit: int = 20) -> list[Job]:
        """Jobs that ended at this time or later, newest first."""
        return self._first(limit, "ended since", {"at": float(at)})

    def failed_since(self, at: float, limit: int = 20) -> list[Job]:
        """Jobs that failed at this time or later, the newest first."""
        return self._first(limit, "failed since", {"at": float(at)})

    def to_notify_since(self, at: float, limit: int = 20) -> list[Job]:
        """Jobs with `--notify` that ended at this time or later, the newest first."""
        return self._first(limit, "to notify since", {"at": float(at)})

    def _first(self, limit: int, statement: str, parameters: Parameters) -> list[Job]:
        sql = f"{self._driver.sql(statement)} {_limit(limit)}"
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def by_origin(self, prefix: str) -> list[Job]:
        """The jobs with this prefix of their origin, sorted by origin."""
        # The last code point of Unicode follows every character of an origin.
        parameters: Parameters = {"prefix": prefix, "beyond": prefix + "\U0010ffff"}
        return [job_of(row) for row in self._driver.fetch("jobs by origin", parameters)]

    def counts(self) -> dict[State, int]:
        """The number of jobs per state; states without jobs are left out."""
        return dict(self._driver.fetch("counts", {}))

    def unfinished_counts(self) -> dict[State, int]:
        """The number of unfinished jobs per state, quickly even for a long queue.

        Queued jobs are counted up to `MOST_QUEUED`.
        """
        return {state: number for state, number in self._driver.fetch("unfinished counts", {}) if number}

    def failures(self, kind: Failure, at: float, limit: int = 20) -> list[Job]:
        """Failures of this kind after this time, except dismissed ones, newest first."""
        return self._first(limit, "unseen failures", _failures(kind, at))

    def count_failures(self, kind: Failure, at: float) -> int:
        return int(self._driver.fetch("count unseen failures", _failures(kind, at))[0][0])

    def in_line(self, limit: int = 50) -> list[Job]:
        """The first queued jobs in order, ready or not."""
        return self._first(limit, "in line", {})

    def first_ids(self, limit: int) -> list[str]:
        """The ids of the first queued jobs in order."""
        return [row[0] for row in self._driver.fetch_text(f"{self._driver.sql('ids in line')} {_limit(limit)}", {})]

    def neighbours(self, job: Job) -> tuple[str | None, str | None]:
        """The ids of its neighbours among the waiting jobs of its priority."""
        ((before, behind),) = self._driver.fetch("neighbours", _place(job))
        return before, behind

    def needs_of(self, jobs: Iterable[str]) -> Needs:
        """The unfinished dependencies of several jobs, direct and indirect, in one query."""
        wanted = list(jobs)
        return Needs(self._driver.fetch("unfulfilled needs", {"jobs": json_text(wanted)}) if wanted else ())

    def names(self, ids: Iterable[str]) -> dict[str, str]:
        """The names of these jobs, by id; unnamed jobs are left out."""
        wanted = sorted(set(ids))
        return dict(self._driver.fetch("names", {"ids": json_text(wanted)})) if wanted else {}

    def durations(self, patterns: Iterable[str]) -> dict[str, list[float]]:
        """Durations in seconds of the last 15 successful jobs of each pattern."""
        wanted, found = sorted(set(patterns)), dict[str, list[float]]()
        for pattern, seconds in self._driver.fetch("durations", {"patterns": json_text(wanted)}) if wanted else ():
            if seconds is not None:
                found.setdefault(pattern, []).append(float(seconds))
        return found

    def forgettable(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """The number of jobs that `clean` would delete."""
        return int(self._driver.fetch("count forgettable", forgettable(older_than, states))[0][0])


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _limit(rows: int) -> str:
    """A literal limit: with a parameter, PostgreSQL plans for a tenth of the table."""
    return f"LIMIT {max(0, rows):d}"


def _failures(kind: Failure, at: float) -> Parameters:
    return {"at": float(at), "seen": seen(kind), "by_rule": int(kind == "stopped")}


def seen(kind: Failure) -> str:
    return f"seen: {kind}"


def _place(job: Job) -> Parameters:
    """The sort keys of a waiting job."""
    return {"priority": job.priority, "position": job.position, "submitted": job.submitted, "id": job.id}


def forgettable(older_than: float, states: Sequence[State]) -> Parameters:
    return {"states": json_text([state for state in states if state in ENDED]), "age": float(older_than)}
