"""The fields of a job, each defined once for `submit`, `edit`, feeds, the API, the form and the client."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec

from stoker.errors import BadInputError, InvalidFieldsError
from stoker.queue.code.archive import CodeSnapshot
from stoker.queue.commands import wants_batch_size
from stoker.queue.field_kinds import (
    ACTIONS,
    COMMAND,
    COUNT,
    DIRECTORY,
    DURATION,
    ENDS,
    ENVIRONMENT,
    FACT,
    FLAG,
    GPU_MODEL,
    GROUP,
    ID,
    INTEGER,
    JOBS,
    LABELS,
    LIMIT,
    MACHINE,
    MACHINES,
    MAPPING,
    MEMORY,
    METRICS,
    MOMENT,
    NODES,
    NOTIFY,
    POLICY,
    RAM,
    RECURRENCE,
    SIZE,
    SLURM,
    TAGS,
    TEXT,
    FieldKind,
    choice,
)
from stoker.queue.slurm_options import check_further, check_value
from stoker.rules.rule import Stored

State = Literal["queued", "held", "running", "succeeded", "failed", "cancelled"]

NOT_RUNNING: Final[tuple[State, ...]] = ("queued", "held", "succeeded", "failed", "cancelled")
ALWAYS: Final[tuple[State, ...]] = (*NOT_RUNNING, "running")


class FormInput(msgspec.Struct, frozen=True):
    """A field's input in the page's form: a check box for a flag, a text input otherwise."""

    label: str
    hint: str = ""
    row: str = "more"
    """Inputs with the same row are side by side."""
    numeric: bool = False
    filled: bool = False
    """An empty form shows the default."""


class FieldPart(msgspec.Struct, frozen=True):
    """An entry of a mapping field, with its own option and input."""

    key: str
    option: str
    help: str
    label: str
    hint: str = ""
    check: Callable[[object], None] = check_value
    """Raises for a value, or an item of a list, outside the limits."""
    several: bool = False
    """The entry is a list, and the option may be repeated."""


class JobField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a job."""

    kind: FieldKind
    help: str
    option: str = ""
    """The option of `submit` and `edit`; empty if the verbs define their own."""
    edit_help: str = ""
    """The help of `edit`, if it differs."""
    feed_help: str = ""
    """The help of `feed`; empty if feeds do not have the option."""
    form: FormInput | None = None
    example: Any = None
    editable_in: tuple[State, ...] = NOT_RUNNING
    remote: bool = True
    """The API and the page can set it."""
    required: bool = False
    """Blank text is refused instead of meaning the default."""
    parts: tuple[FieldPart, ...] = ()
    """The entries of a mapping; each has its own option."""
    placed: bool = False
    """It matters for placement."""
    name: str = ""
    default: Any = None

    def read(self, value: object) -> Any:
        """Parses text or JSON. None or blank text means the default."""
        if not self.required and (value is None or (isinstance(value, str) and not value.strip())):
            return self.default
        try:
            found = self.kind.read("" if value is None else value)
            self.kind.check(found)
        except BadInputError as error:
            raise InvalidFieldsError({self.name: str(error)}) from None
        return found

    def value(self, job: "JobSpec") -> Any:
        """The field's value in a job."""
        return getattr(job, self.name)

    def check(self, job: "JobSpec") -> None:
        value = self.value(job)
        if value is None and self.default is None:
            return
        try:
            self.kind.check(value)
        except BadInputError as error:
            raise InvalidFieldsError({self.name: str(error)}) from None


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job. Its annotations are the table of fields."""

    command: Annotated[
        str | tuple[str, ...],
        JobField(
            kind=COMMAND,
            help="Text for the shell, or a list of words for a command without one.",
            example="python train.py --lr 1e-3",
            required=True,
        ),
    ]
    directory: Annotated[
        str,
        JobField(
            kind=DIRECTORY,
            help="The working directory: an absolute path on the machine that runs it.",
            example="/home/me/project",
            required=True,
        ),
    ] = "/"
    environment: Annotated[
        dict[str, str],
        JobField(
            kind=ENVIRONMENT,
            help="Variables added to the worker's environment. `***`, which replaces values that look like secrets, "
            "keeps the current value.",
        ),
    ] = {}
    name: Annotated[
        str,
        JobField(
            kind=TEXT,
            help="A name for people; the queue assigns the id.",
            option="--name",
            form=FormInput("Name", row="name"),
        ),
    ] = ""
    tags: Annotated[
        tuple[str, ...],
        JobField(
            kind=TAGS,
            help="A tag for searches (repeatable).",
            option="--tag",
            edit_help="Replace its tags; none removes all.",
            feed_help="A tag for searches (repeatable).",
            form=FormInput("Tags", "Commas or spaces between them.", row="name"),
        ),
    ] = ()
    group: Annotated[
        str,
        JobField(
            kind=GROUP,
            help="Its group: one name for several jobs. Sweeps and files get a group automatically.",
            option="--group",
            edit_help="Its group; none removes it from its group.",
            feed_help="Their group: one name for all of them.",
            form=FormInput("Group", "One name for several jobs.", row="group"),
            example="night",
        ),
    ] = ""
    at_most: Annotated[
        int | None,
        JobField(
            kind=SIZE,
            help="The limit of running jobs of its group, on all machines together.",
            option="--at-most",
            edit_help="The limit of running jobs of its group, even while it runs; or none.",
            feed_help="The limit of running jobs of the group, on all machines together.",
            form=FormInput("At most at once", "Of the group.", row="group", numeric=True),
            example=4,
        ),
    ] = None
    metrics: Annotated[
        tuple[str, ...],
        JobField(
            kind=METRICS,
            help="A metric in its output, like loss, to plot and to show with it (repeatable).",
            option="--metric",
            edit_help="Replace its metrics; none plots all.",
            feed_help="A metric in their output, like loss, to plot and to show (repeatable).",
            form=FormInput("Metrics", "Figures that it prints, like `loss, val_acc`; empty for all.", row="figures"),
            example=["loss", "val_acc"],
        ),
    ] = ()
    gpus: Annotated[
        int,
        JobField(
            kind=COUNT,
            placed=True,
            help="The number of GPUs, per machine if it runs on several; 0 for none.",
            option="--gpus",
            feed_help="The number of GPUs per job, per machine if it runs on several; 0 for none.",
            form=FormInput("GPUs", "0 for none.", row="gpus", numeric=True, filled=True),
            example=1,
        ),
    ] = 1
    memory: Annotated[
        int | None,
        JobField(
            kind=MEMORY,
            placed=True,
            help="Memory that it uses on each GPU, like 20GiB; others may share the rest.",
            option="--memory",
            feed_help="Memory that each uses on each GPU, like 20GiB; others may share the rest.",
            form=FormInput("Memory it uses per GPU", "Like `20GiB`.", row="gpus"),
            example="20GiB",
        ),
    ] = None
    share: Annotated[
        bool,
        JobField(
            kind=FLAG,
            placed=True,
            help="Allow sharing its GPUs with other jobs; needs --memory.",
            option="--share",
            edit_help="Allow sharing its GPUs with other jobs.",
            feed_help="Allow sharing their GPUs with other jobs; needs --memory.",
            form=FormInput("May share a GPU with others (say how much memory)"),
        ),
    ] = False
    gpu_model: Annotated[
        str | None,
        JobField(
            kind=GPU_MODEL,
            placed=True,
            help="Only GPUs with this in their name, like a100 or 'a100|h100'.",
            option="--gpu-model",
            feed_help="Only GPUs with this in their name, like a100 or 'a100|h100'.",
            form=FormInput("GPU model", "A part of the name, like `a100` or `a100|h100`.", row="model"),
            example="a100|h100",
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        JobField(
            kind=RAM,
            placed=True,
            help="Only GPUs with at least this much total memory, like 40GiB.",
            option="--gpu-memory",
            feed_help="Only GPUs with at least this much total memory, like 40GiB.",
            form=FormInput("Memory of the card", "At least, like `40GiB`.", row="model"),
            example="40GiB",
        ),
    ] = None
    machine: Annotated[
        str | None,
        JobField(
            kind=MACHINE,
            placed=True,
            help="Only on this machine: the host of a worker, or a node of a cluster.",
            option="--machine",
            feed_help="Only on this machine: the host of a worker, or a node of a cluster.",
            form=FormInput("Machine", "Only there.", row="where"),
            example="gpu-box",
        ),
    ] = None
    labels: Annotated[
        tuple[str, ...],
        JobField(
            kind=LABELS,
            placed=True,
            help="Only on machines with this label, or nodes with this feature (repeatable; all are required).",
            option="--label",
            edit_help="Replace the required labels of its machine; or none.",
            feed_help="Only on machines with this label (repeatable; all are required).",
            form=FormInput("Labels", "Only on machines with all of them.", row="where"),
            example=["ib"],
        ),
    ] = ()
    exclude_machines: Annotated[
        tuple[str, ...],
        JobField(
            kind=MACHINES,
            placed=True,
            help="Not on this machine (repeatable).",
            option="--exclude-machine",
            edit_help="Replace its excluded machines; or none.",
            feed_help="Not on this machine (repeatable).",
            form=FormInput("Not on", "Machines, with commas or spaces between them.", row="where"),
            example=["old-box"],
        ),
    ] = ()
    cpus: Annotated[
        int | None,
        JobField(
            kind=SIZE,
            placed=True,
            help="CPUs that it gets on each machine; further jobs start only if they fit.",
            option="--cpus",
            edit_help="CPUs that it gets on each machine; or none.",
            feed_help="CPUs that each gets; further jobs start only if they fit.",
            form=FormInput("CPUs", "On each machine.", row="machine", numeric=True),
            example=8,
        ),
    ] = None
    ram: Annotated[
        int | None,
        JobField(
            kind=RAM,
            placed=True,
            help="RAM that it gets on each machine, like 64GiB; further jobs start only if they fit.",
            option="--ram",
            edit_help="RAM that it gets on each machine, like 64GiB; or none.",
            feed_help="RAM that each gets, like 64GiB; further jobs start only if they fit.",
            form=FormInput("RAM", "On each machine, like `64GiB`.", row="machine"),
            example="64GiB",
        ),
    ] = None
    nodes: Annotated[
        int,
        JobField(
            kind=NODES,
            placed=True,
            help="The number of machines; more than one requires a Slurm cluster.",
            option="--nodes",
            feed_help="The number of machines per job; more than one requires a Slurm cluster.",
            form=FormInput("Machines", "More than one takes a cluster with Slurm.", row="machine", numeric=True),
            example=2,
        ),
    ] = 1
    batch_size: Annotated[
        int | None,
        JobField(
            kind=SIZE,
            help="The value of {batch_size} in the command.",
            option="--batch-size",
            feed_help="The value of {batch_size} in commands.",
            form=FormInput("Batch size", "What `{batch_size}` stands for.", row="needs", numeric=True),
            example=64,
        ),
    ] = None
    priority: Annotated[
        int,
        JobField(
            kind=INTEGER,
            help="Jobs with a higher priority start first.",
            option="--priority",
            feed_help="Jobs with a higher priority start first.",
            form=FormInput("Priority", "Higher ones start first; 0 is usual.", row="limits"),
        ),
    ] = 0
    after: Annotated[
        tuple[str, ...],
        JobField(
            kind=JOBS,
            help="Start after that job has succeeded (repeatable).",
            option="--after",
            edit_help="Replace the jobs that must succeed before it starts; or none.",
            form=FormInput("After", "Ids of jobs that must have succeeded.", row="needs"),
        ),
    ] = ()
    after_any: Annotated[
        tuple[str, ...],
        JobField(
            kind=JOBS,
            help="Start after that job has ended in any state (repeatable).",
            option="--after-any",
            edit_help="Replace the jobs that must end before it starts; or none.",
        ),
    ] = ()
    begin: Annotated[
        float | None,
        JobField(
            kind=MOMENT,
            help="Not before this time: 22:00, +2h or '2026-11-19 22:00'.",
            option="--begin",
            form=FormInput("Begin", "Not before `22:00`, `+2h` or `2026-11-19 22:00`.", row="when"),
            example="2026-11-19 22:00",
        ),
    ] = None
    every: Annotated[
        str | None,
        JobField(
            kind=RECURRENCE,
            help="Repeat at these times, in cron's syntax: '0 3 * * *' is 3:00 every day.",
            option="--every",
            form=FormInput("Every", "In cron's syntax: `0 3 * * *` is at 3:00 every day.", row="when"),
            example="0 3 * * * Europe/Berlin",
        ),
    ] = None
    deadline: Annotated[
        float | None,
        JobField(
            kind=MOMENT,
            help="Fail if it has not started by this time: 8:00, +12h or '2026-11-20 8:00'.",
            option="--deadline",
            form=FormInput("Deadline", "It fails if it waits then.", row="when"),
            example="2026-11-20 08:00",
        ),
    ] = None
    retries: Annotated[
        int,
        JobField(
            kind=COUNT,
            help="The number of retries after failures.",
            option="--retries",
            feed_help="The number of retries of each after failures.",
            form=FormInput("Retries", "When it fails.", row="limits", numeric=True),
        ),
    ] = 0
    backoff: Annotated[
        float,
        JobField(
            kind=DURATION,
            help="The delay before the first retry, doubled for each further one.",
            option="--backoff",
            example="30s",
        ),
    ] = 30.0
    retry_on: Annotated[
        tuple[str, ...],
        JobField(
            kind=ENDS,
            help="Retry only after these causes: exit, exit:75, oom, time-limit, start, lost, or a rule like stalled.",
            option="--retry-on",
            edit_help="Replace the causes after which it is retried; none for any.",
            feed_help="Retry each only after these causes: exit:75, oom, stalled and so on.",
            form=FormInput("Retry on", "Like `exit:75, oom, stalled`; empty for any failure.", row="limits"),
            example=["exit:75", "oom"],
        ),
    ] = ()
    time_limit: Annotated[
        float | None,
        JobField(
            kind=LIMIT,
            placed=True,
            help="Stop it after this time.",
            option="--time-limit",
            feed_help="Stop each after this time.",
            form=FormInput("Time limit", "Like `2h`; empty for none.", row="limits"),
            example="12h",
        ),
    ] = None
    requeue_at_limit: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="At the time limit, stop and requeue it without using a retry.",
            option="--requeue-at-limit",
            feed_help="At the time limit, requeue each without using a retry.",
            form=FormInput("At the time limit, stop it and put it back into the queue"),
        ),
    ] = False
    policy: Annotated[
        Stored,
        JobField(
            kind=POLICY,
            help='The settings of its rules in the stored form; `{"idle": false}` turns the idle rule off.',
        ),
    ] = {}
    then: Annotated[
        tuple[str, ...],
        JobField(
            kind=ACTIONS,
            help="An action after a rule has stopped it, as in `stoker run --then` (repeatable).",
            option="--then",
            edit_help="Replace its actions; or none.",
        ),
    ] = ()
    notify: Annotated[
        tuple[str, ...],
        JobField(
            kind=NOTIFY,
            help="Send a message: end, failed, succeeded, stopped, warned, done (its group); URL or WHEN:URL "
            "(repeatable).",
            option="--notify",
            edit_help="Replace its notifications, even while it runs; or none.",
            feed_help="Send a message about each: end, failed, succeeded, stopped, warned; URL or WHEN:URL.",
            form=FormInput("Notify", "Like `end`, `failed:ntfy://…`, or `done` for the group.", row="notify"),
            example=["failed"],
            editable_in=ALWAYS,
        ),
    ] = ()
    fit: Annotated[
        dict[str, Any],
        JobField(kind=MAPPING, help="How to find its batch size on its GPUs; empty if it is given."),
    ] = {}
    preemptible: Annotated[
        bool,
        JobField(
            kind=FLAG,
            placed=True,
            help="Allow stopping and restarting it later when other jobs need its GPUs.",
            option="--preemptible",
            feed_help="Allow stopping and restarting them later when other jobs need GPUs.",
            form=FormInput("May be stopped and started again when others need its GPUs"),
        ),
    ] = False
    on_loss: Annotated[
        Literal["retry", "hold"],
        JobField(kind=choice("retry", "hold"), help="What to do when its machine is lost.", option="--on-loss"),
    ] = "retry"
    slurm: Annotated[
        dict[str, Any],
        JobField(
            kind=SLURM,
            placed=True,
            help="Options for Slurm: `partition`, `account`, `qos`, `constraint`, `reservation`, "
            "and `sbatch`, a list of further options of sbatch.",
            feed_help="Options for Slurm.",
            parts=(
                FieldPart("partition", "--partition", "Slurm: the partition, or several: a,b.", "Partition"),
                FieldPart("account", "--account", "Slurm: the account to charge.", "Account"),
                FieldPart("qos", "--qos", "Slurm: the quality of service.", "QOS"),
                FieldPart(
                    "constraint",
                    "--constraint",
                    "Slurm: required features of its nodes, like 'ib&nvme'.",
                    "Constraint",
                ),
                FieldPart("reservation", "--reservation", "Slurm: the reservation to use.", "Reservation"),
                FieldPart(
                    "sbatch",
                    "--sbatch",
                    "Slurm: a further option of sbatch, like --exclude=node3 (repeatable).",
                    "Options of sbatch",
                    "Like `--exclude=node3 --nice=100`.",
                    check=check_further,
                    several=True,
                ),
            ),
            example={"partition": "gpu", "sbatch": ["--exclude=node3"]},
        ),
    ] = {}
    hold: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="Do not start before `stoker release`.",
            option="--hold",
            form=FormInput("Hold it: do not start before it is released"),
            editable_in=(),
        ),
    ] = False
    pin: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="Run the commit of its submission in a separate worktree.",
            option="--pin",
            remote=False,
        ),
    ] = False
    snapshot: Annotated[
        bool,
        JobField(
            kind=FLAG,
            help="Run the current code, including uncommitted changes, on any machine.",
            option="--snapshot",
            edit_help="Run the code of its submission; only for a job submitted with --snapshot.",
            remote=False,
        ),
    ] = False
    commit: Annotated[str | None, JobField(kind=FACT, help="The commit of its directory.", editable_in=())] = None
    dirty: Annotated[
        bool | None, JobField(kind=FACT, help="Tracked files differed from the commit.", editable_in=())
    ] = None
    code: Annotated[
        CodeSnapshot | None, JobField(kind=FACT, help="The snapshot of the code at its submission.", editable_in=())
    ] = None
    submitter: Annotated[str, JobField(kind=FACT, help="The user who submitted it.", editable_in=())] = ""
    id: str = ""
    """The submitter chooses it if other jobs of the submission depend on this one; otherwise the queue does."""
    origin: str | None = None
    """The source, such as a row of a sheet. An origin becomes a job only once."""


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
# The shape of a job that needs just one GPU.
_USUAL_SHAPE: Final = "0" * 16
_PLACED: Final = tuple(field for field in FIELDS.values() if field.placed)


def placed_values(job: "JobSpec") -> dict[str, Any]:
    """The fields that matter for placement, without defaults."""
    return {field.name: value for field in _PLACED if (value := field.value(job)) != field.default}


def shape_of(job: "JobSpec") -> str:
    """A key shared by all jobs with the same requirements."""
    if not (asked := placed_values(job)):
        return _USUAL_SHAPE
    import hashlib  # imported lazily: loading OpenSSL takes milliseconds

    return hashlib.blake2b(msgspec.json.encode(asked, order="sorted"), digest_size=8).hexdigest()


def key_of(shape: str) -> str:
    """The key of the capped group, which the queue appends to shapes; empty without a cap."""
    return shape[len(_USUAL_SHAPE) + 1 :]


def editable(state: State = "queued") -> list[str]:
    """The fields that can be edited in this state."""
    return [name for name, field in FIELDS.items() if state in field.editable_in]


def values_of(job: JobSpec) -> dict[str, Any]:
    """The values of all fields, by name."""
    return {name: field.value(job) for name, field in FIELDS.items()}


def spec_of(values: Mapping[str, Any]) -> JobSpec:
    """The job with these values. Raises if one has the wrong type."""
    if unknown := values.keys() - set(JobSpec.__struct_fields__):
        raise BadInputError(f"a job has no field {min(unknown)!r}")
    try:
        return msgspec.convert(values, JobSpec)
    except msgspec.ValidationError as error:
        said, _, where = str(error).replace("`", "").partition(" - at $.")
        if "required field" in said:
            raise BadInputError("a job needs a command") from None
        raise InvalidFieldsError({where: f"{said[:1].lower()}{said[1:]}"}) from None


def _check_needs(names: Sequence[str]) -> None:
    for needed in names:
        if not ID.fullmatch(needed):
            raise BadInputError(f"{needed!r} is not the id of a job")


def _check_place(job: JobSpec) -> None:
    """Raises for contradictory fields about placement."""
    if job.share and job.memory is None:
        raise InvalidFieldsError({"memory": "a job that shares a GPU must say how much memory it needs"})
    if job.gpu_model is not None and not job.gpus:
        raise InvalidFieldsError({"gpu_model": "a job without a GPU cannot choose its model: leave it out"})
    if job.gpu_memory is not None and not job.gpus:
        raise InvalidFieldsError({"gpu_memory": "a job without a GPU cannot choose its memory: leave it out"})
    if job.machine is not None and job.nodes > 1:
        raise InvalidFieldsError({"machine": "a job over several machines cannot be given to one: leave it out"})
    if job.machine is not None and job.machine in job.exclude_machines:
        raise InvalidFieldsError({"exclude_machines": f"the job is to run on {job.machine} and not on it"})


def _check_times(job: JobSpec) -> None:
    if job.begin is not None and job.deadline is not None and job.deadline <= job.begin:
        raise InvalidFieldsError({"deadline": "the deadline is before the job may begin: choose a later one"})
    if job.retry_on and not job.retries:
        raise InvalidFieldsError({"retry_on": "a job without retries is not tried again: add --retries"})
    if job.every is not None and job.deadline is not None:
        raise InvalidFieldsError({"deadline": "a job that recurs has no deadline: use --time-limit, or leave one out"})


def check(job: JobSpec) -> None:
    """Raises for the first field whose value is outside its limits."""
    if not job.command or (isinstance(job.command, tuple) and not job.command[0]):
        raise BadInputError("a job needs a command: none was given")
    for name, field in FIELDS.items():
        # Defaults are skipped for speed: a sweep may have a hundred thousand jobs.
        if name not in _CHECKED_ELSEWHERE and field.value(job) != field.default:
            field.check(job)
    _check_place(job)
    _check_times(job)
    if job.batch_size is None and not job.fit and wants_batch_size(job.command):
        raise InvalidFieldsError(
            {
                "batch_size": "the command contains {batch_size}: give a batch size, or write {{batch_size}} for the "
                "literal text"
            }
        )
    if job.snapshot and job.code is None:
        raise InvalidFieldsError({"snapshot": "the job has no snapshot of its code: submit it again with --snapshot"})
    if job.snapshot and job.pin:
        raise InvalidFieldsError({"pin": "a job runs a commit or a snapshot: leave out --pin or --snapshot"})
    _check_needs((*job.after, *job.after_any))
    if job.id and not ID.fullmatch(job.id):
        raise BadInputError(f"{job.id!r} cannot be the id of a job: it must be eight hexadecimal digits")


# Checked once on input, since checking each of a hundred thousand jobs takes too long.
_CHECKED_ELSEWHERE: Final = frozenset({"command", "environment", "policy"})
