"""Where the output of probes is kept while they run, and longer when one of them failed."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stoker.errors import StokerError
from stoker.fit.model import ProbeFailedError
from stoker.paths import private_directory

# For as long as somebody may still want to read why it failed.
KEPT_FOR: Final = 7 * 86400.0


@contextlib.contextmanager
def probe_outputs(home: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """A fresh directory there. It stays when a probe failed that had printed something, and `tell` says where it is."""
    directory = _fresh(home)
    keep = False
    try:
        yield directory
    except ProbeFailedError:
        if any(file.stat().st_size for file in directory.iterdir()):
            tell(f"the whole output of the probes is in {directory}")
            keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _fresh(home: Path) -> Path:
    try:
        private_directory(home)
        directory = Path(tempfile.mkdtemp(dir=home))
    except OSError as error:
        raise StokerError(f"the output of probes cannot be kept in {home}: {error.strerror}") from None
    for older in home.iterdir():
        with contextlib.suppress(OSError):
            if older.stat().st_mtime < time.time() - KEPT_FOR:
                shutil.rmtree(older)
    return directory
