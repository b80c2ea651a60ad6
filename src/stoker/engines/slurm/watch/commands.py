"""The watcher's Slurm commands, and the step that it starts beside each job."""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, Final, cast

import msgspec

from stoker.engines.slurm.client import Running, config, environment, parse_config, scancel, set_comment
from stoker.engines.slurm.step import SrunStep, srun_command
from stoker.engines.slurm.watch import agent
from stoker.engines.slurm.watch.agent import Report
from stoker.engines.slurm.watch.jobs import ClusterJob, squeue_command
from stoker.errors import BadInputError, StokerError

# Variables for the agent, in addition to those for Slurm's commands.
_CARRIED: Final = ("PYTHONPATH", "STOKER_GPUS", "STOKER_DEADLINE")
# A step must exit this soon after its input closes.
_LEAVE_TIME: Final = 10.0


def check_commands(names: Sequence[str]) -> None:
    for name in names:
        if shutil.which(name) is None:
            raise BadInputError(f"there are no Slurm commands here: {name} was not found in PATH")


def running_jobs(user: str | None) -> Running:
    """The running jobs of one user or of all, for `jobs.parse_jobs`."""
    return Running(squeue_command(user), variables={"SLURM_TIME_FORMAT": "%s"})


def cluster_name() -> str:
    """The name of the cluster; empty if it cannot be read now. Blocks."""
    with contextlib.suppress(StokerError):
        return parse_config(config().result()).cluster
    return ""


def cancel(job: int, reason: str) -> str | None:
    """Cancels a job, with the reason in its comment. Returns the error of setting the comment, if any.

    Blocks. Raises StokerError.
    """
    complaint = None
    try:
        set_comment(job, reason).result()
    except StokerError as error:
        complaint = str(error)
    scancel([job]).result()
    return complaint


class AgentStep(SrunStep):
    """One `srun --overlap` beside a job: an agent on each of its nodes."""

    def __init__(self, job: ClusterJob, every: float, cluster: str) -> None:
        """`cluster`: its name; empty if unknown. Raises OSError, or KeyError for an unknown user."""
        self._decoder = msgspec.json.Decoder(Report)
        self._leave_by: float | None = None
        self.damaged = 0
        """The number of reports that could not be decoded."""
        agents = (sys.executable, "-m", agent.__name__, f"{every:g}")
        carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        if cluster:
            # Slurm sets it in jobs, but not in a step that is started from outside.
            carried["SLURM_CLUSTER_NAME"] = cluster
        super().__init__(
            srun_command(job.id, job.nodes, "--job-name=stoker-watch", "--cpus-per-task=1", "--input=all", *agents),
            {**environment(), **carried},
            stdin=subprocess.PIPE,
            **_as_owner(job.user),
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        os.set_blocking(self._stdin.fileno(), False)

    def reports(self) -> list[Report]:
        """New reports."""
        found = []
        for _node, content in self.messages():
            try:
                found.append(self._decoder.decode(content))
            except msgspec.DecodeError:
                self.damaged += 1
        return found

    def keep(self) -> None:
        """Tells the agents that the watcher is alive."""
        with contextlib.suppress(OSError):
            os.write(self._stdin.fileno(), b"\n")

    def leave(self) -> None:
        """Asks the agents to exit; `over` reports their end."""
        if self._leave_by is None:
            self._leave_by = time.monotonic() + _LEAVE_TIME
            with contextlib.suppress(OSError):
                self._stdin.close()

    def over(self) -> str | None:
        """Why it has ended; None while it runs."""
        if not self.has_ended():
            if self._leave_by is not None and time.monotonic() >= self._leave_by:
                self.terminate()
                self._leave_by += _LEAVE_TIME
            return None
        return f"the step beside the job has ended: {self.cause() or 'it gave no reason'}"

    def close(self, patience: float = _LEAVE_TIME) -> None:
        """Terminates srun, and so the step, and waits for it."""
        self.leave()
        super().close(patience)


def _as_owner(user: str) -> dict[str, Any]:
    """Only the owner of a job may start a step in it; root becomes the owner for that."""
    if os.geteuid() != 0 or user == "root":
        return {}
    entry = pwd.getpwnam(user)
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
