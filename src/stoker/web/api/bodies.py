"""What requests hold: checked here for their shape, and for their meaning by `stoker.web.submission`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stoker.queue.commands import LONGEST_COMMAND
from stoker.queue.model import LONGEST_LABEL
from stoker.web.submission import Wanted

# As far as the queue's numbers go.
Count = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
# Ten years.
Seconds = Annotated[float, Field(ge=0, le=10 * 365 * 86400, allow_inf_nan=False)]
# `90s`, `20GiB`, `5%`: no sensible one is longer.
Written = Annotated[str, Field(max_length=40)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
JobName = Annotated[str, Field(min_length=1, max_length=LONGEST_LABEL)]
Label = Annotated[str, Field(max_length=LONGEST_LABEL)]
Value = Annotated[str, Field(max_length=128 * 1024)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class FitBody(Body):
    """How the batch size is found, in the words of `stoker fit`."""

    base: Annotated[int, Field(ge=1, lt=2**31)] = 8
    """The size that is tried first."""
    multiple: Annotated[int, Field(ge=1, lt=2**31)] = 8
    """The answer is a multiple of it."""
    max: Annotated[int, Field(ge=1, lt=2**31)] = 4096
    margin: Fraction | Written = 0.1
    """The share of the memory that stays free: a fraction, or text like `5%`."""
    effective: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The batch that the experiment wants in all, by gradient accumulation."""
    batch_arg: Value | None = None
    """Appended to the command, with the size in its braces: `--batch_size={}`."""
    batch_env: Label | None = None
    """The environment variable that carries the size."""
    probe_args: Value = ""
    """Appended to probes only."""
    retries_oom: Annotated[int, Field(ge=0, lt=1000)] = 2
    """How often it is started again, smaller, when it runs out of memory later."""


class Asking(Body):
    """What a job asks for. What is left out stays as it is, or as usual; null says that there is none of it."""

    command: (
        Annotated[str, Field(max_length=LONGEST_COMMAND)] | Annotated[list[Value], Field(max_length=10_000)] | None
    ) = Field(None, examples=["python train.py --lr 1e-3"])
    """Text for the shell, or the words of a command that needs none."""
    name: Label | None = None
    """What people call it."""
    tags: Annotated[list[Label], Field(max_length=100)] | None = None
    gpus: Count | None = Field(None, examples=[1])
    """How many GPUs it needs; 0 for none."""
    memory: Bytes | Written | None = Field(None, examples=["20GiB"])
    """On each GPU: bytes, or text like `20GiB`."""
    share: bool | None = None
    """Whether it may share a GPU with others; needs `memory`."""
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = None
    """Higher ones start first."""
    after: Annotated[list[JobName], Field(max_length=1000)] | None = None
    """Jobs that must have succeeded before: ids, their beginnings, or names."""
    after_any: Annotated[list[JobName], Field(max_length=1000)] | None = None
    """Jobs that must have ended before, however."""
    retries: Count | None = None
    """How often it is tried again when it failed."""
    backoff: Seconds | Written | None = Field(None, examples=["30s"])
    """Before the first retry: seconds, or text like `30s`; then doubled."""
    time_limit: Seconds | Written | None = Field(None, examples=["2h"])
    """It is stopped after this long in any case."""
    directory: Annotated[str, Field(max_length=4096)] | None = Field(None, examples=["/home/me/project"])
    """Where it runs: an absolute path on the machine that will run it."""
    environment: dict[str, Value] | None = None
    """What is added to the worker's own environment. `***`, as values that look like secrets are shown, keeps the
    value that the job has."""
    preemptible: bool | None = None
    """Whether it may be stopped, and started again later, when others need its GPUs."""
    on_loss: Literal["retry", "hold"] | None = None
    """What becomes of it when its machine was lost."""
    batch_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """What `{batch_size}` in the command stands for."""
    fit: bool | FitBody | None = None
    """Whether the largest batch size that fits is found first; or how."""
    idle: bool | Literal["on", "off"] | None = None
    """`off`: it is never stopped because its GPUs are idle."""
    idle_for: Seconds | Written | None = Field(None, examples=["30m"])
    """How long its GPUs must stay idle without a break."""
    idle_below: Fraction | Written | None = Field(None, examples=["5%"])
    """A GPU is idle while its utilization stays below this."""
    idle_after: Seconds | Written | None = None
    """The window begins after this long."""
    policy: dict[str, str | int | float | bool | None] | None = None
    """The settings of all rules as a job keeps them; `{"idle": false}` turns the idle rule off. Leave it out beside
    the four above."""

    def wanted(self) -> Wanted:
        """Only what was said."""
        said: dict[str, Any] = {
            name: getattr(self, name) for name in self.model_fields_set & set(Wanted.__struct_fields__)
        }
        if isinstance(self.fit, FitBody):
            said["fit"] = self.fit.model_dump(exclude_unset=True)
        return Wanted(**said)


class SubmitBody(Asking):
    """One command; with `sweep`, one job for each combination of values."""

    held: bool = False
    """Whether it waits for a release."""
    sweep: dict[Label, Value | Annotated[list[Value], Field(min_length=1, max_length=1000)]] | None = Field(
        None, examples=[{"lr": "1e-3,1e-4", "seed": "1..5"}]
    )
    """Values by the names of parameters: text like `1e-3,1e-4` or `1..5`, or a list."""
    again: JobName | None = None
    """The job that everything is copied from which is not said here."""
    dry_run: bool = False
    """Say what would be submitted, and do nothing."""


class ChangeBody(Asking):
    """What is to be changed in what a job asks for. A job that runs cannot be changed."""


class RetryBody(Body):
    """How it waits again."""

    held: bool = False
    """Only for a job that was cancelled: it waits for a release, as if it had been held all the time."""


class MoveBody(Body):
    """Where to: a `place` among the jobs of the same priority, or beside another one, whose priority it takes."""

    place: Literal["first", "last", "up", "down"] | None = None
    before: JobName | None = None
    """The id of a job that waits."""
    after: JobName | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if sum(value is not None for value in (self.place, self.before, self.after)) != 1:
            raise ValueError("one of place, before and after is meant")
        return self


class DismissBody(Body):
    """Failures that need nobody any more."""

    failure: Literal["failed", "stopped"]
    """Those that failed by themselves, or those that were stopped because their GPUs stayed idle."""
    until: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the epoch: those that ended by then, such as the `until` of a point of the overview."""


class SnoozeBody(Body):
    """For how long the job is left alone, whatever its GPUs do."""

    seconds: Seconds | Written = Field(examples=["30m"])
    """Seconds, or text like `30m`; 0 ends it."""
