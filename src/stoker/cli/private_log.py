"""A log that only its owner reads, also after it began anew, and that does not grow for ever."""

import logging
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from stoker.paths import open_privately

# A few weeks of a busy page; the oldest part is dropped.
_SIZE: Final = 8 * 2**20
_KEPT: Final = 2


class PrivateLog(RotatingFileHandler):
    def __init__(self, path: Path, form: str, size: int = _SIZE) -> None:
        """OSError when it cannot be written."""
        super().__init__(path, maxBytes=size, backupCount=_KEPT, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(form))

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=open_privately)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A full disk is no reason not to answer, nor to write on the terminal."""
