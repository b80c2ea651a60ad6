"""From what somebody typed, on the page or in a request, to jobs: by the same rules as `stoker submit`."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from stoker.errors import BadInputError
from stoker.fit.spec import FitSpec, check_fittable, kept
from stoker.queue.commands import wants_batch_size
from stoker.queue.model import Job, JobSpec, NewJob, check
from stoker.queue.provenance import checkout_of
from stoker.queue.store import Store
from stoker.queue.sweep import Sweep, variants
from stoker.rules.registry import policies_of, stored_form
from stoker.web import reading
from stoker.web.problems import ConflictError, MistakesError, ParameterError

T = TypeVar("T")

# A slip of the thumb must not fill the queue; a terminal takes a hundred times as many.
MOST_JOBS: Final = 1000


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants run. Everything may be text as it was typed into a form.

    What was not said is left unset: it is as in the job that is run `again`, or else as usual. None, or empty text,
    says that there is none of it. A box that is not ticked says `off`, for browsers leave it out.
    """

    command: str | Sequence[str] | UnsetType | None = UNSET
    """Text for the shell, or the words of a command that needs none."""
    name: str | UnsetType | None = UNSET
    tags: str | Sequence[str] | UnsetType | None = UNSET
    """In text, commas or spaces are between them."""
    gpus: str | int | UnsetType | None = UNSET
    memory: str | int | UnsetType | None = UNSET
    """`20GiB`, or bytes."""
    share: str | bool | UnsetType | None = UNSET
    priority: str | int | UnsetType | None = UNSET
    after: str | Sequence[str] | UnsetType | None = UNSET
    """Ids, their beginnings, or names."""
    after_any: str | Sequence[str] | UnsetType | None = UNSET
    retries: str | int | UnsetType | None = UNSET
    backoff: str | float | UnsetType | None = UNSET
    """`30s`, or seconds."""
    time_limit: str | float | UnsetType | None = UNSET
    directory: str | UnsetType | None = UNSET
    """An absolute path, on the machine that will run it."""
    environment: str | Mapping[str, str] | UnsetType | None = UNSET
    """In text, one `NAME=VALUE` a line."""
    preemptible: str | bool | UnsetType | None = UNSET
    on_loss: str | UnsetType | None = UNSET
    held: str | bool | UnsetType | None = UNSET
    batch_size: str | int | UnsetType | None = UNSET
    fit: str | bool | Mapping[str, object] | UnsetType | None = UNSET
    """Whether its batch size is found first; or how, by the fields of `reading.Fit`."""
    idle: str | bool | UnsetType | None = UNSET
    """`off`: it is never stopped because its GPUs are idle."""
    idle_for: str | float | UnsetType | None = UNSET
    idle_below: str | float | UnsetType | None = UNSET
    """`5%`, or a fraction."""
    idle_after: str | float | UnsetType | None = UNSET
    policy: Mapping[str, str | int | float | bool | None] | UnsetType | None = UNSET
    """The whole idle policy, as a job keeps it, for who wants more of it than the four above."""
    sweep: str | Mapping[str, str | Sequence[str]] | UnsetType | None = UNSET
    """In text, one `NAME=VALUES` a line."""
    again: str | UnsetType | None = UNSET
    """The job that everything is copied from which is not said here."""


def jobs_of(store: Store, wanted: Wanted, submitter: str = "") -> list[NewJob]:
    """The jobs to submit. `MistakesError` says of each field what cannot be meant."""
    text = _said(wanted.again)
    earlier = _or_mistake("again", lambda: store.job(text)) if text else None
    form = _Form(earlier)
    form.read(store, wanted)
    sweeps: Sequence[Sweep] = form.tried("sweep", lambda: reading.sweeps(_said(wanted.sweep))) or ()
    held = form.tried("held", lambda: reading.flag(_said(wanted.held)))
    form.demand("command", "a job needs a command")
    form.demand("directory", "a job needs a directory to start in: write an absolute path, like /home/me/project")
    form.check_together(sweeps)
    asked = form.result() | {"submitter": submitter}
    asked |= _code(asked["directory"], earlier)
    chosen = _or_mistake("sweep", lambda: list(variants(asked["command"], asked.get("name", ""), sweeps)))
    return [NewJob(**(asked | {"command": one.command, "name": one.name}), held=bool(held)) for one in chosen]


def changes_of(store: Store, wanted: Wanted, job: Job) -> dict[str, object]:
    """What is to be edited in a job that is there: its fields that become something else."""
    form = _Form(job)
    form.read(store, wanted)
    form.check_together(())
    asked = form.result()
    return {field: asked[field] for field in JobSpec.__struct_fields__ if asked[field] != getattr(job, field)}


class _Form:
    """The fields of `JobSpec` that were said or copied, and what cannot be meant of the others."""

    def __init__(self, earlier: Job | None) -> None:
        self._asked: dict[str, Any] = {}
        self._mistakes: dict[str, str] = {}
        if earlier is not None:
            self._asked = {field: getattr(earlier, field) for field in JobSpec.__struct_fields__}

    def read(self, store: Store, wanted: Wanted) -> None:
        readers = dict(reading.READ)
        readers["after"] = readers["after_any"] = partial(reading.needed, store)
        readers["environment"] = partial(reading.environment, earlier=self._asked.get("environment", {}))
        for field, read in readers.items():
            said = getattr(wanted, field)
            if said is not UNSET:
                self._take(field, partial(read, said))
        self._take_policy(wanted)
        if wanted.fit is not UNSET:
            self._take("fit", lambda: reading.fit(wanted.fit, self._asked.get("command", ("-",))))

    def demand(self, field: str, sentence: str) -> None:
        if field not in self._asked:
            self._mistakes.setdefault(field, sentence)

    def tried(self, field: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except BadInputError as error:
            self._mistakes[field] = str(error)
            return None

    def check_together(self, sweeps: Sequence[Sweep]) -> None:
        """Finds what is wrong with fields that are right one by one."""
        asked, usual = self._asked, JobSpec(command="-")
        command, batch_size, fit = asked.get("command", ()), asked.get("batch_size"), asked.get("fit")
        if asked.get("share") and asked.get("memory") is None:
            self._mistakes.setdefault("memory", "a job that shares a GPU must say how much of its memory it takes")
        if fit:
            self.tried("fit", lambda: check_fittable(batch_size, asked.get("gpus", usual.gpus)))
            self.tried("fit", lambda: kept(msgspec.convert(fit, FitSpec), [command] if command else []))
        is_swept = any(sweep.name == "batch_size" for sweep in sweeps)
        if batch_size is None and not fit and not is_swept and wants_batch_size(command):
            self._mistakes.setdefault(
                "batch_size",
                "the command has {batch_size} in it: say how much that is, or write {{batch_size}} for the word itself",
            )
        jobs = math.prod(len(sweep.values) for sweep in sweeps)
        if jobs > MOST_JOBS:
            self._mistakes["sweep"] = (
                f"that would be {jobs:,} jobs: at most {MOST_JOBS:,} at once here, and more by `stoker submit`"
            )

    def result(self) -> dict[str, Any]:
        """What was asked for, unless some of it cannot be meant."""
        if self._mistakes:
            raise MistakesError(self._mistakes)
        return self._asked

    def _take(self, field: str, read: Callable[[], object]) -> None:
        def checked() -> object:
            value = read()
            fields: dict[str, Any] = {"command": "-", field: value}
            check(JobSpec(**fields))
            return value

        self._asked.pop(field, None)
        value = self.tried(field, checked)
        if field not in self._mistakes:
            self._asked[field] = value

    def _take_policy(self, wanted: Wanted) -> None:
        """The idle policy, out of the fields about it."""
        if wanted.policy is not UNSET:
            self._take("policy", partial(reading.policy, wanted.policy))
        policy = {**self._asked.get("policy", {})}
        is_on = policy.pop("idle", True) is not False
        idle = _said(wanted.idle)
        if wanted.idle is not UNSET:
            is_on = self.tried("idle", lambda: True if idle in {None, ""} else reading.flag(idle)) or False
        elif all(getattr(wanted, field) is UNSET for field in reading.IDLE):
            return
        for field, (name, read) in reading.IDLE.items():
            said = getattr(wanted, field)
            if said is not UNSET:
                policy.pop(name, None)
            if said not in {UNSET, None, ""}:
                policy[name] = self.tried(field, partial(read, said))
        if not is_on:
            self._asked["policy"] = stored_form(policies_of({**policy, "idle": False}))
        elif not self._mistakes.keys() & reading.IDLE.keys():
            said_of_it = (field for field in reading.IDLE if getattr(wanted, field) not in {UNSET, None, ""})
            field = next(said_of_it, "idle")
            self._asked["policy"] = self.tried(field, lambda: stored_form(policies_of(policy)))


def _code(directory: str, earlier: Job | None) -> dict[str, Any]:
    """Which code is there now, where the directory is here. A pinned job runs again what it ran."""
    if earlier is not None and earlier.pin and directory == earlier.directory:
        return {}
    found = checkout_of(directory)
    return {"commit": found.commit, "dirty": found.dirty, "pin": False}


def _or_mistake(field: str, work: Callable[[], T]) -> T:
    """For what nothing else can be looked at without."""
    try:
        return work()
    except BadInputError as error:
        raise MistakesError({field: str(error)}) from None


def _said(value: T | UnsetType) -> T | None:
    return None if isinstance(value, UnsetType) else value


HEADER: Final = "Idempotency-Key"


REPLAYED: Final = "Idempotent-Replayed"


# Enough to tell any two apart, and short enough that origins can be read.
_DIGITS: Final = 24


class Submitted(NamedTuple):
    jobs: list[Job]
    is_replay: bool


def submit_once(
    store: Store, key: str | None, sender: str, asked: bytes, make: Callable[[], Sequence[NewJob]]
) -> Submitted:
    """Submits what `make` gives, unless the same sender has done so with this key. `asked` is what was asked for."""
    if key is None:
        return Submitted(_found(store, store.submit(make())), is_replay=False)
    prefix = f"web:{_digest(f'{len(sender)}:{sender}{key}'.encode(errors='replace'))}:"
    origin = f"{prefix}{_digest(asked)}:"
    if earlier := store.by_origin(prefix):
        if not all((job.origin or "").startswith(origin) for job in earlier):
            raise ParameterError(HEADER, "this key was used for another request: take a new one for each submission")
        return Submitted(earlier, is_replay=True)
    # Numbered so that they sort in their order.
    jobs = [replace(job, origin=f"{origin}{number:06d}") for number, job in enumerate(make())]
    return Submitted(_found(store, store.submit(jobs)), is_replay=False)


def _found(store: Store, ids: Sequence[str]) -> list[Job]:
    try:
        return [store.job(name) for name in ids]
    except BadInputError:
        raise ConflictError("the jobs of this submission have been forgotten since (`stoker clean`)") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
