"""Runs `stoker run`: the record, the reaper, and the supervisor in the foreground of a terminal."""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.gpus.spawn import forked
from stoker.gpus.visible import select_gpus
from stoker.paths import state_home
from stoker.procfs import boot_id, read_stat, user_name
from stoker.rules.registry import in_words, stored_form
from stoker.rules.rule import Verdict
from stoker.runs.loop import helpers_of
from stoker.runs.plan import OF_THE_JOB, Plan
from stoker.runs.processes.reaper import OrphanStop, Reaper, exit_code, fork_reaper
from stoker.runs.processes.signals import FORWARDED, SignalStream, Terminal
from stoker.runs.processes.spawn import OWN_FAILURE
from stoker.runs.record import Ending, NoRecord, Record, Records, Spec, readable
from stoker.runs.supervisor import Supervisor, log


def supervise(
    plan: Plan,
    on_rule_stop: Callable[[Verdict], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> int:
    """Runs the plan and returns the exit code. `on_rule_stop` is called after a stop by a rule.

    `on_warning` is called with warnings for people; it must return at once.
    """
    prober = Prober(plan.source, deadline=plan.deadline, start=forked, sharing="start")
    _check_gpus(plan, prober)
    record = _create_record(plan)
    with SignalStream(FORWARDED) as signals, contextlib.closing(Terminal()) as terminal:
        reaper = _fork_reaper(prober)
        supervisor = Supervisor(plan, record, prober, os.environ, signals, reaper, on_warning=on_warning)
        try:
            code = supervisor.run()
        finally:
            if supervisor.status.ending != "exited" or not reaper.exited:
                terminal.restore()
            reaper.close()
            record.forget_if_empty()
    if on_rule_stop is not None and supervisor.stopped_by is not None:
        on_rule_stop(supervisor.stopped_by)
    return code


def _create_record(plan: Plan) -> Record:
    """Creates the record. The command runs even if that fails."""
    record: Record = NoRecord()
    try:
        records = Records(state_home())
        # Pruning first may free the needed space.
        records.prune()
        record = records.create()
        record.write_spec(spec_of(plan, record))
    except StokerError as error:
        # If there is a directory, the spec is written with the next status, which logs a failure.
        if not record.is_kept:
            log(f"{error}; the command runs without a record")
            record.write_spec(spec_of(plan, record))
    return record


def _fork_reaper(prober: Prober) -> Reaper:
    try:
        return fork_reaper(orphaned=record_orphan_stop, helpers=lambda: helpers_of(prober))
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise StokerError(f"the command cannot be started: {why}", exit_code=OWN_FAILURE) from None


def spec_of(plan: Plan, record: Record) -> Spec:
    """The spec of this plan, with this process as its supervisor."""
    return Spec(
        id=record.id,
        command=tuple(map(readable, plan.command)),
        directory=readable(plan.directory or _here()),
        host=socket.gethostname(),
        user=_user(os.getuid()),
        boot=boot_id(),
        supervisor=os.getpid(),
        supervisor_started=_started(os.getpid()),
        started=time.time(),
        policy=stored_form(plan.policies, whole=True),
        rule=in_words(plan.policies),
        gpus=plan.gpus,
        dry_run=plan.dry_run,
    )


# A shim writes a spec for each of its jobs.
_user: Final = functools.cache(user_name)


@functools.cache
def _started(_me: int) -> int:
    # Not by the pid, which may be another process in /proc of another namespace.
    return read_stat("/proc/self/stat").started


def record_orphan_stop(stop: OrphanStop) -> None:
    """Writes the status of a job after its supervisor was killed. Runs in the reaper, which has stopped the job."""
    record = Record(Path(stop.about))
    status = record.status()
    if status.state == "ended":
        return  # the supervisor wrote the end before it was killed
    code = None if stop.status is None else exit_code(stop.status)
    ending: Ending = "supervisor killed"
    reason = f"Stoker itself was killed, so the job was stopped: {stop.words}."
    # During a stop the job did not end by itself. Before its start was recorded it did.
    if stop.ended_before and status.state != "stopping":
        ending, reason = "exited", f"It ended by itself with code {code}, and Stoker was killed a moment later."
    with contextlib.suppress(StokerError):
        record.write_status(
            msgspec.structs.replace(
                status,
                state="ended",
                ending=ending,
                reason=reason,
                exit_code=code,
                left=stop.survivors,
                ended=time.time(),
            )
        )


def _check_gpus(plan: Plan, prober: Prober) -> None:
    """Raises `BadInputError` for GPUs that do not exist, if the machine can be read now."""
    if plan.gpus in {OF_THE_JOB, "mine", "visible", "all"}:
        return
    with contextlib.suppress(AbsentError):
        look = prober.look()
        if look.gpus:
            select_gpus(look.gpus, plan.gpus)


def _here() -> str:
    """The current directory, which may have been removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(removed)"
