"""The cluster's nodes, partitions and settings, refreshed now and then in the background."""

import contextlib
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stoker.engines.slurm import MOST_NODES, answers, client
from stoker.engines.slurm.answers import SlurmConfig, SlurmNode, SlurmPartition
from stoker.engines.slurm.client import Running
from stoker.engines.slurm.submission import check_partition, lacking
from stoker.errors import BadInputError, StokerError
from stoker.queue.fields import JobSpec
from stoker.queue.model import ClusterNode

# Nodes and partitions change rarely, and each query loads the controller.
_EVERY: Final = 30.0
# The shorter interval after a job of this queue began or ended.
_SOON: Final = 12.0
_AGAIN: Final = 15.0
_KILL_WAIT: Final = 30.0


class Cluster:
    """The cluster as last seen. Unknown values lead to no conclusion."""

    def __init__(self) -> None:
        """Raises StokerError if Slurm's commands are missing or too old."""
        if shutil.which("sbatch") is None:
            raise BadInputError("there are no Slurm commands here: sbatch was not found in PATH")
        answers.parse_version(client.version().result())
        self.nodes: tuple[SlurmNode, ...] = ()
        self.partitions: tuple[SlurmPartition, ...] = ()
        self.config: SlurmConfig | None = None
        self._asking: dict[str, Running] = {}
        self._ask_at = self._asked_at = -math.inf

    @property
    def kill_wait(self) -> float:
        return _KILL_WAIT if self.config is None else self.config.kill_wait

    @property
    def name(self) -> str:
        return "" if self.config is None else self.config.cluster

    def ask(self) -> None:
        """Queries everything, and waits for the answers. Raises StokerError."""
        self.config = answers.parse_config(client.config().result())
        self.partitions = tuple(answers.parse_partitions(client.partitions().result()))
        self.nodes = tuple(answers.parse_nodes(client.nodes().result()))
        self._asked_at = time.monotonic()
        self._ask_at = self._asked_at + _EVERY

    def ask_soon(self) -> None:
        """Queries the nodes soon, because their usage has changed."""
        self._ask_at = min(self._ask_at, max(time.monotonic(), self._asked_at + _SOON))

    def check_partition(self, name: str | None) -> None:
        """Raises BadInputError if the cluster is known and lacks this partition."""
        of_nodes = {partition for node in self.nodes for partition in node.partitions}
        check_partition(name, of_nodes.union(partition.name for partition in self.partitions))

    def gpu_type(self, model: str | None) -> str:
        """The cluster's name of this GPU model."""
        wanted = (model or "").lower()
        return next((node.gpu_model for node in self.nodes if wanted and node.gpu_model.lower() == wanted), "")

    def why_never(self, job: JobSpec, partition: str | None, labels: Sequence[str] = ()) -> str | None:
        """Why no node of its partition can ever run the job; None if one can, or if that is unknown."""
        partition = partition or next((one.name for one in self.partitions if one.default), None)
        try:
            self.check_partition(partition)
        except BadInputError as error:
            return f"can never start here: {error}"
        missing = lacking(job, self.nodes, partition, labels)
        return next((f"can never start here: {why}" for why in missing.values()), None)

    def view(self, running: Iterable[tuple[str, str, int]]) -> tuple[ClusterNode, ...]:
        """The nodes for people. `running`: id, nodes and GPUs per node of the queue's running jobs."""
        own: dict[str, dict[str, int]] = {}
        for name, hosts, gpus in running:
            with contextlib.suppress(ValueError):
                for node in answers.expand_hosts(hosts):
                    own.setdefault(node, {})[name] = gpus
        # A huge cluster does not report all nodes; those with jobs of the queue come first.
        shown = sorted(self.nodes, key=lambda node: (node.name not in own, not node.gpus))[:MOST_NODES]
        return tuple(_node_view(node, own.get(node.name, {})) for node in sorted(shown, key=lambda node: node.name))

    # Questions in the background

    def descriptors(self) -> Iterable[int]:
        return [command.fileno() for command in self._asking.values()]

    def due(self) -> float:
        return min((command.due() for command in self._asking.values()), default=self._ask_at)

    def step(self) -> bool:
        """True if a change affects which jobs can start."""
        if not self._asking and time.monotonic() >= self._ask_at:
            self._asked_at = time.monotonic()
            self._ask_at = self._asked_at + _EVERY
            self._asking = {"nodes": client.nodes()}
            if self.config is None:
                self._asking |= {"partitions": client.partitions(), "config": client.config()}
        before = self._gist()
        for what, command in list(self._asking.items()):
            if not command.has_ended():
                continue
            del self._asking[what]
            try:
                self._take(what, command.result())
            except StokerError:
                self._ask_at = time.monotonic() + _AGAIN
        return self._gist() != before

    def _take(self, what: str, answer: str) -> None:
        match what:
            case "nodes":
                self.nodes = tuple(answers.parse_nodes(answer))
            case "partitions":
                self.partitions = tuple(answers.parse_partitions(answer))
            case _:
                self.config = answers.parse_config(answer)

    def _gist(self) -> Mapping[str, tuple[object, ...]]:
        return {node.name: (node.gpus, node.gpu_model, node.features) for node in self.nodes}

    def close(self) -> None:
        for command in self._asking.values():
            with contextlib.suppress(OSError):
                command.kill()


def _node_view(node: SlurmNode, jobs: Mapping[str, int]) -> ClusterNode:
    """`jobs`: the GPUs of each job of the queue on this node. They are known before the node reports them."""
    own = min(node.gpus, sum(jobs.values()))
    return ClusterNode(
        name=node.name,
        partitions=node.partitions,
        state=node.state,
        available=node.available,
        reason=node.reason,
        gpus=node.gpus,
        gpus_allocated=max(own, node.gpus_allocated),
        own=own,
        gpu_model=node.gpu_model,
        cpus=node.cpus,
        cpus_allocated=node.cpus_allocated,
        memory=node.memory,
        features=node.features,
        jobs=tuple(sorted(jobs)),
    )
