"""Slurm's commands: run without blocking, in a clean environment, with a deadline."""

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Final

from stoker.engines.slurm.answers import (
    JOB_FIELDS,
    SEPARATOR_LENGTH,
    TRIES_AGAIN,
    SlurmClosed,
    SlurmConfig,
    SlurmFull,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    SlurmProblem,
    SlurmRefusal,
    failure,
    gpus_in,
    parse_config,
    parse_fields,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_version,
    submitted_id,
)

__all__ = [
    "DEADLINE",
    "Running",
    "SlurmClosed",
    "SlurmConfig",
    "SlurmFull",
    "SlurmJob",
    "SlurmNode",
    "SlurmPartition",
    "SlurmProblem",
    "SlurmRefusal",
    "all_jobs",
    "config",
    "environment",
    "gpus_in",
    "job_details",
    "nodes",
    "own_jobs",
    "parse_config",
    "parse_fields",
    "parse_jobs",
    "parse_nodes",
    "parse_partitions",
    "parse_version",
    "partitions",
    "sbatch",
    "scancel",
    "set_comment",
    "submitted_id",
    "version",
]

DEADLINE: Final = 30.0
# Variables that Slurm's commands inherit. Others, such as SQUEUE_FORMAT or SBATCH_PARTITION, would change their output.
_PASSED_ON: Final = ("PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT")
# Seconds since the epoch instead of local time without a time zone.
_TIMES: Final = {"SLURM_TIME_FORMAT": "%s"}


class Running:
    """A running command."""

    def __init__(
        self,
        command: Sequence[str],
        script: str = "",
        variables: Mapping[str, str] | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        """`script` is its input. All errors are raised by `result`."""
        self._name = command[0]
        self._deadline = deadline
        self._due = time.monotonic() + deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: SlurmProblem | None = None
        with contextlib.ExitStack() as files:
            self._output = files.enter_context(_new_file())
            self._errors = files.enter_context(_new_file())
            # The pipe closes when the command ends, since only the command holds its write end. Unlike pidfd_open, this
            # works before Linux 5.3, which many clusters run.
            self._ended, held_open = os.pipe()
            files.callback(os.close, self._ended)
            try:
                self._process = self._start(command, script, {**environment(), **(variables or {})}, held_open)
            except FileNotFoundError:
                self._problem = SlurmProblem(f"there are no Slurm commands here: {self._name} was not found in PATH")
            except (OSError, ValueError) as error:
                self._problem = SlurmProblem(f"{self._name} could not be started: {error}")
            finally:
                os.close(held_open)
            self._files = files.pop_all()

    def _start(
        self, command: Sequence[str], script: str, variables: Mapping[str, str], held_open: int
    ) -> "subprocess.Popen[bytes]":
        with _new_file() as given:
            given.write(script.encode(errors="surrogateescape"))
            given.seek(0)
            return subprocess.Popen(
                command,
                env=variables,
                stdin=given,
                stdout=self._output,
                stderr=self._errors,
                pass_fds=(held_open,),
                start_new_session=True,  # Ctrl-C goes to the worker alone
            )

    def fileno(self) -> int:
        """A descriptor that becomes readable when the command ends."""
        return self._ended

    def due(self) -> float:
        """Its deadline in monotonic seconds."""
        return self._due

    def has_ended(self) -> bool:
        """True once it has ended. Kills it if it is overdue, or if it waits for room in the cluster."""
        process = self._process
        if process is None or self._is_over(process):
            return True
        if TRIES_AGAIN in _read(self._errors):
            self._problem = SlurmFull("the cluster has as many jobs as it may")
        elif time.monotonic() >= self._due:
            self._problem = SlurmProblem(f"{self._name} did not end within {self._deadline:g} s")
        else:
            return False
        _kill(process)
        self._process = None
        return True

    def result(self) -> str:
        """Waits for its end and returns its output. Raises SlurmProblem or SlurmRefusal. Call it once."""
        import select

        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        while not self.has_ended():
            poll.poll(max(0.0, self._due - time.monotonic()) * 1000 + 1)
        with self._files:
            if self._problem is not None or self._process is None:
                raise self._problem or SlurmProblem(f"{self._name} was not started")
            code = self._process.returncode
            if code == 0:
                return _read(self._output)
            if code < 0:
                raise SlurmProblem(f"{self._name} was ended by signal {-code}")
            raise failure(self._name, code, _read(self._errors))

    def kill(self) -> None:
        """Kills the command; its request may have been carried out."""
        if self._process is not None and not self._is_over(self._process):
            _kill(self._process)
        self._files.close()

    def _is_over(self, process: "subprocess.Popen[bytes]") -> bool:
        if process.returncode is None:
            try:
                # Popen.poll reports success for a process that was collected elsewhere, as the kernel does while
                # SIGCHLD is ignored. So it is called only for a zombie.
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return False
            except ChildProcessError:
                self._problem = SlurmProblem(f"it is not known how {self._name} ended")
        return process.poll() is not None


def _new_file() -> IO[bytes]:
    """An anonymous file, in memory if possible: creating it on disk takes longer than the rest of a start."""
    try:
        return os.fdopen(os.memfd_create("slurm-command"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A command that hangs in a dead file system cannot be waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def environment() -> dict[str, str]:
    """The environment of Slurm's commands, which `sbatch` passes on to its job."""
    found = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**found, "LANG": "C"}


def own_jobs() -> Running:
    """All jobs of this user that Slurm still knows, for `parse_jobs`."""
    return _jobs(f"--user={os.getuid()}")


def all_jobs() -> Running:
    """All jobs of all users that Slurm still knows, for `parse_jobs`."""
    return _jobs()


def _jobs(*options: str) -> Running:
    separator = secrets.token_hex(SEPARATOR_LENGTH // 2)
    form = separator + separator.join(f"%{field}" for field in JOB_FIELDS)
    # Hidden partitions are included: a job that is not listed counts as gone.
    words = ("squeue", "--noheader", "--all", "--array", "--states=all", *options, f"--format={form}")
    return Running(words, variables=_TIMES)


def job_details(job: int) -> Running:
    """One job with the indices of its GPUs, for `parse_fields`."""
    return Running(("scontrol", "--all", "--details", "--oneliner", "show", "job", str(job)), variables=_TIMES)


def nodes() -> Running:
    """All nodes, for `parse_nodes`."""
    return Running(("scontrol", "--all", "--details", "--oneliner", "show", "node"), variables=_TIMES)


def partitions() -> Running:
    """All partitions, for `parse_partitions`."""
    return Running(("scontrol", "--all", "--oneliner", "show", "partition"), variables=_TIMES)


def config() -> Running:
    """The cluster's settings, for `parse_config`."""
    return Running(("scontrol", "show", "config"), variables=_TIMES)


def version() -> Running:
    """Slurm's version here, for `parse_version`."""
    return Running(("sbatch", "--version"))


def sbatch(arguments: Sequence[str], script: str) -> Running:
    """Submits a job, for `submitted_id` if `--parsable` is among the arguments."""
    return Running(("sbatch", *arguments), script)


def scancel(jobs: Iterable[int]) -> Running:
    """Cancels jobs. Ended jobs are no error."""
    return Running(("scancel", *map(str, sorted(jobs))))


def set_comment(job: int, comment: str) -> Running:
    """Replaces the comment of a pending or running job."""
    return Running(("scontrol", "update", f"JobId={job}", f"Comment={comment}"))
