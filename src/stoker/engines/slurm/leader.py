"""The first node of a multi-node job: its shim starts the other shims, judges all GPUs, and reports for all.

```
  batch script: shim ── stoker-reaper ── the command        node 0
       └── srun ── shim ── stoker-reaper ── the command     node 1, node 2, …, in one step
```

Observations and ends of the other nodes arrive as messages through `srun`. Orders, heartbeats, logs and reports go
through the attempt's directory. The nodes need no other connection.
"""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from stoker.engines.attempt import lease_clock
from stoker.engines.execution import STOP_SIGNALS, STOPPED
from stoker.engines.preparation import AS_TYPED, on_one_machine, rendezvous_port
from stoker.engines.slurm.execution import FOLLOWER, RETRY, SlurmExecution, slurm_identity, slurm_variables
from stoker.engines.slurm.record import (
    LeaderOrder,
    NodeGroup,
    NodeRecord,
    Owner,
    SlurmAttemptRecord,
    SlurmAttemptSpec,
)
from stoker.engines.slurm.step import SrunStep, srun_command
from stoker.engines.slurm.submission import shim_command
from stoker.gpus.prober import Prober
from stoker.queue.commands import Command
from stoker.rules.nodes import ClockShift, NodeObservations, on_clock_here
from stoker.rules.rule import DEFAULT_EVERY, Observation, Policy
from stoker.runs.plan import Plan
from stoker.runs.processes.reaper import Reaper
from stoker.runs.processes.signals import SignalStream
from stoker.runs.record import Ending, Status
from stoker.runs.supervisor import OtherNodes, StopRequest, Supervisor

if TYPE_CHECKING:
    from stoker.runs.postmortem.facts import NodeFacts

# After a failure on one node, the others get this long, or the grace if that is shorter, to exit by themselves. Their
# own errors say more than a signal, but processes often wait for a dead peer for minutes.
_NOTICE_WITHIN: Final = 10.0
# The delay after which a network file system shows the last status of a node.
_SHOWN_WITHIN: Final = 10.0
# The time for an order to reach a node, and for its effect to be seen here, in addition to the grace.
_ORDER_SEEN_WITHIN: Final = 15.0
# The time for facts of other nodes to arrive, in addition to collecting them.
_FACTS_WITHIN: Final = 15.0
_LONGEST_COLLECTING: Final = 10.0
_STEP_ENDS_WITHIN: Final = 5.0
# The delay between the two signals of a preemption: the usual grace time of partitions and QOS.
_PREEMPTED_WITHIN: Final = 120.0
_PAUSE: Final = 0.1
# This process must finish this long before Slurm's SIGKILL.
_KILL_MARGIN: Final = 1.0
# A merged observation waits this many intervals for a node.
_PATIENT_LOOKS: Final = 3
# Variables about the whole job, which differ in a step.
_WHOLE_JOB: Final = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NAME")


class NodeMessage(msgspec.Struct, frozen=True):
    """A message of another node through `srun`."""

    observation: Observation | None = None
    ended: Status | None = None
    """The last status of its run."""


class _Node:
    """One of the other nodes."""

    def __init__(self, name: str, record: NodeRecord) -> None:
        self.name = name
        self.record = record
        self.shift = ClockShift()
        self.alive = 0
        self.heard_at = lease_clock()
        self.version = 0
        self.ended: Status | None = None
        self.lost = ""
        """Why it counts as lost."""

    @property
    def is_over(self) -> bool:
        return self.ended is not None or bool(self.lost)


class LeaderExecution(SlurmExecution):
    """An attempt on several nodes, seen from the first."""

    def __init__(
        self,
        record: SlurmAttemptRecord,
        attempt_spec: SlurmAttemptSpec,
        owner: Owner,
        signals: SignalStream,
        reaper: Reaper,
        prober: Prober,
        environment: Mapping[str, str],
        names: tuple[str, ...],
    ) -> None:
        whole = slurm_variables({}, len(names), 0)
        super().__init__(record, attempt_spec, owner, signals, reaper, prober, {**environment, **whole})
        self._given = dict(self._environment)
        """Variables that the other nodes know already."""
        self._names = names
        self._address = _own_address(names[0])
        self._runs = 0
        self._nodes: Nodes | None = None

    def _run(self, plan: Plan, environment: dict[str, str]) -> bool:
        self._check_before_start()
        self._runs += 1
        group = NodeGroup(
            start=self._mine.start,
            run=self._runs,
            names=self._names,
            master_addr=self._address,
            master_port=_free_port(rendezvous_port(f"{self._attempt_spec.attempt}.{self._runs}")),
            command=plan.command,
            environment={name: value for name, value in environment.items() if self._given.get(name) != value},
            slurm={name: os.environ[name] for name in _WHOLE_JOB if name in os.environ},
            directory=plan.directory,
        )
        here = group.rendezvous(0)
        self._nodes = Nodes(self._record, self._attempt_spec, group, plan.policies, self)
        try:
            self._nodes.begin()
            own = msgspec.structs.replace(plan, command=tuple(map(here.fill, plan.command)))
            return super()._run(own, here.fill_all(environment))
        finally:
            self._nodes.close()

    def other_nodes(self, supervisor: Supervisor) -> OtherNodes | None:  # noqa: ARG002 - the same for every run
        return self._nodes

    def for_probes(self, command: Command) -> tuple[Command, dict[str, str]]:
        """Probes run as a job on this node alone, where each GPU needs at least as much memory as on several."""
        here = on_one_machine(self._attempt_spec.attempt)
        words = here.fill(command) if isinstance(command, str) else tuple(map(here.fill, command))
        return words, here.fill_all(self._environment) | slurm_variables({}, 1, 0)

    def outputs(self) -> list[Path]:
        first = [] if self._nodes is None else self._nodes.failed_outputs()
        others: list[Path] = []
        with contextlib.suppress(OSError):
            others = [node.output for node in self._record.other_nodes()]
        return list(dict.fromkeys([*first, self._record.output, *others]))

    def remark(self) -> str:
        return "" if self._nodes is None else self._nodes.failure

    def recorded_plan(self) -> Plan:
        plan = super().recorded_plan()
        return msgspec.structs.replace(plan, command=tuple(map(AS_TYPED.fill, plan.command)))

    def helpers(self) -> tuple[int, ...]:
        step = () if self._nodes is None or self._nodes.step is None else (self._nodes.step.pid,)
        return (*super().helpers(), *step)

    def poll(self) -> StopRequest | None:
        is_due = time.monotonic() >= self._poll_at
        request = super().poll()
        if request is None and is_due and self._nodes is not None:
            request = self._nodes.check()
        return request

    def wait_until_recorded(self) -> None:
        """Waits longer in a preemption: Slurm signals the steps first and the batch script minutes later. A script that
        exits in between would not be restarted."""
        super().wait_until_recorded()
        if self._nodes is not None and self._nodes.is_interrupted:
            ends = lease_clock() + _PREEMPTED_WITHIN
            while lease_clock() < ends and self._killed_at is None:
                self.wait(RETRY)

    def wait(self, seconds: float) -> None:
        """Waits for other nodes, with heartbeats, and notes Slurm's signals."""
        self._pause(seconds)
        for received in self._signals.read():
            if received.signal in STOP_SIGNALS and self._killed_at is None:
                self._killed_at = lease_clock() + self._attempt_spec.kill_wait

    def patience(self) -> float:
        """The longest wait in seconds for the other nodes after an order to stop."""
        longest = self._attempt_spec.plan.grace + _ORDER_SEEN_WITHIN
        if self._killed_at is not None:
            longest = min(longest, self._killed_at - _KILL_MARGIN - lease_clock())
        return longest


class Nodes:
    """The leader's view of the other nodes of one run."""

    def __init__(
        self,
        record: SlurmAttemptRecord,
        attempt_spec: SlurmAttemptSpec,
        group: NodeGroup,
        policies: Sequence[Policy],
        leader: LeaderExecution,
    ) -> None:
        self._record = record
        self._spec = attempt_spec
        self._group = group
        self._slurm_job = slurm_identity()[0]
        self._is_watched = bool(policies)
        self._every = every = min((policy.every for policy in policies), default=DEFAULT_EVERY)
        self._leader = leader
        ranks = range(1, len(group.names))
        self._others = [_Node(group.names[rank], NodeRecord(record.directory, rank)) for rank in ranks]
        self._observations = NodeObservations(group.names, time.monotonic(), every * _PATIENT_LOOKS)
        self._decoder = msgspec.json.Decoder(NodeMessage)
        self._order = LeaderOrder(run=group.run)
        self._is_ordered = True
        """The order is on disk."""
        self._ended_here = False
        self._code = 0
        """The exit code of the first command that failed."""
        self._failed_node = ""
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        self._interruption = ""
        self._step_ended_at: float | None = None
        self.failure = ""
        """A sentence about the first failure and its node."""
        self.step: SrunStep | None = None
        self._is_closed = False

    @property
    def here(self) -> str:
        return self._group.names[0]

    @property
    def is_interrupted(self) -> bool:
        """True if Slurm's signal to another node ended the job."""
        return self._interrupted_at is not None and self._order.ending == "machine"

    def begin(self) -> None:
        """Starts the shims of the other nodes. Raises OSError."""
        for one in self._record.other_nodes():
            # Clears the files of an earlier run.
            one.begin_again(self._group.run)
        if self._group.run > 1:
            self._record.write_status(Status())
        self._record.write_order(self._order)
        self._record.write_nodes(self._group)
        shims = shim_command(sys.executable, str(self._record.directory), FOLLOWER, self._group.start)
        others = [node.name for node in self._others]
        options = (f"--nodelist={','.join(others)}", "--input=none", "--job-name=stoker")
        variables = {name: os.environ[name] for name in self._spec.exported if name in os.environ}
        if restart := os.environ.get("SLURM_RESTART_COUNT"):
            variables["SLURM_RESTART_COUNT"] = restart
        self.step = SrunStep(srun_command(self._slurm_job, others, *options, *shims), variables)

    # What they see

    def descriptors(self) -> Iterable[int]:
        return () if self.step is None or self._step_ended_at is not None else (self.step.fileno(),)

    def due(self) -> float:
        return self._observations.due() if self._is_judged() else math.inf

    def share(self, observation: Observation) -> None:
        if not self._ended_here:
            self._observations.add(self.here, observation)

    def observation(self) -> Observation | None:
        self._receive()
        return self._observations.take(time.monotonic()) if self._is_judged() else None

    def _is_judged(self) -> bool:
        return self._is_watched and not (self._ended_here and all(node.is_over for node in self._others))

    def _receive(self) -> None:
        if self.step is None:
            return
        now = time.monotonic()
        by_name = {node.name: node for node in self._others}
        for name, content in self.step.messages():
            node = by_name.get(name)
            try:
                message = self._decoder.decode(content)
            except msgspec.DecodeError:
                continue  # a line was lost, so its content stays unknown
            if node is None:
                continue
            node.heard_at = lease_clock()
            if message.observation is not None and not node.is_over:
                self._observations.add(name, on_clock_here(message.observation, node.shift, now))
            if message.ended is not None:
                self._note_end(node, message.ended)
        if self._step_ended_at is None and self.step.has_ended():
            self._step_ended_at = lease_clock()

    # Their ends

    def check(self) -> StopRequest | None:
        """Checks heartbeats and ends. Returns a request if the whole job must stop."""
        if self._is_closed:
            return None  # the run is over, and the next has not begun
        self._look()
        if not self._is_ordered:
            self._give_order()
        for node in self._others:
            if node.lost:
                return StopRequest("node lost", f"{node.lost}.", STOPPED)
            if (ended := node.ended) is not None and ended.ending in _NOT_RUN:
                return StopRequest(ended.ending or "", f"On {node.name}: {ended.reason}", ended.exit_code or STOPPED)
        if self._is_overdue(self._interrupted_at):
            return StopRequest("machine", self._interruption, STOPPED)
        if self._is_overdue(self._failed_at) and not self._ended_here:
            return StopRequest("exited", f"{self.failure}.", self._code)
        return None

    def _is_overdue(self, since: float | None) -> bool:
        return since is not None and lease_clock() >= since + min(_NOTICE_WITHIN, self._spec.plan.grace)

    def ended(self, code: int) -> int | None:
        if not self._ended_here:
            self._ended_here = True
            self._observations.leave(self.here)
            if code:
                self._note_failure(self.here, code)
        self._look()
        is_over = all(node.ended is not None and node.ended.ending == "exited" for node in self._others)
        return self._code if is_over or self._is_overdue(self._failed_at) else None

    def _look(self) -> None:
        self._receive()
        for node in self._others:
            if node.is_over:
                continue
            self._look_at(node)
            if node.ended is None:
                node.lost = self._why_lost(node)

    def _look_at(self, node: _Node) -> None:
        """Reads a node's record. Values that cannot be read now stay as they are."""
        with contextlib.suppress(OSError):
            if (alive := node.record.alive_version()) != node.alive:
                node.alive, node.heard_at = alive, lease_clock()
        if (version := node.record.status_version()) != node.version:
            node.version, status = version, node.record.status()
            if status.state == "ended":
                self._note_end(node, status)

    def _why_lost(self, node: _Node) -> str:
        now = lease_clock()
        shown_within = min(_SHOWN_WITHIN, self._spec.lease / 4)
        if self.step is not None and self._step_ended_at is not None and now >= self._step_ended_at + shown_within:
            cause = self.step.cause()
            return f"Slurm ended the part of the job on {node.name}" + (f": {cause.rstrip('.')}" if cause else "")
        if now >= node.heard_at + self._spec.lease:
            return f"{node.name} gave no sign of life for as long as the lease"
        return ""

    def _note_end(self, node: _Node, status: Status) -> None:
        if node.ended is not None:
            return
        node.ended = status
        self._observations.leave(node.name)
        if status.ending == "exited":
            if status.exit_code:
                self._note_failure(node.name, status.exit_code)
        elif status.ending == "machine":
            # Slurm signals all nodes at about the same time, and its signal to this node says more.
            self._interrupted_at = self._interrupted_at or lease_clock()
            self._interruption = f"On {node.name}: {status.reason}"
        elif not self._order.stop and status.ending not in _NOT_RUN:
            node.lost = f"The job was stopped on {node.name}: {status.reason.rstrip('.') or 'nobody says why'}"

    def _note_failure(self, name: str, code: int) -> None:
        if self._failed_at is None:
            self._failed_at, self._code, self._failed_node = lease_clock(), code, name
            self.failure = f"the command on {name} ended with code {code}"

    def failed_outputs(self) -> list[Path]:
        """The log of the node that failed first, unless that is the leader."""
        return [node.record.output for node in self._others if node.name == self._failed_node]

    # The report

    def ask_for_facts(self) -> None:
        self._set_order(explain=self._order.explain + 1)

    def facts(self) -> "Sequence[NodeFacts]":
        from stoker.runs.postmortem.facts import NodeFacts, RunFacts

        found: dict[str, NodeFacts] = {}
        asked = [node for node in self._others if not node.is_over and node.alive]
        ends = lease_clock() + min(max(self._every, 1.0), _LONGEST_COLLECTING) + _FACTS_WITHIN
        while len(found) < len(asked):
            for node in asked:
                if node.name not in found:
                    with contextlib.suppress(OSError, ValueError):
                        content = node.record.facts(self._order.explain).read_bytes()
                        found[node.name] = NodeFacts(node.name, msgspec.msgpack.decode(content, type=RunFacts))
            if lease_clock() >= ends or len(found) == len(asked):
                break
            self._leader.wait(_PAUSE)
        return [found.get(node.name) or NodeFacts(node.name, problem=_why_no_facts(node)) for node in self._others]

    # The stop

    def stop(self, ending: Ending, reason: str) -> None:
        if not self._order.stop:
            self._set_order(stop=True, ending=ending, reason=reason)

    def finish(self, ending: Ending, reason: str) -> Sequence[str]:
        if all(node.ended is not None for node in self._others):
            return ()
        self.stop(ending, reason)
        begun = lease_clock()
        while (left := [node for node in self._others if not node.is_over]) and (
            lease_clock() < begun + self._leader.patience()
        ):
            self._leader.wait(_PAUSE)
            self._look()
            if not self._is_ordered:
                self._give_order()
        if any(node.ended is None for node in self._others) and self.step is not None:
            self.step.terminate()  # ends what Slurm can reach
        return [f"what ran on {node.name} may still run: it did not answer" for node in left]

    def close(self) -> None:
        self._is_closed = True
        if self.step is not None:
            self.step.messages()
            self.step.close(_STEP_ENDS_WITHIN)

    def _set_order(self, **changes: object) -> None:
        self._order = msgspec.structs.replace(self._order, **changes)
        self._give_order()

    def _give_order(self) -> None:
        """Writes the order. A failed write is retried."""
        try:
            self._record.write_order(self._order)
        except OSError:
            self._is_ordered = False
        else:
            self._is_ordered = True


# Endings of a node that did not run the command. The whole job then ends in the same way.
_NOT_RUN: Final = frozenset({"could not start", "not started", "cancelled", "preempted"})


def _why_no_facts(node: _Node) -> str:
    if node.ended is not None:
        return f"The command had ended there with code {node.ended.exit_code}."
    return node.lost or ("It did not answer in time." if node.alive else "It had not begun.")


def _own_address(name: str) -> str:
    """The host name by which other nodes reach this one: Slurm's node name if it resolves."""
    for one in (name, socket.gethostname()):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(one, None)
            return one
    return socket.gethostname()


def _free_port(wanted: int) -> int:
    """The wanted port, or another if it is in use."""
    with socket.socket() as probe:
        for port in (wanted, 0):
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return int(probe.getsockname()[1])
    return wanted
