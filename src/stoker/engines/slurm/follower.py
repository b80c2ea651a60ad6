"""The shim on any node but the first of a multi-node job: runs this node's part on the leader's orders.

It never judges and never reports for the attempt. If the leader is silent for almost as long as the lease, it stops its
part, like a shim that cannot reach the attempt's directory.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stoker.engines.attempt import AttemptResult, lease_clock
from stoker.engines.execution import STOPPED
from stoker.engines.slurm.execution import RETRY, SlurmExecution
from stoker.engines.slurm.leader import NodeMessage
from stoker.engines.slurm.record import NodeGroup, NodeRecord, Owner, SlurmAttemptRecord, SlurmAttemptSpec
from stoker.engines.slurm.step import frames
from stoker.errors import StokerError
from stoker.gpus.prober import Prober
from stoker.paths import write_atomically
from stoker.rules.rule import Observation
from stoker.runs.processes.reaper import Reaper
from stoker.runs.processes.signals import SignalStream
from stoker.runs.record import Ending, Status
from stoker.runs.supervisor import OtherNodes, StopRequest, Supervisor

if TYPE_CHECKING:
    from stoker.runs.postmortem.facts import NodeFacts


def as_follower(attempt_spec: SlurmAttemptSpec, group: NodeGroup, rank: int) -> SlurmAttemptSpec:
    """This node's part of the attempt. The leader handles time limit, actions, snapshot and batch size."""
    plan = msgspec.structs.replace(
        attempt_spec.plan,
        command=tuple(map(group.rendezvous(rank).fill, group.command)),
        directory=group.directory,
        max_time=None,
        then=(),
    )
    return msgspec.structs.replace(attempt_spec, plan=plan, commit=None, code=None, fitting=None)


class FollowerExecution(SlurmExecution):
    """This node's part of an attempt."""

    _record: NodeRecord

    def __init__(
        self,
        record: NodeRecord,
        attempt_spec: SlurmAttemptSpec,
        owner: Owner,
        signals: SignalStream,
        reaper: Reaper,
        prober: Prober,
        environment: Mapping[str, str],
        group: NodeGroup,
    ) -> None:
        self._leader_alive = 0
        self._looked_at = self._leader_at = lease_clock()
        """When the leader's heartbeat was last checked, and when one was last certain."""
        super().__init__(record, attempt_spec, owner, signals, reaper, prober, environment)
        self._shared = SlurmAttemptRecord(record.directory.parent)
        self._group = group
        self._supervisor: Supervisor | None = None
        self._explained = 0
        self._leader_version = 0
        self._to_leader = _ToLeader(group.names[record.rank])

    def other_nodes(self, supervisor: Supervisor) -> OtherNodes | None:
        self._supervisor = supervisor
        return self._to_leader

    def _in_touch_at(self) -> float:
        return min(self._heard_at, self._leader_at)

    def _why_out_of_touch(self) -> str:
        return f"{self._group.names[0]} gave no sign of life for so long that another attempt may run."

    def _ordered(self) -> StopRequest | None:
        self._look_for_leader()
        if (request := super()._ordered()) is not None:
            return request
        order = self._shared.order()
        if order is not None and order.run == self._group.run:
            if order.stop:
                return StopRequest("signal", order.reason, STOPPED)
            if order.explain > self._explained:
                self._explained = order.explain
                self._explain(order.explain)
        return self._after_leader()

    def _look_for_leader(self) -> None:
        """Checks the leader's heartbeat. A new one is dated to the previous check, the earliest possible time."""
        now = lease_clock()
        with contextlib.suppress(OSError):
            alive = self._shared.alive_version()
            if alive != self._leader_alive:
                self._leader_alive, self._leader_at = alive, self._looked_at
                self._fence()
            self._looked_at = now

    def _after_leader(self) -> StopRequest | None:
        """Stops after the leader's end, which its reaper records if the leader is killed."""
        version = self._shared.status_version()
        if version == self._leader_version:
            return None
        self._leader_version = version
        if self._shared.status().state == "ended":
            return StopRequest("node lost", f"The job has ended on {self._group.names[0]}.", STOPPED)
        return None

    def _explain(self, number: int) -> None:
        """Writes this node's part of a report. A failure must not affect the job."""
        if self._supervisor is None:
            return
        with contextlib.suppress(OSError, StokerError, ValueError):
            facts = msgspec.structs.replace(self._supervisor.collect_facts(), node=self._to_leader.here)
            write_atomically(self._record.facts(number), msgspec.msgpack.encode(facts))

    def on_ended(self, status: Status) -> None:
        super().on_ended(status)
        self._to_leader.send(NodeMessage(ended=status))

    def announce(self, result: AttemptResult) -> None:
        """The leader reads the status."""

    def wait_until_recorded(self) -> None:
        gives_up_at = lease_clock() + (self._attempt_spec.lease if self._killed_at is None else 0.0)
        while not self._write_outcome() and lease_clock() < gives_up_at:
            self._pause(RETRY)


class _ToLeader:
    """The connection to the leader, which gets this node's observations and judges them."""

    def __init__(self, here: str) -> None:
        self.here = here
        # A leader that does not read must not block the supervision of this node.
        os.set_blocking(1, False)

    def send(self, message: NodeMessage) -> None:
        """Sends a message, one write per line. To the leader, lost parts are unknown."""
        with contextlib.suppress(OSError):
            for line in frames(self.here, msgspec.json.encode(message)):
                os.write(1, line)

    def descriptors(self) -> Iterable[int]:
        return ()

    def due(self) -> float:
        return math.inf

    def share(self, observation: Observation) -> None:
        self.send(NodeMessage(observation=observation))

    def observation(self) -> Observation | None:
        return None

    def ended(self, code: int) -> int | None:
        return code

    def ask_for_facts(self) -> None:
        pass

    def facts(self) -> "Sequence[NodeFacts]":
        return ()

    def stop(self, ending: Ending, reason: str) -> None:
        pass

    def finish(self, ending: Ending, reason: str) -> Sequence[str]:  # noqa: ARG002 - the leader's affair
        return ()
