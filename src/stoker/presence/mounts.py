"""Whether an open file can be asked what it is without the risk of waiting for a network that is gone."""

import os
from pathlib import Path
from typing import Final

# File systems that answer from this machine alone. Asking a file on any other, even through /proc, can block for
# as long as its server is away; a device node there would not be honoured by any usual mount anyway.
LOCAL: Final = frozenset(
    {
        "bcachefs", "btrfs", "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs",
        "squashfs", "tmpfs", "xfs", "zfs",
    }
)  # fmt: skip


class Mounts:
    """The mounts that can hold device nodes, read when first needed. For one scan: mounts come and go."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._can_hold_nodes: dict[bytes, bool] = {}

    def can_hold_nodes(self, pid: int, path: str) -> bool:
        """Whether this /proc/PID/fd/N lies where there can be device nodes, found out without touching the file."""
        try:
            mount = _mount_of(path.replace("/fd/", "/fdinfo/"))
            if mount not in self._can_hold_nodes:
                # The numbers of mounts are the same for all processes, but each sees only those of its namespace.
                self._can_hold_nodes |= _read_mounts(f"{self._proc}/{pid}/mountinfo")
        except OSError:
            return False
        # What no process has mounted is the kernel's own, or was taken away because its server is gone.
        return self._can_hold_nodes.setdefault(mount, False)


def _mount_of(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # It is the third of a few short lines.
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    return text.partition(b"mnt_id:")[2].split(maxsplit=1)[0] if b"mnt_id:" in text else b""


def _read_mounts(path: str) -> dict[bytes, bool]:
    mounts = {}
    for line in Path(path).read_bytes().splitlines():
        own, _, of_file_system = line.partition(b" - ")
        fields, kind = own.split(), of_file_system.partition(b" ")[0]
        if len(fields) > 5:
            mounts[fields[0]] = kind.decode(errors="replace") in LOCAL and b"nodev" not in fields[5].split(b",")
    return mounts
