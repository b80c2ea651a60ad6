"""The bodies of requests. Types are checked here, values by `stoker.web.submission`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from stoker.errors import InvalidFieldsError
from stoker.queue.field_kinds import JobName, Label, Seconds, Value, Written
from stoker.queue.fields import FIELDS
from stoker.queue.search import LONGEST_QUERY
from stoker.web.submission import Fit, settable

Fraction = Annotated[float, Meta(ge=0, le=1)]


async def body_of(request: Request, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON object in the request. Every value has the type of its field in `kind`."""
    data = await request.body()
    try:
        sent = msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidFieldsError({"": "the body is not a JSON object"}) from None
    if data and not request.headers.get("content-type", "").startswith("application/json"):
        raise InvalidFieldsError({"": "send the body with `Content-Type: application/json`"})
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    mistakes = {name: "this field is required" for name, field in fields.items() if field.required and name not in sent}
    for name, value in sent.items():
        if name not in fields:
            mistakes[name] = f"unknown field: the fields are {', '.join(fields)}"
            continue
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            mistakes[name] = _plain(error)
    if mistakes:
        raise InvalidFieldsError(mistakes)
    return sent


def _plain(error: msgspec.ValidationError) -> str:
    """`expected str, got int in [1]`."""
    message, at, place = str(error).replace("`", "").partition(" - at $")
    return message[:1].lower() + message[1:] + (f" in {place.lstrip('.')}" if at else "")


class IdleFields(msgspec.Struct, kw_only=True):
    """Fields of a request that a job stores in another form."""

    fit: Annotated[
        bool | Fit | None, Meta(description="Find the largest batch size that fits first; an object has options.")
    ] = None
    idle: Annotated[
        bool | Literal["on", "off"] | None, Meta(description="`off`: never stop the job because its GPUs are idle.")
    ] = None
    idle_for: Annotated[
        Seconds | Written | None, Meta(description="How long its GPUs must stay idle.", examples=["30m"])
    ] = None
    idle_below: Annotated[
        Fraction | Written | None, Meta(description="A GPU below this utilization is idle.", examples=["5%"])
    ] = None
    idle_after: Annotated[Seconds | Written | None, Meta(description="Do not stop the job before this time.")] = None


class SubmitFields(IdleFields, kw_only=True):
    """Fields of a request that a job does not have."""

    sweep: Annotated[
        dict[Label, Value | Annotated[list[Value], Meta(min_length=1, max_length=1000)]] | None,
        Meta(
            description="One job for each combination of values: text like `1e-3,1e-4` or `1..5`, or a list.",
            examples=[{"lr": "1e-3,1e-4", "seed": "1..5"}],
        ),
    ] = None
    again: Annotated[JobName | None, Meta(description="The job to copy all other fields from.")] = None
    dry_run: Annotated[bool, Meta(description="Return what would be submitted without submitting it.")] = False


def job_body(name: str, base: type[IdleFields], *, at_submission: bool) -> type[msgspec.Struct]:
    """With the fields of a job that a request may set; null means the default."""
    fields = [
        (
            field,
            Annotated[
                FIELDS[field].kind.json | None,
                Meta(
                    description=FIELDS[field].help, examples=[FIELDS[field].example] if FIELDS[field].example else None
                ),
            ],
            None,
        )
        for field in settable(at_submission=at_submission)
        if field not in IdleFields.__struct_fields__
    ]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True)


SubmitBody = job_body("SubmitBody", SubmitFields, at_submission=True)
ChangeBody = job_body("ChangeBody", IdleFields, at_submission=False)


class RetryBody(msgspec.Struct, kw_only=True):
    held: Annotated[bool, Meta(description="Hold it; only for a job that was cancelled while it was held.")] = False


class MoveBody(msgspec.Struct, kw_only=True):
    """Exactly one of the three."""

    place: Annotated[
        Literal["first", "last", "up", "down"] | None, Meta(description="Among the jobs of its priority.")
    ] = None
    before: Annotated[JobName | None, Meta(description="The id of a waiting job, whose priority is adopted.")] = None
    after: Annotated[JobName | None, Meta(description="The same, after that job.")] = None


SearchText = Annotated[str, Meta(max_length=LONGEST_QUERY)]
Ids = Annotated[list[JobName], Meta(max_length=10_000)]


class BulkBody(msgspec.Struct, kw_only=True):
    """One action for many jobs: `jobs`, or all that match `q`."""

    action: Annotated[
        Literal["cancel", "retry", "hold", "release", "move", "tag", "untag"], Meta(description="The action.")
    ]
    q: Annotated[SearchText | None, Meta(description="All jobs that match this search.")] = None
    jobs: Annotated[Ids | None, Meta(description="Their ids.")] = None
    held: Annotated[
        Ids | None, Meta(description="With `retry`: jobs to hold again, because they were held when cancelled.")
    ] = None
    place: Annotated[Literal["first", "last"] | None, Meta(description="With `move`.")] = None
    positions: Annotated[
        dict[JobName, float] | None, Meta(description="With `move`: earlier positions, from `undo`.")
    ] = None
    tag: Annotated[JobName | None, Meta(description="With `tag` and `untag`.")] = None
    dry_run: Annotated[bool, Meta(description="Return what would happen without changing anything.")] = False


class DismissBody(msgspec.Struct, kw_only=True):
    failure: Annotated[
        Literal["failed", "stopped"], Meta(description="Jobs that failed by themselves, or that a rule stopped.")
    ]
    until: Annotated[float, Meta(ge=0, description="Only those that ended by then, like `until` of a health point.")]


class SnoozeBody(msgspec.Struct, kw_only=True):
    seconds: Annotated[Seconds | Written, Meta(description="Seconds, or text like `30m`; 0 ends the snooze.")]
