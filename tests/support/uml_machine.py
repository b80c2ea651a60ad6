"""Another kernel as a process: User-mode Linux on the files of this machine, which it cannot change.

It has cgroup v2 with all controllers, whatever this machine's own kernel was started with.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The shutdown is the only way for a first process to end; the console is where it writes.
_INIT = """#!/bin/sh
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs run /run && mount -t cgroup2 cgroup /sys/fs/cgroup
export HOME=/run PATH={path} PYTHONPATH={root} LANG=C.UTF-8
cd /run
sh {script} 2>&1
{python} -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'
"""

# On processors with more registers (AMX) than this kernel has room for, its first process cannot start.
_UNSUPPORTED_PROCESSOR = "ptrace set fp regs failed"


def run_in_uml(directory: Path, script: str) -> str:
    """Runs a shell script as root of a freshly started machine, and returns what it printed. /run can be written."""
    kernel = shutil.which("linux.uml")
    if kernel is None:
        if os.environ.get("CI"):
            pytest.fail("linux.uml is missing, and under CI nothing is skipped for that")
        pytest.skip("linux.uml (Debian's package user-mode-linux) is missing: `make test` installs it where it may")
    init, written = directory / "init", directory / "script"
    written.write_text(script)
    python = Path(sys.executable)
    path = f"{python.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    root = Path(__file__).parents[2]
    init.write_text(
        _INIT.format(path=path, root=shlex.quote(str(root)), script=shlex.quote(str(written)), python=python)
    )
    init.chmod(0o755)
    done = subprocess.run(
        [
            *(kernel, "mem=512M", "quiet", "con=null", "con0=fd:0,fd:1"),
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=240,
        check=False,
        # Its control socket goes there.
        env={**os.environ, "HOME": str(directory)},
    )
    if _UNSUPPORTED_PROCESSOR in done.stdout:
        pytest.skip("linux.uml is too old for the vector registers of this processor")
    return done.stdout
