"""The stat file of a process or thread in /proc, read once and split where it can be split; and which boot this is."""

import os
import pwd
from pathlib import Path

# Fields after the name, which is the second of the file, counted from the state: see proc_pid_stat(5).
STATE = 0
PARENT = 1
GROUP = 2
SESSION = 3
FLAGS = 6
USER_TICKS = 11
SYSTEM_TICKS = 12
THREADS = 17
STARTED = 19
RESIDENT_PAGES = 21

# PF_KTHREAD among the flags: a thread of the kernel itself, which has no program and no open files.
KERNEL_THREAD = 0x00200000

# The inode of the first pid namespace is fixed in the kernel (PROC_PID_INIT_INO): any other is a container's.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
OUTSIDE = "processes outside this container cannot be seen"


def read_stat_fields(path: str) -> tuple[str, list[bytes]]:
    """The name, printable, and all that follows it. OSError when it is gone, ValueError when it is no such file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A short name and fifty numbers: one read has it all.
        line = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    # The name itself may hold spaces and brackets, nothing after it does.
    before, bracket, after = line.rpartition(b")")
    fields = after.split()
    if not bracket or len(fields) <= RESIDENT_PAGES:
        raise ValueError(f"{path} is not the stat file of a process")
    name = before.partition(b"(")[2].decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in name), fields


def boot_id() -> str:
    """Monotonic times and pids mean something only within one boot. Empty when it cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def inside_pid_namespace(root: Path = Path("/")) -> bool:
    """Whether pids here are numbered differently from those of the machine itself."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE
    except OSError:
        return False  # A kernel without pid namespaces has no such file.


def user_name(uid: int) -> str:
    """The name of a user; the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
