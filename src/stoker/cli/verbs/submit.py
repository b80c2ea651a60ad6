"""`stoker submit`: put commands into the queue."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker.cli.options.common import Typed
from stoker.cli.options.job import JobCommand, fit_of, fit_options, job_options, job_values
from stoker.cli.options.policy import OF_JOBS, policy_options_with, with_joined_actions
from stoker.cli.options.queue import opened, opened_or_created, queue_option
from stoker.cli.output import count_of, dry_run_option, json_option, note, print_json
from stoker.errors import BadInputError, StokerError
from stoker.queue.commands import Command, check_command, shell_text
from stoker.queue.fields import JobSpec
from stoker.queue.groups import UNNAMED
from stoker.queue.provenance import submitted_from, working_directory
from stoker.queue.sweep import Sweep, job_specs, parse_sweep
from stoker.rules.registry import policies_of, stored_form
from stoker.settings import load_settings
from stoker.units import parse_memory

if TYPE_CHECKING:
    from stoker.queue import Store
    from stoker.queue.code.packing import PackedCode

SWEEP: Final = Typed("sweep", parse_sweep)


class _SubmitCommand(JobCommand):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_joined_actions(args))


@click.command(
    "submit",
    cls=_SubmitCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="One word is text for the shell, several words are run without a shell. {id}, {gpus} and {batch_size} are "
    "filled in when the job starts, and for a job on several machines {nodes}, {node_rank}, {master_addr} and "
    "{master_port}; write {{id}} for a literal {id}.",
)
@job_options("submit")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Set a variable, or copy yours (repeatable)."
)
@click.option("--bare-env", is_flag=True, help="Do not use the active virtualenv or conda environment.")
@click.option("--directory", metavar="DIR", help="Working directory [here].")
@click.option("--allow-dirty", is_flag=True, help="With --pin: ignore uncommitted changes.")
@click.option("--snapshot-limit", type=Typed("size", parse_memory), metavar="SIZE",
              help="Maximum size of the snapshot [50MiB].")  # fmt: skip
@fit_options("Find the largest batch size that fits, and run with it.")
@policy_options_with(flags=OF_JOBS)
@click.option("--sweep", "sweeps", multiple=True, type=SWEEP, metavar="NAME=VALUES",
              help="One job per value of 1e-3,1e-4 or 1..5; repeat for all combinations.")  # fmt: skip
@click.option("--from", "file", metavar="FILE", help="One shell command per line of FILE; - is standard input.")
@dry_run_option("Print what would be submitted, and submit nothing.")
@json_option("Print the jobs as a JSON list instead of their ids.")
@queue_option
@click.argument("words", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)
def submit_command(
    words: tuple[str, ...],
    file: str | None,
    sweeps: tuple[Sweep, ...],
    variables: tuple[str, ...],
    bare_env: bool,
    directory: str | None,
    allow_dirty: bool,
    snapshot_limit: int | None,
    fits: bool,
    fit_with: str | None,
    retries_oom: int,
    dry_run: bool,
    as_json: bool,
    queue_url: str | None,
    **options: Any,
) -> int:
    """Put COMMAND into the queue, and print its id."""
    commands = _commands(words, file)
    asked = job_values(options)
    asked["policy"] = stored_form(policies_of(options))
    if snapshot_limit is not None and not asked["snapshot"]:
        raise BadInputError("--snapshot-limit is the limit of a snapshot: add --snapshot")
    packed = _packed(directory, snapshot_limit) if asked["snapshot"] else None
    with packed or contextlib.nullcontext():
        asked |= submitted_from(
            directory,
            _variables(variables),
            bare=bare_env,
            pin=asked["pin"],
            allow_dirty=allow_dirty,
            packed=packed,
        )
        if fits or fit_with is not None:
            asked["fit"] = fit_of(fit_with or "", retries_oom, commands, asked["batch_size"], asked["gpus"])
        needs = {field: asked.pop(field) for field in ("after", "after_any")}
        jobs = job_specs(asked, commands, sweeps)
        if dry_run:
            _print_dry_run(jobs, needs, queue_url, as_json)
        else:
            _submit(jobs, needs, queue_url, as_json, packed, _new_group(asked, sweeps, file))
    if packed is not None:
        note(packed.description)
        if packed.warning:
            note(packed.warning)
    return 0


def _packed(directory: str | None, limit: int | None) -> "PackedCode":
    from stoker.queue.code.packing import pack

    return pack(working_directory(directory), load_settings().snapshot_bytes if limit is None else limit)


def _submit(
    jobs: list[JobSpec],
    needs: Mapping[str, Sequence[str]],
    queue_url: str | None,
    as_json: bool,
    packed: "PackedCode | None",
    new_group: str,
) -> None:
    from stoker.engines.admission import check_jobs

    with opened_or_created(queue_url) as store:
        check_jobs(store, jobs)
        ids = store.jobs.submit(
            _depending(store, jobs, needs), packed.blobs if packed is not None else (), new_group=new_group
        )
        if new_group:
            note(f"{count_of(len(ids), 'job')} in the group {store.jobs.get(ids[0]).group}")
        if as_json:
            _print_json([store.jobs.get(name) for name in ids])
        else:
            sys.stdout.write("".join(f"{name}\n" for name in ids))
        _advise(store)


def _new_group(asked: Mapping[str, Any], sweeps: Sequence[Sweep], file: str | None) -> str:
    """The default name of a group for a sweep or file; empty for a single command."""
    if asked["group"] or not (sweeps or file):
        return ""
    named = asked["name"] or ("" if file in {None, "-"} else Path(str(file)).stem)
    return named or UNNAMED


def _commands(words: tuple[str, ...], file: str | None) -> list[Command]:
    if file is not None:
        if words:
            raise BadInputError("the commands are in --from and on the command line: leave one of them out")
        return commands_in(file)
    if not words:
        raise BadInputError(
            "there is no command to submit: write it after --, as in `stoker submit -- python train.py`, or use --from"
        )
    return [words[0] if len(words) == 1 else words]


def _variables(texts: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for written in texts:
        name, equals, value = written.partition("=")
        if not name:
            raise BadInputError(f"--env {written!a} is not a variable: write NAME=VALUE, or NAME to copy yours")
        if not equals and name not in os.environ:
            raise BadInputError(f"--env {name!a} cannot be copied: it is not set here")
        variables[name] = value if equals else os.environ[name]
    return variables


def _depending(store: "Store", jobs: list[JobSpec], needs: Mapping[str, Sequence[str]]) -> list[JobSpec]:
    """The jobs with the ids of their dependencies."""
    if not any(needs.values()):
        return jobs
    from msgspec.structs import replace

    ids: dict[str, Any] = {field: store.jobs.ids_of(words) for field, words in needs.items()}
    return [replace(job, **ids) for job in jobs]


def _print_dry_run(
    jobs: list[JobSpec], needs: Mapping[str, Sequence[str]], queue_url: str | None, as_json: bool
) -> None:
    """Prints what would be submitted, without creating a queue."""
    from stoker.engines.admission import check_jobs
    from stoker.queue.fields import check

    for job in jobs:
        check(job)
    try:
        with opened(queue_url) as store:
            check_jobs(store, jobs)
    except BadInputError:
        raise
    except StokerError:
        pass  # there is no queue yet
    if any(needs.values()):
        with opened(queue_url) as store:
            jobs = _depending(store, jobs, needs)
    if as_json:
        _print_json(jobs)
        return
    for job in jobs:
        sys.stdout.write(shell_text(job.command) + "\n")
    sys.stderr.write(f"{count_of(len(jobs), 'job')} would be submitted\n")


def _print_json(jobs: Sequence[object]) -> None:
    import msgspec

    from stoker.masking import masked

    print_json(masked(msgspec.to_builtins(jobs)))


def _advise(store: "Store") -> None:
    """Prints, on a terminal, why no worker starts these jobs now."""
    if not sys.stderr.isatty():
        return
    now = store.clock()
    if not any(worker.is_there(now) for worker in store.workers.all()):
        sys.stderr.write("no worker is running: `stoker work` starts one\n")
    elif store.paused():
        sys.stderr.write("the queue is paused: `stoker resume` starts jobs again\n")


# A longer file is a mistake, such as a device.
LONGEST_FILE: Final = 64 * 1024 * 1024


def commands_in(file: str) -> list[Command]:
    """The commands of the file, or of standard input for `-`; blank lines and comments are skipped."""
    called = "standard input" if file == "-" else file
    commands: list[Command] = []
    for number, line in enumerate(_text(file, called).split("\n"), 1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        try:
            check_command(written)
        except BadInputError as error:
            raise BadInputError(f"line {number} of {called}: {error}") from None
        commands.append(written)
    if not commands:
        raise BadInputError(f"there is no command in {called}: write one per line")
    return commands


def _text(file: str, called: str) -> str:
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as stream:
            data = stream.read(LONGEST_FILE + 1)
    except OSError as error:
        raise BadInputError(f"{called} cannot be read: {error.strerror}") from None
    if len(data) > LONGEST_FILE:
        raise BadInputError(f"{called} is longer than {LONGEST_FILE:,} bytes: it is not a list of commands")
    try:
        # Some editors write a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInputError(f"line {line} of {called} is not text in UTF-8") from None
