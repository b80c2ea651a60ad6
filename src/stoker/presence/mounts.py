"""Whether an open file can be asked what it is without the risk of waiting for a network that is gone."""

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
        self._can_hold_nodes: dict[str, bool] = {}

    def can_hold_nodes(self, pid: int, descriptor: str) -> bool:
        """Whether this open file lies where there can be device nodes, found out without touching the file."""
        try:
            mount = _mount_of(f"{self._proc}/{pid}/fdinfo/{descriptor}")
            if mount not in self._can_hold_nodes:
                # The numbers of mounts are the same for all processes, but each sees only those of its namespace.
                self._can_hold_nodes |= _read_mounts(f"{self._proc}/{pid}/mountinfo")
        except OSError:
            return False
        # What no process has mounted is the kernel's own, or was taken away because its server is gone.
        return self._can_hold_nodes.setdefault(mount, False)


def _mount_of(path: str) -> str:
    for line in Path(path).read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == "mnt_id":
            return value.strip()
    return ""


def _read_mounts(path: str) -> dict[str, bool]:
    mounts = {}
    for line in Path(path).read_text(errors="replace").splitlines():
        own, _, of_file_system = line.partition(" - ")
        fields, kind = own.split(), of_file_system.split(" ", 1)[0]
        if len(fields) > 5:
            mounts[fields[0]] = kind in LOCAL and "nodev" not in fields[5].split(",")
    return mounts
