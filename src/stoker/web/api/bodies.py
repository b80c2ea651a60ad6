"""The bodies of requests: their shape is checked here, their meaning by `stoker.web.submission`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from stoker.queue.fields import FIELDS, LONGEST_LABEL
from stoker.units import LONGEST_SECONDS
from stoker.web.submission import settable

Seconds = Annotated[float, Field(ge=0, le=LONGEST_SECONDS, allow_inf_nan=False)]
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


def fields_body(*, at_submission: bool) -> type[Body]:
    """The fields of a job that a request may set; all may be left out, and null says that there is none of it."""
    fields: dict[str, Any] = {
        name: (
            _pydantic(FIELDS[name].kind.json) | None,
            Field(
                None, description=FIELDS[name].help, examples=[FIELDS[name].example] if FIELDS[name].example else None
            ),
        )
        for name in settable(at_submission=at_submission)
    }
    return create_model("JobFields", __base__=Body, **fields)


def _pydantic(hint: Any) -> Any:
    """The same type with pydantic's limits in the place of msgspec's."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        limits: dict[str, Any] = {}
        for meta in arguments[1:]:
            limits |= {name: getattr(meta, name) for name in _LIMITS if getattr(meta, name) is not None}
        inner = _pydantic(arguments[0])
        if inner is float:
            limits["allow_inf_nan"] = False
        return Annotated[inner, Field(**limits)]
    if not arguments or get_origin(hint) is Literal:
        return hint
    inside = tuple(map(_pydantic, arguments))
    origin = get_origin(hint)
    return origin[inside] if isinstance(origin, type) and origin in {dict, list} else Union[inside]  # noqa: UP007 - made while it runs


_LIMITS = ("gt", "ge", "lt", "le", "min_length", "max_length")

if TYPE_CHECKING:

    class _Submitted(Body):
        """Made while the program runs."""

    class _Changed(Body):
        """The same."""

else:
    _Submitted, _Changed = fields_body(at_submission=True), fields_body(at_submission=False)


class IdleBody(Body):
    """The parts of a job that are asked for in other words than they are kept."""

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


class SubmitBody(IdleBody, _Submitted):
    """One command; with `sweep`, one job for each combination of values."""

    sweep: dict[Label, Value | Annotated[list[Value], Field(min_length=1, max_length=1000)]] | None = Field(
        None, examples=[{"lr": "1e-3,1e-4", "seed": "1..5"}]
    )
    """Values by the names of parameters: text like `1e-3,1e-4` or `1..5`, or a list."""
    again: JobName | None = None
    """The job that everything is copied from which is not said here."""
    dry_run: bool = False
    """Say what would be submitted, and do nothing."""


class ChangeBody(IdleBody, _Changed):
    """What is to be changed in what a job asks for. A job that runs cannot be changed."""


def said(body: BaseModel) -> dict[str, object]:
    """Only what was said."""
    told = {name: getattr(body, name) for name in body.model_fields_set if name != "dry_run"}
    if isinstance(told.get("fit"), FitBody):
        told["fit"] = told["fit"].model_dump(exclude_unset=True)
    return told


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
    """Those that failed by themselves, or those that a rule stopped."""
    until: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since the epoch: those that ended by then, such as the `until` of a point of the overview."""


class SnoozeBody(Body):
    """For how long the job is left alone, whatever its GPUs do."""

    seconds: Seconds | Written = Field(examples=["30m"])
    """Seconds, or text like `30m`; 0 ends it."""
