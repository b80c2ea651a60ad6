"""Decides when to warn the owner of a job and when to cancel the job. Pure.

An owner gets two warnings before a cancellation: when a rule first warns, and halfway to the stop. Only delivered
warnings count.
"""

import math
import time
from collections.abc import Collection
from typing import Final, Literal, NamedTuple

import msgspec

from stoker.engines.slurm.watch.jobs import ClusterJob
from stoker.rules.judge import Judgement
from stoker.units import format_duration

# After a restart of the watcher, older warnings are obsolete.
REMEMBERED_FOR: Final = 86400.0
# Long enough for a mail server to restart.
TRY_AGAIN_AFTER: Final = 300.0


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The warnings that a job's owner got. Times are seconds since the epoch."""

    first: float
    second: float | None = None
    stop_at: float | None
    """The time of cancellation in the last warning; None if it announced none."""

    @property
    def last(self) -> float:
        return self.first if self.second is None else self.second


class NoticeStep(NamedTuple):
    """The next thing to do."""

    kind: Literal["warn", "stop"]
    number: int = 0
    """The number of the warning: 1 or 2."""
    stop_at: float | None = None
    """The time of cancellation in the warning."""


class OwnerNotices:
    """The notices of all jobs, by key."""

    def __init__(self, notice: float, found: dict[str, Notice], now: float) -> None:
        """`notice`: the minimum time from the first warning to the cancellation. `found`: notices of an earlier
        process."""
        self._notice = notice
        self._notices = {key: one for key, one in found.items() if now - one.last < REMEMBERED_FOR}
        self._not_before: dict[str, float] = {}
        """The earliest time of the next try after a failed or running step."""

    def all(self) -> dict[str, Notice]:
        return dict(self._notices)

    def decide(self, key: str, judgement: Judgement, now: float) -> NoticeStep | None:
        """The next step, from the judgement of the job's newest observation."""
        if judgement.verdict.kind == "busy":
            # The job works again, so the next time starts with a first warning.
            self._notices.pop(key, None)
            return None
        is_late = judgement.warned is not None or judgement.fired
        if not is_late or now < self._not_before.get(key, -math.inf):
            return None
        notice = self._notices.get(key)
        acts_in = 0.0 if judgement.fired else judgement.acts_in
        if notice is None:
            return NoticeStep("warn", 1, None if acts_in is None else now + max(acts_in, self._notice))
        return None if acts_in is None else self._after_first(notice, acts_in, now, fired=judgement.fired)

    def _after_first(self, notice: Notice, acts_in: float, now: float, *, fired: bool) -> NoticeStep | None:
        if notice.second is None:
            stop_at = max(now + acts_in, notice.first + self._notice, now + self._notice / 2)
            is_due = fired or notice.stop_at is None or now >= (notice.first + notice.stop_at) / 2
            return NoticeStep("warn", 2, stop_at) if is_due else None
        may_stop = now >= max(notice.first + self._notice, notice.second + self._notice / 2)
        return NoticeStep("stop") if fired and may_stop else None

    def begin(self, key: str, now: float) -> None:
        """Notes that a step is running, so that no other starts before it ends or fails."""
        self._not_before[key] = now + TRY_AGAIN_AFTER

    def warned(self, key: str, step: NoticeStep, now: float) -> None:
        """Notes a delivered warning."""
        self._not_before.pop(key, None)
        notice = self._notices.get(key)
        if notice is None:
            self._notices[key] = Notice(first=now, stop_at=step.stop_at)
        else:
            self._notices[key] = msgspec.structs.replace(notice, second=now, stop_at=step.stop_at)

    def keep_only(self, keys: Collection[str]) -> None:
        """Forgets jobs that have ended."""
        self._notices = {key: one for key, one in self._notices.items() if key in keys}
        self._not_before = {key: at for key, at in self._not_before.items() if key in keys}


def warning_text(job: ClusterJob, step: NoticeStep, reason: str, now: float, *, stops: bool) -> tuple[str, str]:
    """Title and body of a warning."""
    title = f"Slurm job {job.id} ({job.name}) does not use its GPUs"
    until = time.strftime("%Y-%m-%d", time.localtime(now + 86400))
    lines = [f"{job.label} on {','.join(job.nodes)}: {reason}."]
    if step.stop_at is None:
        title = f"Slurm job {job.id} ({job.name}) may hang"
        lines.append("It is not cancelled, but it may be worth a look.")
    elif stops:
        at = time.strftime("%H:%M", time.localtime(step.stop_at))
        left = format_duration(max(round(step.stop_at - now), 0))
        title = f"{title} and is cancelled at {at}"
        lines += [
            f"It is cancelled at {at} (in {left}) if it does not use them before. To keep it:",
            f'  scontrol update jobid={job.id} comment="stoker: keep until {until}"',
        ]
    return title, "\n".join(lines)
