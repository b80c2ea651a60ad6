"""Command, environment and devices of a job at its start."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engines.preparation import KNOWN_LATER, ONE_MACHINE, Rendezvous, on_one_machine, prepare
from stoker.errors import BadInputError
from stoker.gpus.model import Gpu
from stoker.gpus.visible import visible_gpus
from stoker.queue.model import Job
from stoker.runs.plan import Plan
from tests.support.looks import a_gpu


def a_job(**changes: Any) -> Job:
    usual: dict[str, Any] = {
        "id": "0a1b2c3d",
        "command": ("train",),
        "state": "running",
        "position": 1.0,
        "submitted": 0.0,
        "started": 1.0,
        "ended": None,
        "not_before": 0.0,
        "retries_left": 0,
        "attempts": 1,
        "attempt": "a",
        "exit_code": None,
        "reason": "",
        "link": "",
        "cancel_requested": None,
        "origin": None,
    }
    return Job(**(usual | changes))


class Prepared(NamedTuple):
    plan: Plan
    environment: dict[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        return self.plan.command


def prepared(
    *,
    gpus: tuple[Gpu, ...] = (a_gpu(0),),
    worker: dict[str, str] | None = None,
    number: int = 1,
    rendezvous: Rendezvous = ONE_MACHINE,
    **job: Any,
) -> Prepared:
    return Prepared(*prepare(a_job(**job), gpus, worker or {}, number, rendezvous=rendezvous))


class TestCommand:
    def test_command_text_runs_in_a_shell_and_an_argument_list_does_not(self) -> None:
        assert prepared(command="a && b").command == ("/bin/sh", "-c", "a && b")
        assert prepared(command=("a", "&&", "b c")).command == ("a", "&&", "b c")

    @pytest.mark.parametrize(
        ("written", "replaced"),
        [
            ("out/{id}", "out/0a1b2c3d"),
            ("-n {gpus} -b {batch_size} {batch_size}", "-n 2 -b 64 64"),
            ("{{id}} {{gpus}}{{batch_size}}", "{id} {gpus}{batch_size}"),
            ("{{{id}}}", "{{id}}"),
            ("awk '{print $1}' ${HOME} {} {ID} { id } {id:x} {{other}} %s", None),
            ('{"id": 1, "gpus": [{}]}', None),
        ],
    )
    def test_only_documented_placeholders_are_replaced(self, written: str, replaced: str | None) -> None:
        two = (a_gpu(0), a_gpu(1))
        assert prepared(command=written, batch_size=64, gpus=two).command[2] == (replaced or written)
        assert prepared(command=("x", written, "y"), batch_size=64, gpus=two).command == ("x", replaced or written, "y")

    def test_missing_batch_size_is_refused(self) -> None:
        with pytest.raises(BadInputError, match=r"job 0a1b2c3d contains \{batch_size\}, but the job has no batch size"):
            prepared(command=("train", "--bs={batch_size}"))
        assert prepared(command=("train", "{{batch_size}}")).command == ("train", "{batch_size}")


class TestRendezvous:
    COMMAND = ("torchrun", "--nnodes={nodes}", "--node-rank={node_rank}", "{master_addr}:{master_port}", "{{nodes}}")

    def test_command_of_several_machines_knows_where_to_meet(self) -> None:
        found = prepared(command=self.COMMAND, nodes=3, rendezvous=Rendezvous(3, 2, "node1", 29500))
        assert found.command == ("torchrun", "--nnodes=3", "--node-rank=2", "node1:29500", "{nodes}")
        expected = {"STOKER_NODES": "3", "STOKER_NODE_RANK": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
        assert found.environment.items() >= expected.items()

    def test_command_on_one_machine_meets_there(self) -> None:
        here = on_one_machine("a" * 32)
        found = prepared(command=self.COMMAND, rendezvous=here)
        assert found.command[1:4] == ("--nnodes=1", "--node-rank=0", f"127.0.0.1:{here.master_port}")
        assert not found.environment.keys() & {"MASTER_ADDR", "MASTER_PORT"}

    def test_attempts_have_their_own_unprivileged_port(self) -> None:
        ports = {int(on_one_machine(f"{number:032x}").master_port) for number in range(100)}
        assert len(ports) > 90
        # Linux gives ports from 32768 on to clients.
        assert all(20_000 <= port < 32_768 for port in ports)

    def test_values_that_are_known_later_are_filled_in_on_each_machine(self) -> None:
        found = prepared(command=(*self.COMMAND, "{{node_rank}} {other}"), rendezvous=KNOWN_LATER)
        here = Rendezvous(4, 3, "node1", 29500)
        words = tuple(map(here.fill, found.command))
        assert words[1:4] == ("--nnodes=4", "--node-rank=3", "node1:29500")
        assert words[-1] == "{node_rank} {other}"
        filled = here.fill_all(found.environment)
        assert (filled["STOKER_NODES"], filled["STOKER_NODE_RANK"]) == ("4", "3")
        assert (filled["MASTER_ADDR"], filled["MASTER_PORT"]) == ("node1", "29500")

    def test_own_addresses_are_kept_and_those_of_the_worker_are_not(self) -> None:
        found = prepared(
            rendezvous=Rendezvous(2, 0, "node1", 29500),
            worker={"MASTER_ADDR": "login", "MASTER_PORT": "1"},
            environment={"MASTER_PORT": "7"},
        ).environment
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node1", "7")


class TestEnvironment:
    def test_job_environment_overrides_that_of_the_worker(self) -> None:
        environment = prepared(worker={"A": "1", "B": "2"}, environment={"B": "3", "C": "4"}).environment
        assert {name: environment[name] for name in "ABC"} == {"A": "1", "B": "3", "C": "4"}

    def test_job_id_overrides_other_values(self) -> None:
        environment = prepared(
            worker={"STOKER_JOB_ID": "other", "STOKER_BATCH_SIZE": "1", "STOKER_RUN": "r", "STOKER_RUN_DIR": "/r"},
            environment={"STOKER_ATTEMPT": "9", "STOKER_RUN_DIR": "/s"},
            number=3,
        ).environment
        assert {name: value for name, value in environment.items() if name.startswith("STOKER_")} == {
            "STOKER_JOB_ID": "0a1b2c3d",
            "STOKER_ATTEMPT": "3",
            "STOKER_NODES": "1",
            "STOKER_NODE_RANK": "0",
        }
        assert prepared(batch_size=64).environment["STOKER_BATCH_SIZE"] == "64"

    def test_settings_of_stoker_are_kept(self) -> None:
        assert prepared(worker={"STOKER_GPUS": "sim:/x"}).environment["STOKER_GPUS"] == "sim:/x"

    def test_wandb_shows_every_attempt_as_one_run_of_this_name(self) -> None:
        first, second = prepared(name="baseline"), prepared(name="baseline", number=2)
        assert wandb(first) == {"WANDB_RUN_ID": "0a1b2c3d", "WANDB_NAME": "baseline"}
        assert wandb(second) == wandb(first) | {"WANDB_RESUME": "allow"}
        assert wandb(prepared())["WANDB_NAME"] == "0a1b2c3d"

    @pytest.mark.parametrize("whose", ["worker", "environment"])
    def test_wandb_variables_of_the_user_are_kept(self, whose: str) -> None:
        own = {"WANDB_RUN_ID": "mine", "WANDB_NAME": "me", "WANDB_RESUME": "must"}
        job: dict[str, Any] = {whose: own}
        assert wandb(prepared(number=2, **job)) == own

    def test_python_is_unbuffered_unless_set_otherwise(self) -> None:
        assert prepared().environment["PYTHONUNBUFFERED"] == "1"
        assert prepared(worker={"PYTHONUNBUFFERED": ""}).environment["PYTHONUNBUFFERED"] == ""
        assert prepared(environment={"PYTHONUNBUFFERED": "0"}).environment["PYTHONUNBUFFERED"] == "0"

    def test_environment_of_the_worker_is_not_modified(self) -> None:
        worker = {"CUDA_VISIBLE_DEVICES": "0", "A": "1"}
        prepared(worker=worker)
        assert worker == {"CUDA_VISIBLE_DEVICES": "0", "A": "1"}


def wandb(prepared: Prepared) -> dict[str, str]:
    return {name: value for name, value in prepared.environment.items() if name.startswith("WANDB_")}


def machine_of(vendor: str, count: int = 5) -> tuple[Gpu, ...]:
    return tuple(a_gpu(index, vendor=vendor) for index in range(count))


CHOICES = st.sampled_from(["0", "1,0", "", "-1", "GPU-00000003", "x"])
CHOOSING = st.dictionaries(
    st.sampled_from(["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"]),
    CHOICES,
)


class TestVisibleDevices:
    @given(st.sampled_from(["nvidia", "sim", "amd"]), st.sets(st.integers(0, 4), min_size=1), CHOOSING, CHOOSING)
    def test_job_sees_exactly_its_gpus_despite_other_settings(
        self, vendor: str, given_to_it: set[int], worker: dict[str, str], own: dict[str, str]
    ) -> None:
        everything = machine_of(vendor)
        gpus = tuple(everything[index] for index in given_to_it)
        environment = prepared(gpus=gpus, worker=worker, environment=own).environment
        assert visible_gpus(everything, environment) == tuple(sorted(gpus, key=lambda gpu: gpu.index))

    def test_nvidia_and_simulated_gpus_are_identified_by_full_uuid(self) -> None:
        for vendor in ("nvidia", "sim"):
            environment = prepared(gpus=(a_gpu(3, vendor=vendor), a_gpu(1, vendor=vendor))).environment
            assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000001,GPU-00000003"
            assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert prepared(worker={"CUDA_DEVICE_ORDER": "x"}).environment["CUDA_DEVICE_ORDER"] == "x"

    def test_slice_is_identified_by_its_uuid(self) -> None:
        whole, *slices = a_gpu(0), a_gpu(1, uuid="MIG-1", parent="GPU-c"), a_gpu(2, uuid="MIG-2", parent="GPU-c")
        environment = prepared(gpus=(slices[1],)).environment
        assert visible_gpus((whole, *slices), environment) == (slices[1],)

    def test_amd_gpu_without_a_uuid_is_identified_by_its_index_among_amd_gpus(self) -> None:
        graphics = a_gpu(0, uuid="PCI-0", vendor="intel")
        amd = (a_gpu(1, uuid="PCI-1", vendor="amd"), a_gpu(2, vendor="amd"), a_gpu(3, uuid="PCI-3", vendor="amd"))
        present = (graphics, *amd)
        environment = Prepared(*prepare(a_job(), amd[1:], {}, 1, present)).environment
        assert environment["ROCR_VISIBLE_DEVICES"] == "GPU-00000002,2"
        assert visible_gpus(amd, environment) == amd[1:]

    def test_intel_gpus_are_identified_by_index(self) -> None:
        intel = machine_of("intel")
        assert prepared(gpus=(intel[2], intel[0])).environment["ZE_AFFINITY_MASK"] == "0,2"

    @given(st.sampled_from(["nvidia", "sim", "amd"]), CHOOSING)
    def test_job_without_gpus_sees_none(self, vendor: str, worker: dict[str, str]) -> None:
        environment = prepared(gpus=(), worker=worker).environment
        assert visible_gpus(machine_of(vendor), environment) == ()

    def test_job_without_gpus_may_set_its_visible_devices(self) -> None:
        environment = prepared(gpus=(), environment={"CUDA_VISIBLE_DEVICES": "1"}).environment
        assert environment["CUDA_VISIBLE_DEVICES"] == "1"
        assert environment["ROCR_VISIBLE_DEVICES"] == ""


def check_policy(job: Job) -> None:
    prepare(job, [], {}, 1)


class TestPolicy:
    @pytest.mark.parametrize("stored", [{}, {"below": 0.05, "window": 60, "require": "any", "warn_at": None}])
    def test_valid_settings_are_accepted(self, stored: dict[str, Any]) -> None:
        check_policy(a_job(policy=stored))

    def test_settings_of_a_job_without_gpus_are_ignored(self) -> None:
        check_policy(a_job(gpus=0, policy={"belov": 0.1}))

    @pytest.mark.parametrize("stored", [{"belov": 0.1}, {"below": "much"}, {"below": 2.0}, {"require": "some"}])
    def test_invalid_settings_are_refused(self, stored: dict[str, Any]) -> None:
        with pytest.raises(BadInputError, match="the policy of job 0a1b2c3d cannot be used: "):
            check_policy(a_job(policy=stored))
