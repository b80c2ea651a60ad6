"""Groups: jobs of a sweep, of a file or with one `--group` share a name and a cap on running jobs."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from stoker.actions.subscription import OF_GROUP, parse_subscription
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.queue.driver import FOR_PEOPLE, Driver, Parameters
from stoker.queue.field_kinds import ID, LONGEST_LABEL
from stoker.queue.fields import FIELDS, JobSpec, State
from stoker.queue.model import ENDED
from stoker.queue.table import Table, clean_text, json_text, notify_of, notify_text

UNNAMED: Final = "sweep-1"
"""The name of the first unnamed sweep."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group and the states of its jobs."""

    name: str
    at_most: int | None = None
    """The cap on running jobs; None without a cap."""
    submitted: float = 0.0
    """The time of the last submission into it."""
    notify: tuple[str, ...] = ()
    """Entries of `--notify` for the end of all its jobs."""
    counts: dict[State, int] = {}
    """The number of its jobs per state; states without jobs are left out."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def ended(self) -> int:
        return sum(self.counts.get(state, 0) for state in ENDED)

    @property
    def is_done(self) -> bool:
        return self.ended == self.total

    @property
    def progress(self) -> str:
        """`12 of 15 done, 1 failed, 2 running`."""
        also = [(state, self.counts.get(state, 0)) for state in ("failed", "cancelled", "running", "held")]
        return ", ".join(
            [f"{self.ended} of {self.total} done", *(f"{number} {state}" for state, number in also if number)]
        )


class Groups(Table):
    """The groups of jobs."""

    def get(self, name: str) -> Group:
        found = self.several([name])
        if name not in found:
            raise BadInputError(f"there is no group {name!r} in {self._driver.place}: `stoker list` shows them")
        return found[name]

    def several(self, names: Collection[str]) -> dict[str, Group]:
        """The groups among these names, in one or two queries."""
        if not names:
            return {}
        wanted: Parameters = {"names": json_text([clean_text(name) for name in names])}
        return self._counted(self._driver.sql("groups_named"), wanted)

    def newest(self, limit: int = 50) -> list[Group]:
        """The groups with the most recent submissions."""
        return list(self._counted(f"{self._driver.sql('groups_newest')} LIMIT {max(0, limit):d}", {}).values())

    def _counted(self, which: str, wanted: Parameters) -> dict[str, Group]:
        rows = self._driver.fetch_text(f"{self._driver.sql('groups')} {which}", wanted)
        names: Parameters = {"names": json_text([row[0] for row in rows])}
        counts: dict[str, dict[State, int]] = {}
        for name, state, number in self._driver.fetch("group counts", names) if rows else ():
            counts.setdefault(name, {})[state] = number
        return {
            name: Group(name=name, at_most=at_most, submitted=submitted, notify=notify_of(notify), counts=counts[name])
            for name, at_most, submitted, notify in rows
            if name in counts
        }

    def done_since(self, at: float) -> list[tuple[Group, float]]:
        """Groups whose last job ended at this time or later, and when. Groups of one job count only with `notify`."""
        ended: dict[str, float] = dict(self._driver.fetch("groups done since", {"at": float(at)}))
        known = self.several(ended)
        return [
            (known[name], when)
            for name, when in ended.items()
            if name in known and (known[name].total > 1 or known[name].notify)
        ]

    def running(self) -> dict[str, tuple[int, int]]:
        """Running jobs and cap of each active group with a cap."""
        return {name: (number, at_most) for name, at_most, number in self._driver.fetch("running groups", {})}

    def cap(self, name: str, at_most: int | None) -> bool:
        """Sets the cap on running jobs; those that run continue. False if there is no such group."""
        if at_most is not None:
            FIELDS["at_most"].kind.check(at_most)
        return self._change(lambda: set_cap(self._driver, clean_text(name), at_most))

    def set_notify(self, name: str, entries: Sequence[str]) -> bool:
        """Sets the notifications for the end of all its jobs. False if there is no such group."""
        FIELDS["notify"].kind.check(entries)
        if own := [entry for entry in entries if parse_subscription(entry).when != OF_GROUP]:
            when = parse_subscription(own[0]).when
            raise InvalidFieldsError({"notify": f"{when!r} is an event of a job: for a group write {OF_GROUP}"})
        group = clean_text(name)

        def work() -> bool:
            if not self._driver.fetch("notify of group", {"group": group}):
                return False
            self._driver.fetch("set notify of group", {"group": group, "notify": notify_text(entries)[1]})
            return True

        return self._change(work, FOR_PEOPLE)


def set_cap(driver: Driver, group: str, at_most: int | None) -> bool:
    """Sets the cap, and updates the shapes of its jobs if a cap was added or removed."""
    before = driver.fetch("cap of group", {"group": group})
    if not before:
        return False
    if before[0][0] != at_most:
        driver.fetch("set cap", {"group": group, "at_most": at_most})
    if (before[0][0] is None) != (at_most is None):
        driver.fetch("set shapes", {"group": group})
    return True


def set_notify_of_groups(driver: Driver, edits: Iterable[tuple[JobSpec, JobSpec]]) -> None:
    """Updates groups after edits, given as jobs before and after: all jobs of a group share its notifications."""
    wanted: dict[str, str] = {}
    for before, after in edits:
        if after.notify != before.notify and after.group == before.group:
            _check_grouped(after)
            wanted[after.group] = notify_text(after.notify)[1]
    # Sorted, so that two edits do not deadlock.
    for group, notify in sorted(wanted.items()):
        driver.fetch("set notify of group", {"group": group, "notify": notify})


def _check_grouped(job: JobSpec) -> bool:
    """True if it has notifications for the end of its group. Raises if it has no group."""
    has_entries = bool(job.notify and notify_text(job.notify)[1])
    if has_entries and not job.group:
        raise InvalidFieldsError(
            {"notify": f"{OF_GROUP!r} is the end of a group: give the jobs one with --group, or write end"}
        )
    return has_entries


def _add_notify(driver: Driver, group: str, entries: Sequence[str]) -> None:
    """Adds the entries for the end of the group to its notifications."""
    (row,) = driver.fetch("notify of group", {"group": group})
    driver.fetch("set notify of group", {"group": group, "notify": notify_text((*notify_of(row[0]), *entries))[1]})


def join_groups(driver: Driver, jobs: Iterable[JobSpec]) -> None:
    """Creates or locks the groups of these jobs, and sets their caps and notifications."""
    caps: dict[str, int | None] = {}
    notify: dict[str, dict[str, None]] = {}
    for job in jobs:
        if _check_grouped(job):
            notify.setdefault(job.group, {}).update(dict.fromkeys(job.notify))
        if job.at_most is not None and not job.group:
            raise InvalidFieldsError({"at_most": "only groups have a cap: put the jobs into one with --group"})
        if job.group:
            caps[job.group] = job.at_most if job.at_most is not None else caps.get(job.group)
    # Sorted, so that two submissions do not deadlock.
    for group, at_most in sorted(caps.items()):
        driver.fetch("join group", {"group": group, "key": _key()})
        if at_most is not None:
            set_cap(driver, group, at_most)
        if group in notify:
            _add_notify(driver, group, list(notify[group]))


def in_new_group(driver: Driver, jobs: Sequence[JobSpec], base: str) -> list[JobSpec]:
    """Puts the jobs without a group into a new one, named `base` or `base` with a number."""
    if not base or not any(not job.group for job in jobs):
        return list(jobs)
    name = _free_name(driver, base)
    # If another submission takes the name now, this one retries.
    driver.fetch("begin group", {"group": name, "key": _key()})
    return [job if job.group else replace(job, group=name) for job in jobs]


def _free_name(driver: Driver, base: str) -> str:
    """A free name for a group. Names of jobs are taken, too."""
    base = clean_text(base).replace("/", "-")[: LONGEST_LABEL - 8].strip()
    stem = base.partition("-")[0] if base == UNNAMED else base
    # "." follows "-" in ASCII.
    wanted: Parameters = {"name": base, "begin": f"{stem}-", "beyond": f"{stem}."}
    taken = {name for (name,) in driver.fetch("group names", wanted)}
    if base in taken or ID.fullmatch(base) or driver.fetch("jobs by name", {"name": base}):
        numbers = [int(end) for name in taken if (end := name.removeprefix(f"{stem}-")).isdecimal() and end.isascii()]
        return f"{stem}-{max(numbers, default=1) + 1}"
    return base


def _key() -> str:
    return os.urandom(6).hex()
