"""`gpu_mon` with the files that people have: what runs on idle GPUs, and for whom it steps aside."""

import signal
import time

import pytest

from tests.support.fill_site import FAST, MINER, PATIENCE, FillSite, alive, typed_at
from tests.support.gpu_mon_conf import ONE_FOR_ALL, ONE_FOR_EACH
from tests.support.openers import NOBODY, needs_root

ROOT = 0
NOT_SUPPORTED, VERSION_MISMATCH = 3, 18  # NVML errors


def at_once(text: str) -> str:
    """The same file for people who cannot wait a minute: as gpu_mon did, at the next tick."""
    return text.replace("interval_seconds=10", "interval_seconds=10\nidle_for=0")


class TestThePublishedFiles:
    @pytest.mark.parametrize("text", [ONE_FOR_ALL, ONE_FOR_EACH])
    def test_unchanged_they_start_their_programs_after_a_minute_of_rest(self, filling: FillSite, text: str) -> None:
        begun = time.monotonic()
        filling.gpu_mon("-c", filling.write(text), environment=filling.fast_clock())
        expected = [",".join(filling.uuids)] if text is ONE_FOR_ALL else filling.uuids
        filling.wait_for_start(len(expected))
        assert time.monotonic() - begun >= 60 / FAST
        assert sorted(filling.started().values()) == sorted(expected)

    def test_the_file_in_the_home_directory_is_used_when_none_is_named(self, filling: FillSite) -> None:
        home = filling.directory / "home"
        (home / ".config").mkdir(parents=True)
        (home / ".config/gpu_mon.conf").write_text(ONE_FOR_ALL.replace("_seconds=10", "_seconds=10\nidle_for=1h"))
        filling.gpu_mon(environment={"HOME": str(home)})
        filling.wait_for_why("^idle, and given to process-all in (1h|59m[0-9]+s)$")

    @pytest.mark.parametrize("gpu", [0, 1])
    def test_one_program_on_all_gpus_stops_when_another_user_opens_any(self, filling: FillSite, gpu: int) -> None:
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        (miner,) = filling.wait_for_start()
        visitor = filling.visit(gpu)
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        mon.wait_until_it_says(rf"process-all on GPUs 0, 1: stops, used by \w+'s \S+ \(pid {visitor.pid}\)")

    def test_one_program_on_all_gpus_waits_until_all_are_idle(self, filling: FillSite) -> None:
        visitor = filling.visit(1)
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        filling.wait_for_why(rf"used by \w+'s \S+ \(pid {visitor.pid}\)")
        assert not filling.started()
        filling.leave(visitor)
        filling.wait_for_start()

    def test_of_a_program_for_each_gpu_only_the_one_that_is_in_the_way_stops(self, filling: FillSite) -> None:
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)))
        filling.wait_for_start(2)
        by_gpu = {uuid: pid for pid, uuid in filling.started().items()}
        assert set(by_gpu) == set(filling.uuids)
        filling.visit(1)
        filling.wait_for_end(by_gpu[filling.uuids[1]])
        # The other would have been asked at the same moment.
        assert filling.asked_to_end() == {by_gpu[filling.uuids[1]]}
        assert alive(by_gpu[filling.uuids[0]])


class TestGpusThatTellLittle:
    def test_device_nodes_are_enough_to_start_and_to_step_aside(self, filling: FillSite) -> None:
        lists = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        for function in ("nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates", *(f"{name}_v3" for name in lists)):
            filling.machine.fault(function, code=NOT_SUPPORTED)
        for gpu in filling.machine.gpus:
            gpu.gpm_supported = 0
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        (miner,) = filling.wait_for_start()
        filling.visit(1)
        filling.wait_for_end(miner)

    def test_a_driver_of_another_version_is_reported_in_one_message(self, filling: FillSite) -> None:
        filling.machine.fault("nvmlInitWithFlags", code=VERSION_MISMATCH)
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)), environment=filling.fast_clock())
        mon.wait_until_it_says("so nothing is started on them: .* are of different versions")
        assert len(mon.said.splitlines()) == 1
        filling.machine.clear_faults()
        mon.wait_until_it_says("the GPUs can be read again")
        filling.wait_for_start()


class TestIgnoredPrograms:
    def test_monitors_do_not_count(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("=nvidia-smi", "=nvidia-smi, my-monitor, looker-?")
        names = ("nvidia-smi", "my-monitor", "looker-7", "dcgm-exporter", "Xorg", "nvidia-persistenced")
        for name in names:
            filling.visit_as(name, 0, 1)
        filling.gpu_mon("-c", filling.write(text))
        (miner,) = filling.wait_for_start()
        for name in names:
            filling.visit_as(name, 0)
        # Once this one's coming is noticed, that of those before it was as well.
        visitor = filling.visit_as("somebody", 1)
        filling.wait_for_end(miner)
        filling.wait_for_why(rf"used by \w+'s somebody \(pid {visitor.pid}\)")

    def test_a_program_that_is_only_named_alike_counts(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("=nvidia-smi", "=nvidia-smi, looker-?")
        earlier = filling.visit(0)
        filling.gpu_mon("-c", filling.write(text))
        for name in ("nvidia-smi-2", "an-nvidia-smi", "Nvidia-smi", "looker-", "looker-77"):
            visitor = filling.visit_as(name, 0)
            filling.leave(earlier)
            filling.wait_for_why(f"used by .*'s {name} ")
            earlier = visitor
        assert not filling.started()

    def test_the_list_that_is_shipped_can_be_left_out(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("idle_for=0", "idle_for=0\nignore_shipped=no")
        filling.visit_as("nvtop", 0)
        filling.gpu_mon("-c", filling.write(text))
        filling.wait_for_why("used by .*'s nvtop ")

    def test_what_the_program_and_its_children_open_is_their_own_business(self, filling: FillSite) -> None:
        filling.program("miner-run", f'exec 3<"{filling.nodes[0]}"; sleep 999 & {MINER}')
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)))
        filling.wait_for_start(2)
        by_gpu = {uuid: pid for pid, uuid in filling.started().items()}
        # Both hold the first one's node: the second program is of the same house.
        visitor = filling.visit(1)
        filling.wait_for_why(f"pid {visitor.pid}", slot=1)
        filling.wait_for_end(by_gpu[filling.uuids[1]])
        assert filling.slots()[0]["state"] == "running"
        assert filling.asked_to_end() == {by_gpu[filling.uuids[1]]}

    def test_whoever_only_reads_the_gpus_by_the_driver_does_not_count(self, filling: FillSite) -> None:
        filling.environment["MOCK_NVML_NODES"] = ":".join(map(str, filling.nodes))
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)))
        (miner,) = filling.wait_for_start()
        filling.follow_gpus()
        visitor = filling.visit(0)
        filling.wait_for_end(miner)
        mon.wait_until_it_says(rf"stops, used by \w+'s \S+ \(pid {visitor.pid}\)")


class TestPeopleAtTerminals:
    """With a clock that is fast: terminals are looked at every five seconds."""

    def test_another_user_active_stops_everything(self, filling: FillSite) -> None:
        mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)), environment=filling.fast_clock())
        miners = filling.wait_for_start(2)
        terminal = filling.terminal(ROOT, idle=0)
        for miner in miners:
            filling.wait_for_end(miner)
        mon.wait_until_it_says(
            f"process-1 on GPU 1: stops, root was active at pts/{terminal.name} (just now|[0-9]+s ago)"
        )

    def test_another_user_active_lets_nothing_start_until_idle_for_long_enough(self, filling: FillSite) -> None:
        terminal = filling.terminal(ROOT, idle=60)
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)), environment=filling.fast_clock())
        filling.wait_for_why(f"root was active at pts/{terminal.name} [0-9ms]+ ago")
        assert not filling.started()
        typed_at(terminal, idle=400)
        filling.wait_for_start()

    def test_another_user_who_typed_nothing_for_long_does_not_count(self, filling: FillSite) -> None:
        filling.terminal(ROOT, idle=400)
        filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_ALL)), environment=filling.fast_clock())
        filling.wait_for_start()

    @needs_root
    def test_who_is_on_the_whitelist_does_not_count(self, filling: FillSite) -> None:
        text = at_once(ONE_FOR_ALL).replace("user1,user2", "user1,nobody")
        filling.terminal(NOBODY, idle=0)
        filling.gpu_mon("-c", filling.write(text), environment=filling.fast_clock())
        (miner,) = filling.wait_for_start()
        filling.terminal(ROOT, idle=0)
        filling.wait_for_end(miner)

    def test_nobody_counts_when_terminals_are_not_watched(self, filling: FillSite) -> None:
        filling.terminal(ROOT, idle=0)
        text = at_once(ONE_FOR_ALL).replace("enabled=True", "enabled=False")
        filling.gpu_mon("-c", filling.write(text), environment=filling.fast_clock())
        filling.wait_for_start()


def test_all_mistakes_of_a_file_are_reported_and_nothing_is_started(filling: FillSite) -> None:
    file = filling.write(ONE_FOR_EACH.replace("gpus=1\n", "gpus=0\n").replace("enabled=True", "enabled=perhaps"))
    mon = filling.gpu_mon("-c", file)
    assert mon.process.wait(timeout=PATIENCE) == 2
    assert "Traceback" not in mon.said
    assert f"{file}: process-1 gpus: process-0 has GPU 0 already: give each" in mon.said
    assert f"{file}: [tty] enabled: 'perhaps' is not valid: write true or false" in mon.said
    assert not filling.started()


def test_ctrl_c_leaves_nothing_behind(filling: FillSite) -> None:
    mon = filling.gpu_mon("-c", filling.write(at_once(ONE_FOR_EACH)))
    miners = filling.wait_for_start(2)
    assert mon.stop(signal.SIGINT) == 0
    assert not any(map(alive, miners))
    # What read the GPUs for it is not waited for.
    filling.wait_until_nothing_is_left()
