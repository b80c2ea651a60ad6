"""The session of `stoker top`: what is shown, and what each key does."""

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from rich.text import Text

from stoker.cli.output import count_of
from stoker.cli.top.screen import (
    GroupRow,
    TopView,
    filled,
    frame,
    job_of,
    key_of,
    progress_bar,
    sections,
    selected,
)
from stoker.cli.top.terminal import HELP, TopTerminal
from stoker.errors import BadInputError, StokerError
from stoker.logs.reader import local_tail
from stoker.logs.terminal import plain_text
from stoker.queue.explanation import spoken
from stoker.queue.groups import Group
from stoker.queue.listing import GROUP_PREFIX
from stoker.queue.model import Attempt, Job
from stoker.queue.provenance import login_name
from stoker.queue.steering import CANCEL, HOLD, RELEASE, RETRY, Verb, moving, why_not_any_more
from stoker.queue.store import Store
from stoker.status.detail import AttemptDetail, JobDetail, read_detail
from stoker.status.health import without_queue
from stoker.status.job_text import command_text, job_label, job_title, one_line
from stoker.status.model import Health, Snapshot
from stoker.status.snapshot import SnapshotBuilder
from stoker.units import clock_time, format_duration

if TYPE_CHECKING:
    from stoker.queue import Store

# Utilization, progress and times change even if the queue does not.
_LOOK_EVERY: Final = 1.0
# Minimum interval, regardless of changes of the queue.
_SECONDS_BETWEEN_LOOKS: Final = 0.2
_LINES_OF_LOG: Final = 200
_STEPS: Final = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -(10**6), "end": 10**6}
_ON_A_JOB: Final = frozenset({"enter", "right", "left", "l", "c", "r", "h", "u", "d", "s"})

Mode = Literal["jobs", "job", "help"]


class TopSession:
    def __init__(self, store: Store, home: Path, terminal: TopTerminal, queue: str | None) -> None:
        self._store = store
        self._home = home
        self._terminal = terminal
        self._queue = queue
        self._builder = SnapshotBuilder(home)
        self._snapshot: Snapshot | None = None
        self._health: Health | None = None
        """The health at the last answer of the queue."""
        self._detail: tuple[JobDetail, list[str]] | None = None
        self._view: TopView = TopView()
        self._mode: Mode = "jobs"
        self._question: Callable[[], str] | None = None
        """The action of `y`."""
        self._due = 0.0

    def run(self) -> int:
        """Runs until q or a signal; returns the exit code."""
        changes = self._store.listen()
        looked = -_SECONDS_BETWEEN_LOOKS
        try:
            while (code := self._terminal.leaves_with) is None:
                if time.monotonic() >= self._due:
                    self._look()
                    looked = time.monotonic()
                    self._due = looked + _LOOK_EVERY
                self._terminal.draw(self._lines(*self._terminal.size))
                for key in self._terminal.wait([changes.fileno()], self._due - time.monotonic()):
                    if not self._press(key):
                        return 0
                if changes.poll():
                    self._due = min(self._due, looked + _SECONDS_BETWEEN_LOOKS)
        finally:
            changes.close()
        return code

    # Display

    def _look(self) -> None:
        before = self._snapshot
        try:
            self._snapshot = self._builder.observe(self._store)
            self._health = self._snapshot.health
            self._change(away="")
            if self._mode == "job":
                self._read_detail()
            else:
                self._view = selected(self._snapshot, self._view)
        except StokerError as error:
            if self._snapshot is before:
                self._lose(str(error))
            self._change(away=f"{error} (waiting; this state is outdated)")

    def _lose(self, why: str) -> None:
        """Shows the outage of the queue as the health: the last good state must not look current."""
        if self._snapshot is not None and self._health is not None:
            self._snapshot = msgspec.structs.replace(self._snapshot, health=without_queue(self._health, why))

    def _read_detail(self) -> None:
        if self._view.selected is None:
            return
        detail = read_detail(self._store, self._view.selected, self._home)
        last = detail.last
        self._detail = detail, [] if last is None else last_words(self._store, self._home, last.attempt)

    def _lines(self, width: int, height: int) -> list[Text]:
        if self._mode == "help":
            return help_frame(self._view, width, height)
        if self._mode == "job" and self._detail is not None:
            return detail_frame(*self._detail, self._view, width, height)
        if self._snapshot is None:
            return filled([], self._view, width, height)
        return frame(self._snapshot, self._view, width, height)

    # Keys

    def _press(self, key: str) -> bool:
        """False for quit."""
        if self._question is not None:
            question, self._question = self._question, None
            self._perform(question if key == "y" else lambda: "nothing was done")
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
            self._perform(lambda: turn_queue(self._store))
        elif key in _ON_A_JOB and (found := self._selected()) is not None:
            if isinstance(found, Group):
                self._act_on_group(key, found)
            else:
                self._act_on(key, found)

    def _act_on(self, key: str, job: Job) -> None:
        if key == "enter":
            self._mode = "job"
            self._due = 0.0
        elif key in {"left", "right"}:
            if key == "left" and job.group in self._view.unfolded:
                self._fold(job.group)
        elif key == "l":
            self._follow(job)
        elif key == "c" and job.state == "running":
            self._change(note=f"{job_title(job)} is running: stop it? y/n")
            self._question = lambda: act(self._store, key, job.id)
        else:
            self._perform(lambda: act(self._store, key, job.id))

    def _act_on_group(self, key: str, group: Group) -> None:
        if key in {"enter", "left", "right"}:
            unfolded = self._view.unfolded
            if group.name in unfolded and key != "right":
                self._fold(group.name)
            elif key != "left":
                self._view = msgspec.structs.replace(self._view, unfolded=unfolded | {group.name})
        elif key in {"l", "s"}:
            self._change(note="that is for one job: → unfolds the group")
        else:
            self._perform(lambda: self._ask_group(key, group.name))

    def _fold(self, name: str) -> None:
        """Folds a group and selects it."""
        unfolded = self._view.unfolded - {name}
        self._view = msgspec.structs.replace(self._view, unfolded=unfolded, selected=f"{GROUP_PREFIX}{name}")

    def _ask_group(self, key: str, name: str) -> str:
        """The question before an action on all suitable jobs of a group, or why there is none."""
        verb, jobs = verb_for_group(self._store, key, name)
        if not jobs:
            return f"no job of {name} can be {verb.done}: none is {' or '.join(verb.among)}"
        if key in {"u", "d"}:
            return steer_group(self._store, verb, name, jobs)
        runs = sum(job.state == "running" for job in jobs)
        also = f", {runs} of them running" if runs and runs < len(jobs) else ", which runs" if runs == 1 else ""
        also = also or (", all of them running" if runs else "")
        self._question = lambda: steer_group(self._store, verb, name, jobs)
        return f"{verb.name} {count_of(len(jobs), 'job')} of {name}{also}? y/n"

    def _step(self, step: int) -> None:
        if self._snapshot is None:
            return
        view = selected(self._snapshot, self._view, step)
        if self._mode == "job":
            # A group has no details; use the next job.
            onward = 1 if step > 0 else -1
            while (view.selected or "").startswith(GROUP_PREFIX):
                before, view = view, selected(self._snapshot, view, onward)
                if view == before:
                    return
            self._due = 0.0
        self._view = view

    def _turn_mine(self) -> None:
        me = login_name()
        if not self._view.mine and not me:
            self._change(note="your user name is unknown: all jobs are shown")
            return
        self._change(mine="" if self._view.mine else me)
        if self._snapshot is not None:
            self._view = selected(self._snapshot, self._view)

    def _selected(self) -> Job | Group | None:
        if self._mode == "job" and self._detail is not None:
            return self._detail[0].job
        found = sections(self._snapshot, self._view) if self._snapshot is not None else ()
        for row in (row for section in found for row in section.rows):
            if key_of(row) == self._view.selected:
                return row.group if isinstance(row, GroupRow) else job_of(row)
        self._change(note="no job is selected")
        return None

    def _follow(self, job: Job) -> None:
        """Gives the screen to `stoker logs -f` until q."""
        program = [sys.executable, "-P", "-m", "stoker.cli", "logs", "-f", "-n", str(_LINES_OF_LOG), job.id]
        # Not as an argument: the address may contain a password, and every user can see arguments.
        environment = {**os.environ, **({"STOKER_QUEUE": self._queue} if self._queue else {})}
        with self._terminal.released():
            _say(f"the log of job {job.id}: q returns")
            follower = subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL)
            is_over = False
            try:
                while self._terminal.leaves_with is None and not {"q", "escape"} & set(self._terminal.wait([], 0.5)):
                    if not is_over and follower.poll() is not None:
                        is_over = True
                        _say("it has ended: q returns")
            except KeyboardInterrupt:
                pass  # Ctrl-C ends the log only
            finally:
                follower.terminate()
                follower.wait()
        self._due = 0.0

    def _perform(self, action: Callable[[], str]) -> None:
        """Performs an action, shows its result, and refreshes."""
        try:
            self._change(note=action())
        except StokerError as error:
            self._change(note=f"nothing was done: {error}")
        self._due = 0.0

    def _change(self, **changes: str) -> None:
        self._view = msgspec.structs.replace(self._view, **changes)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"stoker: {sentence}\n".encode())


# `stoker snooze` takes any duration.
SNOOZE_SECONDS: Final = 1800.0

VERBS: Final[dict[str, Verb]] = {"c": CANCEL, "r": RETRY, "u": moving("up"), "d": moving("down")}


def act(store: "Store", key: str, job: str) -> str:
    """Applies the action of a key to a job; returns the result."""
    if key == "s":
        return _snooze(store, job)
    if key == "h":
        return _steer(store, RELEASE if store.jobs.get(job).state == "held" else HOLD, job)
    return _steer(store, VERBS[key], job)


def verb_for_group(store: "Store", key: str, name: str) -> tuple[Verb, list[Job]]:
    """The action of a key for a group, and the jobs to which it applies."""
    members = store.jobs.members(f"{GROUP_PREFIX}{name}")
    verb = VERBS[key] if key != "h" else HOLD if any(job.state == "queued" for job in members) else RELEASE
    now = store.clock()
    return verb, [job for job in members if job.state in verb.among and verb.obstacle(job, now) is None]


def steer_group(store: "Store", verb: Verb, name: str, jobs: Sequence[Job]) -> str:
    """Applies the action to these jobs of a group; returns the result."""
    became = verb.apply(store, [job.id for job in jobs])
    done = [f"{count_of(number, 'job')} {what}" for what, number in Counter(became.values()).items()]
    return f"{name}: {', '.join(done) or 'nothing was done, its jobs have just changed'}"


def turn_queue(store: "Store") -> str:
    """Pauses or resumes the queue."""
    if store.paused():
        store.pause(False)
        return "the queue is resumed"
    store.pause()
    return "the queue is paused: no more jobs start, running jobs continue; p resumes it"


def _steer(store: "Store", verb: Verb, name: str) -> str:
    job = store.jobs.get(name)
    title = job_title(job)
    obstacle = verb.obstacle(job, store.clock())
    if obstacle is None:
        if became := verb.apply(store, [job.id]).get(job.id):
            return f"{title}: {became}"
        obstacle = why_not_any_more(store, job.id, verb)
    return f"{title} was not {verb.done}: {obstacle}"


def _snooze(store: "Store", name: str) -> str:
    job = store.jobs.get(name)
    if job.state != "running" or job.attempt is None:
        raise BadInputError("only a running job can be snoozed")
    named = job_title(job)
    if not store.attempts.snooze(job.attempt, SNOOZE_SECONDS, login_name()):
        return f"{named} has just ended"
    now = store.clock()
    return f"{named} is snoozed for {format_duration(SNOOZE_SECONDS)}, until {clock_time(now + SNOOZE_SECONDS, now)}"


# More than the largest terminal can show.
_TAIL: Final = 32 * 1024
_MOST_ATTEMPTS: Final = 5


def last_words(store: "Store", home: Path, attempt: Attempt) -> list[str]:
    """The last lines of its output, without control characters."""
    text = local_tail(home, attempt, _TAIL)
    text = store.logs.read(attempt.id)[-_TAIL:] if text is None else text
    return [one_line(line) for line in plain_text(text).rstrip("\n").split("\n")]


def detail_frame(detail: JobDetail, output: Sequence[str], view: TopView, width: int, height: int) -> list[Text]:
    head = _about(detail)
    room = max(0, height - 1 - len(head))
    tail = [Text(line) for line in output[-room:]] if room else []
    hint = "q back  l log  c cancel  r retry  h hold  u/d move  s snooze"
    return filled([*head, *tail], view, width, height, hint)


def help_frame(view: TopView, width: int, height: int) -> list[Text]:
    lines = [Text.assemble((f"  {keys:<10}", "bold"), does) for keys, does in HELP]
    return filled([Text("stoker top", style="bold"), Text(""), *lines], view, width, height, "q back")


def _about(detail: JobDetail) -> list[Text]:
    job = detail.job
    lines = [
        Text.assemble((job_label(job), "bold"), (f"  {job.id}", "dim")),
        Text(one_line(detail.why.reason)),
        Text.assemble(("command   ", "dim"), one_line(command_text(job))),
        Text.assemble(("in        ", "dim"), one_line(job.directory)),
    ]
    facts = [f"submitted {clock_time(job.submitted, detail.now)}"]
    facts += [f"by {one_line(job.submitter)}"] if job.submitter else []
    facts += [f"priority {job.priority}"] if job.priority else []
    facts += [f"tagged {one_line(', '.join(job.tags))}"] if job.tags else []
    lines.append(Text(", ".join(facts), style="dim"))
    if job.link:
        lines.append(Text.assemble(("page      ", "dim"), one_line(job.link)))
    if detail.snoozed_until is not None:
        lines.append(Text(f"snoozed for {spoken(detail.snoozed_until - detail.now)} more", style="yellow"))
    if detail.progress is not None:
        lines.append(progress_bar(detail.progress))
    lines += [_attempt(one, detail.now) for one in detail.attempts[-_MOST_ATTEMPTS:]]
    if detail.last is not None:
        where = "" if detail.last.whole_here else f" (its end; the whole is on {one_line(detail.last.host)})"
        lines.append(Text(f"output{where}", style="dim underline"))
    return lines


def _attempt(one: AttemptDetail, now: float) -> Text:
    attempt = one.attempt
    gpus = one_line(attempt.where) or ",".join(one.gpus) or "no GPU"
    outcome = attempt.outcome or ("pending" if attempt.pending else "running")
    lasted = spoken((attempt.ended if attempt.ended is not None else now) - attempt.started)
    because = f": {one_line(attempt.reason)}" if attempt.reason else ""
    return Text.assemble(
        (f"attempt {attempt.number} ", "dim"),
        f"on {one_line(one.host)} ({gpus}), {clock_time(attempt.started, now)}, {lasted}, ",
        (outcome, "red" if outcome in {"failed", "lost"} else "green" if outcome == "succeeded" else ""),
        because,
    )
