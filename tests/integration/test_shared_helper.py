"""One helper for all processes of a user: who shares it, what each sees, and what its death costs."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.gpus import sharing, source
from stoker.gpus.model import Look, known
from stoker.gpus.nvml.device import FIRST_SPAN
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.sharing import Sharing, started_here
from stoker.gpus.source import SourceEntry
from stoker.gpus.spawn import forked
from stoker.runs.processes.reaper import Empty, Program, ReaperKilled, launch
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for

CLIENT = """
import json, os, sys
from stoker.gpus.prober import Prober
prober = Prober("nvml", deadline=60, sharing="start")
for line in sys.stdin:
    look = prober.look()
    print(json.dumps([prober.helper, look.problem and look.problem.reason]), flush=True)
"""


@contextlib.contextmanager
def sharing_one(count: int, how: Sharing = "start", deadline: float = 60.0) -> Iterator[list[Prober]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Prober("nvml", deadline=deadline, sharing=how)) for _ in range(count)]


def good_look(prober: Prober) -> Look:
    def good() -> Look | None:
        look = prober.look()
        return look if look.problem is None else None

    return wait_for(good, named="a good look")


def problem(look: Look) -> str:
    assert look.problem is not None
    return look.problem.reason


def peak(look: Look) -> float:
    utilization = look.readings[0].utilization
    assert known(utilization)
    return utilization.peak


def ended(pid: int) -> bool:
    started_here()  # collects it
    return not psutil.pid_exists(pid)


def test_64_clients_have_one_helper_and_share_a_reading(nvidia: MockMachine) -> None:
    with sharing_one(64) as probers:
        for prober in probers:
            assert prober.look().problem is None
        assert len({prober.helper for prober in probers}) == 1
        assert nvidia.calls("nvmlInitWithFlags") <= 1 + len(probers)
        begun = nvidia.calls("nvmlDeviceGetTemperature")
        for prober in probers:
            prober.ask(max_age=60)
        for prober in probers:
            wait_for(prober.answer, named="a look")
        assert nvidia.calls("nvmlDeviceGetTemperature") - begun == len(nvidia.gpus)
        (pid,) = {prober.helper for prober in probers}
        assert pid is not None
    wait_for(lambda: ended(pid), named="the end of a helper without clients")


def test_look_is_never_older_than_asked(nvidia: MockMachine) -> None:
    with sharing_one(2) as (one, other):
        one.look()
        asked = time.monotonic()
        assert other.look().at >= asked
        one.ask(max_age=60)
        shared = wait_for(one.answer)
        assert shared.at >= asked
        # It has seen that one: the next covers some time.
        one.ask(max_age=60)
        assert wait_for(one.answer).at > shared.at


def test_looks_of_other_clients_hide_no_activity(nvidia: MockMachine) -> None:
    gpu = nvidia.gpus[0]
    gpu.utilization = 0
    gpu.set_samples([])
    with sharing_one(2) as (seldom, often):
        before = seldom.look()
        often.look()
        gpu.set_samples([(0.001, 100)])
        assert peak(often.look()) == 1.0
        for _ in range(5):
            often.look()
        assert peak(often.look()) == 0.0
        seen = seldom.look()
        assert peak(seen) == 1.0
        assert seen.readings[0].span == pytest.approx(seen.at - before.at, abs=0.001)


def test_client_that_comes_later_sees_as_much_as_the_first(nvidia: MockMachine) -> None:
    gpu = nvidia.gpus[0]
    gpu.utilization = 0
    gpu.set_samples([])
    with sharing_one(2) as (first, late):
        begun = first.look().at
        gpu.report_xid(79)
        wait_for(lambda: time.monotonic() - begun > 2 * FIRST_SPAN, named="more time than a first look covers")
        gpu.set_samples([(2 * FIRST_SPAN - 0.1, 100)])
        seen = late.look()
        assert (peak(seen), seen.readings[0].span) == (0.0, FIRST_SPAN)
        assert late.choices == first.choices
        assert peak(first.look()) == 1.0
        gpu.report_xid(48)
        assert [_xids(prober.look()) for prober in (first, late)] == [(79, 48), (48,)]


def _xids(look: Look) -> tuple[int, ...]:
    health = look.readings[0].health
    assert known(health)
    return health.xids


def test_killed_helper_costs_at_most_a_look(nvidia: MockMachine) -> None:
    with sharing_one(8) as probers:
        gpus, *_ = [prober.look().gpus for prober in probers]
        (killed,) = {prober.helper for prober in probers}
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: ended(killed), named="its death")
        for prober in probers:
            assert good_look(prober).gpus == gpus
        (another,) = {prober.helper for prober in probers}
        assert another != killed


def test_death_during_a_look_is_reported(nvidia: MockMachine) -> None:
    with sharing_one(2) as (one, other):
        one.look()
        other.look()
        nvidia.fault("nvmlDeviceGetSamples", hang=600)
        one.ask()
        other.ask()
        nvidia.wait_until_hanging()
        assert one.helper is not None
        os.kill(one.helper, signal.SIGKILL)
        looks = [wait_for(prober.answer, named="the end of the look") for prober in (one, other)]
        assert "; it is started again" in problem(looks[0])
        assert [len(look.readings) for look in looks] == [2, 2]
        nvidia.clear_faults()
        for prober in (one, other):
            good_look(prober)
        assert one.helper == other.helper


def test_blocked_driver_blocks_one_process_and_all_clients_see_unknown(nvidia: MockMachine) -> None:
    with sharing_one(8) as probers:
        for prober in probers:
            prober.look()
        nvidia.fault("nvmlDeviceGetSamples", hang=600)
        for prober in probers:
            prober.deadline = 0.3
            prober.ask()
        for prober in probers:
            assert problem(wait_for(prober.answer)) == "the driver did not answer in 0.3 s"
        nvidia.wait_until_hanging()
        with Prober("nvml", deadline=0.2, sharing="start") as late:
            assert problem(late.look()) == "the driver did not answer in 0.2 s"
            assert late.helper == probers[0].helper
        assert nvidia.max_in_flight == 1
        nvidia.clear_faults()
        for prober in probers:
            assert good_look(prober).gpus
        assert len({prober.helper for prober in probers}) == 1


def test_concurrent_first_start_has_one_winner(nvidia: MockMachine) -> None:
    clients = [
        subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("look\n" * 2)
            client.stdin.flush()
        answers = []
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()
            # A client that came before the helper knows the pid of its starter: by now all know the helper's.
            answers.append(json.loads(client.stdout.readline()))
        assert [why for _, why in answers] == [None] * len(clients)
        assert nvidia.calls("nvmlInitWithFlags") <= 1 + len(clients)
        assert len([one for one in psutil.process_iter() if _reads(one, nvidia)]) == 1
    finally:
        for client in clients:
            client.communicate(timeout=60)


def _reads(process: psutil.Process, machine: MockMachine) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name() == "stoker-gpus" and process.environ().get("MOCK_NVML_STATE") == str(machine.path)
    return False


def test_helper_outlives_the_process_that_started_it(nvidia: MockMachine) -> None:
    """In its own session, so that neither Ctrl-C nor the end of a terminal reaches it."""
    starter = subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    starter.stdin.write("look\n")
    starter.stdin.flush()
    helper, _ = json.loads(starter.stdout.readline())
    with Prober("nvml", deadline=60, sharing="join") as prober:
        assert prober.look().problem is None
        os.killpg(starter.pid, signal.SIGINT)
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
        assert prober.look().problem is None
        assert prober.helper == helper
        assert os.getsid(helper) == helper
        links = {str(Path(f"/proc/{helper}/{link}").readlink()) for link in ("fd/1", "fd/2", "cwd")}
        assert links == {os.devnull, "/"}
    starter.communicate()


def test_helper_is_never_taken_for_a_process_of_the_job() -> None:
    """Also not where its starter adopts what a killed reaper leaves behind."""
    with Prober("sim:2", deadline=60, start=forked, sharing="start") as prober:
        reaper = launch(Program(("sleep", "600"), os.environ), helpers=lambda: prober.children, contain_cgroup=False)
        with contextlib.closing(reaper):
            assert prober.look().problem is None
            helper = prober.helper
            assert helper in prober.children
            os.kill(reaper.pid, signal.SIGKILL)
            wait_for(lambda: isinstance(reaper.next_event(), ReaperKilled), named="the death of the reaper")
            assert helper not in {process.pid for process in reaper.processes()}
            for process in reaper.processes():
                os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: isinstance(reaper.next_event(), Empty), named="the end of the job")
            assert prober.look().problem is None
            assert prober.helper == helper


def test_another_users_helper_is_not_trusted(nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    name = sharing._name("nvml", "/")
    assert name is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind(name)
        squatter.listen()
        monkeypatch.setattr(sharing, "peer_user", lambda _connection: os.geteuid() + 1)
        with Prober("nvml", deadline=60, sharing="start") as prober:
            assert prober.look().problem is None
            assert prober.helper in prober.children
            assert prober.helper not in started_here()


AS_NOBODY = (
    "import os, socket, sys; os.setuid(65534); name = bytes.fromhex(sys.argv[1]); s = socket.socket(socket.AF_UNIX);"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@as_root
def test_another_user_is_not_served(nvidia: MockMachine) -> None:
    program = f"{AS_NOBODY} s.settimeout(60); s.connect(name); print(s.recv(1))"
    with Prober("nvml", deadline=60, sharing="start") as prober:
        prober.look()
        name = sharing._name("nvml", "/")
        assert name is not None
        assert subprocess.check_output([sys.executable, "-c", program, name.hex()], text=True) == "b''\n"
        assert prober.look().problem is None


@as_root
def test_name_that_another_user_has_taken_leaves_a_private_helper(nvidia: MockMachine) -> None:
    program = f"{AS_NOBODY} s.bind(name); s.listen(); print(flush=True); sys.stdin.read()"
    name = sharing._name("nvml", "/")
    assert name is not None
    command = [sys.executable, "-c", program, name.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as squatter:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        with Prober("nvml", deadline=60, sharing="start") as prober:
            assert prober.look().problem is None
            assert prober.helper in prober.children
        squatter.communicate()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LD_LIBRARY_PATH", "/elsewhere"), ("LD_PRELOAD", ""), ("STOKER_ROOT", "/tmp")],
)
def test_helper_is_not_shared_where_something_else_is_read(
    nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    before = sharing._name("nvml", "/")
    if variable == "STOKER_ROOT":
        assert sharing._name("nvml", value) != before
    else:
        monkeypatch.setenv(variable, value)
        assert sharing._name("nvml", "/") != before
    assert sharing._name("sim:2", "/") != sharing._name("sim:3", "/")


def test_visible_devices_and_path_make_no_difference(nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [sharing._name(spec, "/") for spec in ("nvml", "auto")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PATH", f"/elsewhere:{os.environ['PATH']}")
    assert [sharing._name(spec, "/") for spec in ("nvml", "auto")] == before


def test_another_version_has_its_own_helper(nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing_one(2) as (one, other):
        one.look()
        monkeypatch.setattr(sharing, "__version__", "0.1.0")
        assert other.look().problem is None
        assert one.helper != other.helper


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "STOKER_DEBUG"])
def test_nothing_is_shared_in_an_allocation_or_while_debugging(
    nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with sharing_one(2) as (outside, inside):
        outside.look()
        monkeypatch.setenv(variable, "1")
        assert inside.look().problem is None
        assert inside.helper != outside.helper


def test_process_in_a_run_joins_a_helper_but_starts_none(nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing_one(2) as (inside, outside):
        monkeypatch.setenv("STOKER_RUN", "abc")
        inside.look()
        assert inside.helper not in started_here()
        monkeypatch.delenv("STOKER_RUN")
        outside.look()
        monkeypatch.setenv("STOKER_RUN", "abc")
        with Prober("nvml", deadline=60, sharing="start") as nested:
            nested.look()
            assert nested.helper == outside.helper != inside.helper


def test_relative_directory_is_not_shared() -> None:
    assert sharing._name("sim:2@here", "/") is None
    assert sharing._name("sim:2@/there", "/") is not None


def test_nothing_is_shared_with_a_source_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SOURCES", dict(source._SOURCES))
    assert sharing._name("auto", "/") is not None
    source.register(SourceEntry("acme", "acme:open_source", "another vendor", auto=True))
    assert sharing._name("auto", "/") is None
    assert sharing._name("acme", "/") is None


def test_nothing_is_written(nvidia: MockMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a home that cannot be written, a file that a killed helper left: none of them matters."""
    home = Path(os.environ["STOKER_HOME"])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    with sharing_one(1) as (prober,):
        prober.look()
    assert not home.exists()
    assert not (tmp_path / "runtime").exists()


def test_client_without_descriptors_sees_unknown_and_recovers(nvidia: MockMachine) -> None:
    with sharing_one(1) as (prober,):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            look = prober.look()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert problem(look) == "the helper that reads the GPUs could not be started"
        assert good_look(prober).gpus


def test_aligned_looks_of_many_are_one_reading(nvidia: MockMachine) -> None:
    with sharing_one(6) as probers:
        for prober in probers:
            prober.look()
        begun = nvidia.calls("nvmlDeviceGetTemperature") // 2
        samplers = [Sampler(prober, 1.0, first=0.01 * number, aligned=True) for number, prober in enumerate(probers)]
        seen = [0] * len(samplers)
        while min(seen) < 4:
            for number, sampler in enumerate(samplers):
                seen[number] += sampler.step() is not None
            time.sleep(0.001)
        assert nvidia.calls("nvmlDeviceGetTemperature") // 2 - begun < sum(seen) / 2
