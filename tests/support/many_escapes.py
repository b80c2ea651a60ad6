"""Lets one way to escape be tried many times under one supervisor, and says what went wrong: nothing when all is well.

`python -m tests.support.many_escapes WAY TIMES cgroup|descent`, as a separate process: a supervisor is
single-threaded and adopts orphans, and a test runner is neither.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.procfs import Identity, identify
from stoker.runs.processes.reaper import Program, Reaper, launch
from stoker.runs.processes.termination import stop
from stoker.runs.processes.tree import ProcessScan, children, send
from tests.support.escapes import ESCAPES, Escape, Holders, build

# Long enough for a program that obeys to end, short enough to be waited for a hundred times.
GRACE_OF_THE_OBEDIENT = 10.0
GRACE_OF_THE_DEAF = 0.01
# Processes that nobody else's are among, with numbers of their own.
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class Bystander:
    """A process in the same process group and session, child of the same parent, that is none of the job's."""

    def __init__(self) -> None:
        holders = Holders()
        asked, self._ask = os.pipe()
        self._output, write_end = os.pipe()
        self.pid = os.posix_spawn(
            build(),
            ["escapes", "bystander", str(holders.writer)],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, asked, 0), (os.POSIX_SPAWN_DUP2, write_end, 1)],
        )
        os.close(asked)
        os.close(write_end)
        holders.let_go()
        holders.wait_until_ready(1)
        holders.close()

    def dismiss(self) -> None:
        os.close(self._ask)
        os.close(self._output)
        os.waitpid(self.pid, 0)

    def troubles(self) -> list[str]:
        """What was done to it. It ends here."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid and not os.WIFSTOPPED(status):
            return [f"a bystander was killed (wait status {status})"]
        if pid:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._ask)
        received = os.read(self._output, 4096).decode()
        os.close(self._output)
        os.waitpid(self.pid, 0)
        stopped = ["a bystander was stopped"] if pid else []
        return stopped + ([f"a bystander was sent the signals {received}"] if received else [])


class StaleScans:
    """A job whose first scans still list an ended process, whose pid has been reused."""

    def __init__(self, reaper: Reaper, ghost: Identity) -> None:
        self._reaper = reaper
        self._ghost = ghost
        self._sightings = 6
        self.fileno = reaper.fileno
        self.update = reaper.update
        self.kill = reaper.kill

    @property
    def empty(self) -> bool:
        return self._reaper.empty

    def scan_processes(self) -> ProcessScan:
        found = self._reaper.scan_processes()
        if self._sightings == 0:
            return found
        self._sightings -= 1
        return ProcessScan([*found.processes, self._ghost], found.settled)


def main() -> None:
    way, times, means, *apart = sys.argv[1:]
    escape = ESCAPES[way]
    if way.startswith("pid reused") and not apart:
        go_apart()
    bystanders = [Bystander(), Bystander()]
    troubles: list[str] = []
    for number in range(int(times)):
        found = attempt(escape, means, bystanders, reuse=way.startswith("pid reused"))
        troubles += [f"try {number + 1}: {trouble}" for trouble in found]
        if troubles:
            break
    for bystander in bystanders:
        troubles += bystander.troubles()
    sys.stdout.write("\n".join(troubles))


def go_apart() -> None:
    """Enters a pid namespace if allowed: choosing pids would disturb other processes of the machine."""
    if subprocess.run([*APART, "true"], check=False, capture_output=True).returncode == 0:
        # A shell is the first process there: that one is treated by the kernel as no other is.
        again = [sys.executable, "-m", "tests.support.many_escapes", *sys.argv[1:], "apart"]
        os.execvp(APART[0], [*APART, "sh", "-c", '"$@"; exit $?', "sh", *again])


def attempt(escape: Escape, means: str, bystanders: list[Bystander], *, reuse: bool) -> list[str]:
    with launched(escape, means) as (reaper, holders):
        extra = []
        if reuse:
            ghost, heir = reused_pid(reaper)
            extra.append(heir)
            if send(ghost, signal.SIGKILL):
                return ["a signal for a process that had ended was sent"]
            outcome = stop(StaleScans(reaper, ghost), signal.SIGTERM, GRACE_OF_THE_DEAF)
        else:
            grace = GRACE_OF_THE_DEAF if escape.deaf else GRACE_OF_THE_OBEDIENT
            outcome = stop(reaper, signal.SIGTERM, grace)
        troubles = [f"it says that {survivor} is left" for survivor in outcome.survivors]
        if holders.anyone_left():
            troubles.append(f"a process is left although it reports: {outcome.in_words()}")
    if reaper.cgroup and reaper.cgroup.path.exists():
        troubles.append("its cgroup is left")
    others = {bystander.pid for bystander in [*bystanders, *extra]}
    if left := set(children(os.getpid())) - others:
        troubles.append(f"the children {left} are left")
    return troubles + [trouble for bystander in extra for trouble in bystander.troubles()]


@contextmanager
def launched(escape: Escape, means: str) -> Iterator[tuple[Reaper, Holders]]:
    holders = Holders()
    environment = {**os.environ, "ESCAPES": str(build()), "PIPE": str(holders.writer)}
    program = Program(["sh", "-c", escape.command], environment)
    reaper = launch(program, contain_cgroup=means == "cgroup")
    holders.let_go()
    try:
        holders.wait_until_ready(escape.ready)
        yield reaper, holders
    finally:
        reaper.close()
        holders.close()


def reused_pid(reaper: Reaper) -> tuple[Identity, Bystander]:
    """A process that has ended, and a bystander that has its pid now."""
    job = reaper.job
    ghost = next(process for process in reaper.processes() if process != job)
    send(ghost, signal.SIGKILL)
    ends = time.monotonic() + 60
    while identify(ghost.pid) == ghost:
        if time.monotonic() > ends:
            raise AssertionError("a killed process was not collected")
    while True:
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(ghost.pid - 1))
        except OSError:
            # Only root chooses pids. Everybody can misremember when a process was started.
            heir = Bystander()
            return Identity(heir.pid, ghost.started - 1), heir
        heir = Bystander()
        # Start times have a resolution of 10 ms, and chosen pids are reused faster than that.
        if heir.pid == ghost.pid and identify(heir.pid) != ghost:
            return ghost, heir
        if heir.pid != ghost.pid and identify(ghost.pid) is not None:
            return Identity(heir.pid, ghost.started - 1), heir  # the pid of an unrelated process
        heir.dismiss()


if __name__ == "__main__":
    main()
