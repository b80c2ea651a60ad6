"""The form that submits: what it shows at first, and what somebody wants who sent it."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from fastapi import APIRouter, HTTPException, Request
from starlette.responses import RedirectResponse, Response

from stoker.errors import BadInputError
from stoker.queue.model import Job, JobSpec
from stoker.queue.store import Store
from stoker.status.job_text import command_text, whole_command
from stoker.units import format_duration, format_percent
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.problems import MistakesError
from stoker.web.submission import Wanted, jobs_of, submit_once
from stoker.web.templating import page

# More fields than the form has, and than anybody sweeps over.
_MOST_FIELDS: Final = 200
_BOXES: Final = ("share", "preemptible", "held", "fit", "idle")
_TEXTS: Final = (
    "command",
    "name",
    "tags",
    "gpus",
    "memory",
    "directory",
    "priority",
    "time_limit",
    "retries",
    "batch_size",
    "after",
    "idle_for",
    "idle_below",
    "idle_after",
)
_GIB: Final = 2**30
_MIB: Final = 2**20


class SweepRow(msgspec.Struct, frozen=True):
    name: str = ""
    values: str = ""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the form, as text."""

    texts: dict[str, str] = {}
    ticked: frozenset[str] = frozenset()
    sweep: tuple[SweepRow, ...] = ()
    again: str = ""
    """The id of the job that it began with."""
    key: str = ""
    """The same for every time that this form is sent: a double tap submits once."""


def empty(directory: str, key: str) -> Form:
    return Form(
        texts=dict.fromkeys(_TEXTS, "") | {"gpus": "1", "directory": directory}, ticked=frozenset({"idle"}), key=key
    )


def like(job: Job, key: str, *, whole: bool = True) -> Form:
    """The form as it would have been filled in for this job; not `whole`: without the secrets in its command."""
    texts = dict.fromkeys(_TEXTS, "") | {
        "command": whole_command(job) if whole else command_text(job),
        "name": job.name,
        "tags": ", ".join(job.tags),
        "gpus": str(job.gpus),
        "memory": _memory(job.memory),
        "directory": job.directory,
        "priority": _number(job.priority),
        "time_limit": "" if job.time_limit is None else _seconds(job.time_limit),
        "retries": _number(job.retries),
        "batch_size": "" if job.batch_size is None else str(job.batch_size),
        "after": ", ".join(job.after),
        "idle_for": _seconds(job.policy.get("window")),
        "idle_below": _share(job.policy.get("below")),
        "idle_after": _seconds(job.policy.get("after")),
    }
    boxes = {
        "share": job.share,
        "preemptible": job.preemptible,
        "fit": bool(job.fit),
        "idle": job.policy.get("idle", True) is not False,
    }
    return Form(texts=texts, ticked=frozenset(box for box, on in boxes.items() if on), again=job.id, key=key)


def sent(body: bytes) -> Form:
    """The form as it came back."""
    fields = parse_qsl(
        body.decode(errors="replace"), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="replace"
    )
    said = dict(fields)
    names = [value.strip() for field, value in fields if field == "sweep_name"]
    values = [value.strip() for field, value in fields if field == "sweep_values"]
    rows = [SweepRow(name, value) for name, value in zip(names, values, strict=False) if name or value]
    return Form(
        # Browsers end lines as on a typewriter; shells do not.
        texts={field: said.get(field, "").replace("\r\n", "\n") for field in _TEXTS},
        ticked=frozenset(box for box in _BOXES if box in said),
        sweep=tuple(rows),
        again=said.get("again", ""),
        key=said.get("key", ""),
    )


def submission_of(form: Form, original: Form | None) -> Wanted:
    """What somebody wants who sent this. What still is as in the `original` is left to the job that it came from."""
    said: dict[str, Any] = {
        field: text for field, text in form.texts.items() if original is None or text != original.texts[field]
    }
    for box in _BOXES:
        if original is None or (box in form.ticked) != (box in original.ticked):
            said[box] = "on" if box in form.ticked else "off"
    if form.sweep:
        said["sweep"] = "\n".join(f"{row.name}={row.values}" for row in form.sweep)
    if original is not None:
        said["again"] = form.again
    return Wanted(**said)


def content(form: Form) -> bytes:
    """All that was asked for, whenever and by whom."""
    return msgspec.json.encode([sorted(form.texts.items()), sorted(form.ticked), form.sweep, form.again])


def recent_directories(jobs: Sequence[JobSpec]) -> list[str]:
    """Each once, the latest first."""
    # Before there is any job, where a person's own files are is as good a guess as any.
    return list(dict.fromkeys(job.directory for job in jobs)) or [str(Path.home())]


def beside(mistakes: Mapping[str, str]) -> dict[str, str]:
    """Mistakes by the field that they are shown at; what has none is shown above the form."""
    shown = {*_TEXTS, *_BOXES, "sweep"}
    return {field: text for field, text in mistakes.items() if field in shown}


def above(mistakes: Mapping[str, str]) -> list[str]:
    return [text for field, text in mistakes.items() if field not in beside(mistakes)]


def _number(number: int) -> str:
    return str(number) if number else ""


def _seconds(seconds: object) -> str:
    """So that reading it gives the same again."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return ""
    written = format_duration(seconds)
    return written if seconds < 86400 and seconds == int(seconds) and int(seconds) % 60 == 0 else f"{seconds:g}s"


def _share(fraction: object) -> str:
    return format_percent(fraction) if isinstance(fraction, float) else ""


def _memory(amount: int | None) -> str:
    if amount is None:
        return ""
    for unit, size in (("GiB", _GIB), ("MiB", _MIB)):
        if amount and amount % size == 0:
            return f"{amount // size}{unit}"
    return str(amount)


router = APIRouter()

# Whoever has worked in more places than these lately types the one that is meant.
_RECENT_JOBS: Final = 50


@router.get("/submit")
async def form(request: Request, again: str = "") -> Response:
    if not user_of(request).operates:
        raise HTTPException(403, "a token that may only look cannot submit: `stoker tokens add` makes one that may act")
    app_state, key = app_state_of(request), secrets.token_urlsafe(16)
    operates = user_of(request).operates

    def look(store: Store) -> tuple[Form, list[str]]:
        directories = recent_directories(store.page(limit=_RECENT_JOBS))
        if again:
            return like(store.job(again), key, whole=operates), directories
        return empty(directories[0], key), directories

    filled, directories = await app_state.pool.ask(look)
    return _page(request, filled, directories)


@router.post("/submit")
async def submit(request: Request) -> Response:
    app_state, sender = app_state_of(request), user_of(request).name
    try:
        filled = sent(await request.body())
    except ValueError:
        return Response("a form with so many fields is not ours", 400, media_type="text/plain")
    try:
        jobs = await app_state.pool.ask(lambda store: _submitted(store, filled, sender))
    except MistakesError as error:
        return await _again(request, app_state, filled, error.mistakes)
    except BadInputError as error:
        return await _again(request, app_state, filled, {"": str(error)})
    app_state.snapshot_cache.look_now()
    return RedirectResponse(f"/jobs/{jobs[0].id}" if len(jobs) == 1 else f"/jobs?made={len(jobs)}", 303)


def _submitted(store: Store, filled: Form, sender: str) -> list[Job]:
    original = like(store.job(filled.again), filled.key) if filled.again else None
    wanted = submission_of(filled, original)
    # With what was asked for in the key, a form that is changed and sent once more is another submission.
    asked = content(filled)
    key = f"{filled.key}:{hashlib.sha256(asked).hexdigest()}" if filled.key else None
    return submit_once(store, key, sender, asked, lambda: jobs_of(store, wanted, sender)).jobs


async def _again(request: Request, app_state: AppState, filled: Form, mistakes: dict[str, str]) -> Response:
    directories = await app_state.pool.ask(lambda store: recent_directories(store.page(limit=_RECENT_JOBS)))
    return _page(request, filled, directories, mistakes)


def _page(request: Request, filled: Form, directories: list[str], mistakes: dict[str, str] | None = None) -> Response:
    return page(
        request,
        "submit.html",
        status=422 if mistakes else 200,
        form=filled,
        directories=directories,
        mistakes=beside(mistakes or {}),
        above=above(mistakes or {}),
        here="submit",
    )
