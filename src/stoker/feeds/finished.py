"""The file of finished commands: each job that succeeded is appended once, whoever dies in the middle of it."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from stoker.errors import StokerError
from stoker.queue.model import Job


class FileAwayError(StokerError):
    """A file cannot be read or written now; later it may."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the journal: what is about to be appended, or, without a text, that it was."""

    jobs: tuple[str, ...] = ()
    at: int = 0
    """How long the file was before."""
    text: str = ""


class FinishedFile:
    """It belongs to people: they may edit, empty or remove it. What was appended is remembered in a file beside it."""

    def __init__(self, path: Path, appended: str = "") -> None:
        """`appended`: what the feed put behind each command, and is left out here."""
        self.path = path
        self._appended = appended
        self._journal = path.with_name(f".{path.name}.stoker")
        self._seen: set[str] = set()
        """Jobs that are known to be in it."""

    def append(self, jobs: Sequence[Job]) -> None:
        """Appends the commands of those jobs that it does not have yet."""
        unseen = [job for job in jobs if job.id not in self._seen]
        if not unseen:
            return
        try:
            with self._locked() as journal:
                known = self._known(journal)
                if fresh := [job for job in unseen if job.id not in known]:
                    self._append(journal, fresh)
                self._seen |= {job.id for job in unseen}
        except OSError as error:
            raise FileAwayError(f"finished commands cannot be written to {self.path}: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The journal, for one feeder at a time."""
        with self._journal.open("a+b") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            yield journal

    def _known(self, journal: BinaryIO) -> set[str]:
        """The jobs that are in the file. What somebody began to append and could not finish is finished first."""
        journal.seek(0)
        entries = [_entry(line) for line in journal.read().splitlines()]
        if entries and entries[-1] is not None and entries[-1].text:
            self._mend(entries[-1])
            _write(journal, Entry())
        return {job for entry in entries if entry is not None for job in entry.jobs}

    def _append(self, journal: BinaryIO, jobs: Sequence[Job]) -> None:
        with self.path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            text = _separator(file, size) + "".join(f"{_one_line(job, self._appended)}\n" for job in jobs)
            _write(journal, Entry(tuple(job.id for job in jobs), size, text))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        _write(journal, Entry())

    def _mend(self, entry: Entry) -> None:
        text = entry.text.encode()
        with self.path.open("a+b") as file:
            file.seek(entry.at)
            there = file.read(len(text))
            if text.startswith(there):
                file.write(text[len(there) :])
            else:
                # Somebody has edited it since: all of it is there, or none.
                file.seek(0)
                if text.strip() not in file.read():
                    file.write(text)


def _write(journal: BinaryIO, entry: Entry) -> None:
    # A line that was cut off by a crash or a full disk is ended by the first newline.
    journal.write(b"\n" + msgspec.json.encode(entry) + b"\n")
    journal.flush()
    os.fsync(journal.fileno())


def _entry(line: bytes) -> Entry | None:
    """None for what is no entry: an empty line, or half of one that was never acted on."""
    try:
        return msgspec.json.decode(line, type=Entry) if line else None
    except msgspec.DecodeError:
        return None


def _separator(file: BinaryIO, size: int) -> str:
    """A newline, where the last one to write into the file left that out."""
    if not size:
        return ""
    file.seek(size - 1)
    return "" if file.read(1) == b"\n" else "\n"


def _one_line(job: Job, appended: str) -> str:
    """As it was written in the feed; a person may have edited it since."""
    words = job.command if isinstance(job.command, str) else " ".join(job.command)
    words = words.removesuffix(f" {appended}") if appended else words
    return " ".join(words.splitlines())
