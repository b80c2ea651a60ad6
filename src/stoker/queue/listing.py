"""Looking jobs up and listing them. No statement gets slower with the number of ended jobs."""

from collections.abc import Iterable, Sequence
from typing import Final

from stoker.errors import BadInputError
from stoker.queue.driver import Parameters, Row
from stoker.queue.explanation import Needs
from stoker.queue.field_kinds import ID
from stoker.queue.fields import State
from stoker.queue.model import ENDED, Failure, Job, NoSuchJobError, Order
from stoker.queue.table import Table, clean_text, job_of, json_text, literal

GROUP_PREFIX: Final = "group:"
"""Before a name that means a group, whatever jobs are called."""


class JobReader(Table):
    """Queries for jobs."""

    def get(self, text: str) -> Job:
        """The job with this id or name, or the only one whose id begins with this text."""
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
        """All jobs of the group with this name, or of `group:NAME`, in their order; none when there is no such group.

        Raises when another job, which does not belong to it, is called so, too.
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
        """The job that a word names, or all jobs of the group."""
        is_job = ID.fullmatch(text) and self._driver.fetch("one job", {"id": text})
        return (not is_job and self.members(text)) or [self.get(text)]

    def ids_of(self, words: Iterable[str]) -> tuple[str, ...]:
        """The ids of all jobs that these words name, each once."""
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
        if tag is not None:
            parameters["tag"] = clean_text(tag)
        sql = self._driver.sql("all jobs" if tag is None else "tagged jobs")
        if states:
            # Written into the statement, so that the planner knows how many jobs have these states.
            sql += f" WHERE j.state IN ({', '.join(literal(state) for state in states)})"
        newest = "begun first" if list(states) == ["running"] else "newest first"
        sql += " " + self._driver.sql(newest if order == "newest" else "in order")
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def page(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        before: tuple[float, float] | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """The newest first; `before` is the `submitted` and `position` of the last job of the page before."""
        parameters = dict[str, str | int | float | None]()
        conditions = []
        if before is not None:
            parameters |= {"submitted": float(before[0]), "position": float(before[1])}
            conditions.append(self._driver.sql("older_than_last"))
        if tag is not None:
            parameters["tag"] = clean_text(tag)
        chosen = self._driver.sql("all jobs" if tag is None else "tagged jobs")
        newest = f"{self._driver.sql('newest')} {_limit(limit)}"
        # Each state by itself, because the index finds the newest of one state, not of several.
        parts = [
            _part(chosen, [f"j.state = {literal(state)}", *conditions], newest) for state in dict.fromkeys(states)
        ] or [_part(chosen, conditions, newest)]
        if len(parts) == 1:
            return [job_of(row) for row in self._driver.fetch_text(parts[0], parameters)]
        each = [f"SELECT * FROM ({part}) AS one" for part in parts]  # noqa: S608  # put together from our own pieces
        sql = f"SELECT * FROM ({' UNION ALL '.join(each)}) AS j {newest}"  # noqa: S608  # the same
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def ended_since(self, at: float, limit: int = 20) -> list[Job]:
        """Jobs that ended at this time or later, the newest end first."""
        return self._first(limit, "ended since", {"at": float(at)})

    def failed_since(self, at: float, limit: int = 20) -> list[Job]:
        """Jobs that failed at this time or later, the newest first."""
        return self._first(limit, "failed since", {"at": float(at)})

    def _first(self, limit: int, statement: str, parameters: Parameters) -> list[Job]:
        sql = f"{self._driver.sql(statement)} {_limit(limit)}"
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def by_origin(self, prefix: str) -> list[Job]:
        """The jobs whose origins begin with this prefix, ordered by origin."""
        # The last code point of Unicode follows every character of an origin.
        parameters: Parameters = {"prefix": prefix, "beyond": prefix + "\U0010ffff"}
        return [job_of(row) for row in self._driver.fetch("jobs by origin", parameters)]

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state; states without jobs are left out."""
        return dict(self._driver.fetch("counts", {}))

    def unfinished_counts(self) -> dict[State, int]:
        """The same for jobs that have not ended, which takes no longer with many ended ones."""
        return dict(self._driver.fetch("unfinished counts", {}))

    def failures(self, kind: Failure, at: float, limit: int = 20) -> list[Job]:
        """Failures of this kind after this time that were not dismissed, the newest first."""
        return self._first(limit, "unseen failures", _failures(kind, at))

    def count_failures(self, kind: Failure, at: float) -> int:
        return int(self._driver.fetch("count unseen failures", _failures(kind, at))[0][0])

    def in_line(self, limit: int = 50) -> list[Job]:
        """The first queued jobs in their order, ready or not."""
        return self._first(limit, "in line", {})

    def ahead_of(self, job: Job, most: int) -> int:
        """How many queued jobs come before this one, counted up to `most`."""
        sql = f"SELECT count(*) FROM ({self._driver.sql('ahead')} {_limit(most)}) AS counted"  # noqa: S608  # our own pieces
        return int(self._driver.fetch_text(sql, _place(job))[0][0])

    def neighbours(self, job: Job) -> tuple[str | None, str | None]:
        """The ids of the jobs right before and after it among the queued and held ones of its priority."""
        ((before, behind),) = self._driver.fetch("neighbours", _place(job))
        return before, behind

    def needs_of(self, jobs: Iterable[str]) -> Needs:
        """What several jobs still wait for, and what those wait for in turn, in one query."""
        wanted = list(jobs)
        return Needs(self._driver.fetch("unfulfilled needs", {"jobs": json_text(wanted)}) if wanted else ())

    def names(self, ids: Iterable[str]) -> dict[str, str]:
        """The names of those of these jobs that have one."""
        wanted = sorted(set(ids))
        return dict(self._driver.fetch("names", {"ids": json_text(wanted)})) if wanted else {}

    def forgettable(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """How many jobs `clean` would delete."""
        return int(self._driver.fetch("count forgettable", forgettable(older_than, states))[0][0])


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _limit(rows: int) -> str:
    """Written into the statement: PostgreSQL plans for a tenth of the table when the limit is a parameter."""
    return f"LIMIT {max(0, rows):d}"


def _part(chosen: str, conditions: Sequence[str], newest: str) -> str:
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"{chosen}{where} {newest}"


def _failures(kind: Failure, at: float) -> Parameters:
    return {"at": float(at), "seen": seen(kind), "by_rule": int(kind == "stopped")}


def seen(kind: Failure) -> str:
    return f"seen: {kind}"


def _place(job: Job) -> Parameters:
    """What orders waiting jobs."""
    return {"priority": job.priority, "position": job.position, "submitted": job.submitted, "id": job.id}


def forgettable(older_than: float, states: Sequence[State]) -> Parameters:
    return {"states": json_text([state for state in states if state in ENDED]), "age": float(older_than)}
