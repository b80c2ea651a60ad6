"""`stoker edit`: change what jobs ask for, by options or in an editor."""

import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from stoker.cli.options.job import job_options, job_values, without_none
from stoker.cli.options.policy import policy_options_with
from stoker.cli.options.queue import opened
from stoker.cli.output import Changed, ChangeReport, Unchanged
from stoker.cli.verbs.steer import Request, print_job_changes, request_options
from stoker.errors import BadInputError, StokerError
from stoker.queue.fields import FIELDS, JobField, editable, spec_of
from stoker.queue.provenance import working_directory
from stoker.rules.registry import changed, setting_keys

if TYPE_CHECKING:
    from stoker.queue import Job, State, Store

AMONG: Final[tuple["State", ...]] = ("queued", "held")
_WORDS: Final = "stoker.cli.verbs.edit.words"
# Options of the idle policy and fields of the job may have the same name.
_RULE: Final = "rule_"
RUNNING: Final = "it is running: it can be edited when it has ended"
SO_ALREADY: Final = "it is so already"


class _EditCommand(click.Command):
    """What stands behind -- is the command, and no jobs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = args
        if "--" in args:
            before, words = args[: args.index("--")], args[args.index("--") + 1 :]
            if not words:
                raise BadInputError("there is no command behind --: write it like `stoker edit JOB -- python train.py`")
            ctx.meta[_WORDS] = words[0] if len(words) == 1 else tuple(words)
        return super().parse_args(ctx, before)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command("edit", cls=_EditCommand)
@request_options(*AMONG, tag_option="--tagged")
@click.option("--command", metavar="TEXT", help="What it runs, as text for the shell.")
@job_options("edit")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set this variable too.")
@click.option("--no-env", "unset", multiple=True, metavar="NAME", help="Do not set this variable any more.")
@click.option("--directory", metavar="DIR", help="Where it runs.")
@policy_options_with(flags={"--after": "--idle-after"})
@click.option("--from", "file", metavar="FILE", help="Take it from a text as the editor shows it.")
@click.pass_context
def edit_command(context: click.Context, /, request: Request, file: str | None, **options: Any) -> int:
    """Change what jobs ask for, unless they run. Without options, on a terminal, $EDITOR opens on the job.

    JOB is an id, the beginning of one, or the name of a job or a sweep. What no option names stays as it is. COMMAND is
    what it runs instead, as with `stoker submit`: one word is text for the shell.
    """
    typed = {name: options[name] for name in options if _was_typed(context, name)}
    rule = {f"{_RULE}{name}": typed.pop(name) for name in setting_keys() if name in typed}
    given = without_none(job_values(typed)) | typed | rule
    if (words := context.meta.get(_WORDS)) is not None:
        if "command" in given:
            raise BadInputError("the command is either in --command or behind --: leave one of them out")
        given["command"] = words
    if file is not None and given:
        raise BadInputError("what is to be changed stands either in --from or in the options: leave one of them out")
    with opened(request.queue_url) as store:
        jobs = request.selection.jobs(store, AMONG)
        if not given:
            return _as_text(store, jobs, request, file)
        changes = {job.id: _changes(store, job, given) for job in jobs if job.state != "running"}
        report = _edited(store, jobs, changes, request)
    return print_job_changes(report, "edited", request, AMONG)


def _was_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _edited(
    store: "Store", jobs: list["Job"], changes: Mapping[str, Mapping[str, object]], request: Request
) -> ChangeReport:
    """All of them at once: a mistake in one leaves all as they are."""
    wanted = {job.id: changes[job.id] for job in jobs if changes.get(job.id)}
    for job in jobs:
        if job.id in wanted:
            _check(job, wanted[job.id])
    done = set(wanted if request.dry_run else store.jobs.edit_many(wanted))
    changed = [Changed(job.id, job.name, f"edited ({_fields(wanted[job.id])})") for job in jobs if job.id in done]
    unchanged = [
        Unchanged(job.id, job.name, SO_ALREADY if changes.get(job.id) == {} else RUNNING)
        for job in jobs
        if job.id not in done
    ]
    return ChangeReport("edit", store.place, request.dry_run, changed, unchanged)


def _fields(changes: Mapping[str, object]) -> str:
    return ", ".join(field.replace("_", " ") for field in changes)


def _check(job: "Job", wanted: Mapping[str, Any]) -> None:
    from stoker.queue.jobs import check_changes

    check_changes(job, wanted)


def _changes(store: "Store", job: "Job", given: Mapping[str, Any]) -> dict[str, object]:
    """What the options change in this job, by the names of its fields."""
    wanted: dict[str, object] = {name: given[name] for name in FIELDS if name in given}
    for name in wanted.keys() & {"after", "after_any"}:
        wanted[name] = store.jobs.ids_of(given[name])
    if "directory" in wanted:
        wanted["directory"] = working_directory(given["directory"])
    if given.keys() & {"variables", "unset"}:
        wanted["environment"] = _environment(job, given)
    rule = {name.removeprefix(_RULE): value for name, value in given.items() if name.startswith(_RULE)}
    if rule:
        wanted["policy"] = changed(job.policy, rule)
    return {name: value for name, value in wanted.items() if FIELDS[name].value(job) != value}


def _environment(job: "Job", given: Mapping[str, Any]) -> dict[str, str]:
    environment = dict(job.environment)
    for name in given.get("unset", ()):
        if environment.pop(name, None) is None:
            raise BadInputError(f"--no-env {name}: job {job.id} sets no such variable")
    for written in given.get("variables", ()):
        name, equals, value = written.partition("=")
        if not name or not equals or "\0" in written:
            raise BadInputError(f"--env {written!r} sets no variable: write NAME=VALUE")
        environment[name] = value
    return environment


def _as_text(store: "Store", jobs: list["Job"], request: Request, file: str | None) -> int:
    """Takes the changes from a file, or lets a person write them."""
    if file is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadInputError("what is to be changed? Say it by an option such as --priority 5 (there is no terminal)")
    if len(jobs) != 1:
        raise BadInputError(f"a text is the text of one job, and {len(jobs)} are meant: change several by options")
    (job,) = jobs
    if job.state == "running":
        report = _edited(store, jobs, {}, request)
        return print_job_changes(report, "edited", request, AMONG)
    text = text_of(file) if file is not None else edited_text(job)
    try:
        report = _edited(store, jobs, {job.id: changes_in(text, job)}, request)
    except BadInputError as error:
        where = file or kept(job, text)
        raise BadInputError(
            f"{error}; nothing was changed, and your text is in {where}: "
            f"`stoker edit {job.id} --from {where}` takes it when it is mended"
        ) from None
    return print_job_changes(report, "edited", request, AMONG)


# How a job is fitted is nested: `submit --fit-with` sets it, and `batch_size` replaces it.
_NOT_AS_TEXT: Final = ("fit",)
OFF: Final = "off"
"""What stands for no value in a policy: TOML has none."""


def written(job: "Job") -> str:
    """The text: what has no value stands there as a comment with an example."""
    lines = [f"# Job {job.id}, {job.state}. A line that is taken out goes back to its default."]
    tables = []
    for field in _as_text_fields():
        value = field.value(job)
        if isinstance(value, dict):
            tables += ["", f"[{field.name}]", *(f"{_string(key)} = {_scalar(each)}" for key, each in value.items())]
        elif value is None:
            lines.append(f"# {field.name} = {_scalar(field.example or '...')}")
        else:
            lines.append(f"{field.name} = {_in_toml(field, value)}")
    return "\n".join([*lines, *tables]) + "\n"


def changes_in(text: str, job: "Job") -> dict[str, object]:
    """The fields that the text gives another value than the job has."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"that is not TOML: {error}") from None
    known = {field.name: field for field in _as_text_fields()}
    if unknown := values.keys() - known.keys():
        raise BadInputError(f"a job has no {min(unknown)!r} that could be edited")
    asked = spec_of({name: _plain(known[name], value) for name, value in values.items()})
    return {name: field.value(asked) for name, field in known.items() if field.value(asked) != field.value(job)}


def _as_text_fields() -> list[JobField]:
    return [FIELDS[name] for name in editable() if name not in _NOT_AS_TEXT]


def _plain(field: JobField, value: object) -> object:
    """The value of a field, where it was written with a unit."""
    if field.name == "policy" and isinstance(value, dict):
        return {key: None if each == OFF else each for key, each in value.items()}
    if not field.kind.has_unit or not isinstance(value, str):
        return value
    try:
        return field.kind.read(value)
    except BadInputError as error:
        raise BadInputError(f"{field.name}: {error}") from None


def _in_toml(field: JobField, value: Any) -> str:
    """With its unit where that says exactly the same."""
    if field.kind.has_unit:
        written = field.kind.write(value)
        return _string(written) if field.kind.read(written) == value else repr(value)
    if field.name == "command" and isinstance(value, str) and "\n" in value:
        return _several_lines(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_string, value))}]"
    return _scalar(value)


def _scalar(value: str | float | bool | None) -> str:
    match value:
        case str():
            return _string(value)
        case bool():
            return "true" if value else "false"
        case None:
            return _string(OFF)
    return repr(value)


def _several_lines(text: str) -> str:
    """As it is, between the quotes in which TOML leaves everything alone; if it holds these, in one line."""
    odd = any((ord(letter) < 32 and letter not in "\n\t") or ord(letter) == 127 for letter in text)
    return _string(text) if odd or "'''" in text or text.endswith("'") else f"'''\n{text}'''"


def _string(text: str) -> str:
    """JSON's way to write a string is also TOML's, but for the one character that JSON does not escape."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def edited_text(job: "Job") -> str:
    """What is in the text after the editor was closed."""
    path = _file(job, written(job))
    try:
        _open(path)
        text = text_of(str(path))
    except StokerError as error:
        if path.read_bytes() == written(job).encode():
            path.unlink()
            raise
        raise StokerError(f"{error}; nothing was changed, and your text is in {path}") from None
    path.unlink()
    return text


def kept(job: "Job", text: str) -> str:
    """Where the text was put, for the person to mend it."""
    return str(_file(job, text))


def text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInputError(f"{file} is not text in UTF-8") from None
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}") from None


def _file(job: "Job", text: str) -> Path:
    number, name = tempfile.mkstemp(prefix=f"stoker-{job.id}-", suffix=".toml")
    with os.fdopen(number, "w", encoding="utf-8") as stream:
        stream.write(text)
    return Path(name)


def _open(path: Path) -> None:
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        ended = subprocess.run([*shlex.split(chosen), str(path)], check=False)
    except (OSError, ValueError):
        raise StokerError(f"the editor {chosen!r} cannot be started: set EDITOR to one that is there") from None
    if ended.returncode != 0:
        raise StokerError(f"the editor {chosen!r} ended with code {ended.returncode}")
