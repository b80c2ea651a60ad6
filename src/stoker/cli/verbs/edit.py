"""`stoker edit` and `clone`: change jobs by options or in an editor; submit them again with changes."""

import functools
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from stoker.cli.options.job import JobCommand, job_options, job_values, without_none
from stoker.cli.options.policy import OF_JOBS, policy_options_with
from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName
from stoker.cli.output import (
    Changed,
    ChangeReport,
    Unchanged,
    dry_run_option,
    json_option,
    print_changes,
    print_json,
)
from stoker.cli.verbs.steer import Request, print_job_changes, request_options
from stoker.errors import BadInputError, StokerError
from stoker.masking import masked, masked_command
from stoker.queue.commands import shell_text
from stoker.queue.fields import FIELDS, JobField, editable, spec_of
from stoker.queue.provenance import login_name, working_directory
from stoker.rules.registry import changed, setting_keys

if TYPE_CHECKING:
    from stoker.queue import Job, State, Store

F = TypeVar("F", bound=Callable[..., Any])

AMONG: Final[tuple["State", ...]] = ("queued", "held")
_WORDS: Final = "stoker.cli.verbs.edit.words"
# An option of a rule and a field of the job may have the same name.
_RULE: Final = "rule_"
RUNNING: Final = "it is running; it can be edited after it has ended"
SAME_ALREADY: Final = "it already has these values"


class _EditCommand(JobCommand):
    """The words after -- are the command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = args
        if "--" in args:
            before, words = args[: args.index("--")], args[args.index("--") + 1 :]
            if not words:
                raise BadInputError(
                    f"there is no command after --: write it like `stoker {self.name} JOB -- python train.py`"
                )
            ctx.meta[_WORDS] = words[0] if len(words) == 1 else tuple(words)
        return super().parse_args(ctx, before)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def _change_options(command: F) -> F:
    """The options of `edit` and `clone`."""
    decorators = (
        click.option("--command", metavar="TEXT", help="The command, as text for the shell."),
        job_options("edit"),
        click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set this variable (repeatable)."),
        click.option("--no-env", "unset", multiple=True, metavar="NAME", help="Remove this variable."),
        click.option("--directory", metavar="DIR", help="Where it runs."),
        policy_options_with(flags=OF_JOBS),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(decorators), command)


@click.command("edit", cls=_EditCommand)
@request_options(*AMONG, tag_option="--tagged")
@_change_options
@click.option("--from", "file", metavar="FILE", help="Read the changes from a text like the editor's.")
@click.pass_context
def edit_command(context: click.Context, /, request: Request, file: str | None, **options: Any) -> int:
    """Change the options of jobs that are not running. Without options, on a terminal, opens the job in $EDITOR.

    JOB is an id, the beginning of an id, or the name of a job or group. Fields without an option keep their value.
    --at-most also applies to a group with running jobs, which continue; --notify also applies to running jobs. COMMAND
    replaces the command, as in `stoker submit`: one word is text for the shell.
    """
    given = _given(context, options)
    if file is not None and given:
        raise BadInputError("the changes are in --from and in options: leave one of them out")
    with opened(request.queue_url) as store:
        if given.keys() == {"at_most"} and not request.selection.by_rule:
            report = _capped(store, request, given["at_most"])
            print_changes(report, "edited", lambda name, _called: name, as_json=request.as_json, noun="group ")
            return 0 if report.changed else 1
        jobs = request.selection.jobs(store, AMONG)
        if not given:
            return _as_text(store, jobs, request, file)
        able = [job for job in jobs if given.keys() <= set(editable("running")) or job.state != "running"]
        changes = {job.id: _changes(store, job, given) for job in able}
        report = _edited(store, jobs, changes, request)
    return print_job_changes(report, "edited", jobs, request, AMONG)


@click.command("clone", cls=_EditCommand)
@click.argument("job", type=JobName())
@_change_options
@click.option("--hold", is_flag=True, help="Hold the new job until `stoker release`.")
@dry_run_option("Print what would be submitted, and submit nothing.")
@json_option("Print the jobs as a JSON list instead of their ids.")
@queue_option
@click.pass_context
def clone_command(
    context: click.Context, /, job: str, hold: bool, dry_run: bool, as_json: bool, queue_url: str | None, **options: Any
) -> int:
    """Submit JOB again as a new job, with its environment and these changes, and print the new id.

    JOB is an id, the beginning of an id, or the name of a job or group; it may be in any state and is not changed.
    COMMAND replaces the command, as in `stoker submit`. The new job uses the same snapshot or pinned commit.
    """
    from stoker.engines.admission import check_jobs
    from stoker.queue.jobs import cloned

    given, submitter = _given(context, options), login_name()
    with opened(queue_url) as store:
        specs = [
            msgspec.structs.replace(cloned(one, _changes(store, one, given), submitter), hold=hold)
            for one in store.jobs.named(job)
        ]
        check_jobs(store, specs)
        jobs = [] if dry_run else [store.jobs.get(name) for name in store.jobs.submit(specs)]
    if as_json:
        print_json(masked(msgspec.to_builtins(jobs or specs)))
    else:
        shown = [one.id for one in jobs] or [masked_command(shell_text(one.command)) for one in specs]
        sys.stdout.write("".join(f"{line}\n" for line in shown))
    return 0


def _given(context: click.Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options: job fields, variables, rule settings and the command."""
    typed = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    rule = {f"{_RULE}{name}": typed.pop(name) for name in setting_keys() if name in typed}
    given = without_none(job_values(typed)) | typed | rule
    if (words := context.meta.get(_WORDS)) is not None:
        if "command" in given:
            raise BadInputError("the command is in --command and after --: leave one of them out")
        given["command"] = words
    return given


def _capped(store: "Store", request: Request, at_most: int | None) -> ChangeReport:
    """Sets the cap of the groups selected directly or by one of their jobs, even while jobs run."""
    groups = dict.fromkeys(job.group for word in request.selection.words for job in store.jobs.named(word))
    if not groups or "" in groups:
        raise BadInputError("only groups have a cap: name a group, or put the jobs into one with --group")
    known = store.groups.several(groups)
    same = [Unchanged(name, "", SAME_ALREADY) for name, group in known.items() if group.at_most == at_most]
    wanted = [name for name, group in known.items() if group.at_most != at_most]
    if not request.dry_run:
        wanted = [name for name in wanted if store.groups.cap(name, at_most)]
    became = "no cap" if at_most is None else f"at most {at_most} at once"
    return ChangeReport("edit", store.place, request.dry_run, [Changed(name, "", became) for name in wanted], same)


def _edited(
    store: "Store", jobs: list["Job"], changes: Mapping[str, Mapping[str, object]], request: Request
) -> ChangeReport:
    """All or nothing: an error in one changes none."""
    from stoker.engines.admission import check_edits
    from stoker.queue.jobs import check_changes

    wanted = {job.id: changes[job.id] for job in jobs if changes.get(job.id)}
    check_edits(store, [(job, check_changes(job, wanted[job.id])) for job in jobs if job.id in wanted])
    done = set(wanted if request.dry_run else store.jobs.edit_many(wanted))
    fields = {name: ", ".join(changed).replace("_", " ") for name, changed in wanted.items()}
    edited = [Changed(job.id, job.name, f"edited ({fields[job.id]})") for job in jobs if job.id in done]
    unchanged = [
        Unchanged(job.id, job.name, SAME_ALREADY if changes.get(job.id) == {} else RUNNING)
        for job in jobs
        if job.id not in done
    ]
    return ChangeReport("edit", store.place, request.dry_run, edited, unchanged)


def _changes(store: "Store", job: "Job", given: Mapping[str, Any]) -> dict[str, object]:
    """The changes of the options to this job, by field."""
    wanted: dict[str, object] = {name: given[name] for name in FIELDS if name in given}
    for name in wanted.keys() & {"after", "after_any"}:
        wanted[name] = store.jobs.ids_of(given[name])
    for name in (name for name in wanted if FIELDS[name].parts):
        merged = {**FIELDS[name].value(job), **given[name]}
        wanted[name] = {key: value for key, value in merged.items() if value is not None}
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
            raise BadInputError(f"--no-env {name}: job {job.id} does not set it")
    for written in given.get("variables", ()):
        name, equals, value = written.partition("=")
        if not name or not equals or "\0" in written:
            raise BadInputError(f"--env {written!r} is not a variable: write NAME=VALUE")
        environment[name] = value
    return environment


def _as_text(store: "Store", jobs: list["Job"], request: Request, file: str | None) -> int:
    """Reads the changes from a file or from the editor."""
    if file is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadInputError("nothing to change: use an option such as --priority 5 (there is no terminal)")
    if len(jobs) != 1:
        raise BadInputError(f"a text describes one job, not {len(jobs)}: change several with options")
    (job,) = jobs
    if job.state == "running":
        report = _edited(store, jobs, {}, request)
    elif file is not None:
        report = _edited(store, jobs, {job.id: changes_in(_text_of(file), job)}, request)
    else:
        report = _edited_in_editor(store, job, request)
    return print_job_changes(report, "edited", jobs, request, AMONG)


def _edited_in_editor(store: "Store", job: "Job", request: Request) -> ChangeReport:
    """Invalid text is saved for the next try."""
    number, name = tempfile.mkstemp(prefix=f"stoker-{job.id}-", suffix=".toml")
    path = Path(name)
    with os.fdopen(number, "w", encoding="utf-8") as stream:
        stream.write(written(job))
    try:
        click.edit(filename=name)
        report = _edited(store, [job], {job.id: changes_in(_text_of(path), job)}, request)
    except (click.ClickException, StokerError) as error:
        problem = error.message if isinstance(error, click.ClickException) else str(error)
        if path.read_bytes() != written(job).encode():
            problem += (
                f"; nothing was changed, and your text is in {path}: "
                f"correct it and run `stoker edit {job.id} --from {path}`"
            )
        else:
            path.unlink()
        raise StokerError(problem, exit_code=error.exit_code) from None
    path.unlink()
    return report


# `fit` is nested: `submit --fit-with` sets it, and `batch_size` replaces it.
_NOT_AS_TEXT: Final = ("fit",)
OFF: Final = "off"
"""Stands for no value in a policy: TOML has no null."""


def written(job: "Job") -> str:
    """The job as TOML; a field without a value is a comment with an example."""
    lines = [f"# Job {job.id}, {job.state}. A line that you remove returns to its default."]
    tables = []
    for field in _as_text_fields():
        value = field.value(job)
        if isinstance(value, dict):
            tables += ["", f"[{field.name}]", *(f"{_toml(key)} = {_toml(each)}" for key, each in value.items())]
        elif value is None:
            lines.append(f"# {field.name} = {_toml(field.example or '...')}")
        else:
            lines.append(f"{field.name} = {_in_toml(field, value)}")
    return "\n".join([*lines, *tables]) + "\n"


def changes_in(text: str, job: "Job") -> dict[str, object]:
    """The fields that the text changes."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"this is not TOML: {error}") from None
    known = {field.name: field for field in _as_text_fields()}
    if unknown := values.keys() - known.keys():
        raise BadInputError(f"a job has no field {min(unknown)!r} to edit")
    asked = spec_of({name: _plain(known[name], value) for name, value in values.items()})
    return {name: field.value(asked) for name, field in known.items() if field.value(asked) != field.value(job)}


def _as_text_fields() -> list[JobField]:
    return [FIELDS[name] for name in editable() if name not in _NOT_AS_TEXT]


def _plain(field: JobField, value: object) -> object:
    """The value of a field, parsed with its unit."""
    if field.name == "policy" and isinstance(value, dict):
        return {key: None if each == OFF else each for key, each in value.items()}
    return field.read(value) if field.kind.has_unit and isinstance(value, str) else value


def _in_toml(field: JobField, value: Any) -> str:
    """With its unit if exact; a multi-line command as multi-line text if TOML allows it."""
    if field.kind.has_unit and field.kind.read(text := field.kind.write(value)) == value:
        return _toml(text)
    if field.name == "command" and isinstance(value, str) and "\n" in value:
        literal = value.replace("\n", "").replace("\t", "").isprintable() and "'''" not in value
        return f"'''\n{value}'''" if literal and not value.endswith("'") else _toml(value)
    return _toml(value)


def _toml(value: object) -> str:
    """JSON is TOML, except for null, and for DEL, which JSON does not escape."""
    return msgspec.json.encode(OFF if value is None else value).decode().replace("\x7f", "\\u007f")


def _text_of(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInputError(f"{file} is not text in UTF-8") from None
    except OSError as error:
        raise BadInputError(f"{file} cannot be read: {error.strerror}") from None
