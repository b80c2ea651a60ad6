"""The form for submitting, cloning and editing jobs: its initial content, and the parsing of a sent form."""

import hashlib
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from fastapi import APIRouter, HTTPException, Request
from starlette.responses import RedirectResponse, Response

from stoker.engines.admission import check_edits
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.masking import MASK, masked_environment, masked_notify
from stoker.queue.field_kinds import FLAG, seconds_text
from stoker.queue.fields import FIELDS, FieldPart, JobField, JobSpec
from stoker.queue.jobs import check_changes
from stoker.queue.model import Job
from stoker.queue.store import Store
from stoker.status.job_text import job_title, whole_command
from stoker.units import format_percent
from stoker.web.answers import found
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.problems import ConflictError
from stoker.web.submission import IDLE, changes_of, jobs_of, new_group_of, submit_once
from stoker.web.templating import page

# More than the form has.
_MOST_FIELDS: Final = 200
# Inputs that are not fields of the table, or have a special place in the form.
_OTHER_BOXES: Final = ("fit", "idle")
_OTHER_TEXTS: Final = ("command", "directory", "environment", *IDLE)
# The unfolded rows.
_MAIN_ROWS: Final = ("name", "gpus")


def inputs(*, boxes: bool) -> list[JobField]:
    """The fields with a check box, or those with a text input, in the order of the table."""
    return [field for field in FIELDS.values() if field.form is not None and (field.kind is FLAG) == boxes]


def rows(*, main: bool) -> list[list[JobField]]:
    """The text inputs by row."""
    found: dict[str, list[JobField]] = {}
    for field in inputs(boxes=False):
        if field.form is not None and (field.form.row in _MAIN_ROWS) == main:
            found.setdefault(field.form.row, []).append(field)
    return list(found.values())


def folds() -> dict[str, list[tuple[str, FieldPart]]]:
    """The fields that are mappings, each with the inputs of its entries and their names."""
    return {
        field.name: [(f"{field.name}_{part.key}", part) for part in field.parts]
        for field in FIELDS.values()
        if field.parts and field.remote
    }


def _texts() -> list[str]:
    of_entries = [name for fold in folds().values() for name, _part in fold]
    return [*_OTHER_TEXTS, *(field.name for field in inputs(boxes=False)), *of_entries]


def _boxes() -> list[str]:
    return [*_OTHER_BOXES, *(field.name for field in inputs(boxes=True))]


class SweepRow(msgspec.Struct, frozen=True):
    name: str = ""
    values: str = ""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the form, as text."""

    texts: dict[str, str] = {}
    ticked: frozenset[str] = frozenset()
    sweep: tuple[SweepRow, ...] = ()
    again: str = ""
    """The id of the job from which it was filled."""
    key: str = ""
    """The same for each sending of this form: a double tap submits once."""


def empty(directory: str, key: str) -> Form:
    filled = {field.name: _text(field, field.default) for field in inputs(boxes=False)}
    return Form(
        texts=dict.fromkeys(_texts(), "") | filled | {"directory": directory}, ticked=frozenset({"idle"}), key=key
    )


def like(job: Job, key: str) -> Form:
    """The form filled in for this job, with the secrets in its command; only for operators."""
    texts = {
        "command": whole_command(job),
        "directory": job.directory,
        "environment": _variables(job),
        **{field.name: _text(field, field.value(job)) for field in inputs(boxes=False)},
        "notify": " ".join(masked_notify(job.notify)),
        **{
            name: _entry_text(FIELDS[field].value(job).get(part.key, ""))
            for field, fold in folds().items()
            for name, part in fold
        },
        "idle_for": _seconds(job.policy.get("window")),
        "idle_below": _share(job.policy.get("below")),
        "idle_after": _seconds(job.policy.get("after")),
    }
    boxes = {field.name: bool(field.editable_in) and field.value(job) for field in inputs(boxes=True)}
    boxes |= {"fit": bool(job.fit), "idle": job.policy.get("idle") is not False}
    return Form(texts=texts, ticked=frozenset(box for box, on in boxes.items() if on), again=job.id, key=key)


def sent(body: bytes) -> Form:
    """The form as it was sent."""
    fields = parse_qsl(
        body.decode(errors="replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="replace"
    )
    said = dict(fields)
    names = [value.strip() for field, value in fields if field == "sweep_name"]
    values = [value.strip() for field, value in fields if field == "sweep_values"]
    rows = [SweepRow(name, value) for name, value in zip(names, values, strict=False) if name or value]
    return Form(
        # Browsers send CRLF.
        texts={field: said.get(field, "").replace("\r\n", "\n") for field in _texts()},
        ticked=frozenset(box for box in _boxes() if box in said),
        sweep=tuple(rows),
        again=said.get("again", ""),
        key=said.get("key", ""),
    )


def submission_of(form: Form, original: Form | None) -> dict[str, object]:
    """The values of the form. Fields equal to the `original` are copied from the job from which it was filled."""
    said: dict[str, object] = {
        field: text for field, text in form.texts.items() if original is None or text != original.texts[field]
    }
    for field, fold in folds().items():
        if [name for name, _part in fold if said.pop(name, None) is not None]:
            said[field] = {part.key: form.texts[name] for name, part in fold}
    for box in _boxes():
        if original is None or (box in form.ticked) != (box in original.ticked):
            said[box] = "on" if box in form.ticked else "off"
    if form.sweep:
        said["sweep"] = "\n".join(f"{row.name}={row.values}" for row in form.sweep)
    if original is not None:
        said["again"] = form.again
    return said


def content(form: Form) -> bytes:
    """All values without the key."""
    return msgspec.json.encode([sorted(form.texts.items()), sorted(form.ticked), form.sweep, form.again])


def recent_directories(jobs: Sequence[JobSpec]) -> list[str]:
    """Each once, the latest first; without jobs, the home directory."""
    return list(dict.fromkeys(job.directory for job in jobs)) or [str(Path.home())]


def beside(mistakes: Mapping[str, str]) -> dict[str, str]:
    """Errors shown at their field; the others are shown above the form."""
    shown = {*_texts(), *_boxes(), *folds(), "sweep"}
    return {field: text for field, text in mistakes.items() if field in shown}


def above(mistakes: Mapping[str, str]) -> list[str]:
    return [text for field, text in mistakes.items() if field not in beside(mistakes)]


def _text(field: JobField, value: Any) -> str:
    """Text that parses to the same value. Most defaults are not shown."""
    if value is None or (value == field.default and field.form is not None and not field.form.filled):
        return ""
    return field.kind.write(value)


def _variables(job: Job) -> str:
    """One per line. Secrets and multi-line values are masked; left masked, they stay unchanged."""
    shown = masked_environment(job.environment)
    return "\n".join(f"{name}={MASK if len(value.splitlines()) > 1 else value}" for name, value in shown.items())


def _entry_text(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else shlex.join(value)


def _seconds(seconds: object) -> str:
    return seconds_text(seconds) if isinstance(seconds, int | float) and not isinstance(seconds, bool) else ""


def _share(fraction: object) -> str:
    return format_percent(fraction) if isinstance(fraction, float) else ""


router = APIRouter()

# Their directories are suggested.
_RECENT_JOBS: Final = 50


@router.get("/submit")
async def form(request: Request, again: str = "") -> Response:
    app_state, key = app_state_of(request), secrets.token_urlsafe(16)
    _must_operate(request)

    def look(store: Store) -> tuple[Form, list[str]]:
        directories = recent_directories(store.jobs.search(limit=_RECENT_JOBS).jobs)
        if again:
            return like(store.jobs.get(again), key), directories
        return empty(directories[0], key), directories

    filled, directories = await app_state.pool.run(look)
    return _page(request, filled, directories)


@router.post("/submit")
async def submit(request: Request) -> Response:
    app_state, sender = app_state_of(request), user_of(request).name
    try:
        filled = sent(await request.body())
    except ValueError:
        return Response("the form has too many fields", 400, media_type="text/plain")
    try:
        jobs = await app_state.pool.run(lambda store: _submitted(store, filled, sender))
    except InvalidFieldsError as error:
        return await _again(request, app_state, filled, error.mistakes)
    except BadInputError as error:
        return await _again(request, app_state, filled, {"": str(error)})
    app_state.snapshot_cache.refresh()
    return RedirectResponse(f"/jobs/{jobs[0].id}" if len(jobs) == 1 else f"/jobs?made={len(jobs)}", 303)


def _must_operate(request: Request) -> None:
    user = user_of(request)
    if not user.operates:
        message = f"the token {user.name!r} is read-only: `stoker tokens add` creates one that can submit"
        raise HTTPException(403, message)


@router.get("/jobs/{job}/edit")
async def edit_form(request: Request, job: str) -> Response:
    app_state = app_state_of(request)
    _must_operate(request)

    def look(store: Store) -> tuple[Form, Job, list[str]]:
        one = found(store, job)
        return _to_edit(one), one, recent_directories(store.jobs.search(limit=_RECENT_JOBS).jobs)

    filled, one, directories = await app_state.pool.run(look)
    mistakes = {"": why_not} if (why_not := _why_not_edited(one)) else {}
    return _page(request, filled, directories, mistakes, one)


@router.post("/jobs/{job}/edit")
async def edit(request: Request, job: str) -> Response:
    """Applies the differences to the job, if nobody has changed or started it since the form was shown."""
    app_state = app_state_of(request)
    try:
        filled = sent(await request.body())
    except ValueError:
        return Response("the form has too many fields", 400, media_type="text/plain")

    def change(store: Store) -> None:
        _edited(store, found(store, job), filled)

    try:
        await app_state.pool.run(change)
    except InvalidFieldsError as error:
        return await _again(request, app_state, filled, error.mistakes, job)
    except BadInputError as error:
        return await _again(request, app_state, filled, {"": str(error)}, job)
    app_state.snapshot_cache.refresh()
    return RedirectResponse(f"/jobs/{job}", 303)


def _edited(store: Store, job: Job, filled: Form) -> None:
    if why_not := _why_not_edited(job):
        raise ConflictError(why_not)
    original = _to_edit(job)
    if filled.key != original.key:
        raise ConflictError("somebody else has changed the job since this form was shown: open it again")
    if changes := changes_of(store, submission_of(filled, original), job):
        check_edits(store, [(job, check_changes(job, changes))])
        store.jobs.edit(job.id, changes)


def _to_edit(job: Job) -> Form:
    """The key identifies the job's values when the form was shown."""
    filled = like(job, "")
    return msgspec.structs.replace(filled, key=hashlib.sha256(content(filled)).hexdigest()[:32])


def _why_not_edited(job: Job) -> str:
    if job.state == "running":
        return "the job has started meanwhile without these changes: clone it to run it with them"
    return "" if job.state in ("queued", "held") else f"the job has {job.state} meanwhile: clone it, or retry it"


def _submitted(store: Store, filled: Form, sender: str) -> list[Job]:
    original = like(store.jobs.get(filled.again), filled.key) if filled.again else None
    wanted = submission_of(filled, original)
    # The key contains the content: a form that is changed and sent again is another submission.
    asked = content(filled)
    key = f"{filled.key}:{hashlib.sha256(asked).hexdigest()}" if filled.key else None
    return submit_once(store, key, sender, asked, lambda: jobs_of(store, wanted, sender), new_group_of(wanted)).jobs


def _status(mistakes: Mapping[str, str], edits: Job | None) -> int:
    if not mistakes:
        return 200
    return 409 if edits is not None and not beside(mistakes) else 422


async def _again(
    request: Request, app_state: AppState, filled: Form, mistakes: dict[str, str], edits: str = ""
) -> Response:
    def look(store: Store) -> tuple[list[str], Job | None]:
        return recent_directories(store.jobs.search(limit=_RECENT_JOBS).jobs), found(store, edits) if edits else None

    directories, job = await app_state.pool.run(look)
    return _page(request, filled, directories, mistakes, job)


def _page(
    request: Request,
    filled: Form,
    directories: list[str],
    mistakes: dict[str, str] | None = None,
    edits: Job | None = None,
) -> Response:
    """`edits`: the job that is edited; without one, the form submits a new one."""
    return page(
        request,
        "submit.html",
        status=_status(mistakes or {}, edits),
        form=filled,
        directories=directories,
        mistakes=beside(mistakes or {}),
        above=above(mistakes or {}),
        main_rows=rows(main=True),
        more_rows=rows(main=False),
        boxes=[field for field in inputs(boxes=True) if edits is None or field.editable_in],
        folds=folds(),
        edits=edits,
        title=job_title(edits) if edits is not None else "",
        here="submit" if edits is None else "job",
    )
