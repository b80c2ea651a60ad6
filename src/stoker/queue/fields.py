"""The fields of a job, each stated once: for `submit`, `edit`, feeds, the API, the form and the client."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta

from stoker.errors import BadInputError
from stoker.queue.commands import LONGEST_COMMAND, Command, check_command, shell_text
from stoker.queue.provenance import check_environment, working_directory
from stoker.rules.registry import Stored, policies_of
from stoker.units import LONGEST_SECONDS, format_duration, format_memory, parse_duration, parse_memory

State = Literal["queued", "held", "running", "succeeded", "failed", "cancelled"]

ID: Final = re.compile(r"[0-9a-f]{8}")
LONGEST_LABEL: Final = 200
NOT_RUNNING: Final[tuple[State, ...]] = ("queued", "held", "succeeded", "failed", "cancelled")

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}")
_YES: Final = frozenset({"on", "true", "yes", "1"})
_NO: Final = frozenset({"", "off", "false", "no", "0"})

# Types of the API, with limits.
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
Written = Annotated[str, Meta(max_length=40)]
Label = Annotated[str, Meta(max_length=LONGEST_LABEL)]
JobName = Annotated[str, Meta(min_length=1, max_length=LONGEST_LABEL)]
Value = Annotated[str, Meta(max_length=128 * 1024)]


class FieldKind(msgspec.Struct, frozen=True, kw_only=True):
    """How the values of a field are read, written and limited."""

    name: str
    read: Callable[[Any], Any]
    """From text, or from a JSON value."""
    write: Callable[[Any], str] = str
    """As text that `read` understands."""
    check: Callable[[Any], None] = lambda _value: None
    """Raises for a value outside the limits."""
    json: Any = Annotated[str, Meta(max_length=LONGEST_LABEL)]
    """The type that the API takes."""
    metavar: str = "TEXT"
    has_unit: bool = False
    """Whether it may be written as a number or as text with a unit."""


class FormInput(msgspec.Struct, frozen=True):
    """The input of a field in the page's form: a check box for a flag, text for everything else."""

    label: str
    hint: str = ""
    row: str = "more"
    """Inputs of the same row stand side by side."""
    numeric: bool = False
    filled: bool = False
    """Whether the default is shown in an empty form."""


class JobField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a job."""

    kind: FieldKind
    help: str
    option: str = ""
    """The option of `submit` and `edit`; empty when the verbs define their own."""
    edit_help: str = ""
    """The help of `edit`, if it differs."""
    feed_help: str = ""
    """The help of `feed`; empty when feeds do not take it."""
    form: FormInput | None = None
    example: Any = None
    editable_in: tuple[State, ...] = NOT_RUNNING
    remote: bool = True
    """Whether the API and the page can set it."""
    required: bool = False
    """Whether blank text is refused instead of read as the default."""
    name: str = ""
    default: Any = None

    def read(self, value: object) -> Any:
        """The value from text or JSON. None or blank text means the default."""
        if not self.required and (value is None or (isinstance(value, str) and not value.strip())):
            return self.default
        found = self.kind.read("" if value is None else value)
        self.kind.check(found)
        return found

    def value(self, job: "JobSpec") -> Any:
        """The value that a job has."""
        return getattr(job, self.name)

    def check(self, job: "JobSpec") -> None:
        value = self.value(job)
        if value is None and self.default is None:
            return
        try:
            self.kind.check(value)
        except BadInputError as error:
            raise BadInputError(f"{self.name}: {error}") from None


# Kinds


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadInputError(f"{str(value)[:40]!r} is not text")
    text = value.strip()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{text[:40]!a} is not text in UTF-8") from None
    if "\0" in text:
        raise BadInputError(f"{text[:40]!a} has the character NUL in it")
    return text


def _check_label(value: str) -> None:
    if len(value) > LONGEST_LABEL or any(ord(letter) < 32 for letter in value):
        raise BadInputError(f"{value[:40]!r} is not one line of at most {LONGEST_LABEL} letters")


def _several(value: object) -> list[str]:
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return list(value) if isinstance(value, Sequence) else []


def _check_tags(tags: Sequence[str]) -> None:
    for tag in tags:
        _check_label(tag)
        if not tag:
            raise BadInputError("a tag must not be empty")


def _check_needs(names: Sequence[str]) -> None:
    for needed in names:
        if not ID.fullmatch(needed):
            raise BadInputError(f"{needed!r} is not the id of a job")


def _command(value: object) -> Command:
    command: Command = value.strip() if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    check_command(command)
    return command


def _whole(value: object) -> int:
    if isinstance(value, str):
        if not _WHOLE.fullmatch(value.strip()):
            raise BadInputError(f"{value.strip()[:40]!r} is not a whole number")
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInputError(f"{value!r} is not a whole number")
    return value


def _between(least: int, most: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        if not least <= value <= most:
            raise BadInputError(f"must be between {least} and {most}, not {value}")

    return check


def _number(least: int) -> FieldKind:
    most = 2**31 - 1
    limited = Annotated[int, Meta(ge=least, le=most)]
    return FieldKind(name="number", read=_whole, check=_between(least, most), json=limited, metavar="N")


def read_flag(value: object) -> bool:
    """Whether it is on, from JSON or from the text of a check box."""
    if not isinstance(value, str):
        return bool(value)
    if value.strip().lower() not in _YES | _NO:
        raise BadInputError(f"{value[:40]!r} is neither on nor off")
    return value.strip().lower() in _YES


def _memory(value: object) -> int:
    if isinstance(value, str) and not value.strip().isdecimal():
        return parse_memory(value)
    return _whole(value)


def _memory_text(amount: int) -> str:
    readable = format_memory(amount).replace(" ", "")
    if parse_memory(readable) == amount:
        return readable
    return f"{amount // 2**20}MiB" if amount % 2**20 == 0 else f"{amount}B"


def read_seconds(value: object) -> float:
    """Seconds in text like `2h`, or a number."""
    if isinstance(value, str):
        return parse_duration(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadInputError(f"{value!r} is not a duration: write it like 90s, 5m or 1h30m")
    return float(value)


def seconds_text(seconds: float) -> str:
    """Text that `read_seconds` turns into the same number."""
    readable = format_duration(seconds)
    return readable if parse_duration(readable) == seconds else f"{seconds:.15f}".rstrip("0").rstrip(".") + "s"


def check_seconds(seconds: float) -> None:
    if not math.isfinite(seconds) or not 0 <= seconds <= LONGEST_SECONDS:
        raise BadInputError(f"{seconds:g} s is not between zero and ten years: write it like 90s or 2h")


def _check_limit(seconds: float) -> None:
    check_seconds(seconds)
    if seconds == 0:
        raise BadInputError("must be greater than zero: leave it out for no limit")


def _choice(*values: str) -> FieldKind:
    def check(value: object) -> None:
        if value not in values:
            raise BadInputError(f"{str(value)[:40]!r} is not one of {', '.join(values)}")

    return FieldKind(name="choice", read=str, check=check, json=Literal[values], metavar="|".join(values))


def _directory(value: object) -> str:
    path = _text(value)
    if not path.startswith("/"):
        raise BadInputError("a job needs a directory to start in: write an absolute path, like /home/me/project")
    return working_directory(path)


def _environment(value: object) -> dict[str, str]:
    if isinstance(value, str):
        pairs = [line.partition("=") for line in value.splitlines() if line.strip()]
        if bare := [name for name, equals, _value in pairs if not equals]:
            raise BadInputError(f"{bare[0][:40]!r} sets no variable: write NAME=VALUE on each line")
        return {name.strip(): text for name, _equals, text in pairs}
    return dict(value) if isinstance(value, Mapping) else {}


def _check_policy(policy: Mapping[str, object]) -> None:
    policies_of(policy)


def _check_actions(texts: Sequence[str]) -> None:
    from stoker.actions.catalogue import check_actions

    check_actions(texts)


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInputError(f"{str(value)[:40]!r} is not a mapping")
    return dict(value)


TEXT: Final = FieldKind(name="text", read=_text, check=_check_label, json=Label)
TAGS: Final = FieldKind(
    name="tags",
    read=lambda value: tuple(dict.fromkeys(map(_text, _several(value)))),
    write=", ".join,
    check=_check_tags,
    json=Annotated[list[Label], Meta(max_length=100)],
)
JOBS: Final = FieldKind(
    name="jobs",
    read=lambda value: tuple(dict.fromkeys(_several(value))),
    write=", ".join,
    json=Annotated[list[JobName], Meta(max_length=1000)],
    metavar="JOB",
)
ACTIONS: Final = FieldKind(
    name="action",
    read=lambda value: tuple(line.strip() for line in (value.splitlines() if isinstance(value, str) else value)),
    write="\n".join,
    check=_check_actions,
    json=Annotated[list[Annotated[str, Meta(max_length=LONGEST_COMMAND)]], Meta(max_length=20)],
    metavar="ACTION",
)
COMMAND: Final = FieldKind(
    name="command",
    read=_command,
    write=shell_text,
    json=Annotated[str, Meta(max_length=LONGEST_COMMAND)] | Annotated[list[Value], Meta(max_length=10_000)],
)
COUNT: Final = _number(0)
SIZE: Final = _number(1)
INTEGER: Final = _number(1 - 2**31)
MEMORY: Final = FieldKind(
    name="memory",
    read=_memory,
    write=_memory_text,
    check=_between(0, 2**63 - 1),
    json=Annotated[int, Meta(ge=0, le=2**63 - 1)] | Written,
    metavar="SIZE",
    has_unit=True,
)
DURATION: Final = FieldKind(
    name="duration",
    read=read_seconds,
    write=seconds_text,
    check=check_seconds,
    json=Seconds | Written,
    metavar="DURATION",
    has_unit=True,
)
LIMIT: Final = msgspec.structs.replace(DURATION, check=_check_limit)
FLAG: Final = FieldKind(name="flag", read=read_flag, write=lambda on: "on" if on else "off", json=bool)
DIRECTORY: Final = FieldKind(
    name="directory",
    read=_directory,
    json=Annotated[str, Meta(max_length=4096)],
    metavar="DIR",
)
ENVIRONMENT: Final = FieldKind(name="environment", read=_environment, check=check_environment, json=dict[str, Value])
POLICY: Final = FieldKind(
    name="policy", read=_mapping, check=_check_policy, json=dict[str, str | int | float | bool | None]
)
MAPPING: Final = FieldKind(name="mapping", read=_mapping, json=dict[str, Any])
FACT: Final = FieldKind(name="fact", read=lambda value: value, json=Any)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for. Its annotations are the table of fields."""

    command: Annotated[
        str | tuple[str, ...],
        JobField(
            kind=COMMAND,
            help="Text for the shell, or the words of a command that needs none.",
            example="python train.py --lr 1e-3",
            required=True,
        ),
    ]
    directory: Annotated[
        str,
        JobField(
            kind=DIRECTORY,
            help="Where it runs: an absolute path on the machine that runs it.",
            example="/home/me/project",
            required=True,
        ),
    ] = "/"
    environment: Annotated[
        dict[str, str],
        JobField(
            kind=ENVIRONMENT,
            help="Added to the worker's own environment. `***`, which is shown for values that look like secrets, "
            "keeps the value that the job has.",
        ),
    ] = {}
    name: Annotated[
        str,
        JobField(
            kind=TEXT,
            help="What people call it; ids are given by the queue.",
            option="--name",
            form=FormInput("Name", row="name"),
        ),
    ] = ""
    tags: Annotated[
        tuple[str, ...],
        JobField(
            kind=TAGS,
            help="To find it by. May be repeated.",
            option="--tag",
            edit_help="Its tags, instead of those it has; none for none.",
            feed_help="To find them by. May be repeated.",
            form=FormInput("Tags", "Commas or spaces between them.", row="name"),
        ),
    ] = ()
    gpus: Annotated[
        int,
        JobField(
            kind=COUNT,
            help="How many GPUs it needs; 0 for none.",
            option="--gpus",
            feed_help="GPUs for each job; 0 for none.",
            form=FormInput("GPUs", "0 for none.", row="gpus", numeric=True, filled=True),
            example=1,
        ),
    ] = 1
    memory: Annotated[
        int | None,
        JobField(
            kind=MEMORY,
            help="Memory that it needs on each GPU: bytes, or text like 20GiB.",
            option="--memory",
            feed_help="Memory that each needs on each GPU, like 20GiB.",
            form=FormInput("Memory per GPU", "Like `20GiB`.", row="gpus"),
            example="20GiB",
        ),
    ] = None
    share: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="It may share a GPU with others; needs --memory.",
            option="--share",
            edit_help="Whether it may share a GPU with others.",
            feed_help="They may share a GPU with others; needs --memory.",
            form=FormInput("May share a GPU with others (say how much memory)"),
        ),
    ] = False
    batch_size: Annotated[
        int | None,
        JobField(
            kind=SIZE,
            help="What {batch_size} in the command stands for.",
            option="--batch-size",
            feed_help="What {batch_size} in commands stands for.",
            form=FormInput("Batch size", "What `{batch_size}` stands for.", row="needs", numeric=True),
            example=64,
        ),
    ] = None
    priority: Annotated[
        int,
        JobField(
            kind=INTEGER,
            help="Higher ones start first.",
            option="--priority",
            feed_help="Higher ones start first.",
            form=FormInput("Priority", "Higher ones start first; 0 is usual.", row="limits"),
        ),
    ] = 0
    after: Annotated[
        tuple[str, ...],
        JobField(
            kind=JOBS,
            help="Start when that job succeeded. May be repeated.",
            option="--after",
            edit_help="Start when these have succeeded, instead of those before; or none.",
            form=FormInput("After", "Ids of jobs that must have succeeded.", row="needs"),
        ),
    ] = ()
    after_any: Annotated[
        tuple[str, ...],
        JobField(
            kind=JOBS,
            help="Start when that job ended, however. May be repeated.",
            option="--after-any",
            edit_help="Start when these have ended, however; or none.",
        ),
    ] = ()
    retries: Annotated[
        int,
        JobField(
            kind=COUNT,
            help="How often it is tried again when it fails.",
            option="--retries",
            feed_help="How often each is tried again when it fails.",
            form=FormInput("Retries", "When it fails.", row="limits", numeric=True),
        ),
    ] = 0
    backoff: Annotated[
        float,
        JobField(
            kind=DURATION,
            help="Wait before the first retry, doubled for each further one.",
            option="--backoff",
            example="30s",
        ),
    ] = 30.0
    time_limit: Annotated[
        float | None,
        JobField(
            kind=LIMIT,
            help="Stop it after this long in any case.",
            option="--time-limit",
            feed_help="Stop each after this long in any case.",
            form=FormInput("Time limit", "Like `2h`; empty for none.", row="limits"),
            example="12h",
        ),
    ] = None
    policy: Annotated[
        Stored,
        JobField(
            kind=POLICY,
            help='The settings of its rules as a job keeps them; `{"idle": false}` turns the idle rule off.',
        ),
    ] = {}
    then: Annotated[
        tuple[str, ...],
        JobField(
            kind=ACTIONS,
            help="What to do after a rule has stopped it, as `stoker run --then` takes it. May be repeated.",
            option="--then",
            edit_help="Its actions, instead of those it has; none for none.",
        ),
    ] = ()
    fit: Annotated[
        dict[str, Any],
        JobField(kind=MAPPING, help="How its batch size is found on the GPUs that it gets; empty: it is not."),
    ] = {}
    preemptible: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="It may be stopped, and started again later, when others need its GPUs.",
            option="--preemptible",
            feed_help="They may be stopped, and started again, when others need GPUs.",
            form=FormInput("May be stopped and started again when others need its GPUs"),
        ),
    ] = False
    on_loss: Annotated[
        Literal["retry", "hold"],
        JobField(kind=_choice("retry", "hold"), help="What happens when its machine is lost.", option="--on-loss"),
    ] = "retry"
    hold: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="Do not start it before `stoker release`.",
            option="--hold",
            form=FormInput("Hold it: do not start before it is released"),
            editable_in=(),
        ),
    ] = False
    pin: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="Run the code as committed at its submission, in a snapshot.",
            option="--pin",
            remote=False,
        ),
    ] = False
    commit: Annotated[str | None, JobField(kind=FACT, help="The commit of its directory.", editable_in=())] = None
    dirty: Annotated[
        bool | None, JobField(kind=FACT, help="Whether tracked files differed from the commit.", editable_in=())
    ] = None
    submitter: Annotated[str, JobField(kind=FACT, help="Who put it into the queue.", editable_in=())] = ""
    id: str = ""
    """Chosen by the submitter if other jobs of the same submission come after it, otherwise by the queue."""
    origin: str | None = None
    """Where it came from, such as a row of a sheet. An origin becomes a job only once."""


def _fields() -> dict[str, JobField]:
    """The table in the annotations of `JobSpec`, each field with its name and default."""
    hints = get_type_hints(JobSpec, include_extras=True)
    fields = {}
    for info in msgspec.structs.fields(JobSpec):
        default = None if info.default is msgspec.NODEFAULT else info.default
        if info.default_factory is not msgspec.NODEFAULT:
            default = info.default_factory()
        for field in getattr(hints[info.name], "__metadata__", ()):
            fields[info.name] = msgspec.structs.replace(field, name=info.name, default=default)
    return fields


FIELDS: Final = _fields()


def editable(state: State = "queued") -> list[str]:
    """The fields that may be changed in a job of this state."""
    return [name for name, field in FIELDS.items() if state in field.editable_in]


def values_of(job: JobSpec) -> dict[str, Any]:
    """The values of all fields, by name."""
    return {name: field.value(job) for name, field in FIELDS.items()}


def spec_of(values: Mapping[str, Any]) -> JobSpec:
    """The job with these values. Raises when one has the wrong type."""
    if unknown := values.keys() - set(JobSpec.__struct_fields__):
        raise BadInputError(f"a job has no field {min(unknown)!r}")
    try:
        return msgspec.convert(values, JobSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(in_words(error)) from None


def in_words(error: msgspec.ValidationError) -> str:
    """`gpus: expected int, got str`."""
    said, _, where = str(error).replace("`", "").partition(" - at $.")
    if "required field" in said:
        return "a job needs a command"
    return f"{where}: {said[:1].lower()}{said[1:]}" if where else said


def check(job: JobSpec) -> None:
    """Raises for the first field whose value is outside its limits."""
    if not job.command or (isinstance(job.command, tuple) and not job.command[0]):
        raise BadInputError("a job needs a command: none was given")
    for name, field in FIELDS.items():
        # Most values are defaults, and a sweep may have a hundred thousand jobs.
        if name not in _CHECKED_ELSEWHERE and field.value(job) != field.default:
            field.check(job)
    _check_needs((*job.after, *job.after_any))
    if job.id and not ID.fullmatch(job.id):
        raise BadInputError(f"{job.id!r} cannot be the id of a job: it must be eight hexadecimal digits")


# Checked once where they are read: it would cost too much for each of a hundred thousand jobs.
_CHECKED_ELSEWHERE: Final = frozenset({"command", "environment", "policy"})
