"""Turns forms and request bodies into jobs, by the same rules as `stoker submit`."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from stoker.engines.admission import check_jobs
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.fit.model import FitSpec, Overrides, SearchOptions, fit_fields
from stoker.masking import MASK, unmasked_notify
from stoker.queue.field_kinds import JOBS, check_seconds, read_flag, read_seconds
from stoker.queue.fields import FIELDS, JobSpec, editable, values_of
from stoker.queue.groups import UNNAMED
from stoker.queue.jobs import check_submission
from stoker.queue.model import Job
from stoker.queue.provenance import checkout_of
from stoker.queue.store import Store
from stoker.queue.sweep import Sweep, job_specs, parse_sweep, sweep_of
from stoker.rules.registry import policies_of, stored_form
from stoker.units import parse_fraction
from stoker.web.problems import ConflictError, ParameterError

T = TypeVar("T")
Said = Mapping[str, object]
"""What a job asks for, by the names of its fields: text of a form, or JSON values.

Missing fields are copied from the job `again`, or have their default. None or empty text stands for the default. Other
names are `idle`, `idle_for`, `idle_below`, `idle_after`, `sweep` and `again`; `fit` is a flag or the fields of `Fit`.
"""

# A typing error must not fill the queue; `stoker submit` takes a hundred times as many.
MOST_JOBS: Final = 1000


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch size is found, by the options of `stoker fit`."""

    base: int = SearchOptions().base
    multiple: int = SearchOptions().multiple
    max: int = SearchOptions().most
    margin: float | str = SearchOptions().margin
    effective: int | None = None
    batch_arg: str | None = None
    batch_env: str | None = None
    probe_args: str = ""
    retries_oom: int = FitSpec().retries_oom


def settable(*, at_submission: bool) -> list[str]:
    """The fields that may be set from another machine."""
    names = [name for name, field in FIELDS.items() if field.remote and (at_submission or field.editable_in)]
    return [name for name in names if FIELDS[name].kind.name != "fact"]


def new_group_of(said: Said) -> str:
    """What the group of a sweep is called that was given none; empty for a single command."""
    if said.get("group") or not said.get("sweep"):
        return ""
    return str(said.get("name") or "").strip() or UNNAMED


def jobs_of(store: Store, said: Said, submitter: str = "") -> list[JobSpec]:
    """The jobs to submit. Raises InvalidFieldsError with a message for each invalid field."""
    again = said.get("again")
    earlier = _or_mistake("again", lambda: store.jobs.get(str(again))) if again else None
    form = _Form(store, earlier)
    form.read(said, settable(at_submission=True))
    sweeps: Sequence[Sweep] = form.tried("sweep", lambda: _sweeps(said.get("sweep"))) or ()
    asked = form.result() | {"submitter": submitter}
    asked |= _code(asked["directory"], earlier)
    jobs = _or_mistake("sweep", lambda: job_specs(asked, [asked["command"]], sweeps, MOST_JOBS))
    check_submission(jobs)
    check_jobs(store, jobs)
    return jobs


def changes_of(store: Store, said: Said, job: Job) -> dict[str, object]:
    """The fields of the job that change, with their new values."""
    form = _Form(store, job)
    form.read(said, settable(at_submission=False))
    asked = form.result()
    return {name: asked[name] for name in FIELDS if name in asked and asked[name] != FIELDS[name].value(job)}


class _Form:
    """The values that were given or copied, and the mistakes in the others."""

    def __init__(self, store: Store, earlier: Job | None) -> None:
        self._store = store
        self._asked: dict[str, Any] = {}
        self._mistakes: dict[str, str] = {}
        if earlier is not None:
            values = values_of(earlier)
            self._asked = {name: values[name] for name in editable()}
        self._environment: Mapping[str, str] = self._asked.get("environment", {})
        self._notify: tuple[str, ...] = self._asked.get("notify", ())

    def read(self, said: Said, names: Sequence[str]) -> None:
        for name in names:
            if name != "fit" and (name in said or (FIELDS[name].required and name not in self._asked)):
                self._take(name, partial(self._value, name, said.get(name)))
        self._take_policy(said)
        if "fit" in said:
            self._take("fit", lambda: _fit(said["fit"]))
        if self._asked.get("fit"):
            self._take("fit", self._checked_fit)

    def _value(self, name: str, said: object) -> object:
        field = FIELDS[name]
        if name == "notify" and MASK in str(said):
            return _unmasked_notify(said, self._notify)
        value = field.read(said)
        if field.kind is JOBS:
            return self._store.jobs.ids_of(value)
        if name == "environment":
            return _unmasked(value, self._environment)
        return value

    def tried(self, field: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except InvalidFieldsError as error:
            self._mistakes |= error.mistakes
            return None
        except BadInputError as error:
            self._mistakes[field] = str(error)
            return None

    def _checked_fit(self) -> dict[str, Any]:
        asked = self._asked
        commands = [asked["command"]] if "command" in asked else []
        gpus = asked.get("gpus", FIELDS["gpus"].default)
        return fit_fields(msgspec.convert(asked["fit"], FitSpec), commands, asked.get("batch_size"), gpus)

    def result(self) -> dict[str, Any]:
        if self._mistakes:
            raise InvalidFieldsError(self._mistakes)
        return self._asked

    def _take(self, name: str, read: Callable[[], object]) -> None:
        value = self.tried(name, read)
        self._asked.pop(name, None)
        if name not in self._mistakes:
            self._asked[name] = value

    def _take_policy(self, said: Said) -> None:
        """The idle policy from its inputs."""
        if not said.keys() & {"idle", *IDLE}:
            return
        policy = {**self._asked.get("policy", {})}
        if "idle" in said:
            policy["idle"] = self.tried("idle", lambda: said["idle"] in {None, ""} or read_flag(said["idle"]))
        given = [field for field in IDLE if said.get(field) not in {None, ""}]
        for field, (name, read) in IDLE.items():
            if field in said:
                policy.pop(name, None)
            if field in given:
                policy[name] = self.tried(field, partial(read, said[field]))
        if not self._mistakes.keys() & {"idle", *IDLE}:
            self._asked["policy"] = self.tried(given[0] if given else "idle", lambda: stored_form(policies_of(policy)))


def seconds_of(value: object) -> float:
    """Seconds in text like `2h`, or a number."""
    seconds = read_seconds(value)
    check_seconds(seconds)
    return seconds


def _fraction(value: object) -> float:
    """`5%`, or 0.05."""
    found = parse_fraction(value) if isinstance(value, str) else float(value) if isinstance(value, int | float) else -1
    if not 0 <= found <= 1:
        raise BadInputError("a percentage must be between 0% and 100%")
    return found


IDLE: Final[Mapping[str, tuple[str, Callable[[object], object]]]] = {
    "idle_for": ("window", seconds_of),
    "idle_below": ("below", _fraction),
    "idle_after": ("after", seconds_of),
}
"""Inputs of the idle policy, each with the field that it sets and how it is read."""


def _unmasked(said: dict[str, str], earlier: Mapping[str, str]) -> dict[str, str]:
    """A masked value stands for the one that the job has now."""
    for name, text in said.items():
        if text == MASK:
            if name not in earlier:
                raise BadInputError(f"{MASK} stands for a hidden value: write the value of {name[:40]}")
            said[name] = earlier[name]
    return said


def _unmasked_notify(said: object, earlier: tuple[str, ...]) -> object:
    """A masked URL stands for the one that the job has now."""
    field = FIELDS["notify"]
    known = unmasked_notify(field.kind.read(said), earlier)
    if known is None:
        raise BadInputError(f"{MASK} stands for a hidden URL: write the URL")
    return field.read(known)


def _fit(value: object) -> dict[str, Any]:
    """As stored with the job; empty if no batch size is searched."""
    if not isinstance(value, Mapping):
        if not read_flag(value):
            return {}
        value = {}
    try:
        chosen = msgspec.convert(dict(value), Fit)
    except msgspec.ValidationError as error:
        raise BadInputError(f"invalid options of fit: {error}") from None
    if not 0 <= chosen.retries_oom < 1000:
        raise BadInputError(f"retries_oom must be between 0 and 999, not {chosen.retries_oom}")
    search_options = SearchOptions(
        base=chosen.base,
        multiple=chosen.multiple,
        most=chosen.max,
        margin=_fraction(chosen.margin),
        effective=chosen.effective,
    )
    overrides = Overrides(argument=chosen.batch_arg, variable=chosen.batch_env, probe_arguments=chosen.probe_args)
    fields: dict[str, Any] = msgspec.to_builtins(
        FitSpec(search_options=search_options, overrides=overrides, retries_oom=chosen.retries_oom)
    )
    return fields


def _sweeps(value: object) -> list[Sweep]:
    """From text with one parameter per line, or from values by name."""
    if isinstance(value, str):
        found = [parse_sweep(line.strip()) for line in value.splitlines() if line.strip()]
    elif isinstance(value, Mapping):
        found = [
            parse_sweep(f"{name}={values}") if isinstance(values, str) else sweep_of(name, tuple(values))
            for name, values in value.items()
        ]
    else:
        return []
    return found


def _code(directory: str, earlier: Job | None) -> dict[str, Any]:
    """The commit of the directory if it is on this machine. A pinned job keeps its commit, and any its snapshot."""
    if earlier is not None and (earlier.pin or earlier.snapshot) and directory == earlier.directory:
        return {"commit": earlier.commit, "dirty": earlier.dirty, "code": earlier.code}
    found = checkout_of(directory)
    return {"commit": found.commit, "dirty": found.dirty, "pin": False, "snapshot": False}


def _or_mistake(field: str, work: Callable[[], T]) -> T:
    """For fields without which nothing else can be checked."""
    try:
        return work()
    except BadInputError as error:
        raise InvalidFieldsError({field: str(error)}) from None


HEADER: Final = "Idempotency-Key"
# Of the digest: unique, and still readable as part of an origin.
_DIGITS: Final = 24


class Submitted(NamedTuple):
    jobs: list[Job]
    is_replay: bool


def submit_once(
    store: Store, key: str | None, sender: str, asked: bytes, make: Callable[[], Sequence[JobSpec]], new_group: str = ""
) -> Submitted:
    """Submits the jobs of `make`, unless this sender did so before with this key. `asked`: the request itself."""
    if key is None:
        return Submitted(_found(store, store.jobs.submit(make(), new_group=new_group)), is_replay=False)
    prefix = f"web:{_digest(f'{len(sender)}:{sender}{key}'.encode(errors='replace'))}:"
    origin = f"{prefix}{_digest(asked)}:"
    if earlier := store.jobs.by_origin(prefix):
        if not all((job.origin or "").startswith(origin) for job in earlier):
            raise ParameterError(HEADER, "this key was used for another request: use a new one for each submission")
        return Submitted(earlier, is_replay=True)
    # Numbered so that their order is kept.
    jobs = [replace(job, origin=f"{origin}{number:06d}") for number, job in enumerate(make())]
    return Submitted(_found(store, store.jobs.submit(jobs, new_group=new_group)), is_replay=False)


def _found(store: Store, ids: Sequence[str]) -> list[Job]:
    try:
        return [store.jobs.get(name) for name in ids]
    except BadInputError:
        raise ConflictError("the jobs of this submission have been removed by `stoker clean`") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
