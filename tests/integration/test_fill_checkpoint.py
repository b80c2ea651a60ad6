"""A background program that is checkpointed by `cuda-checkpoint` instead of stopped, with a stand-in for that tool."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stoker.fill.slot_runner import Toggle
from tests.support.fill_site import FillSite, RunningFiller, alive, filling
from tests.support.waiting import wait_for

__all__ = ["filling"]

PROGRAM = "cmd = miner-run\npreempt = checkpoint\n"


@pytest.fixture
def tool(filling: FillSite) -> Path:
    """A working `cuda-checkpoint` that records its arguments."""
    return with_tool(filling, "")


def with_tool(site: FillSite, then: str) -> Path:
    return site.program("cuda-checkpoint", f'echo "$@" >> "{site.directory}/toggles"\n{then}\n')


def toggles(site: FillSite) -> list[str]:
    noted = site.directory / "toggles"
    return noted.read_text().splitlines() if noted.exists() else []


def state(site: FillSite) -> str:
    slots = site.slots()
    return str(slots[0]["state"]) if slots else ""


def status(site: FillSite) -> dict[str, Any]:
    found: dict[str, Any] = site.stoker("fill", "status", "--json").json()["status"]
    return found


def later(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """The second one, if it was written after the first."""
    return after if after["written"] > before["written"] else None


class Aside(NamedTuple):
    filler: RunningFiller
    miner: int
    other_user: "subprocess.Popen[str]"


def checkpointed(site: FillSite) -> Aside:
    """A filler with a fast clock, its checkpointed program, and the other user on GPU 0."""
    config = site.config(PROGRAM + "checkpoint_timeout = 10m")
    filler = site.fill("--config", config, environment=site.fast_clock())
    (miner,) = site.wait_for_start()
    other_user = site.open_node(0)
    filler.wait_until_it_says("process-0 on GPUs 0, 1: is checkpointed")
    return Aside(filler, miner, other_user)


class TestTheTool:
    def finished(self, toggle: Toggle) -> Toggle:
        ends = time.monotonic() + 60
        while toggle.ok is None:
            assert time.monotonic() < ends
            select.select([toggle.fileno()], [], [], max(0.0, toggle.due() - time.monotonic()))
            toggle.update()
        return toggle

    def test_tool_runs_for_each_process_in_turn(self, filling: FillSite, tool: Path) -> None:
        assert self.finished(Toggle(str(tool), [41, 42], timeout=60)).ok is True
        assert toggles(filling) == ["--toggle --pid 41", "--toggle --pid 42"]

    def test_last_line_of_the_tool_is_the_reason_of_failure(self, filling: FillSite) -> None:
        path = with_tool(filling, "echo first >&2; echo no CUDA here >&2; exit 3")
        toggle = self.finished(Toggle(str(path), [41, 42], timeout=60))
        assert (toggle.ok, toggle.why) == (False, "cuda-checkpoint ended with code 3: no CUDA here")
        assert toggles(filling) == ["--toggle --pid 41"]

    def test_tool_past_its_timeout_is_killed(self, filling: FillSite) -> None:
        path = with_tool(filling, "exec sleep 300")
        toggle = Toggle(str(path), [41], timeout=0.2)
        pid = toggle.pid
        assert pid is not None
        assert self.finished(toggle).why == "cuda-checkpoint did not end in time"
        assert not alive(pid)

    def test_tool_that_cannot_run_is_a_failure(self, tmp_path: Path) -> None:
        toggle = Toggle(str(tmp_path / "nothing"), [41], timeout=60)
        assert (toggle.ok, toggle.why) == (False, "cuda-checkpoint cannot be run: no such file or directory")


@pytest.mark.usefixtures("tool")
class TestSetAside:
    def test_checkpointed_program_keeps_its_process_and_resumes(self, filling: FillSite) -> None:
        filler, miner, other_user = checkpointed(filling)
        wait_for(lambda: state(filling) == "checkpointed")
        # Taking it back takes a while: nobody must be in a hurry and do it twice.
        with_tool(filling, "sleep 0.5")
        filling.leave(other_user)
        filler.wait_until_it_says("process-0 on GPUs 0, 1: is restored")
        wait_for(lambda: state(filling) == "running")
        assert toggles(filling) == [f"--toggle --pid {miner}"] * 2
        assert filling.wait_for_start() == [miner]
        assert not filling.asked_to_end()
        assert filling.slots()[0]["preemptions"] == 1

    def test_checkpointed_time_is_not_counted_as_gpu_time(self, filling: FillSite) -> None:
        checkpointed(filling)
        wait_for(lambda: state(filling) == "checkpointed")
        before = status(filling)
        after = wait_for(lambda: later(before, status(filling)), named="the next status")
        assert after["slots"][0]["gpu_hours"] == before["slots"][0]["gpu_hours"]

    def test_user_who_arrives_during_restore_gets_the_gpu(self, filling: FillSite) -> None:
        filler, miner, other_user = checkpointed(filling)
        with_tool(filling, f'until [ -e "{filling.directory}/flag" ]; do sleep 0.02; done')
        filling.leave(other_user)
        wait_for(lambda: len(toggles(filling)) == 2, named="the way back")
        other_user = filling.open_node(1)
        (filling.directory / "flag").touch()
        filler.wait_until_it_says(
            rf"is restored\n.*stops, used by \w+'s \S+ \(pid {other_user.pid}\)\n.*is checkpointed"
        )
        assert toggles(filling) == [f"--toggle --pid {miner}"] * 3

    def test_program_whose_restore_fails_is_stopped(self, filling: FillSite) -> None:
        filler, miner, other_user = checkpointed(filling)
        with_tool(filling, "exit 4")
        filling.leave(other_user)
        filling.wait_for_end(miner)
        filler.wait_until_it_says("cuda-checkpoint ended with code 4; it is stopped\n.*: has stopped")

    def test_program_that_dies_during_restore_is_restarted(self, filling: FillSite) -> None:
        _filler, miner, other_user = checkpointed(filling)
        with_tool(filling, "exec sleep 300")
        filling.leave(other_user)
        wait_for(lambda: len(toggles(filling)) == 2, named="the way back")
        os.kill(miner, signal.SIGKILL)
        (_, second) = filling.wait_for_start(2)
        assert alive(second)

    def test_checkpointed_program_is_stopped_with_the_filler(self, filling: FillSite) -> None:
        filler, miner, _other_user = checkpointed(filling)
        assert filler.stop() == 0
        assert not alive(miner)
        filling.wait_until_nothing_is_left()


class TestStoppedInstead:
    @pytest.mark.parametrize(
        ("then", "timeout", "result"),
        [
            ("echo no CUDA here >&2; exit 3", "10m", "cuda-checkpoint ended with code 3: no CUDA here; it is stopped"),
            ("exec sleep 300", "0.5s", "cuda-checkpoint did not end in time; it is stopped"),
        ],
        ids=["fails", "hangs"],
    )
    def test_program_is_stopped_when_the_checkpoint_fails(
        self, filling: FillSite, then: str, timeout: str, result: str
    ) -> None:
        with_tool(filling, then)
        filler = filling.fill("--config", filling.config(f"{PROGRAM}checkpoint_timeout = {timeout}"))
        (miner,) = filling.wait_for_start()
        filling.open_node(0)
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        filler.wait_until_it_says(f"process-0 on GPUs 0, 1: {result}\n.*: has stopped")

    def test_program_is_stopped_when_the_tool_is_missing(self, filling: FillSite) -> None:
        filler = filling.fill("--config", filling.config(PROGRAM))
        (miner,) = filling.wait_for_start()
        filling.open_node(0)
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        filler.wait_until_it_says("there is no cuda-checkpoint here; it is stopped")

    def test_hanging_tool_is_killed_with_the_filler(self, filling: FillSite) -> None:
        with_tool(filling, "exec sleep 300")
        filler = filling.fill("--config", filling.config(PROGRAM + "checkpoint_timeout = 10m"))
        filling.wait_for_start()
        filling.open_node(0)
        wait_for(lambda: toggles(filling), named="the way out")
        assert filler.stop() == 0
        filling.wait_until_nothing_is_left()
