"""The loop of `stoker watch --slurm`: lists jobs, runs a step beside each, warns owners, cancels jobs."""

import functools
import os
import pwd
import select
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.actions.action import ActionError, RunningAction, log_to_stderr
from stoker.actions.notify import AppriseChannel
from stoker.actions.systemd import ServiceManager
from stoker.actions.watcher import Wakeup
from stoker.engines.slurm.client import Running
from stoker.engines.slurm.watch.commands import cancel, cluster_name, running_jobs
from stoker.engines.slurm.watch.jobs import ClusterJob, Exemptions, parse_jobs
from stoker.engines.slurm.watch.notices import Notice, NoticeStep, OwnerNotices, warning_text
from stoker.engines.slurm.watch.usage import DailyUsage, last_monday, table_text, usage_rows
from stoker.engines.slurm.watch.watched import WatchedJob
from stoker.errors import StokerError
from stoker.paths import private_directory, write_atomically
from stoker.rules.judge import Judgement
from stoker.rules.registry import in_words
from stoker.rules.rule import Policy
from stoker.settings import Settings
from stoker.units import parse_duration

_SIGNALLED: Final = 128
ASK_EVERY: Final = 30.0
# A list of jobs older than this many intervals decides nothing: the controller is away.
_FRESH: Final = 3.0
# The limit of steps started per round, to spare the controller.
_STARTS: Final = 10
_SAVE_EVERY: Final = 300.0
_PATIENCE: Final = 90.0
_COMMENT: Final = 250


class SlurmWatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `stoker watch --slurm`."""

    user: str | None
    """The owner of the jobs; None for all users."""
    warn: bool = False
    stop: bool = False
    policies: tuple[Policy, ...]
    interactive: tuple[Policy, ...]
    """The same policies with the window of interactive jobs."""
    home: Path
    """The directory of notices and usage."""
    ask_every: float = ASK_EVERY

    @property
    def dry_run(self) -> bool:
        return not (self.warn or self.stop)


class _Kept(msgspec.Struct):
    """The file `watch.json`."""

    notices: dict[str, Notice] = {}
    table_sent: float = 0.0


class _Work(NamedTuple):
    """An action in a thread, with its callback."""

    running: RunningAction
    done: Callable[[str | None], None]


class SlurmWatcher:
    """A single-threaded loop around `poll`; slow actions run in threads."""

    def __init__(
        self, options: SlurmWatchOptions, settings: Settings, *, log: Callable[[str], None] = log_to_stderr
    ) -> None:
        """Raises BadInputError for settings that cannot work."""
        self._options = options
        self._settings = settings
        self._log = log
        self._exemptions = Exemptions(settings.slurm_watch)
        wall = time.time()
        self._kept = _read_kept(options.home / "watch.json")
        # A dry run neither loads nor saves notices.
        found = {} if options.dry_run else self._kept.notices
        self._notices = OwnerNotices(parse_duration(settings.slurm_watch.notice), found, wall)
        self._kept.table_sent = self._kept.table_sent or wall
        self._usage = DailyUsage(options.home, wall)
        self._service = ServiceManager(os.environ)
        self._wakeup = Wakeup()
        self._work: list[_Work] = []
        self._cluster = ""
        """Its name; empty until it was read."""
        self._jobs: dict[str, WatchedJob] = {}
        self._left_alone: dict[str, str] = {}
        self._leaving: list[WatchedJob] = []
        self._asked: Running | None = None
        self._ask_at = time.monotonic()
        self._listed_at: float | None = None
        """When the list of jobs was last read."""
        self._away = False
        self._save_at = time.monotonic() + _SAVE_EVERY

    def run(self) -> int:
        with self._wakeup:
            self._log(self._in_words())
            self._service.ready("watching Slurm's jobs")
            try:
                while self._wakeup.signal is None:
                    self._wait()
                    self._round()
            finally:
                self._service.stopping()
                self._end()
        return _SIGNALLED + self._wakeup.signal

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        due = [self._ask_at, self._save_at, *(work.running.deadline for work in self._work)]
        if self._asked is not None:
            due[0] = self._asked.due()
            poll.register(self._asked.fileno(), select.POLLIN)
        for watched in self._jobs.values():
            due.append(watched.due())
            if watched.step is not None:
                poll.register(watched.step.fileno(), select.POLLIN)
        if self._leaving:
            due.append(time.monotonic() + 1.0)
        if (ping := self._service.keep_alive(time.monotonic())) is not None:
            due.append(ping)
        # A short sleep batches the output of many steps.
        wait = max(min(due) - time.monotonic(), 0.0)
        if poll.poll(wait * 1000 + 1) and self._wakeup.signal is None:
            time.sleep(0.02)

    def _round(self) -> None:
        self._wakeup.clear()
        now, wall = time.monotonic(), time.time()
        self._finish_work()
        self._list_jobs(now, wall)
        starts = _STARTS
        for watched in list(self._jobs.values()):
            starts -= self._start_step(watched, now, starts)
            watched.read(now)
            if (judged := watched.judge(now)) is not None:
                judgement, used = judged
                self._usage.observe(wall, watched.job.user, used.watched, used.idle)
                self._consider(watched, judgement, now, wall)
        self._leaving = [watched for watched in self._leaving if not _has_left(watched)]
        if now >= self._save_at:
            self._save_at = now + _SAVE_EVERY
            self._save()
            self._send_table(wall)

    def _start_step(self, watched: WatchedJob, now: float, starts: int) -> int:
        if watched.step is not None or now < watched.due():
            return 0
        running = sum(one.step is not None for one in self._jobs.values())
        if starts <= 0 or running >= self._settings.slurm_watch.most_steps:
            return 0
        watched.begin_step(now)
        return 1

    # The list of jobs

    def _list_jobs(self, now: float, wall: float) -> None:
        if self._asked is None and now >= self._ask_at:
            self._asked = running_jobs(self._options.user)
        if self._asked is None or not self._asked.has_ended():
            return
        asked, self._asked = self._asked, None
        self._ask_at = now + self._options.ask_every
        try:
            jobs = parse_jobs(asked.result())
        except (StokerError, ValueError) as error:
            if not self._away:
                self._log(f"Slurm cannot be asked for its jobs, so nothing is decided: {error}")
            self._away = True
            return
        if self._away:
            self._log("Slurm answers again")
            self._away = False
        passed = 0.0 if self._listed_at is None else min(now - self._listed_at, self._options.ask_every * _FRESH)
        self._listed_at = now
        self._take_list(jobs, passed, wall)

    def _take_list(self, jobs: Sequence[ClusterJob], passed: float, wall: float) -> None:
        listed = {job.key: job for job in jobs}
        for key in self._jobs.keys() - listed.keys():
            self._leave(key)
        self._left_alone = {key: why for key, why in self._left_alone.items() if key in listed}
        self._notices.keep_only(listed)
        for key, job in listed.items():
            self._usage.allocate(wall, job.user, job.id, passed * job.gpus)
            why = self._exemptions.why(job, wall)
            watched = self._jobs.get(key)
            if why is None and watched is not None and watched.supervised:
                why = "a 'stoker run' in it supervises it"
            if why is None and key in self._left_alone and "supervises" in self._left_alone[key]:
                continue
            if why is not None:
                if self._left_alone.get(key) != why:
                    self._log(f"{job.label} is left alone: {why}")
                self._left_alone[key] = why
                self._leave(key)
                continue
            self._left_alone.pop(key, None)
            if watched is None:
                policies = self._options.interactive if job.interactive else self._options.policies
                self._cluster = self._cluster or cluster_name()
                self._jobs[key] = WatchedJob(job, policies, self._cluster, dry_run=self._options.dry_run)
            else:
                watched.job = job
                self._report_problem(watched)
                if watched.step is not None:
                    watched.step.keep()
        self._service.status(f"{len(self._jobs)} jobs are watched, {len(self._left_alone)} are left alone")

    def _report_problem(self, watched: WatchedJob) -> None:
        """Logs a problem once it persists: a step also ends when its job does."""
        if watched.problem and watched.problem != watched.reported:
            self._log(f"{watched.job.label} is unknown: {watched.problem}")
        watched.reported = watched.problem

    def _leave(self, key: str) -> None:
        watched = self._jobs.pop(key, None)
        if watched is not None and watched.step is not None:
            watched.step.leave()
            self._leaving.append(watched)

    # Warnings and stops

    def _consider(self, watched: WatchedJob, judgement: Judgement, now: float, wall: float) -> None:
        job = watched.job
        for message in judgement.messages:
            self._log(f"{job.label}: {message.text}")
        # Without a recent list the job may have ended or been exempted.
        if self._listed_at is None or now - self._listed_at > self._options.ask_every * _FRESH or watched.supervised:
            return
        step = self._notices.decide(job.key, judgement, wall)
        if step is None:
            return
        reason = judgement.verdict.reason
        self._notices.begin(job.key, wall)
        if step.kind == "warn":
            self._warn(job, step, reason)
        elif self._options.stop:
            self._cancel(job, reason)

    def _warn(self, job: ClusterJob, step: NoticeStep, reason: str) -> None:
        title, text = warning_text(job, step, reason, time.time(), stops=self._options.stop)
        if self._options.dry_run:
            self._log(f"dry run: {job.user} would be warned ({step.number} of 2): {title}")
            self._notices.warned(job.key, step, time.time())
            return

        def done(failure: str | None) -> None:
            if failure is not None:
                self._log(f"{job.label}: its owner could not be warned, so it is not cancelled: {failure}")
                return
            wall = time.time()
            self._notices.warned(job.key, step, wall)
            self._usage.count(wall, job.user, warnings=1)
            self._log(f"{job.user} was warned ({step.number} of 2): {title}")
            self._save()

        self._begin(functools.partial(self._send_to_owner, job.user, title, text), done)

    def _send_to_owner(self, user: str, title: str, text: str) -> None:
        urls = [self._settings.slurm_watch.owner.replace("{user}", urllib.parse.quote(user, safe=""))]
        if not urls[0]:
            # A user who watches only their own jobs gets the usual notifications.
            urls = list(self._settings.notify.urls)
        for url in urls:
            _send(url, "[slurm-watch] owner", title, text)

    def _cancel(self, job: ClusterJob, reason: str) -> None:
        complaints: list[str] = []

        def work() -> None:
            try:
                complaint = cancel(job.id, f"stoker cancelled it: {reason}"[:_COMMENT])
            except StokerError as error:
                raise ActionError(str(error)) from None
            if complaint is not None:
                complaints.append(complaint)

        def done(failure: str | None) -> None:
            if failure is not None:
                self._log(f"{job.label} could not be cancelled: {failure}")
                return
            for complaint in complaints:
                self._log(f"the comment of job {job.id} could not be set: {complaint}")
            self._usage.count(time.time(), job.user, stops=1)
            self._log(f"{job.label} was cancelled: {reason}")
            self._save()

        self._begin(work, done)

    def _send_table(self, wall: float) -> None:
        url = self._settings.slurm_watch.administrator
        since = last_monday(wall)
        if not url or self._kept.table_sent >= since:
            return
        rows = usage_rows(self._options.home, since - 7 * 86400, since)
        self._kept.table_sent = wall
        body = table_text(rows) if rows else "No job had a GPU."

        def done(failure: str | None) -> None:
            if failure is not None:
                self._log(f"the weekly table was not sent: {failure}")

        send = functools.partial(_send, url, "[slurm-watch] administrator", "Stoker: GPU-hours of the week", body)
        self._begin(send, done)

    def _begin(self, work: Callable[[], None], done: Callable[[str | None], None]) -> None:
        self._work.append(_Work(RunningAction(work, _PATIENCE, self._wakeup.wake), done))

    def _finish_work(self) -> None:
        over = [work for work in self._work if work.running.over]
        self._work = [work for work in self._work if work not in over]
        for work in over:
            work.done(work.running.failure)

    # What is kept

    def _save(self) -> None:
        try:
            private_directory(self._options.home)
            self._usage.save(time.time())
            if not self._options.dry_run:
                self._kept.notices = self._notices.all()
            write_atomically(self._options.home / "watch.json", msgspec.json.encode(self._kept))
        except OSError as error:
            self._log(f"what was sent and used cannot be kept in {self._options.home}: {error.strerror}")

    def _end(self) -> None:
        self._save()
        if self._asked is not None:
            self._asked.kill()
        left = [watched for watched in (*self._jobs.values(), *self._leaving) if watched.step is not None]
        for watched in left:
            if watched.step is not None:
                watched.step.leave()
        for watched in left:
            if watched.step is not None:
                watched.step.close()

    def _in_words(self) -> str:
        options = self._options
        whose = "all users" if options.user is None else options.user
        what = "warn the owner twice, then cancel the job" if options.stop else "warn the owner"
        dry = " (dry run: nothing is sent or cancelled; --warn or --stop changes that)" if options.dry_run else ""
        return f"watching the Slurm jobs of {whose}: {in_words(options.policies)}, then {what}{dry}"


def _send(url: str, where: str, title: str, text: str) -> None:
    channel = AppriseChannel(url)
    try:
        channel.prepare(where)
        channel.send(title, text, "warning")
    except StokerError as error:
        raise ActionError(str(error)) from None
    finally:
        channel.close()


def _has_left(watched: WatchedJob) -> bool:
    step = watched.step
    if step is None:
        return True
    step.reports()
    if step.over() is None:
        return False
    step.close()
    return True


def _read_kept(path: Path) -> _Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return _Kept()


def own_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
