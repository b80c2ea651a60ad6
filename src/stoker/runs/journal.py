"""The readings of a run on disk. The report reads its window back from there.

A supervisor runs beside a training for days, so it keeps no readings in memory. A full disk costs the run its readings,
never the job.
"""

import contextlib
import time
from pathlib import Path

from stoker.errors import StokerError
from stoker.gpus.model import Look
from stoker.gpus.recording import RecordingReader, RecordingWriter
from stoker.runs.record import MOST_READINGS, Record


class Journal:
    """The readings of one run: the newest part, and one older part of the same size."""

    def __init__(self, record: Record) -> None:
        self._path = record.readings
        self._is_kept = record.is_kept
        self._writer: RecordingWriter | None = None
        self.failure: str | None = None
        """Why the last look could not be written. The next one is tried again."""

    def append(self, look: Look) -> None:
        if not self._is_kept:
            return
        try:
            if self._writer is None:
                self._writer = RecordingWriter(self._path, private=True)
            self._writer.append(look)
            if self._writer.size > MOST_READINGS:
                self._turn_over()
            self.failure = None
        except (StokerError, OSError) as error:
            self.failure = str(error)
            self.close()

    def recent(self, seconds: float) -> list[Look]:
        """The looks of the last `seconds`, oldest first."""
        since = time.monotonic() - seconds
        looks: list[Look] = []
        for part in (_older(self._path), self._path):
            with contextlib.suppress(StokerError):
                # Times of one run are of one boot, so they are this process's own.
                looks += [look for look in RecordingReader(part) if look.at >= since]
        return looks

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):
                writer.close()

    def _turn_over(self) -> None:
        self.close()
        self._path.replace(_older(self._path))


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
