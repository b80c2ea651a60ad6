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
    """A `cuda-checkpoint` that works, and notes what it was told."""
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
    visitor: "subprocess.Popen[str]"


def checkpointed(site: FillSite) -> Aside:
    """A filler by a fast clock, its program once that is checkpointed, and for whom: somebody on GPU 0."""
    config = site.config(PROGRAM + "checkpoint_timeout = 10m")
    filler = site.fill("--config", config, environment=site.fast_clock())
    (miner,) = site.wait_for_start()
    visitor = site.visit(0)
    filler.wait_until_it_says("process-0 on GPUs 0, 1: is checkpointed")
    return Aside(filler, miner, visitor)


class TestTheTool:
    def finished(self, toggle: Toggle) -> Toggle:
        ends = time.monotonic() + 60
        while toggle.ok is None:
            assert time.monotonic() < ends
            select.select([toggle.fileno()], [], [], max(0.0, toggle.due() - time.monotonic()))
            toggle.update()
        return toggle

    def test_it_is_called_for_each_process_one_after_another(self, filling: FillSite, tool: Path) -> None:
        assert self.finished(Toggle(str(tool), [41, 42], timeout=60)).ok is True
        assert toggles(filling) == ["--toggle --pid 41", "--toggle --pid 42"]

    def test_what_it_says_last_is_why_it_failed(self, filling: FillSite) -> None:
        path = with_tool(filling, "echo first >&2; echo no CUDA here >&2; exit 3")
        toggle = self.finished(Toggle(str(path), [41, 42], timeout=60))
        assert (toggle.ok, toggle.why) == (False, "cuda-checkpoint ended with code 3: no CUDA here")
        assert toggles(filling) == ["--toggle --pid 41"]

    def test_past_its_time_it_is_killed(self, filling: FillSite) -> None:
        path = with_tool(filling, "exec sleep 300")
        toggle = Toggle(str(path), [41], timeout=0.2)
        pid = toggle.pid
        assert pid is not None
        assert self.finished(toggle).why == "cuda-checkpoint did not end in time"
        assert not alive(pid)

    def test_one_that_cannot_be_run_has_failed(self, tmp_path: Path) -> None:
        toggle = Toggle(str(tmp_path / "nothing"), [41], timeout=60)
        assert (toggle.ok, toggle.why) == (False, "cuda-checkpoint cannot be run: no such file or directory")


@pytest.mark.usefixtures("tool")
class TestSetAside:
    def test_it_stays_alive_without_its_gpu_and_goes_on_later(self, filling: FillSite) -> None:
        filler, miner, visitor = checkpointed(filling)
        wait_for(lambda: state(filling) == "checkpointed")
        # Taking it back takes a while: nobody must be in a hurry and do it twice.
        with_tool(filling, "sleep 0.5")
        filling.leave(visitor)
        filler.wait_until_it_says("process-0 on GPUs 0, 1: is restored")
        wait_for(lambda: state(filling) == "running")
        assert toggles(filling) == [f"--toggle --pid {miner}"] * 2
        assert filling.wait_for_start() == [miner]
        assert not filling.asked_to_end()
        assert filling.slots()[0]["preemptions"] == 1

    def test_time_without_its_gpu_is_not_counted(self, filling: FillSite) -> None:
        checkpointed(filling)
        wait_for(lambda: state(filling) == "checkpointed")
        before = status(filling)
        after = wait_for(lambda: later(before, status(filling)), named="the next status")
        assert after["slots"][0]["gpu_hours"] == before["slots"][0]["gpu_hours"]

    def test_whoever_comes_while_it_is_restored_gets_the_gpu(self, filling: FillSite) -> None:
        filler, miner, visitor = checkpointed(filling)
        with_tool(filling, f'until [ -e "{filling.directory}/gate" ]; do sleep 0.02; done')
        filling.leave(visitor)
        wait_for(lambda: len(toggles(filling)) == 2, named="the way back")
        visitor = filling.visit(1)
        (filling.directory / "gate").touch()
        filler.wait_until_it_says(rf"is restored\n.*stops, used by \w+'s \S+ \(pid {visitor.pid}\)\n.*is checkpointed")
        assert toggles(filling) == [f"--toggle --pid {miner}"] * 3

    def test_one_that_cannot_be_taken_back_is_stopped(self, filling: FillSite) -> None:
        filler, miner, visitor = checkpointed(filling)
        with_tool(filling, "exit 4")
        filling.leave(visitor)
        filling.wait_for_end(miner)
        filler.wait_until_it_says("cuda-checkpoint ended with code 4; it is stopped\n.*: has stopped")

    def test_one_that_dies_while_it_is_restored_is_started_anew(self, filling: FillSite) -> None:
        _filler, miner, visitor = checkpointed(filling)
        with_tool(filling, "exec sleep 300")
        filling.leave(visitor)
        wait_for(lambda: len(toggles(filling)) == 2, named="the way back")
        os.kill(miner, signal.SIGKILL)
        (_, second) = filling.wait_for_start(2)
        assert alive(second)

    def test_the_end_of_the_filler_is_its_end(self, filling: FillSite) -> None:
        filler, miner, _visitor = checkpointed(filling)
        assert filler.stop() == 0
        assert not alive(miner)
        filling.wait_until_nothing_is_left()


class TestStoppedInstead:
    @pytest.mark.parametrize(
        ("then", "timeout", "told"),
        [
            ("echo no CUDA here >&2; exit 3", "10m", "cuda-checkpoint ended with code 3: no CUDA here; it is stopped"),
            ("exec sleep 300", "0.5s", "cuda-checkpoint did not end in time; it is stopped"),
        ],
        ids=["fails", "hangs"],
    )
    def test_when_the_tool_does_not_work(self, filling: FillSite, then: str, timeout: str, told: str) -> None:
        with_tool(filling, then)
        filler = filling.fill("--config", filling.config(f"{PROGRAM}checkpoint_timeout = {timeout}"))
        (miner,) = filling.wait_for_start()
        filling.visit(0)
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        filler.wait_until_it_says(f"process-0 on GPUs 0, 1: {told}\n.*: has stopped")

    def test_when_there_is_no_tool(self, filling: FillSite) -> None:
        filler = filling.fill("--config", filling.config(PROGRAM))
        (miner,) = filling.wait_for_start()
        filling.visit(0)
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        filler.wait_until_it_says("there is no cuda-checkpoint here; it is stopped")

    def test_a_tool_that_hangs_does_not_outlive_the_filler(self, filling: FillSite) -> None:
        with_tool(filling, "exec sleep 300")
        filler = filling.fill("--config", filling.config(PROGRAM + "checkpoint_timeout = 10m"))
        filling.wait_for_start()
        filling.visit(0)
        wait_for(lambda: toggles(filling), named="the way out")
        assert filler.stop() == 0
        filling.wait_until_nothing_is_left()
