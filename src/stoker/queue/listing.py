"""Looking jobs up and listing them; each statement stays quick whatever the history."""

from collections.abc import Iterable, Sequence

from stoker.errors import BadInputError
from stoker.queue.driver import Parameters, Row
from stoker.queue.explanation import Needs
from stoker.queue.fields import ID, State
from stoker.queue.model import (
    ENDED,
    Failure,
    Job,
    NoSuchJobError,
    Order,
    sweep_name,
)
from stoker.queue.table import Table, clean_text, job_of, json_text, literal


class JobReader(Table):
    """Every question about jobs."""

    def get(self, text: str) -> Job:
        """The job with this id, this name, or the only one whose id begins so."""
        if ID.fullmatch(text) and (rows := self._driver.fetch("one job", {"id": text})):
            return job_of(rows[0])
        found = self._driver.fetch("jobs by name", {"name": clean_text(text)})
        if not found and (trials := self._trials(text)):
            if len(trials) > 1:
                raise BadInputError(
                    f"{text!r} is a sweep of {len(trials)} jobs: write the id or name of one, like {trials[0].name!r}"
                )
            return trials[0]
        found = found or self._by_prefix(text)
        if not found:
            raise NoSuchJobError(f"there is no job {text!r} in {self._driver.place}: `stoker list` shows them")
        if len(found) > 1:
            some = ", ".join(row[0] for row in found[:4])
            raise BadInputError(
                f"{text!r} fits several jobs ({some}{' …' if len(found) > 4 else ''}): write more of it"
            )
        return job_of(found[0])

    def trials(self, text: str) -> list[Job]:
        """All jobs of the sweep that was submitted by this name, in their order; none when one job is meant by it."""
        is_job = ID.fullmatch(text) and self._driver.fetch("one job", {"id": text})
        if is_job or self._driver.fetch("jobs by name", {"name": clean_text(text)}):
            return []
        return self._trials(text)

    def _trials(self, text: str) -> list[Job]:
        name = clean_text(text)
        # "!" is behind the space.
        found = self._driver.fetch("jobs of sweep", {"begin": f"{name} ", "beyond": f"{name}!"}) if name else []
        return [job for job in map(job_of, found) if sweep_name(job.name) == name]

    def named(self, text: str) -> list[Job]:
        """The jobs that are meant by a word where several may be: one, or all of a sweep."""
        return self.trials(text) or [self.get(text)]

    def ids_of(self, words: Iterable[str]) -> tuple[str, ...]:
        """The ids of all jobs that these words name, each once."""
        return tuple(dict.fromkeys(job.id for word in words for job in self.named(word)))

    def _by_prefix(self, text: str) -> list[Row]:
        if not text or not text.isascii() or not text.isalnum():
            return []
        # "g" is behind every hexadecimal digit.
        return self._driver.fetch("jobs by prefix", {"prefix": text, "beyond": text + "g"})

    def find(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        order: Order = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Job]:
        """The newest jobs, or in the order of the queue those in front."""
        parameters = dict[str, str | int | float | None](limit=limit, offset=offset)
        if tag is not None:
            parameters["tag"] = clean_text(tag)
        sql = self._driver.sql("all jobs" if tag is None else "tagged jobs")
        if states:
            # Written out, so that the planner knows how many jobs are in them.
            sql += f" WHERE j.state IN ({', '.join(literal(state) for state in states)})"
        sql += " " + self._driver.sql("newest first" if order == "newest" else "in order")
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def page(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        before: tuple[float, float] | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """The newest first; the next page is `before` the `submitted` and `position` of this one's last."""
        parameters = dict[str, str | int | float | None]()
        conditions = []
        if before is not None:
            parameters |= {"submitted": float(before[0]), "position": float(before[1])}
            conditions.append(self._driver.sql("older_than_last"))
        if tag is not None:
            parameters["tag"] = clean_text(tag)
        chosen = self._driver.sql("all jobs" if tag is None else "tagged jobs")
        # Written out, for of a number that it does not know PostgreSQL believes that it is a tenth of the table.
        newest = f"{self._driver.sql('newest')} LIMIT {max(0, limit):d}"
        # Each state by itself: its newest are found by an index, those of several together are not.
        parts = [
            _part(chosen, [f"j.state = {literal(state)}", *conditions], newest) for state in dict.fromkeys(states)
        ] or [_part(chosen, conditions, newest)]
        if len(parts) == 1:
            return [job_of(row) for row in self._driver.fetch_text(parts[0], parameters)]
        each = [f"SELECT * FROM ({part}) AS one" for part in parts]  # noqa: S608  # put together from our own pieces
        sql = f"SELECT * FROM ({' UNION ALL '.join(each)}) AS j {newest}"  # noqa: S608  # the same
        return [job_of(row) for row in self._driver.fetch_text(sql, parameters)]

    def ended_since(self, at: float, limit: int = 20) -> list[Job]:
        """Those that ended then or later, the newest end first."""
        sql = f"{self._driver.sql('ended since')} LIMIT {max(0, limit):d}"
        return [job_of(row) for row in self._driver.fetch_text(sql, {"at": float(at)})]

    def failed_since(self, at: float, limit: int = 20) -> list[Job]:
        """Those that failed then or later, the newest first."""
        sql = f"{self._driver.sql('failed since')} LIMIT {max(0, limit):d}"
        return [job_of(row) for row in self._driver.fetch_text(sql, {"at": float(at)})]

    def by_origin(self, prefix: str) -> list[Job]:
        """The jobs whose origins begin so, in the order of these."""
        # Behind every letter that an origin may hold.
        parameters: Parameters = {"prefix": prefix, "beyond": prefix + "\U0010ffff"}
        return [job_of(row) for row in self._driver.fetch("jobs by origin", parameters)]

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state that any is in."""
        return dict(self._driver.fetch("counts", {}))

    def unfinished_counts(self) -> dict[State, int]:
        """The same of those that have not ended: cheap, however many have."""
        return dict(self._driver.fetch("unfinished counts", {}))

    def failures(self, kind: Failure, at: float, limit: int = 20) -> list[Job]:
        """Failures of this kind after this time that were not dismissed, the newest first."""
        sql = f"{self._driver.sql('unseen failures')} LIMIT {max(0, limit):d}"
        return [job_of(row) for row in self._driver.fetch_text(sql, _failures(kind, at))]

    def count_failures(self, kind: Failure, at: float) -> int:
        return int(self._driver.fetch("count unseen failures", _failures(kind, at))[0][0])

    def in_line(self, limit: int = 50) -> list[Job]:
        """The first of the queued jobs in their order, ready or not, by the index of those that wait."""
        return [
            job_of(row) for row in self._driver.fetch_text(f"{self._driver.sql('in line')} LIMIT {max(0, limit):d}", {})
        ]

    def ahead_of(self, job: Job, most: int) -> int:
        """How many queued jobs come before this one, counted up to `most`."""
        sql = f"SELECT count(*) FROM ({self._driver.sql('ahead')} LIMIT {max(0, most):d}) AS counted"  # noqa: S608  # our own pieces
        return int(self._driver.fetch_text(sql, _place(job))[0][0])

    def neighbours(self, job: Job) -> tuple[str | None, str | None]:
        """The ids of the jobs right before and behind it, of those of its priority that are queued or held."""
        ((before, behind),) = self._driver.fetch("neighbours", _place(job))
        return before, behind

    def needs_of(self, jobs: Iterable[str]) -> Needs:
        """What each of several jobs still waits for, and what those wait for in turn, in one question."""
        wanted = list(jobs)
        return Needs(self._driver.fetch("unfulfilled needs", {"jobs": json_text(wanted)}) if wanted else ())

    def next_wake(self) -> float | None:
        """When the next retry may start, in seconds since the epoch by the database's clock."""
        wake: float | None = self._driver.fetch("next wake", {})[0][0]
        return wake

    def forgettable(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """How many jobs `clean` would forget."""
        return int(self._driver.fetch("count forgettable", forgettable(older_than, states))[0][0])


def _part(chosen: str, conditions: Sequence[str], newest: str) -> str:
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"{chosen}{where} {newest}"


def _failures(kind: Failure, at: float) -> Parameters:
    return {"at": float(at), "seen": seen(kind), "by_rule": int(kind == "stopped")}


def seen(kind: Failure) -> str:
    return f"seen: {kind}"


def _place(job: Job) -> Parameters:
    """What decides the order of those that wait."""
    return {"priority": job.priority, "position": job.position, "submitted": job.submitted, "id": job.id}


def forgettable(older_than: float, states: Sequence[State]) -> Parameters:
    return {"states": json_text([state for state in states if state in ENDED]), "age": float(older_than)}
