"""One person at one terminal with `stoker top`: what is shown, and what each key does."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
from rich.text import Text

from stoker.cli.top_acts import act, turn_queue
from stoker.cli.top_detail import detail_frame, help_frame, last_words
from stoker.cli.top_screen import View, chosen, frame, last_line, selected
from stoker.cli.top_terminal import Terminal
from stoker.errors import StokerError
from stoker.queue.model import Job
from stoker.queue.provenance import login_name
from stoker.queue.store import Store
from stoker.status.detail import Detail, read
from stoker.status.health import without_queue
from stoker.status.job_text import called
from stoker.status.model import Health, Snapshot
from stoker.status.snapshot import SnapshotBuilder

# Utilizations, progress and times go on without a word from the queue.
_LOOK_EVERY: Final = 1.0
# However often the bell rings.
_SECONDS_BETWEEN_LOOKS: Final = 0.2
# What one reads of a log before following it.
_LINES_OF_LOG: Final = 200
_STEPS: Final = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -(10**6), "end": 10**6}
_ON_A_JOB: Final = frozenset({"enter", "l", "c", "r", "h", "u", "d", "s"})

Mode = Literal["jobs", "job", "help"]


class Session:
    """One person at one terminal."""

    def __init__(self, store: Store, home: Path, terminal: Terminal, queue: str | None) -> None:
        self._store = store
        self._home = home
        self._terminal = terminal
        self._queue = queue
        self._observer = SnapshotBuilder(home)
        self._overview: Snapshot | None = None
        self._health: Health | None = None
        """What the queue's last answer came to."""
        self._detail: tuple[Detail, list[str]] | None = None
        self._view: View = View()
        self._mode: Mode = "jobs"
        self._question: Callable[[], str] | None = None
        """What a `y` does."""
        self._due = 0.0

    def run(self) -> int:
        """Until q, or until somebody ends it."""
        bell = self._store.bell()
        looked = -_SECONDS_BETWEEN_LOOKS
        try:
            while (code := self._terminal.leaves_with) is None:
                if time.monotonic() >= self._due:
                    self._look()
                    looked = time.monotonic()
                    self._due = looked + _LOOK_EVERY
                self._draw()
                for key in self._terminal.wait([bell.fileno()], self._due - time.monotonic()):
                    if not self._press(key):
                        return 0
                if bell.heard():
                    self._due = min(self._due, looked + _SECONDS_BETWEEN_LOOKS)
        finally:
            bell.close()
        return code

    # What is shown

    def _look(self) -> None:
        before = self._overview
        try:
            self._overview = self._observer.observe(self._store)
            self._health = self._overview.health
            self._change(away="")
            if self._mode == "job":
                self._read_detail()
            else:
                self._view = selected(self._overview, self._view)
        except StokerError as error:
            if self._overview is before:
                self._lose(str(error))
            self._change(away=f"{error} (waiting; what is shown is old)")

    def _lose(self, why: str) -> None:
        """That all was well when the queue was last asked must not be read as an answer."""
        if self._overview is not None and self._health is not None:
            self._overview = msgspec.structs.replace(self._overview, health=without_queue(self._health, why))

    def _read_detail(self) -> None:
        if self._view.selected is None:
            return
        detail = read(self._store, self._view.selected, self._home)
        last = detail.last
        self._detail = detail, [] if last is None else last_words(self._store, self._home, last.attempt)

    def _draw(self) -> None:
        self._terminal.draw(self._lines(*self._terminal.size))

    def _lines(self, width: int, height: int) -> list[Text]:
        if self._mode == "help":
            return help_frame(self._view, width, height)
        if self._mode == "job" and self._detail is not None:
            return detail_frame(*self._detail, self._view, width, height)
        if self._overview is None:
            return [last_line(self._view, width)]
        return frame(self._overview, self._view, width, height)

    # What keys do

    def _press(self, key: str) -> bool:
        """False when it is time to leave."""
        if self._question is not None:
            question, self._question = self._question, None
            self._tell(question() if key == "y" else "nothing was done")
            return True
        self._change(note="")
        if self._mode != "jobs" and key in {"q", "escape", "enter", "?"}:
            self._mode, self._detail = "jobs", None
            return True
        if key == "q":
            return False
        self._act(key)
        return True

    def _act(self, key: str) -> None:
        if key in _STEPS:
            self._step(_STEPS[key])
        elif key == "?":
            self._mode = "help"
        elif key == "a":
            self._turn_mine()
        elif key == "p":
            self._tell(turn_queue(self._store))
        elif key in _ON_A_JOB and (job := self._selected()) is not None:
            self._act_on(key, job)

    def _act_on(self, key: str, job: Job) -> None:
        if key == "enter":
            self._mode = "job"
            self._due = 0.0
        elif key == "l":
            self._follow(job)
        elif key == "c" and job.state == "running":
            self._change(note=f"{job.id} ({called(job)[:60]}) is running: stop it? y/n")
            self._question = lambda: act(self._store, key, job.id)
        else:
            self._tell(act(self._store, key, job.id))

    def _step(self, step: int) -> None:
        if self._overview is not None:
            self._view = selected(self._overview, self._view, step)
            if self._mode == "job":
                self._due = 0.0

    def _turn_mine(self) -> None:
        me = login_name()
        if not self._view.mine and not me:
            self._tell("who you are cannot be told here: all jobs are shown")
            return
        self._change(mine="" if self._view.mine else me)
        if self._overview is not None:
            self._view = selected(self._overview, self._view)

    def _selected(self) -> Job | None:
        if self._mode == "job" and self._detail is not None:
            return self._detail[0].job
        sections = chosen(self._overview, self._view) if self._overview is not None else ()
        for one in (one for section in sections for one in section):
            if one.job.id == self._view.selected:
                return one.job
        self._change(note="no job is selected")
        return None

    def _follow(self, job: Job) -> None:
        """Lends the screen to `stoker logs -f`, until it has ended and q was pressed."""
        program = [sys.executable, "-P", "-m", "stoker.cli", "logs", "-f", "-n", str(_LINES_OF_LOG), job.id]
        # Not as an argument: an address may hold a password, and arguments are seen by everybody.
        environment = {**os.environ, **({"STOKER_QUEUE": self._queue} if self._queue else {})}
        with self._terminal.lent():
            _say(f"the log of job {job.id}: q returns")
            follower = subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL)
            try:
                self._until_returning(follower)
            except KeyboardInterrupt:
                pass  # Ctrl-C ends the log, not what lent it the screen
            finally:
                follower.terminate()
                follower.wait()
        self._due = 0.0

    def _until_returning(self, follower: subprocess.Popen[bytes]) -> None:
        ended = os.pidfd_open(follower.pid)
        try:
            while self._terminal.leaves_with is None:
                over = follower.poll() is not None
                if over and ended >= 0:
                    os.close(ended)
                    ended = -1
                    _say("it has ended: q returns")
                if {"q", "escape"} & set(self._terminal.wait([ended], 3600.0)):
                    return
        finally:
            if ended >= 0:
                os.close(ended)

    def _tell(self, sentence: str) -> None:
        """The result of something, which may have changed what there is to see."""
        self._change(note=sentence)
        self._due = 0.0

    def _change(self, **changes: str) -> None:
        self._view = msgspec.structs.replace(self._view, **changes)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"stoker: {sentence}\n".encode())
