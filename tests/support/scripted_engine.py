"""A small engine for tests: every attempt is a detached shell, and all of its state is in files.

While the file `unreachable` is in the home, it finds out nothing, like a cluster whose controller is away.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from stoker.engines import EngineOption, integer
from stoker.engines.attempt import ATTEMPT_TAG, AttemptRecord, AttemptResult, AttemptSpec, StopCause
from stoker.engines.engine import (
    CannotTellError,
    Decision,
    Found,
    Log,
    RunningAttempt,
    Start,
    Step,
    WorkerOptions,
)
from stoker.engines.identity import WorkerIdentity
from stoker.engines.preparation import prepare
from stoker.errors import InvalidFieldsError
from stoker.procfs import stat
from stoker.queue import Attempt, Job, JobSpec, queue_address
from stoker.queue.model import ReadyJob, Usage, View
from stoker.runs.plan import Plan

OPTIONS: Final = (EngineOption("--slots", "N", "Run up to N jobs at a time [2].", "2", integer(1, 64)),)
_POLL: Final = 0.05


def create(options: WorkerOptions, own: Mapping[str, Any], log: Log) -> "ScriptedEngine":
    return ScriptedEngine(options, own["slots"], log)


def check(job: JobSpec, view: View | None = None) -> None:
    if job.nodes > 3:
        raise InvalidFieldsError({"nodes": f"a script runs on 3 machines, not on {job.nodes}"})


class ScriptedAttempt(RunningAttempt):
    """A shell that writes its pid to `pid` and its exit code to `exit`."""

    cause: StopCause | None = None
    reason = ""

    @property
    def is_settled(self) -> bool:
        return self.result is not None

    @property
    def pid(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self.record.directory / "pid").read_text())
        return None

    def stop(self, cause: StopCause, reason: str) -> None:
        self.stopping, self.cause, self.reason = True, cause, reason
        self._kill()

    def _kill(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def renewed(self, until: float) -> None:
        pass

    def acknowledge(self) -> None:
        pass

    def look(self) -> None:
        """Finds out whether it has ended, and how."""
        with contextlib.suppress(OSError, ValueError):
            code = int((self.record.directory / "exit").read_text())
            self.result = AttemptResult("succeeded" if code == 0 else "failed", code, "")
            return
        found = None if self.pid is None else stat(self.pid)
        if self.pid is None or (found is not None and not found.is_zombie):
            if self.stopping:
                self._kill()  # it may have been too young for the first one
            return
        if self.cause in ("cancelled", "preempted"):
            self.result = AttemptResult(self.cause, None, self.reason)
        else:
            self.result = AttemptResult("lost", None, self.reason)


class ScriptedEngine:
    def __init__(self, options: WorkerOptions, slots: int, log: Log) -> None:
        self._options = options
        self._slots = slots
        self._log = log
        self._waiting: dict[str, str] = {}
        self.attempts: dict[str, ScriptedAttempt] = {}
        self._prepared: tuple[str, Job, Plan, dict[str, str]] | None = None
        """The id of an attempt that may be claimed, its job, and what it runs."""

    @property
    def lease(self) -> float:
        return self._options.lease

    def open(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._unreachable = identity.directory / "unreachable"

    def find(self) -> Found[RunningAttempt]:
        if self._unreachable.exists():
            return Found((), False)
        found = []
        for directory in sorted((self._identity.directory / "attempts").iterdir()):
            record = AttemptRecord(directory)
            if record.has_attempt():
                spec = msgspec.json.decode((directory / "attempt.json").read_bytes(), type=AttemptSpec)
                if spec.attempt not in self.attempts:
                    attempt = self.attempts[spec.attempt] = ScriptedAttempt(record, spec)
                    attempt.look()
                    found.append(attempt)
        return Found(found, True)

    def is_started(self, attempt: Attempt) -> bool:
        if self._unreachable.exists():
            raise CannotTellError("the cluster is away")
        return AttemptRecord(self._identity.directory_of(attempt.job, attempt.number)).has_attempt()

    def decide(self, waiting: Sequence[ReadyJob], queue_time: float) -> Decision:  # noqa: ARG002 - the engine's protocol
        free = self._slots - sum(1 for attempt in self.attempts.values() if attempt.result is None)
        fitting = [job for job in waiting if not job.gpus]
        self._waiting = {job.id: "waits for a slot" for job in fitting[max(0, free) :]}
        never = {job.id for job in waiting if job.gpus}
        self._waiting |= dict.fromkeys(never, "can never start here: there is no GPU")
        return Decision(start=tuple(Start(job.id) for job in fitting[: max(0, free)]), never=frozenset(never))

    def prepare(self, waiting: Sequence[ReadyJob], read: Callable[[str], Job | None]) -> str:
        job = None if not waiting or waiting[0].gpus else read(waiting[0].id)
        if job is None:
            self._prepared = None
            return ""
        if self._prepared is None or self._prepared[1] != job:
            plan, environment = prepare(job, [], self._identity.environment, job.attempts + 1)
            self._prepared = os.urandom(16).hex(), job, plan, environment
        return self._prepared[0]

    def _was_prepared(self, job: Job, attempt: Attempt) -> tuple[Plan, dict[str, str]] | None:
        prepared, self._prepared = self._prepared, None
        if prepared is None or (prepared[0], prepared[1].attempts + 1) != (attempt.id, attempt.number):
            return None
        is_same = all(getattr(prepared[1], name) == getattr(job, name) for name in JobSpec.__struct_fields__)
        return prepared[2:] if is_same and prepared[1].id == job.id else None

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> ScriptedAttempt:
        plan, environment = self._was_prepared(job, attempt) or prepare(
            job, [], self._identity.environment, attempt.number
        )
        record = AttemptRecord(self._identity.create_directory(attempt))
        spec = AttemptSpec(
            attempt=attempt.id,
            job=job.id,
            number=attempt.number,
            queue=str(queue_address(self._options.queue)),
            plan=plan,
            environment={},
            lease=self.lease,
            lease_until=claimed_at + self.lease,
            log_limit=self._options.log_limit,
            started=time.time(),
        )
        record.write_attempt(spec)
        body = 'echo $$ > "$0/pid"; "$@" > "$0/output" 2>&1; echo $? > "$0/exit.new"; mv "$0/exit.new" "$0/exit"'
        subprocess.Popen(
            ["/bin/sh", "-c", body, str(record.directory), *plan.command],
            env=environment | {ATTEMPT_TAG: attempt.id},
            cwd=plan.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        running = self.attempts[attempt.id] = ScriptedAttempt(record, spec)
        return running

    def commit(self, preempt: Collection[str]) -> None:
        pass

    def forget(self, attempt: str) -> None:
        del self.attempts[attempt]

    def wait_for(self) -> tuple[Iterable[int], float]:
        return (), time.monotonic() + _POLL

    def step(self, readable: Collection[int]) -> Step:  # noqa: ARG002 - the engine's protocol
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if self._unreachable.exists():
            return Step()
        running = [attempt for attempt in self.attempts.values() if attempt.result is None]
        for attempt in running:
            attempt.look()
        ended = [attempt for attempt in running if attempt.result is not None]
        return Step(ended, bool(ended))

    def report(self) -> View:
        return View(waiting=dict(self._waiting), absent=True)

    def usage(self, *, final: bool = False) -> Sequence[Usage]:  # noqa: ARG002 - the engine's protocol
        return []

    def usage_written(self, rows: Iterable[Usage]) -> None:
        pass

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        pass
