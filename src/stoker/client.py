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

# `wait` is woken by changes; it polls in case the listener cannot listen.
POLL_SECONDS: Final = 1.0

Which = str | Job
"""A job, its id, the beginning of its id, or its name."""


class Options(TypedDict, total=False):
    """The options of a job: the fields of `stoker.Job` that can be chosen."""

    directory: str | os.PathLike[str]
    """Where it runs; the current directory when left out."""
    environment: Mapping[str, str]
    """Variables for it. Those of an active virtualenv or conda environment are added."""
    bare_environment: bool
    """Leaves out the active virtualenv or conda environment."""
    name: str
    tags: Sequence[str]
    group: str
    """One name for several jobs."""
    at_most: int | None
    """How many jobs of its group run at once, on all machines together."""
    gpus: int
    """How many on each machine; 0 for a job that needs none."""
    memory: int | str | None
    """That it uses on each GPU: bytes, or text like `20GiB`; others may share the rest."""
    share: bool
    gpu_model: str | None
    """Only GPUs with this in their name, such as `a100|h100`."""
    gpu_memory: int | str | None
    """Only GPUs with at least this much memory in all, such as `40GiB`."""
    machine: str | None
    """Only on this machine."""
    labels: Sequence[str]
    """Only on machines with all of these labels, or nodes with these features."""
    exclude_machines: Sequence[str]
    """Not on these machines."""
    cpus: int | None
    """On each machine: no more jobs start there than these allow."""
    ram: int | str | None
    """On each machine: bytes, or text like `64GiB`; no more jobs start there than it allows."""
    nodes: int
    """How many machines; more than one takes a cluster with Slurm."""
    metrics: Sequence[str]
    """The figures of its log that are drawn and shown, such as `loss`; all that look like results when left out."""
    priority: int
    """Higher ones start first."""
    after: Which | Iterable[Which]
    """Jobs that must have succeeded."""
    after_any: Which | Iterable[Which]
    """Jobs that must have ended, however."""
    begin: float | str | None
    """Not before this time: seconds since the epoch, or text like `22:00` or `+2h`."""
    every: str | None
    """Again and again, in cron's syntax."""
    deadline: float | str | None
    """It fails if it waits at this time."""
    retries: int
    retry_on: Sequence[str]
    """The ends after which it is tried again, such as `exit:75` and `oom`; any failure when left out."""
    backoff: float | str
    """Before the first retry: seconds, or text like `5m`."""
    time_limit: float | str | None
    requeue_at_limit: bool
    """At the time limit it goes back to the queue, without using a retry."""
    then: Sequence[str]
    """What to do after a rule has stopped it: `exec COMMAND`, `notify URL`, …"""
    notify: Sequence[str]
    """When to send a message, and where: `end`, `failed:ntfy://…`, `done` for its group."""
    policy: Mapping[str, str | int | float | bool | None]
    """The settings of its rules, such as `{"window": 600.0}`; `{"idle": False}` turns the idle rule off."""
    preemptible: bool
    on_loss: Literal["retry", "hold"]
    pin: bool
    """Runs the code as it is committed now, in a worktree of its own."""
    allow_dirty: bool
    """With `pin`: leaves out uncommitted changes instead of refusing them."""
    snapshot: bool
    """Runs the code as it is now, with uncommitted changes, on any machine."""
    batch_size: int | None
    """What `{batch_size}` in the command stands for."""
    fit: Mapping[str, Any]
    """How its batch size is found, as in the `fit` of a job that was submitted with `--fit`."""
    slurm: Mapping[str, str | Sequence[str]]
    """What it asks of a cluster with Slurm, such as `{"partition": "gpu", "sbatch": ["--exclude=node3"]}`."""
    hold: bool
    """Waits for `release`."""


class Queue:
    """The queue of experiments. One thread uses it; `with` closes it.

    >>> with Queue() as queue:
    ...     job = queue.submit(["python", "train.py", "--version={id}"], gpus=1, memory="20GiB")
    ...     print(queue.wait(job).state)
    """

    def __init__(self, url: str | None = None) -> None:
        """Opens the queue at `url`, or the one in `STOKER_QUEUE` or `stoker.toml`, or the file in the state directory.

        A missing SQLite file is created; a PostgreSQL database is prepared by `stoker queue init`.
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
        """Submits one command: text for the shell, or the words of a command that needs none."""
        return self.submit_many([command], **options)[0]

    def submit_many(self, commands: Iterable[str | Sequence[str]], **options: Unpack[Options]) -> list[Job]:
        """Submits several commands with the same options, in their order: all of them, or none."""
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
        """Submits a job again as a new one, with its environment and these changes of the fields of `stoker.Job`."""
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
        """The job as it is now, by its id, the beginning of its id, or its name."""
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
        """The newest jobs, or the first in the order of the queue; of all states and tags when left out."""
        return self._store.jobs.find(states, tag, order, limit, offset)

    def group(self, name: str) -> Group:
        """What became of the jobs of a group, and how many of them may run at once."""
        return self._store.groups.get(name)

    def set_at_most(self, group: str, at_most: int | None) -> Group:
        """From now on at most this many jobs of the group are started; None: no limit. Those that run go on."""
        self._store.groups.cap(group, at_most)
        return self._store.groups.get(group)

    def set_notify(self, which: Which | Iterable[Which], notify: Sequence[str]) -> list[Job]:
        """When to send a message about these jobs, and where, as in `submit`; also while they run."""
        entries = FIELDS["notify"].read(notify)
        FIELDS["notify"].kind.check(entries)
        ids = self._ids(which if not isinstance(which, str | Job) else [which])
        self._store.jobs.edit_many({name: {"notify": entries} for name in ids})
        return [self._store.jobs.get(name) for name in ids]

    def search(self, query: str = "", *, sort: str = "submitted", limit: int = 100) -> list[Job]:
        """The jobs that match, like `name:resnet state:failed since:2d lr=1e-3`, newest first.

        `sort` is a column of `stoker list --sort`; with `-` in front, the other way round.
        """
        return self._store.jobs.search(parse_query(query), parse_sort(sort), limit=max(0, limit)).jobs

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state; states without jobs are left out."""
        return self._store.jobs.counts()

    @overload
    def wait(  # type: ignore[overload-overlap]  # a string is one job's name here, not several letters
        self, which: Which, timeout: float | None = None
    ) -> Job: ...

    @overload
    def wait(self, which: Iterable[Which], timeout: float | None = None) -> list[Job]: ...

    def wait(self, which: Which | Iterable[Which], timeout: float | None = None) -> Job | list[Job]:
        """The job when it has ended, or all of several; `TimeoutError` after `timeout` seconds.

        It waits for a database that is away.
        """
        ids = self._ids(which)
        ended = self._ended(ids, None if timeout is None else time.monotonic() + timeout)
        return ended[ids[0]] if isinstance(which, str | Job) else [ended[name] for name in ids]

    def cancel(self, which: Which | Iterable[Which]) -> Cancellation:
        """Cancels jobs and stops running ones. The name of a group means all of its jobs."""
        return self._store.jobs.cancel(self._several_ids(which, CANCEL.among))

    def retry(self, which: Which | Iterable[Which]) -> list[str]:
        """Runs ended jobs again, of a group those that did not succeed; their ids."""
        return self._store.jobs.retry(self._several_ids(which, RETRY.among))

    def hold(self, which: Which | Iterable[Which]) -> list[str]:
        """Keeps waiting jobs from starting; the ids of those that are now held."""
        return self._store.jobs.hold(self._several_ids(which, HOLD.among))

    def release(self, which: Which | Iterable[Which]) -> list[str]:
        """Lets held jobs start; their ids."""
        return self._store.jobs.release(self._several_ids(which, RELEASE.among))

    def tag(self, which: Which | Iterable[Which], tag: str, *, remove: bool = False) -> list[str]:
        """Gives jobs in any state a tag, or removes it; the ids of those that changed."""
        verb = tagging(tag, remove=remove)
        return list(verb.apply(self._store, self._several_ids(which, verb.among)))

    def why(self, which: Which) -> Why:
        """Why the job is in its state: a `reason` in words and, while it is queued, a `forecast` of its start."""
        return forecast.why(self._store, self.job(which))

    def logs(self, which: Which) -> str:
        """The end of the log of the job's last attempt, 64 KiB at most; empty before it started.

        After the job has ended, it waits for the last part of the log, which may arrive shortly after the outcome.
        """
        attempt = self.job(which).attempt
        if attempt is None:
            return ""
        self._store.logs.wait(attempt)
        return self._store.logs.read(attempt)

    def log_matches(self, which: Which, text: str | None = None) -> list[LogMatch]:
        """The lines of the last attempt's log with a text, in upper or lower case; without it, those with an error.

        The whole log is searched where it is here or its worker is alive, otherwise the end that the queue keeps.
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
        """The figures that the last attempt printed, such as its loss, as curves: `names`, or else its `metrics`.

        From the whole log where it is on this machine, otherwise from the end that the queue keeps.
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
        """Utilization, memory and power of the job's GPUs while it had them, over its run or the last minutes of it.

        None stands for a time without readings.
        """
        if points < 2 or (minutes is not None and minutes < 1):
            raise BadInputError("a history needs at least one minute and two points")
        return read_job_history(self._store, self.job(which), minutes, points)

    def diff(self, which: Which, other: Which | None = None) -> str:
        """What differed from the commit in the code of a job with a snapshot; with `other`, between the two jobs.

        Untracked files are not in it; `stoker diff` lists them.
        """
        job, blobs = self.job(which), self._store.blobs
        if other is None:
            return read_changes(blobs, job).difference.decode(errors="replace")
        return b"".join(compare(blobs, job, self.job(other))).decode(errors="replace")

    def _ids(self, which: Which | Iterable[Which]) -> list[str]:
        """One id for one job; where several may be meant, the name of a group means all of its jobs."""
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
        """The values of a job's fields, with the directory, commit and environment that it is submitted from."""
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
    """Waits until something changes, or this long."""
    if descriptor < 0:
        time.sleep(seconds)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll(seconds * 1000)


def _each(which: Which | Iterable[Which]) -> Iterable[Which]:
    return [which] if isinstance(which, str | Job) else which
