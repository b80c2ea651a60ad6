"""`gpu_mon` with the files that people have: what runs on idle GPUs, and for whom it steps aside."""

import signal
import time

import pytest

from tests.support.fill_site import FAST, MINER, PATIENCE, FillSite, alive, typed_at
from tests.support.gpu_mon_conf import ONE_FOR_ALL, ONE_FOR_EACH
from tests.support.node_holders import NOBODY, needs_root

ROOT = 0
NOT_SUPPORTED, VERSION_MISMATCH = 3, 18  # NVML errors


def at_once(text: str) -> str:
    """The same file for people who cannot wait a minute: as gpu_mon did, at the next tick."""
    return text.replace("interval_seconds=10", "interval_seconds=10\nidle_for=0")


class TestThePublishedFiles:
    @pytest.mark.parametrize("text", [ONE_FOR_ALL, ONE_FOR_EACH])
    def test_unchanged_configuration_starts_programs_after_a_minute_of_idleness(
        self, filling: FillSite, text: str
    ) -> None:
        begun = time.monotonic()
        filling.gpu_mon("-c", filling.write(text), environment=filling.fast_clock())
        expected = [",".join(filling.uuids)] if text is ONE_FOR_ALL else filling.uuids
        filling.wait_for_start(len(expected))
        assert time.monotonic() - begun >= 60 / FAST
        assert sorted(filling.started().values()) == sorted(expected)

    def test_file_in_the_home_directory_is_the_default(self, filling: FillSite) -> None:
        home = filling.directory / "home"
        (home / ".config").mkdir(parents=True)
        (home / ".config/gpu_mon.conf").write_text(ONE_FOR_ALL.replace("_seconds=10", "_seconds=10\nidle_for=1h"))
        filling.gpu_mon(environment={"HOME": str(home)})
        filling.wait_for_why("^idle, and given to process-all in (1h|59m[0-9]+s)$")

    @pytest.mark.parametrize("gpu", [0, 1])
    def test_program_on_all_gpus_stops_when_another_user_opens_one(self, filling: FillSite, gpu: int) -> None:
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        (miner,) = filling.wait_for_start()
        other_user = filling.open_node(gpu)
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        mon.wait_until_it_says(rf"process-all on GPUs 0, 1: stops, used by \w+'s \S+ \(pid {other_user.pid}\)")

    def test_program_on_all_gpus_waits_until_all_are_idle(self, filling: FillSite) -> None:
        other_user = filling.open_node(1)
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        filling.wait_for_why(rf"used by \w+'s \S+ \(pid {other_user.pid}\)")
        assert not filling.started()
        filling.leave(other_user)
        filling.wait_for_start()

    def test_only_the_program_on_the_opened_gpu_stops(self, filling: FillSite) -> None:
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)))
        filling.wait_for_start(2)
        by_gpu = {uuid: pid for pid, uuid in filling.started().items()}
        assert set(by_gpu) == set(filling.uuids)
        filling.open_node(1)
        filling.wait_for_end(by_gpu[filling.uuids[1]])
        # The other would have been asked at the same moment.
        assert filling.asked_to_end() == {by_gpu[filling.uuids[1]]}
        assert alive(by_gpu[filling.uuids[0]])


class TestGpusThatTellLittle:
    def test_device_nodes_suffice_to_start_and_to_stop(self, filling: FillSite) -> None:
        lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        for function in ("nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates", *(f"{name}_v3" for name in lists)):
            filling.machine.fault(function, code=NOT_SUPPORTED)
        for gpu in filling.machine.gpus:
            gpu.gpm_supported = 0
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        (miner,) = filling.wait_for_start()
        filling.open_node(1)
        filling.wait_for_end(miner)

    def test_driver_version_mismatch_is_reported_once(self, filling: FillSite) -> None:
        filling.machine.fault("nvmlInitWithFlags", code=VERSION_MISMATCH)
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)), environment=filling.fast_clock())
        mon.wait_until_it_says("so nothing is started on them: .* are of different versions")
        assert len(mon.said.splitlines()) == 1
        filling.machine.clear_faults()
        mon.wait_until_it_says("the GPUs can be read again")
        filling.wait_for_start()


class TestIgnoredPrograms:
    def test_monitoring_programs_do_not_count_as_users(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("=nvidia-smi", "=nvidia-smi, my-monitor, looker-?")
        names = ("nvidia-smi", "my-monitor", "looker-7", "dcgm-exporter", "Xorg", "nvidia-persistenced")
        for name in names:
            filling.open_node_as(name, 0, 1)
        filling.gpu_mon("-c", filling.write(text))
        (miner,) = filling.wait_for_start()
        for name in names:
            filling.open_node_as(name, 0)
        # Once this one's coming is noticed, that of those before it was as well.
        other_user = filling.open_node_as("somebody", 1)
        filling.wait_for_end(miner)
        filling.wait_for_why(rf"used by \w+'s somebody \(pid {other_user.pid}\)")

    def test_program_with_a_similar_name_counts_as_a_user(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("=nvidia-smi", "=nvidia-smi, looker-?")
        earlier = filling.open_node(0)
        filling.gpu_mon("-c", filling.write(text))
        for name in ("nvidia-smi-2", "an-nvidia-smi", "Nvidia-smi", "looker-", "looker-77"):
            other_user = filling.open_node_as(name, 0)
            filling.leave(earlier)
            filling.wait_for_why(f"used by .*'s {name} ")
            earlier = other_user
        assert not filling.started()

    def test_built_in_ignore_list_can_be_disabled(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("idle_for=0", "idle_for=0\nignore_shipped=no")
        filling.open_node_as("nvtop", 0)
        filling.gpu_mon("-c", filling.write(text))
        filling.wait_for_why("used by .*'s nvtop ")

    def test_nodes_opened_by_the_program_and_its_children_do_not_count(self, filling: FillSite) -> None:
        filling.program("miner-run", f'exec 3<"{filling.nodes[0]}"; sleep 999 & {MINER}')
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)))
        filling.wait_for_start(2)
        by_gpu = {uuid: pid for pid, uuid in filling.started().items()}
        # Both hold the first one's node: the second program belongs to the same filler.
        other_user = filling.open_node(1)
        filling.wait_for_why(f"pid {other_user.pid}", slot=1)
        filling.wait_for_end(by_gpu[filling.uuids[1]])
        assert filling.slots()[0]["state"] == "running"
        assert filling.asked_to_end() == {by_gpu[filling.uuids[1]]}

    def test_process_that_only_queries_the_driver_does_not_count(self, filling: FillSite) -> None:
        filling.environment["MOCK_NVML_NODES"] = ":".join(map(str, filling.nodes))
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        (miner,) = filling.wait_for_start()
        filling.follow_gpus()
        other_user = filling.open_node(0)
        filling.wait_for_end(miner)
        mon.wait_until_it_says(rf"stops, used by \w+'s \S+ \(pid {other_user.pid}\)")


class TestPeopleAtTerminals:
    """With a clock that is fast: terminals are looked at every five seconds."""

    def test_active_terminal_user_stops_every_program(self, filling: FillSite) -> None:
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)), environment=filling.fast_clock())
        miners = filling.wait_for_start(2)
        terminal = filling.terminal(ROOT, idle=0)
        for miner in miners:
            filling.wait_for_end(miner)
        mon.wait_until_it_says(
            f"process-1 on GPU 1: stops, root was active at pts/{terminal.name} (just now|[0-9]+s ago)"
        )

    def test_active_terminal_user_delays_the_start(self, filling: FillSite) -> None:
        terminal = filling.terminal(ROOT, idle=60)
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)), environment=filling.fast_clock())
        filling.wait_for_why(f"root was active at pts/{terminal.name} [0-9ms]+ ago")
        assert not filling.started()
        typed_at(terminal, idle=400)
        filling.wait_for_start()

    def test_idle_terminal_user_does_not_count(self, filling: FillSite) -> None:
        filling.terminal(ROOT, idle=400)
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)), environment=filling.fast_clock())
        filling.wait_for_start()

    @needs_root
    def test_user_on_the_whitelist_does_not_count(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("user1,user2", "user1,nobody")
        filling.terminal(NOBODY, idle=0)
        filling.gpu_mon("-c", filling.write(text), environment=filling.fast_clock())
        (miner,) = filling.wait_for_start()
        filling.terminal(ROOT, idle=0)
        filling.wait_for_end(miner)

    def test_terminal_users_do_not_count_when_terminals_are_not_watched(self, filling: FillSite) -> None:
        filling.terminal(ROOT, idle=0)
        text = at_once(ONE_FOR_ALL).replace("enabled=True", "enabled=False")
        filling.gpu_mon("-c", filling.write(text), environment=filling.fast_clock())
        filling.wait_for_start()


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("gpus=1\n", "gpus=0\n", "process-1 gpus: process-0 has GPU 0 already: give each GPU to one program only"),
        ("enabled=True", "enabled=perhaps", "[tty] enabled: 'perhaps' is neither yes nor no"),
    ],
    ids=["overlap", "wrong value"],
)
def test_error_in_a_file_is_reported_and_nothing_starts(
    filling: FillSite, right: str, wrong: str, problem: str
) -> None:
    file = filling.write(ONE_FOR_EACH.replace(right, wrong))
    mon = filling.gpu_mon("-c", file)
    assert mon.process.wait(timeout=PATIENCE) == 2
    assert mon.said == f"gpu_mon: {file}: {problem}\n"
    assert not filling.started()


def test_ctrl_c_leaves_no_process(filling: FillSite) -> None:
    mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)))
    miners = filling.wait_for_start(2)
    assert mon.stop(signal.SIGINT) == 0
    assert not any(map(alive, miners))
    # What read the GPUs for it is not waited for.
    filling.wait_until_nothing_is_left()
