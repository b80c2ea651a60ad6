"""The worker: owns this machine's GPUs, claims jobs for them, and has each one attended to.

Everything is waited for in one place: what attendants say, looks at the GPUs, the queue's bell, signals. Whatever the
queue is told or asked happens in between, in the order of its haste: outcomes, then the next job, then the rest. The
worker may be killed at any moment: attendants go on without it, and the next worker finds them.
"""

import contextlib
import math
import select
import signal
import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final

from stoker.errors import BadInputError, StokerError
from stoker.gpus.lookout import Lookout
from stoker.gpus.model import Look, Unknown
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.queue import Attempt, Job, QueueAwayError, Store, open_queue
from stoker.queue.bell import Bell
from stoker.queue.model import View
from stoker.runs.signals import SignalStream
from stoker.units import format_duration
from stoker.worker.adoption import adopt, give_back
from stoker.worker.assignment import now as lease_clock
from stoker.worker.capacity import Want
from stoker.worker.crew import Crew
from stoker.worker.engagement import Engagement
from stoker.worker.filling import BACKGROUND, Filling
from stoker.worker.home import Home
from stoker.worker.machine import Machine
from stoker.worker.messages import Recorded, Renewed, Stop
from stoker.worker.orders import Orders
from stoker.worker.placement import CannotFit, NoGpusSeen, NoPlaceWithoutGpu, Reason, Start, decide
from stoker.worker.starting import start
from stoker.worker.words import why_waiting

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Far more than any machine has places; what is behind them in the queue is seen when they have started.
_MOST_WAITING: Final = 200
# The first of them that nobody else has is taken in one round trip.
_MOST_ALIKE: Final = 16
# Behind the bell: what it missed is found after this.
_SLOW_POLL: Final = 5.0
# Looks when nothing waits: for people who ask what the machine does.
_QUIET_LOOKS: Final = 10.0
# Looks while jobs wait for GPUs that others use.
_WAITING_LOOKS: Final = 2.0
# Looks while a GPU that was just freed comes to rest.
_SETTLING_LOOKS: Final = 0.25
# A GPU that is not at rest after this is somebody's, and is looked at like those.
_SETTLES_WITHIN: Final = 5.0
# Nobody is given a GPU on the strength of a look that is older than this.
_FRESH: Final = 0.5
_HEARTBEATS: Final = 10.0
_CHANGES: Final = 1.0
_OUTPUT_EVERY: Final = 3.0
# Between two tries to reach a queue that is away.
_FIRST_PAUSE: Final = 0.5
_LAST_PAUSE: Final = 10.0
# A machine that could not start a job (its disk is full) must not draw one job after another into its trouble.
_AFTER_TROUBLE: Final = 60.0
_TIDY_EVERY: Final = 600.0


class WorkerLoop:
    """One worker from its start to its end."""

    def __init__(
        self,
        orders: Orders,
        home: Home,
        crew: Crew,
        prober: Prober,
        tell: Callable[[str], None],
        filling: Filling | None = None,
    ) -> None:
        self._orders = orders
        self._filling = filling
        self._home = home
        self._crew = crew
        self._tell = tell
        self._machine = Machine(orders.gpus, orders.rules)
        self._lookout = Lookout(prober, _QUIET_LOOKS)
        self._looked_at = -math.inf
        self._freed_at = -math.inf
        self._victims: frozenset[str] = frozenset()
        self._no_gpus = False
        self._signals = SignalStream(_STOPPING)
        self._store: Store | None = None
        self._bell: Bell | None = None
        self._away_until = -math.inf
        self._pause = _FIRST_PAUSE
        self._away_told = False
        self._waiting: list[Job] = []
        self._reasons: dict[str, Reason] = {}
        self._hopeless = 0
        """How many of those that wait can never start here."""
        self._overlooked_at = -math.inf
        self._stale = True
        self._next_poll = 0.0
        self._wake_at = math.inf
        self._no_starts_until = -math.inf
        self._renew_at = 0.0
        self._heartbeat_at = 0.0
        self._told_gist: tuple[object, ...] | None = None
        self._told_at = -math.inf
        self._output_at = 0.0
        self._tidy_at = 0.0
        self._found = False

    def run(self) -> int:
        with contextlib.ExitStack() as goodbye:
            goodbye.callback(self._signals.close)
            goodbye.callback(self._crew.dismiss)
            goodbye.callback(self._close_queue)
            goodbye.callback(self._say_goodbye)
            self._crew.keep_some_ready()
            while not self._asked_to_end():
                self._ask_queue()
                if self._orders.until_empty and self._has_nothing_left():
                    self._tell("nothing is left that could start here")
                    return 0
                self._crew.keep_some_ready()
                readable = self._wait()
                self._hear_crew(readable)
                self._hear_filling()
                self._watch()
            if count := len(self._running()):
                self._tell(
                    f"{_jobs(count)} on: the next `stoker work` here finds {'it' if count == 1 else 'them'} again"
                )
            return 0

    # Waiting

    def _wait(self) -> set[int]:
        poll = select.poll()
        wanted = [self._signals.fileno(), self._lookout.fileno(), *self._crew.descriptors()]
        if self._bell is not None:
            wanted.append(self._bell.fileno())
        if self._filling is not None:
            wanted.append(self._filling.fileno())
        for descriptor in wanted:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        found = poll.poll(max(0.0, self._due() - time.monotonic()) * 1000 + 0.5)
        return {descriptor for descriptor, _ in found}

    def _due(self) -> float:
        due = min(self._lookout.due(), self._tidy_at)
        if self._store is None:
            return min(due, self._away_until)
        owed = self._store.owes()
        return min(
            due,
            self._next_poll,
            self._wake_at,
            self._renew_at if self._crew.engaged else math.inf,
            self._heartbeat_at,
            self._output_at if self._crew.engaged else math.inf,
            time.monotonic() + owed if owed is not None else math.inf,
            time.monotonic() if self._stale else math.inf,
        )

    def _asked_to_end(self) -> bool:
        return any(received.signal in _STOPPING for received in self._signals.read())

    # Attendants

    def _hear_crew(self, readable: set[int]) -> None:
        for engagement in self._crew.attend(readable):
            for uuid in engagement.assignment.gpus:
                self._machine.ended(uuid, time.monotonic())
            self._stale = True
            if engagement.assignment.gpus:
                self._freed_at = time.monotonic()
                self._lookout.no_later_than(self._freed_at)

    def _hear_filling(self) -> None:
        if self._filling is None:
            return
        before = self._filling.occupied
        if self._filling.attend():
            for uuid in before - self._filling.occupied:
                self._freed(uuid)
            self._stale = True

    def _freed(self, uuid: str) -> None:
        self._freed_at = time.monotonic()
        self._machine.ended(uuid, self._freed_at)
        self._lookout.no_later_than(self._freed_at)

    def _running(self) -> list[Engagement]:
        return [one for one in self._crew.engaged.values() if one.over is None]

    # Looking

    def _watch(self) -> None:
        try:
            look = self._lookout.step()
        except AbsentError as absent:
            self._note_absence(absent)
            return
        if look is not None:
            self._take_in(look)

    def _note_absence(self, absent: AbsentError) -> None:
        """There is nothing to look at. What was seen of GPUs that were there before says nothing any more."""
        if not self._no_gpus:
            self._no_gpus = True
            self._tell(f"{absent}: jobs that need no GPU are run")
        self._looked_at = time.monotonic()
        nothing = Look("", self._looked_at, time.time(), (), (), Unknown(str(absent)))
        self._machine.observe(nothing, self._owner, self._holders())
        self._stale = self._stale or any(job.gpus for job in self._waiting)

    def _take_in(self, look: Look) -> None:
        self._machine.observe(look, self._owner, self._holders())
        self._looked_at = time.monotonic()
        # GPUs that are seen for the first time are left to background programs once jobs had their choice.
        self._stale = self._stale or self._filling is not None
        if any(job.gpus for job in self._waiting):
            self._stale = True
            settling = look.at - self._freed_at <= _SETTLES_WITHIN
            self._lookout.no_later_than(time.monotonic() + (_SETTLING_LOOKS if settling else _WAITING_LOOKS))

    def _holders(self) -> dict[str, set[str]]:
        """The jobs that hold each GPU, by its uuid."""
        holders: dict[str, set[str]] = {}
        for engagement in self._running():
            for uuid in engagement.assignment.gpus:
                holders.setdefault(uuid, set()).add(engagement.job)
        if self._filling is not None:
            for uuid in self._filling.occupied:
                holders.setdefault(uuid, set()).add(BACKGROUND)
        return holders

    def _owner(self, pid: int) -> str | None:
        job = next((one.job for one in self._crew.engaged.values() if one.owns(pid)), None)
        if job is None and self._filling is not None and self._filling.owns(pid):
            return BACKGROUND
        return job

    # The queue

    def _ask_queue(self) -> None:
        """Everything that the queue is told and asked. While it is away, jobs go on and outcomes wait."""
        if time.monotonic() < self._away_until:
            return
        try:
            store = self._store or self._open_queue()
            if not self._found:
                self._find_jobs(store)
            self._deliver(store)
            self._listen(store)
            self._place(store)
            self._send_last_output(store)
            self._keep_leases(store)
            self._say_hello(store)
            self._send_output(store)
            store.settle()
            self._tidy()
        except StokerError as error:
            self._lose_queue(error)

    def _open_queue(self) -> Store:
        store = open_queue(self._orders.queue)
        self._bell = store.bell()
        self._store = store
        self._stale = True
        self._pause = _FIRST_PAUSE
        if self._away_told:
            self._tell("the queue is back")
            self._away_told = False
            self._renew_at = 0.0
        if self._found:
            # What was claimed when the answer was lost.
            give_back(store, self._home, self._crew.engaged)
        return store

    def _lose_queue(self, error: StokerError) -> None:
        if not self._found and not isinstance(error, QueueAwayError):
            raise error  # a wrong password or address does not mend itself
        if not self._away_told:
            self._tell(f"{error}; jobs go on, and it is tried again")
            self._away_told = True
        self._close_queue()
        self._away_until = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LAST_PAUSE)

    def _close_queue(self) -> None:
        with contextlib.suppress(StokerError):
            if self._bell is not None:
                self._bell.close()
            if self._store is not None:
                self._store.close()
        self._bell = self._store = None

    def _find_jobs(self, store: Store) -> None:
        """Those that an earlier worker of this home started, and those that it did not live to start."""
        found = adopt(store, self._home, self._orders.lease)
        for engagement in found:
            self._crew.engaged[engagement.attempt] = engagement
        self._found = True
        if running := len(self._running()):
            self._tell(f"found {running} job{'s' if running > 1 else ''} that an earlier worker had started")

    def _deliver(self, store: Store) -> None:
        """Outcomes first: whoever waits for one waits for nothing else."""
        for engagement in list(self._crew.engaged.values()):
            if engagement.over is not None and not engagement.recorded:
                over = engagement.over
                accepted = store.finish(engagement.attempt, over.outcome, over.exit_code, over.sentence)
                engagement.recorded = True
                self._stale = True
                if engagement.channel is not None:
                    engagement.channel.send(Recorded())
                self._tell_end(engagement, accepted)

    def _send_last_output(self, store: Store) -> None:
        for engagement in list(self._crew.engaged.values()):
            if engagement.recorded and engagement.channel is None:
                # Its attendant is done with it, so this is the last of the output.
                engagement.excerpt.deliver_last(store)
                engagement.record.delivered()
                del self._crew.engaged[engagement.attempt]

    def _listen(self, store: Store) -> None:
        rang = self._bell is not None and self._bell.heard()
        if rang or time.monotonic() >= self._next_poll:
            self._stale = True
            if self._crew.engaged:
                self._cancel(store.to_be_cancelled(self._home.worker))

    def _cancel(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            engagement = self._crew.engaged.get(attempt)
            if engagement is not None and not engagement.stopping:
                self._tell(f"{engagement.job}: cancelled")
                engagement.stop(Stop("cancelled", "It was cancelled."))

    def _keep_leases(self, store: Store) -> None:
        if time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + self._orders.lease / 4
        held = {attempt: one for attempt, one in self._crew.engaged.items() if not one.recorded}
        if not held:
            return
        before = lease_clock()
        found = store.renew(held, self._orders.lease)
        for attempt, engagement in held.items():
            if attempt in found and engagement.channel is not None:
                engagement.channel.send(Renewed(before + self._orders.lease))
            elif attempt not in found and not engagement.stopping:
                engagement.stop(Stop("lease", "The queue had given the job up, and another may run it."))
        self._cancel([attempt for attempt, wanted in found.items() if wanted])

    # Placing

    def _place(self, store: Store) -> None:
        moment = time.monotonic()
        if not (self._stale or moment >= self._next_poll or moment >= self._wake_at):
            return
        self._stale = False
        limit = _MOST_WAITING + self._hopeless
        self._waiting = store.ready(limit, self._home.worker) if moment >= self._no_starts_until else []
        self._reasons = {}
        self._victims = frozenset()
        wants = [_want(job, order) for order, job in enumerate(self._waiting)]
        fresh = moment - self._looked_at <= _FRESH
        decidable = wants
        if not fresh and any(want.gpus for want in wants):
            self._lookout.no_later_than(moment)
            decidable = [want for want in wants if not want.gpus]
        if decidable:
            self._decide(store, decidable, moment, fresh=fresh)
        if len(decidable) == len(wants):
            # Jobs that are for other machines must not hide those behind them.
            self._hopeless = sum(self._is_hopeless(reason) for reason in self._reasons.values())
            self._stale = self._stale or (len(wants) == limit < _MOST_WAITING + self._hopeless)
        if len(wants) == limit and all(want.gpus for want in wants):
            self._start_overlooked(store, moment)
        self._next_poll = moment + _SLOW_POLL
        wake = store.next_wake()
        self._wake_at = math.inf if wake is None else moment + max(0.0, wake - store.clock())
        self._leave_the_rest()

    def _decide(self, store: Store, wants: list[Want], moment: float, *, fresh: bool) -> None:
        machine = self._machine
        holdings = [one.holding(machine.used.get(one.job, {})) for one in self._running()]
        if self._filling is not None:
            holdings += self._filling.holdings(machine.used.get(BACKGROUND, {}))
        gpus = machine.gpus if fresh else []
        decision = decide(gpus, holdings, wants, self._orders.rules, moment, machine.problem)
        jobs = {job.id: job for job in self._waiting}
        for chosen in decision.start:
            self._start(store, jobs[chosen.job], chosen)
        for engagement in self._running():
            if engagement.job in decision.preempt and not engagement.stopping:
                self._tell(f"{engagement.job}: makes room for another job")
                engagement.stop(Stop("preempted", "It made room for another job."))
        self._reasons = decision.waiting
        self._victims = frozenset(decision.preempt)

    def _start(self, store: Store, job: Job, chosen: Start) -> None:
        if time.monotonic() < self._no_starts_until:
            return  # the one before it could not be started here
        # Whatever fits here fits as well if it asks for the same: then many machines do not all run after one job.
        alike = {other.id: other for other in self._waiting if _shape(other) == _shape(job)}
        before = lease_clock()
        attempt = store.claim_any(list(alike)[:_MOST_ALIKE], self._home.worker, chosen.gpus, self._orders.lease)
        if attempt is None:
            self._stale = True  # other machines were faster
            return
        self._begin(store, alike[attempt.job], attempt, before)

    def _start_overlooked(self, store: Store, moment: float) -> None:
        """Jobs without a GPU that are behind more others than were read: their places wait for nobody else."""
        if moment < self._overlooked_at:
            return
        self._overlooked_at = moment + _SLOW_POLL
        running = sum(1 for engagement in self._running() if not engagement.assignment.gpus)
        for _ in range(self._orders.rules.cpu_jobs - running):
            if time.monotonic() < self._no_starts_until:
                return
            before = lease_clock()
            attempt = store.claim_next(self._home.worker, (), self._orders.lease)
            if attempt is None:
                return
            self._begin(store, store.job(attempt.job), attempt, before)

    def _begin(self, store: Store, job: Job, attempt: Attempt, before: float) -> None:
        want = _want(job, 0)
        try:
            engagement = start(self._orders, self._home, self._crew, self._machine, job, want, attempt, before)
        except BadInputError as error:
            store.finish(attempt.id, "failed", 125, str(error))
            self._tell(f"{job.id}: could not start: {error}")
            self._stale = True
        except (StokerError, OSError) as error:
            store.finish(attempt.id, "lost", None, f"{self._home.host} could not start it: {error}")
            self._tell(f"{job.id}: could not be started here, nothing is started for a minute: {error}")
            self._no_starts_until = time.monotonic() + _AFTER_TROUBLE
        else:
            self._waiting = [waiting for waiting in self._waiting if waiting.id != job.id]
            self._tell(f"{job.id}: started{_on(engagement, self._machine)}: {_shown(job)}")

    def _leave_the_rest(self) -> None:
        """GPUs that no job holds or is promised are left to background programs."""
        if self._filling is None:
            return
        held = {uuid for one in self._crew.engaged.values() for uuid in one.assignment.gpus}
        occupied = self._filling.occupied
        wanted = {uuid for uuid in occupied if self._filling.name_on(uuid) in self._victims}
        # Once asked for, a GPU is not given back before the program on it is gone.
        wanted |= {holding.gpus[0] for holding in self._filling.holdings({}) if holding.stopping}
        self._filling.grant(uuid for uuid in self._machine.known if uuid not in held | wanted)

    def _has_nothing_left(self) -> bool:
        """Whether nothing runs here, and nothing waits that this machine could ever start."""
        if self._crew.engaged or self._stale or self._store is None or self._wake_at < math.inf:
            return False
        return all(self._is_hopeless(self._reasons.get(job.id)) for job in self._waiting)

    def _is_hopeless(self, reason: Reason | None) -> bool:
        match reason:
            case CannotFit():
                return True
            case NoPlaceWithoutGpu(at_once=at_once):
                return at_once == 0
            case NoGpusSeen():
                return self._no_gpus
        return False

    # Telling

    def _say_hello(self, store: Store) -> None:
        """That this worker is there, and why jobs wait, as soon as that changes."""
        moment = time.monotonic()
        if moment < self._heartbeat_at:
            return
        self._heartbeat_at = moment + _CHANGES
        view = View(
            gpus=self._machine.worker_gpus(self._holders()),
            waiting={job: why_waiting(reason) for job, reason in islice(self._reasons.items(), _MOST_WAITING)},
            problem=self._machine.problem,
        )
        if _gist(view) == self._told_gist and moment < self._told_at + _HEARTBEATS:
            return
        store.heartbeat(self._home.worker, self._home.host, view)
        self._told_gist, self._told_at = _gist(view), moment

    def _say_goodbye(self) -> None:
        if self._store is not None:
            with contextlib.suppress(StokerError):
                self._store.farewell(self._home.worker)

    def _send_output(self, store: Store) -> None:
        if time.monotonic() < self._output_at:
            return
        for engagement in self._running():
            engagement.excerpt.deliver(store)
        self._output_at = time.monotonic() + _OUTPUT_EVERY

    def _tidy(self) -> None:
        if time.monotonic() >= self._tidy_at:
            self._home.tidy()
            self._tidy_at = time.monotonic() + _TIDY_EVERY

    def _tell_end(self, engagement: Engagement, accepted: bool) -> None:
        over = engagement.over
        if over is not None:
            lasted = format_duration(round(time.monotonic() - engagement.since))
            said = f" with code {over.exit_code}" if over.exit_code else ""
            said += f": {over.sentence}" if over.sentence else ""
            late = "" if accepted else " (too late: the queue had given the job up)"
            self._tell(f"{engagement.job}: {over.outcome} after {lasted}{said}{late}")


def _gist(view: View) -> tuple[object, ...]:
    """What of it is told at once when it changes; how busy a GPU is changes all the time."""
    return view.waiting, view.problem, [(gpu.uuid, gpu.jobs, gpu.note) for gpu in view.gpus]


def _shape(job: Job) -> tuple[object, ...]:
    """Two jobs of one shape fit into the same place, and the earlier one goes first."""
    return job.gpus, job.memory, job.share, job.priority, job.preemptible, job.time_limit


def _want(job: Job, order: int) -> Want:
    return Want(
        job=job.id,
        gpus=job.gpus,
        order=order,
        memory=job.memory,
        shares=job.share,
        priority=job.priority,
        preemptible=job.preemptible,
        time_limit=job.time_limit,
    )


def _on(engagement: Engagement, machine: Machine) -> str:
    known = machine.known
    indices = sorted(known[uuid].index for uuid in engagement.assignment.gpus if uuid in known)
    if not indices:
        return ""
    return f" on GPU {indices[0]}" if len(indices) == 1 else f" on GPUs {', '.join(map(str, indices))}"


def _shown(job: Job) -> str:
    import shlex

    text = job.command if isinstance(job.command, str) else shlex.join(job.command)
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:99]}…"


def _jobs(count: int) -> str:
    return "1 job goes" if count == 1 else f"{count} jobs go"
