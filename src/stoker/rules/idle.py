"""The idle rule: as many GPUs as required below a threshold, without a break, for a whole window."""

from collections.abc import Sequence

from stoker.gpus.model import Maybe, Unknown
from stoker.rules.policy import LOOK_TAKES, Policy, longest_unseen
from stoker.rules.verdict import Activity, Verdict
from stoker.units import format_duration, format_percent

# Up to here GPUs are called by their names in a sentence; more of them, when they are all there are, are "all 8 GPUs".
_MOST_NAMES = 4


class _IdleClock:
    """Since when one GPU has been idle without a break, as far as anybody saw."""

    def __init__(self) -> None:
        self.idle_since: float | None = None
        self.fresh = True
        """Whether it has been used since the rule fired, if it ever did."""
        self._last: float | None = None

    def observe(self, at: float, activity: Activity, policy: Policy, unseen: float, earliest: float) -> None:
        last, self._last = self._last, at
        hole = _is_hole(last, at, policy.longest_gap)
        if last is not None and at - last - activity.span > unseen:
            hole = True  # the sample of a moment says nothing of a stall before it
        if not _is_idle(activity.peak, policy.below):
            self.idle_since = None
            self.fresh = self.fresh or not isinstance(activity.peak, Unknown)
        elif hole or self.idle_since is None:
            seen_from = at if hole else _seen_from(last, at, activity.span, policy.longest_gap)
            self.idle_since = max(seen_from, earliest)

    def restart(self) -> None:
        """Whatever was idle so far does not count; up to when somebody looked is not forgotten."""
        self.idle_since = None

    def rearm(self) -> None:
        """The rule has fired, and this GPU was told of if it was idle."""
        self.fresh = self.fresh and self.idle_since is None
        self.restart()


class _ArmingClock:
    """Since when some GPU has been seen active at every look.

    A peak proves activity at some moment of the time before its look, not all through it: the stretch begins with the
    first look that saw any, so that one short burst between two looks is never taken for a long one.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._active_since: float | None = None
        self._last: float | None = None
        self.armed = policy.arm_above is None

    def observe(self, at: float, activities: Sequence[Activity]) -> None:
        if self.armed or self._policy.arm_above is None:
            return
        hole = _is_hole(self._last, at, self._policy.longest_gap)
        self._last = at
        level = self._policy.arm_above
        if not any(not isinstance(a.peak, Unknown) and a.peak >= level for a in activities):
            self._active_since = None
            return
        if self._active_since is None or hole:
            self._active_since = at
        self.armed = at >= self._active_since + self._policy.arm_for


class IdleRule:
    """Feeds on looks and says the verdict after each. Times are monotonic seconds of one clock."""

    def __init__(self, policy: Policy, begun: float, *, look_takes: float = LOOK_TAKES) -> None:
        """`look_takes`: how long a look may take, the prober's deadline."""
        policy.check()
        self.policy = policy
        self._longest_unseen = longest_unseen(policy.every, look_takes)
        self._not_before = begun + policy.after
        self._snoozed_until: float | None = None
        self._clocks: dict[str, _IdleClock] = {}
        self._arming = _ArmingClock(policy)
        self._unknown_since: float | None = None
        self._fulfilled = False

    def observe(self, at: float, activities: Sequence[Activity]) -> Verdict:
        """The verdict at `at`, given what each GPU in scope did in the time before."""
        self._arming.observe(at, activities)
        clocks = {a.uuid: self._clocks.get(a.uuid) or _IdleClock() for a in activities}
        earliest = self._earliest
        for activity in activities:
            clocks[activity.uuid].observe(at, activity, self.policy, self._longest_unseen, earliest)
        self._clocks = clocks
        if activities and not any(isinstance(a.peak, Unknown) for a in activities):
            self._unknown_since = None
        elif self._unknown_since is None:
            self._unknown_since = at
        verdict = self._verdict(at, activities)
        self._fulfilled = verdict.word == "idle"
        return verdict

    def snooze(self, until: float) -> None:
        """Somebody said that it will be quiet on purpose: the window begins after that."""
        self._snoozed_until = until
        self._fulfilled = False
        for clock in self._clocks.values():
            clock.restart()

    def rearm(self, at: float) -> None:
        """Starts over after the rule has fired. It fires again only for GPUs of which one was used since."""
        self._not_before = max(at, self._not_before)
        self._arming = _ArmingClock(self.policy)
        self._fulfilled = False
        for clock in self._clocks.values():
            clock.rearm()

    @property
    def spent(self) -> bool:
        """Whether it has fired, was started over, and no GPU has been used since."""
        return bool(self._clocks) and not any(clock.fresh for clock in self._clocks.values())

    def due(self) -> float | None:
        """The moment from which on the rule is fulfilled if all that is idle stays so.

        None while too few GPUs are idle, and once the rule is fulfilled: there is nothing left to wait for.
        """
        if self._fulfilled or not self._arming.armed:
            return None
        since = self._idle_since(self._required(len(self._clocks)))
        return since + self.policy.window if since is not None else None

    def idle_gpus(self, at: float) -> tuple[str, ...]:
        """The uuids of the GPUs that have been idle for a whole window at `at`, required or not."""
        since = {uuid: clock.idle_since for uuid, clock in self._clocks.items()}
        return tuple(uuid for uuid, begun in since.items() if begun is not None and at >= begun + self.policy.window)

    @property
    def _earliest(self) -> float:
        return self._not_before if self._snoozed_until is None else max(self._not_before, self._snoozed_until)

    def _idle_since(self, required: int) -> float | None:
        """Since when as many GPUs as required have been idle, one of them used since the rule last fired."""
        idle = [(clock.idle_since, clock.fresh) for clock in self._clocks.values() if clock.idle_since is not None]
        fresh = [since for since, is_fresh in idle if is_fresh]
        if not fresh or len(idle) < required:
            return None
        return max(sorted(idle)[required - 1][0], min(fresh))

    def _required(self, count: int) -> int:
        """How many GPUs must be idle; 0 when there is none to judge by.

        Where there are fewer GPUs than the number asked for, all of them: a job that uses one GPU of the two that
        were to be idle does nothing once that one is.
        """
        if self.policy.require == "all":
            return count
        return min(1 if self.policy.require == "any" else self.policy.require, count)

    def _verdict(self, at: float, activities: Sequence[Activity]) -> Verdict:
        unknown_for = at - self._unknown_since if self._unknown_since is not None else 0.0
        if not activities:
            return Verdict("unknown", "there is no GPU to judge by", unknown_for=unknown_for)
        if at < self._earliest:
            return Verdict("waiting", self._why_not_yet(at), unknown_for=unknown_for)
        if self.spent:
            return Verdict("arming", "it has fired: not armed until the GPUs are used again", unknown_for=unknown_for)
        if not self._arming.armed:
            return Verdict("arming", self._why_not_armed(), unknown_for=unknown_for)
        idle_since = self._idle_since(self._required(len(activities)))
        if idle_since is None:
            return self._not_idle(activities, unknown_for)
        idle_for = at - idle_since
        # The same sum as in `due`: a difference would round differently, and a look at that very moment come too early.
        fulfilled = at >= idle_since + self.policy.window
        return Verdict(
            "idle" if fulfilled else "waiting",
            self._idle_in_words(activities, idle_since, idle_for, fulfilled=fulfilled),
            idle_for,
            1.0 if fulfilled else min(idle_for / self.policy.window, 1.0),
            unknown_for,
        )

    def _not_idle(self, activities: Sequence[Activity], unknown_for: float) -> Verdict:
        """Busy, or unknown where the GPUs that nobody could see would make the difference."""
        unknown = [(a.label, a.peak.reason) for a in activities if isinstance(a.peak, Unknown)]
        idle = sum(clock.idle_since is not None for clock in self._clocks.values())
        if unknown and idle + len(unknown) >= self._required(len(activities)):
            reason = unknown[0][1]
            names = [label for label, why in unknown if why == reason]
            verb = "is" if len(names) == 1 else "are"
            return Verdict(
                "unknown", f"{_listed(names, len(activities))} {verb} unknown: {reason}", unknown_for=unknown_for
            )
        peak, label = max((a.peak, a.label) for a in activities if not isinstance(a.peak, Unknown))
        return Verdict("busy", f"{label} was at {format_percent(peak)}", unknown_for=unknown_for)

    def _why_not_yet(self, at: float) -> str:
        if self._snoozed_until is not None and at < self._snoozed_until:
            return f"snoozed for another {format_duration(self._snoozed_until - at)}"
        return f"start-up delay: the window begins in {format_duration(self._earliest - at)}"

    def _why_not_armed(self) -> str:
        level = format_percent(self.policy.arm_above or 0.0)
        length = f" for {format_duration(self.policy.arm_for)}" if self.policy.arm_for else ""
        return f"not armed: no GPU has been at {level} or more{length} yet"

    def _idle_in_words(
        self, activities: Sequence[Activity], idle_since: float, idle_for: float, *, fulfilled: bool
    ) -> str:
        names = [a.label for a in activities if self._is_idle_since(a.uuid, idle_since)]
        whole = format_duration(self.policy.window)
        done = whole if fulfilled else f"{format_duration(idle_for)} of {whole}"
        return f"{_listed(names, len(activities))} stayed below {format_percent(self.policy.below)} for {done}"

    def _is_idle_since(self, uuid: str, moment: float) -> bool:
        since = self._clocks[uuid].idle_since
        return since is not None and since <= moment


def _is_idle(peak: Maybe[float], below: float) -> bool:
    """Asked so that whatever cannot be a utilization (negative, not a number) is not idle."""
    return not isinstance(peak, Unknown) and 0 <= peak < below


def _is_hole(last: float | None, at: float, longest_gap: float) -> bool:
    """Whether nobody looked for too long before this look, or time went backwards."""
    return last is not None and not 0 <= at - last <= longest_gap


def _seen_from(last: float | None, at: float, span: float, longest_gap: float) -> float:
    """From when on a reading can vouch for its GPU.

    Never from before the look that went before it, whatever span it claims: after a driver that hung, the first
    reading spans all of the time that was called unknown.
    """
    if last is None:
        return at - span if 0 <= span <= longest_gap else at
    return max(at - max(span, 0.0), last)


def _listed(names: Sequence[str], of: int) -> str:
    """`GPU 0`, `GPU 0 and GPU 1`, `GPU 0, GPU 1 and GPU 2`, `all 8 GPUs`."""
    if len(names) == of > _MOST_NAMES:
        return f"all {of} GPUs"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
