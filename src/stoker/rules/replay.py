"""Applies rules to recorded looks: when they would have fired, what that would have saved, and at what cost."""

import itertools
import statistics
from collections.abc import Container, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from stoker.gpus.model import Gpu, Look, Process, Unknown, known
from stoker.gpus.report import describe
from stoker.rules.judge import Judge, Judgement
from stoker.rules.rule import DEFAULT_EVERY, Activity, Policy, Verdict
from stoker.rules.scope import Scope

# Work that resumes this soon was only interrupted, by a break or between stages of a script.
SOON: Final = 600.0


class Moment(NamedTuple):
    """A time on the monotonic clock and on the wall clock of the recording."""

    at: float
    wall: float


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """A moment at which a rule would have acted, and the activity of the GPUs after it."""

    moment: Moment
    window_from: Moment
    """The start of the idle time of the required GPUs."""
    reason: str
    kind: str
    """The kind of the verdict: `idle`."""
    rule: str
    """The name of the rule."""
    hung: bool = False
    """These GPUs were in use: the job resumes with its next step, not with their use."""
    gpus: tuple[str, ...]
    """The uuids of the GPUs of the verdict, without those of an earlier firing that still holds."""
    working: tuple[str, ...]
    """The labels of busy GPUs, if not all had to be idle."""
    until: Moment
    """The next use of one of these GPUs, or the end of the recording. After a hang, the next step or the end of use."""
    resumed: bool
    """The job used a GPU again, or made a step."""
    resumed_by: str | None = None
    """The process that used it, if recorded."""
    same_process: bool | None = None
    """True if that process was on these GPUs when the rule fired; None if not recorded."""
    saved: float
    """GPU-seconds of idling or hanging from the firing until then."""

    @property
    def idle_after(self) -> float:
        return self.until.at - self.moment.at

    @property
    def hit_work(self) -> bool:
        """True if the stopped work would have continued by itself."""
        return self.resumed and (self.same_process is True or self.idle_after <= SOON)


class Warned(NamedTuple):
    """A warning that people would have got."""

    moment: Moment
    reason: str
    fired: bool
    """The rule fired in the end."""
    rule: str = ""


class Stretch(NamedTuple):
    """An unknown stretch of time, with its reason."""

    begun: Moment
    ended: Moment
    reason: str

    @property
    def seconds(self) -> float:
        return self.ended.at - self.begun.at


class GpuSeconds(NamedTuple):
    """Time summed over GPUs. The rest was busy."""

    recorded: float = 0.0
    idle: float = 0.0
    unknown: float = 0.0
    saved: float = 0.0
    hung: float = 0.0
    """Full use without work: the windows of such firings, and the time until the job resumed."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The results of rules on a recording."""

    policies: tuple[Policy, ...]
    gpus: tuple[Gpu, ...]
    looks: int
    begun: Moment
    ended: Moment
    firings: tuple[Firing, ...]
    warnings: tuple[Warned, ...]
    unknown: tuple[Stretch, ...]
    """Times with at least one unreadable GPU."""
    gaps: tuple[Stretch, ...]
    """Times without records, or with too few."""
    totals: GpuSeconds

    @property
    def every(self) -> float:
        return min(policy.every for policy in self.policies)

    @property
    def below(self) -> float:
        return _below(self.policies)

    @property
    def hits(self) -> int:
        """The number of firings that would have stopped interrupted work."""
        return sum(firing.hit_work for firing in self.firings)


def rhythm_of(looks: Sequence[Look]) -> float:
    """The usual interval of looks in seconds."""
    distances = [later.at - earlier.at for earlier, later in itertools.pairwise(looks)]
    forward = [distance for distance in distances if distance > 0]
    return statistics.median(forward) if forward else DEFAULT_EVERY


def replay(looks: Iterable[Look], policies: Sequence[Policy], scope: Scope) -> Replay:
    """Judges the looks by rules that start over after each firing."""
    player: _Player | None = None
    for look in looks:
        player = player or _Player(policies, scope, look)
        player.take(look)
    if player is None:
        raise ValueError("there is no look to replay")
    return player.result()


class _Player:
    def __init__(self, policies: Sequence[Policy], scope: Scope, first: Look) -> None:
        self._policies = tuple(policies)
        self._scope = scope
        self._judge = Judge(policies, first.at, "act")
        self._below = _below(policies)
        self._longest_gap = min(policy.longest_gap for policy in policies)
        self._begun = self._last = Moment(first.at, first.wall)
        self._looks = 0
        self._gpus: dict[str, Gpu] = {}
        self._gpu_list: Sequence[Gpu] = ()
        self._recorded = self._idle = self._unknown_time = 0.0
        self._firings: list[Firing] = []
        self._aftermaths: list[_Aftermath] = []
        self._warnings: list[Warned] = []
        self._unknown = _Stretches()
        self._gaps: list[Stretch] = []

    def take(self, look: Look) -> None:
        now = Moment(look.at, look.wall)
        observation = self._scope.observe(look)
        activities = observation.activities
        judgement = self._judge.observe(observation)
        passed = self._passed(now)
        states = _States(activities, self._below)
        self._recorded += passed * len(activities)
        self._idle += passed * len(states.idle)
        self._unknown_time += passed * len(states.unknown)
        self._unknown.take(self._last, now, _why_unknown(look, activities))
        if self._aftermaths:
            self._follow(passed, states, look)
        self._note_warning(now, judgement)
        if judgement.fired:
            self._fire(now, judgement.verdict, states, look)
        if look.gpus is not self._gpu_list:
            self._gpu_list = look.gpus
            wanted = {activity.uuid for activity in activities}
            self._gpus |= {gpu.uuid: gpu for gpu in look.gpus if gpu.uuid in wanted and gpu.uuid not in self._gpus}
        self._looks += 1
        self._last = now

    def result(self) -> Replay:
        firings = [*self._firings, *(aftermath.ended(self._last) for aftermath in self._aftermaths)]
        firings.sort(key=lambda firing: firing.moment.at)
        saved = sum(firing.saved for firing in firings)
        hung = [firing for firing in firings if firing.hung]
        hung_time = sum((one.moment.at - one.window_from.at) * len(one.gpus) + one.saved for one in hung)
        return Replay(
            policies=self._policies,
            gpus=tuple(self._gpus.values()),
            looks=self._looks,
            begun=self._begun,
            ended=self._last,
            firings=tuple(firings),
            warnings=tuple(self._warnings),
            unknown=self._unknown.all(),
            gaps=tuple(self._gaps),
            totals=GpuSeconds(self._recorded, self._idle, self._unknown_time, saved, hung_time),
        )

    def _passed(self, now: Moment) -> float:
        """Seconds since the previous look; 0 after a gap."""
        passed = now.at - self._last.at
        if passed <= self._longest_gap:
            return passed
        self._gaps.append(Stretch(self._last, now, "nothing was recorded"))
        return 0.0

    def _note_warning(self, now: Moment, judgement: Judgement) -> None:
        self._warnings += [Warned(now, one.reason, fired=False, rule=one.rule) for one in judgement.new_warnings]

    def _fire(self, now: Moment, verdict: Verdict, states: "_States", look: Look) -> None:
        held = now.at - verdict.since if verdict.since is not None else 0.0
        begun = Moment(now.at - held, now.wall - held)
        seen = {uuid for aftermath in self._aftermaths for uuid in aftermath.gpus}
        gpus = tuple(uuid for uuid in verdict.gpus if uuid not in seen)
        self._aftermaths.append(
            _Aftermath(
                Firing(
                    moment=now,
                    window_from=begun,
                    reason=verdict.reason,
                    kind=verdict.kind,
                    rule=verdict.rule,
                    hung=not states.busy.keys().isdisjoint(gpus),
                    gpus=gpus,
                    working=tuple(label for uuid, label in states.busy.items() if uuid not in gpus),
                    until=now,
                    resumed=False,
                    saved=0.0,
                ),
                present=_identities(look, gpus),
                steps=_steps(look),
            )
        )
        self._judge.rearm(now.at)
        for place, warned in enumerate(self._warnings):
            if warned.rule == verdict.rule and warned.moment.at >= begun.at:
                self._warnings[place] = warned._replace(fired=True)

    def _follow(self, passed: float, states: "_States", look: Look) -> None:
        for aftermath in list(self._aftermaths):
            if aftermath.hung:
                self._follow_hang(aftermath, passed, states, look)
                continue
            used = aftermath.gpus & states.busy.keys()
            if used:
                # It resumed between the two looks; idleness is certain up to the earlier one.
                self._firings.append(aftermath.resumed(self._last, _workers(look, used)))
                self._aftermaths.remove(aftermath)
            else:
                aftermath.saved += passed * len(aftermath.gpus & states.idle)

    def _follow_hang(self, aftermath: "_Aftermath", passed: float, states: "_States", look: Look) -> None:
        if aftermath.made_step(look):
            self._firings.append(aftermath.stepped(self._last))
        elif aftermath.gpus & states.idle:
            self._firings.append(aftermath.ended(self._last))
        else:
            aftermath.saved += passed * len(aftermath.gpus & states.busy.keys())
            return
        self._aftermaths.remove(aftermath)


class _States:
    """The GPUs of one look by state."""

    def __init__(self, activities: Sequence[Activity], below: float) -> None:
        self.idle: set[str] = set()
        self.unknown: set[str] = set()
        self.busy: dict[str, str] = {}
        """Labels by uuid."""
        for activity in activities:
            if isinstance(activity.peak, Unknown):
                self.unknown.add(activity.uuid)
            elif activity.peak < below:
                self.idle.add(activity.uuid)
            else:
                self.busy[activity.uuid] = activity.label


class _Aftermath:
    """A firing without a known end."""

    def __init__(self, firing: Firing, present: frozenset[tuple[int, int]] | None, steps: int | None) -> None:
        """`present`: the processes on its GPUs at the firing; None if unknown. `steps`: the count of steps so far."""
        self._firing = firing
        self._present = present
        self._steps = steps
        self.hung = firing.hung
        self.gpus = frozenset(firing.gpus)
        self.saved = 0.0

    def ended(self, at: Moment) -> Firing:
        """Ends it with the recording or the hang."""
        return msgspec.structs.replace(self._firing, until=at, saved=self.saved)

    def made_step(self, look: Look) -> bool:
        steps = _steps(look)
        return steps is not None and steps != self._steps

    def stepped(self, at: Moment) -> Firing:
        """Ends it with a step of the job."""
        return msgspec.structs.replace(self._firing, until=at, resumed=True, same_process=True, saved=self.saved)

    def resumed(self, at: Moment, workers: Sequence[Process]) -> Firing:
        """Ends it with the use of a GPU, by one of these processes if known."""
        old = [process for process in workers if self._present is not None and _identity(process) in self._present]
        return msgspec.structs.replace(
            self._firing,
            until=at,
            resumed=True,
            resumed_by=describe((old or workers)[0]) if workers else None,
            same_process=bool(old) if workers and self._present is not None else None,
            saved=self.saved,
        )


class _Stretches:
    """Joins failed looks with the same reason into stretches."""

    def __init__(self) -> None:
        self._done: list[Stretch] = []
        self._current: Stretch | None = None

    def take(self, before: Moment, now: Moment, reason: str | None) -> None:
        if self._current is not None and reason == self._current.reason:
            self._current = self._current._replace(ended=now)
            return
        if self._current is not None:
            self._done.append(self._current)
        self._current = None if reason is None else Stretch(before, now, reason)

    def all(self) -> tuple[Stretch, ...]:
        return (*self._done, self._current) if self._current else tuple(self._done)


def _steps(look: Look) -> int | None:
    return look.job.steps if look.job is not None else None


def _below(policies: Iterable[Policy]) -> float:
    """The threshold of use in the sums, from the first rule."""
    return next(iter(policies)).below


def _why_unknown(look: Look, activities: Sequence[Activity]) -> str | None:
    for activity in activities:
        if isinstance(activity.peak, Unknown):
            return look.problem.reason if look.problem else f"{activity.label}: {activity.peak.reason}"
    if not activities:
        return look.problem.reason if look.problem else "there is no GPU to judge by"
    return None


def _identities(look: Look, uuids: Container[str]) -> frozenset[tuple[int, int]] | None:
    """The processes on these GPUs; None if they are unknown for one of them."""
    found: set[tuple[int, int]] = set()
    for reading in look.readings:
        if reading.uuid in uuids:
            if not known(reading.processes):
                return None
            found |= {identity for process in reading.processes if (identity := _identity(process)) is not None}
    return frozenset(found)


def _identity(process: Process) -> tuple[int, int] | None:
    return (process.pid, process.started) if known(process.started) else None


def _workers(look: Look, busy: Container[str]) -> list[Process]:
    """The processes that worked on these GPUs, or all of them if the driver does not report work."""
    there = [
        process
        for reading in look.readings
        if reading.uuid in busy and known(reading.processes)
        for process in reading.processes
    ]
    return [process for process in there if known(process.utilization) and process.utilization > 0] or there
