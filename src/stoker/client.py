"""The queue for Python programs: `stoker.Queue`."""

import contextlib
import os
import select
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, Unpack, get_args, overload

from stoker.engines.admission import check_edits, check_jobs
from stoker.errors import BadInputError, QueueAwayError
from stoker.logs.metrics import CurveReader, LogCurve, curves_of
from stoker.logs.reader import log_directory
from stoker.logs.search import LineFinder, LogIndex, LogMatch
from stoker.paths import state_home
from stoker.queue import open_or_create
from stoker.queue.code.comparison import compare, read_changes
from stoker.queue.code.packing import PackedCode, pack
from stoker.queue.explanation import Why
from stoker.queue.fields import FIELDS, State, editable, spec_of
from stoker.queue.groups import Group
from stoker.queue.jobs import Cancellation, check_changes, cloned
from stoker.queue.model import ENDED, Job, Order, Place
from stoker.queue.provenance import login_name, submitted_from, working_directory
from stoker.queue.search import parse_query, parse_sort
from stoker.queue.steering import CANCEL, HOLD, RELEASE, RETRY, tagging
from stoker.queue.store import Store
from stoker.queue.sweep import job_specs
from stoker.settings import load_settings
from stoker.status import forecast
from stoker.status.log_follower import log_updates
from stoker.status.usage import History, read_job_history

# Changes wake `wait`; it also polls, in case the listener cannot listen.
POLL_SECONDS: Final = 1.0

Which = str | Job
"""A job, its id, a prefix of its id, or its name."""


class Options(TypedDict, total=False):
    """The options of a job: the fields of `stoker.Job` that can be chosen."""

    directory: str | os.PathLike[str]
    """The working directory; by default the current one."""
    environment: Mapping[str, str]
    """Variables for the job. Those of an active virtualenv or conda environment are added."""
    bare_environment: bool
    """Omits the active virtualenv or conda environment."""
    name: str
    tags: Sequence[str]
    group: str
    """The name of its group."""
    at_most: int | None
    """How many jobs of its group may run at once, on all machines together."""
    gpus: int
    """Number of GPUs per machine; 0 for none."""
    memory: int | str | None
    """Memory that it uses on each GPU: bytes, or text like `20GiB`; with `share`, others may use the rest."""
    share: bool
    gpu_model: str | None
    """Only GPUs with this in their name, such as `a100|h100`."""
    gpu_memory: int | str | None
    """Only GPUs with at least this total memory, such as `40GiB`."""
    machine: str | None
    """Only on this machine."""
    labels: Sequence[str]
    """Only on machines with all of these labels, or nodes with these features."""
    exclude_machines: Sequence[str]
    """Not on these machines."""
    cpus: int | None
    """CPUs per machine; the requests of jobs never exceed what a machine has."""
    ram: int | str | None
    """Main memory per machine: bytes, or text like `64GiB`; the requests of jobs never exceed what a machine has."""
    nodes: int
    """Number of machines; more than one needs a Slurm cluster."""
    metrics: Sequence[str]
    """Figures of its log to draw and show, such as `loss`; by default all that look like results."""
    priority: int
    """Higher priorities start first."""
    after: Which | Iterable[Which]
    """Jobs that must have succeeded."""
    after_any: Which | Iterable[Which]
    """Jobs that must have ended in any way."""
    begin: float | str | None
    """Not before this time: seconds since the epoch, or text like `22:00` or `+2h`."""
    every: str | None
    """A recurrence in cron's syntax."""
    deadline: float | str | None
    """The job fails if it still waits at this time."""
    retries: int
    retry_on: Sequence[str]
    """The ends that are retried, such as `exit:75` and `oom`; by default any failure."""
    backoff: float | str
    """Delay before the first retry: seconds, or text like `5m`."""
    time_limit: float | str | None
    requeue_at_limit: bool
    """At the time limit, requeues the job without using a retry."""
    then: Sequence[str]
    """Actions after a rule has stopped it: `exec COMMAND`, `notify URL`, …"""
    notify: Sequence[str]
    """When to send a message, and where: `end`, `failed:ntfy://…`, `done` for its group."""
    policy: Mapping[str, str | int | float | bool | None]
    """The settings of its rules, such as `{"window": 600.0}`; `{"idle": False}` turns the idle rule off."""
    preemptible: bool
    on_loss: Literal["retry", "hold"]
    pin: bool
    """Runs the currently committed code in a worktree."""
    allow_dirty: bool
    """With `pin`: omits uncommitted changes instead of refusing them."""
    snapshot: bool
    """Runs the current code, with uncommitted changes, on any machine."""
    batch_size: int | None
    """The value of `{batch_size}` in the command."""
    fit: Mapping[str, Any]
    """Options of the batch-size search, as in the `fit` of a job submitted with `--fit`."""
    slurm: Mapping[str, str | Sequence[str]]
    """Options for Slurm, such as `{"partition": "gpu", "sbatch": ["--exclude=node3"]}`."""
    hold: bool
    """Waits for `release`."""


class Queue:
    """The queue of experiments. Use it from one thread; `with` closes it.

    >>> with Queue() as queue:
    ...     job = queue.submit(["python", "train.py", "--version={id}"], gpus=1, memory="20GiB")
    ...     print(queue.wait(job).state)
    """

    def __init__(self, url: str | None = None) -> None:
        """Opens the queue at `url`, or the one in `STOKER_QUEUE` or `stoker.toml`, or the file in the state directory.
        Creates a missing SQLite file; `stoker queue init` prepares a PostgreSQL database.
        """
        self._store: Store = open_or_create(url or load_settings().queue or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<stoker.Queue at {self._store.place}>"

    def close(self) -> None:
        """Closes the connection; the jobs stay."""
        self._store.close()

    def submit(self, command: str | Sequence[str], **options: Unpack[Options]) -> Job:
        """Submits one command: text for the shell, or the words of a command without a shell."""
        return self.submit_many([command], **options)[0]

    def submit_many(self, commands: Iterable[str | Sequence[str]], **options: Unpack[Options]) -> list[Job]:
        """Submits several commands in order with the same options: all of them, or none."""
        if isinstance(commands, str):
            raise BadInputError("submit_many takes several commands: use submit for one")
        several = [spec_of({"command": one if isinstance(one, str) else tuple(one)}).command for one in commands]
        packed = _packed(options) if options.get("snapshot") else None
        with packed or contextlib.nullcontext():
            jobs = job_specs(self._values({**options}, packed), several)
            check_jobs(self._store, jobs)
            ids = self._store.jobs.submit(jobs, packed.blobs if packed is not None else ())
        if packed is not None and packed.warning:
            warnings.warn(packed.warning, stacklevel=2)
        return [self._store.jobs.get(name) for name in ids]

    def clone(self, which: Which, **changes: Any) -> Job:
        """Submits a copy of a job, with its environment and these changes to the fields of `stoker.Job`."""
        spec = cloned(self.job(which), self._changed("cloned", changes), login_name())
        check_jobs(self._store, [spec])
        (name,) = self._store.jobs.submit([spec])
        return self._store.jobs.get(name)

    def edit(self, which: Which | Iterable[Which], **changes: Any) -> list[Job]:
        """Changes options of waiting or ended jobs, of a group those that wait: all of them, or none."""
        values = self._changed("edited", changes)
        jobs = [self._store.jobs.get(name) for name in self._several_ids(which, ("queued", "held"))]
        allowed = set(editable("running"))
        if running := [job.id for job in jobs if job.state == "running" and not values.keys() <= allowed]:
            raise BadInputError(f"job {running[0]} is running: it can be edited when it has ended, or cancelled")
        check_edits(self._store, [(job, check_changes(job, values)) for job in jobs])
        done = self._store.jobs.edit_many({job.id: values for job in jobs})
        return [self._store.jobs.get(name) for name in done]

    def move(
        self,
        which: Which | Iterable[Which],
        place: Place | None = None,
        *,
        before: Which | None = None,
        after: Which | None = None,
    ) -> list[str]:
        """Moves waiting jobs among those of their priority, or next to another one; the ids of those that moved."""
        if sum(one is not None for one in (place, before, after)) != 1:
            raise BadInputError("give exactly one of place, before and after")
        ids = self._several_ids(which, ("queued", "held"))
        if before is not None:
            return self._store.jobs.move_beside(ids, self.job(before).id, "before")
        if after is not None:
            return self._store.jobs.move_beside(ids, self.job(after).id, "after")
        if place is None or place not in get_args(Place):
            raise BadInputError(f"the place must be {', '.join(get_args(Place))}, not {place!r}")
        return self._store.jobs.move(ids, place)

    def job(self, which: Which) -> Job:
        """The current state of the job with this id, prefix of an id, or name."""
        return self._store.jobs.get(which.id if isinstance(which, Job) else which)

    def jobs(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        *,
        order: Order = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Job]:
        """The newest jobs, or the first in the order of the queue; by default of all states and tags."""
        return self._store.jobs.find(states, tag, order, limit, offset)

    def group(self, name: str) -> Group:
        """The states of a group's jobs, and how many may run at once."""
        return self._store.groups.get(name)

    def set_at_most(self, group: str, at_most: int | None) -> Group:
        """Limits how many jobs of the group run at once; None: no limit. Running jobs continue."""
        self._store.groups.cap(group, at_most)
        return self._store.groups.get(group)

    def set_notify(self, which: Which | Iterable[Which], notify: Sequence[str]) -> list[Job]:
        """Sets the messages about these jobs, as in `submit`; also while they run."""
        entries = FIELDS["notify"].read(notify)
        FIELDS["notify"].kind.check(entries)
        ids = self._ids(which if not isinstance(which, str | Job) else [which])
        self._store.jobs.edit_many({name: {"notify": entries} for name in ids})
        return [self._store.jobs.get(name) for name in ids]

    def search(self, query: str = "", *, sort: str = "submitted", limit: int = 100) -> list[Job]:
        """The jobs that match, like `name:resnet state:failed since:2d lr=1e-3`, newest first.

        `sort` is a column of `stoker list --sort`; a leading `-` reverses the order.
        """
        return self._store.jobs.search(parse_query(query), parse_sort(sort), limit=max(0, limit)).jobs

    def counts(self) -> dict[State, int]:
        """The number of jobs per state; states without jobs are omitted."""
        return self._store.jobs.counts()

    @overload
    def wait(  # type: ignore[overload-overlap]  # a string is one job's name here, not several letters
        self, which: Which, timeout: float | None = None
    ) -> Job: ...

    @overload
    def wait(self, which: Iterable[Which], timeout: float | None = None) -> list[Job]: ...

    def wait(self, which: Which | Iterable[Which], timeout: float | None = None) -> Job | list[Job]:
        """The job when it has ended, or a list for several; raises `TimeoutError` after `timeout` seconds. Survives an
        outage of the database.
        """
        ids = self._ids(which)
        ended = self._ended(ids, None if timeout is None else time.monotonic() + timeout)
        return ended[ids[0]] if isinstance(which, str | Job) else [ended[name] for name in ids]

    def cancel(self, which: Which | Iterable[Which]) -> Cancellation:
        """Cancels jobs and stops running ones. The name of a group selects all its jobs."""
        return self._store.jobs.cancel(self._several_ids(which, CANCEL.among))

    def retry(self, which: Which | Iterable[Which]) -> list[str]:
        """Runs ended jobs again, in a group those that did not succeed; returns their ids."""
        return self._store.jobs.retry(self._several_ids(which, RETRY.among))

    def hold(self, which: Which | Iterable[Which]) -> list[str]:
        """Prevents waiting jobs from starting; returns the ids of the held jobs."""
        return self._store.jobs.hold(self._several_ids(which, HOLD.among))

    def release(self, which: Which | Iterable[Which]) -> list[str]:
        """Lets held jobs start; returns their ids."""
        return self._store.jobs.release(self._several_ids(which, RELEASE.among))

    def tag(self, which: Which | Iterable[Which], tag: str, *, remove: bool = False) -> list[str]:
        """Adds a tag to jobs in any state, or removes it; returns the ids of the changed jobs."""
        verb = tagging(tag, remove=remove)
        return list(verb.apply(self._store, self._several_ids(which, verb.among)))

    def why(self, which: Which) -> Why:
        """Why the job is in its state: a `reason` in words and, while it is queued, a `forecast` of its start."""
        return forecast.why(self._store, self.job(which))

    def logs(self, which: Which) -> str:
        """The end of the log of the last attempt, at most 64 KiB; empty before its start. After the job has ended,
        waits for the last part of the log, which may arrive shortly after the outcome.
        """
        attempt = self.job(which).attempt
        if attempt is None:
            return ""
        self._store.logs.wait(attempt)
        return self._store.logs.read(attempt)

    def log_matches(self, which: Which, text: str | None = None) -> list[LogMatch]:
        """The lines of the last attempt's log with a text, ignoring case, or by default those that report an error.
        Searches the whole log if it is on this machine or its worker is alive, otherwise the end in the queue.
        """
        finder, found, before = LineFinder(text), list[LogMatch](), 0
        job = self.job(which)
        attempt = None if job.attempt is None else self._store.attempts.get(job.attempt)
        if attempt is None:
            return []
        unfinished = b""
        for update, _is_tail in log_updates(self._store, attempt, state_home()):
            found += finder.matches(update.finished, before)
            before, unfinished = before + update.finished.count(b"\n"), update.unfinished
        return [*found, *finder.matches(unfinished, before)]

    def curves(self, which: Which, names: Sequence[str] = ()) -> list[LogCurve]:
        """The figures that the last attempt printed, such as its loss, as curves: `names`, by default its `metrics`.
        Reads the whole log if it is on this machine, otherwise the end in the queue.
        """
        job = self.job(which)
        attempt = None if job.attempt is None else self._store.attempts.get(job.attempt)
        if attempt is None:
            return []
        names = names or job.metrics
        if (directory := log_directory(state_home(), attempt)) is not None:
            with LogIndex(directory).open() as view:
                return curves_of(view, names)
        reader = CurveReader(names)
        reader.feed(self._store.logs.read(attempt.id))
        return reader.curves()

    def history(self, which: Which, minutes: int | None = None, points: int = 1440) -> History:
        """Utilization, memory and power of the job's GPUs during its attempts, over its run or its last minutes. None
        means no readings.
        """
        if points < 2 or (minutes is not None and minutes < 1):
            raise BadInputError("a history needs at least one minute and two points")
        return read_job_history(self._store, self.job(which), minutes, points)

    def diff(self, which: Which, other: Which | None = None) -> str:
        """The difference between a job's snapshot and its commit; with `other`, between the code of two jobs. Untracked
        files are not included; `stoker diff` lists them.
        """
        job, blobs = self.job(which), self._store.blobs
        if other is None:
            return read_changes(blobs, job).difference.decode(errors="replace")
        return b"".join(compare(blobs, job, self.job(other))).decode(errors="replace")

    def _ids(self, which: Which | Iterable[Which]) -> list[str]:
        """The ids of the selected jobs; where several are allowed, the name of a group selects all its jobs."""
        if isinstance(which, str | Job):
            return [self.job(which).id] if isinstance(which, str) else [which.id]
        several = [[one] if isinstance(one, Job) else self._store.jobs.named(one) for one in which]
        return [job.id for jobs in several for job in jobs]

    def _changed(self, done: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Values of fields, as people write them in Python."""
        if unknown := changes.keys() - set(editable()):
            raise BadInputError(f"a job cannot be {done} with {min(unknown)!r}: there is no such option")
        for name in changes.keys() & {"after", "after_any"}:
            changes[name] = self._ids(_each(changes[name]))
        return {name: FIELDS[name].read(value) for name, value in changes.items()}

    def _several_ids(self, which: Which | Iterable[Which], among: Sequence[State]) -> list[str]:
        """The same, where the name of a group means those of its jobs in these states."""
        found: list[str] = []
        for one in _each(which):
            jobs = self._store.jobs.named(one) if isinstance(one, str) else [one]
            found += [job.id for job in jobs if len(jobs) == 1 or job.state in among]
        return found

    def _values(self, options: dict[str, Any], packed: PackedCode | None) -> dict[str, Any]:
        """The values of a job's fields, with the directory, commit and environment of the submission."""
        bare, allow_dirty = options.pop("bare_environment", False), options.pop("allow_dirty", False)
        where = options.pop("directory", None)
        if unknown := options.keys() - set(editable()) - {"hold"}:
            raise BadInputError(f"a job cannot be submitted with {min(unknown)!r}: there is no such option")
        for name in ("after", "after_any"):
            if name in options:
                options[name] = self._ids(_each(options[name]))
        values = {name: FIELDS[name].read(value) for name, value in options.items()}
        return values | submitted_from(
            None if where is None else os.fspath(where),
            values.get("environment", {}),
            bare=bare,
            pin=values.get("pin", False),
            allow_dirty=allow_dirty,
            packed=packed,
        )

    def _ended(self, ids: Sequence[str], deadline: float | None) -> dict[str, Job]:
        ended: dict[str, Job] = {}
        changes = self._store.listen()
        try:
            while True:
                for name in ids:
                    if name not in ended and (job := self._now(name)) is not None and job.state in ENDED:
                        ended[name] = job
                missing = [name for name in ids if name not in ended]
                if not missing:
                    return ended
                left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"job {missing[0]} has not ended in time")
                _rest(changes.fileno(), left)
                changes.poll()
        finally:
            changes.close()

    def _now(self, name: str) -> Job | None:
        try:
            return self._store.jobs.get(name)
        except QueueAwayError:
            return None


def _packed(options: Options) -> PackedCode:
    where = options.get("directory")
    return pack(working_directory(None if where is None else os.fspath(where)), load_settings().snapshot_bytes)


def _rest(descriptor: int, seconds: float) -> None:
    """Waits for a change, or for this long."""
    if descriptor < 0:
        time.sleep(seconds)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll(seconds * 1000)


def _each(which: Which | Iterable[Which]) -> Iterable[Which]:
    return [which] if isinstance(which, str | Job) else which
