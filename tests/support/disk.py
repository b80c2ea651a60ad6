"""A disk of a machine's own that can be full, or out of inodes: a small tmpfs where one may be mounted."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

SIZE: Final = 48 * 2**20
INODES: Final = 12000
_BLOCK: Final = 2**16
_PAGE: Final = 4096


class Disk:
    """What is mounted at this directory, for as long as it is open."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError where no disk can be mounted."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        options = f"size={SIZE},nr_inodes={INODES},mode=0700"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "stoker-chaos", str(directory)], check=False, capture_output=True
        )
        if done.returncode != 0:
            raise OSError(done.stderr.decode(errors="replace").strip())

    def fill(self, spare_pages: int) -> None:
        """Fills the disk except for that many pages."""
        with (self._directory / "filler").open("wb", buffering=0) as file:
            for size in (_BLOCK, _PAGE):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            file.truncate(max(0, file.tell() - spare_pages * _PAGE))

    def use_up_inodes(self) -> None:
        place = self._directory / "fillers"
        with contextlib.suppress(OSError):
            place.mkdir(exist_ok=True)
            for number in range(INODES):
                os.mknod(place / str(number))

    def relieve(self) -> None:
        """Frees the space again."""
        (self._directory / "filler").unlink(missing_ok=True)
        shutil.rmtree(self._directory / "fillers", ignore_errors=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._directory)], check=True)
