"""`stoker fill` as its users see it: priorities of its programs, its status, and how it ends."""

import contextlib
import getpass
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import stoker_command
from tests.support.fill_site import FAST, MINER, PATIENCE, FillSite, RunningFiller, alive
from tests.support.terminal import terminal
from tests.support.waiting import wait_for

UNKNOWN_ERROR = 999
# A program that ignores SIGTERM and has started another that ignores it too.
DEAF = """\
echo "start $$ x" >> "$JOURNAL"
trap '' TERM
setsid sh -c 'echo "start $$ x" >> "$JOURNAL"; while :; do sleep 1; done' &
while :; do sleep 1; done
"""


def on_both(*keys: str) -> str:
    """One program on both GPUs."""
    return "\n".join(("cmd = miner-run", *keys))


def assert_nothing_is_left(filling: FillSite) -> None:
    """No program at all. What read the GPUs for it is not waited for, and may take a moment longer to leave."""
    names = set()
    for pid in filling.processes():
        with contextlib.suppress(OSError):
            names.add(Path(f"/proc/{pid}/comm").read_text().strip())
    assert not names & {"miner-run", "sh", "setsid", "sleep"}
    filling.wait_until_nothing_is_left()


class TestTheProgram:
    def test_program_gets_both_environments_and_its_gpus_by_uuid(self, filling: FillSite) -> None:
        filling.program("show", 'env > "$JOURNAL.part"; mv "$JOURNAL.part" "$JOURNAL.env"; exec sleep 1000')
        config = filling.config(
            "\n".join(
                (
                    "cmd = show",
                    "gpus = 1",
                    "environment = OWN='two words' SHARED=own",
                )
            )
        )
        filling.fill("--config", config, environment={"SHARED": "caller's", "PLAIN": "1", "CUDA_VISIBLE_DEVICES": "0"})
        shown = Path(f"{filling.journal}.env")
        wait_for(shown.exists, named="its environment")
        found = dict(line.split("=", 1) for line in shown.read_text().splitlines() if "=" in line)
        wanted = {
            "OWN": "two words",
            "SHARED": "own",
            "PLAIN": "1",
            "CUDA_VISIBLE_DEVICES": filling.uuids[1],
        }
        assert {name: found.get(name) for name in wanted} == wanted

    def test_command_may_be_quoted_and_output_is_appended(self, filling: FillSite) -> None:
        filling.program("say", 'printf "[%s]\\n" "$PWD" "$@"; exec sleep 1000')
        log = filling.directory / "log"
        log.write_text("before\n")
        config = filling.config(f"cmd = say 'two words' \"a'b\" c\\ d\nlog = {log}\ndir = {filling.root}")
        filling.fill("--config", config)
        wait_for(lambda: "[c d]\n" in log.read_text(), named="all of its output")
        assert log.read_text() == f"before\n[{filling.root}]\n[two words]\n[a'b]\n[c d]\n"

    def test_output_without_a_log_goes_to_the_console(self, filling: FillSite) -> None:
        filling.program("say", "echo here I am; exec sleep 1000")
        filling.fill("--config", filling.config("cmd = say")).wait_until_it_says("(?m)^here I am$")

    def test_program_runs_with_the_configured_priority(self, filling: FillSite) -> None:
        filling.fill("--config", filling.config(on_both("nice = 7")))
        (miner,) = filling.wait_for_start()
        assert os.getpriority(os.PRIO_PROCESS, miner) == os.getpriority(os.PRIO_PROCESS, 0) + 7

    def test_each_starts_one_program_per_gpu(self, filling: FillSite) -> None:
        filling.fill("--config", filling.config(on_both("each = yes")))
        filling.wait_for_start(2)
        assert sorted(filling.started().values()) == sorted(filling.uuids)

    def test_gpu_out_of_rotation_is_left_and_filled_again_after_its_release(self, filling: FillSite) -> None:
        config = filling.config(on_both("each = yes"))
        filling.fill("--config", config, environment=filling.fast_clock())
        filling.wait_for_start(2)
        (on_first,) = [pid for pid, given in filling.started().items() if given == filling.uuids[0]]
        assert filling.stoker("gpus", "--quarantine", "0", "--reason", "its fan rattles").code == 0
        filling.wait_for_end(on_first)
        filling.wait_for_why("out of rotation .its fan rattles.")
        assert len(filling.started()) == 2
        assert filling.stoker("gpus", "--release", "0").code == 0
        filling.wait_for_start(3)

    def test_program_that_exits_at_once_is_reported_and_restarted_later(self, filling: FillSite) -> None:
        filling.program("miner-run", 'echo "start $$ x" >> "$JOURNAL"; exit 3')
        filler = filling.fill("--config", filling.config(on_both(), defaults="backoff = 2m"))
        filler.wait_until_it_says("process-0 on GPUs 0, 1: after [0-9]+s it ended with code 3: tried again in 2m")
        filling.wait_for_why("after [0-9]+s it ended with code 3: tried again in [12]m")
        assert len(filling.started()) == 1

    def test_restart_delay_doubles(self, filling: FillSite) -> None:
        filling.program("miner-run", "exit 3")
        config = filling.config(on_both(), defaults="backoff = 30s")
        filler = filling.fill("--config", config, environment=filling.fast_clock())
        # Between two starts lies a minute in any case, of which a start may take some.
        filler.wait_until_it_says("code 3: tried again in (1m|[345].s)")
        filler.wait_until_it_says("2 times in a row: tried again in 1m")
        filler.wait_until_it_says("3 times in a row: tried again in 2m")


class TestSteppingAside:
    def test_idle_for_starts_again_after_another_user(self, filling: FillSite) -> None:
        other_user = filling.open_node(0)
        filling.fill("--config", filling.config(on_both("idle_for = 1h")))
        filling.wait_for_why(f"pid {other_user.pid}")
        filling.leave(other_user)
        filling.wait_for_why("^idle, and given to process-0 in (1h|59m[0-9]+s)$")

    def test_program_returns_once_the_gpu_is_idle_again(self, filling: FillSite) -> None:
        config = filling.config(on_both("settle = 80s"))
        filling.fill("--config", config, environment=filling.fast_clock())
        (miner,) = filling.wait_for_start()
        other_user = filling.open_node(1)
        filling.wait_for_end(miner)
        left = time.monotonic()
        filling.leave(other_user)
        filling.wait_for_start(2)
        # Later than a minute after its first start, which is the least in any case. It counts from the last look.
        assert time.monotonic() - left >= 75 / FAST
        assert filling.slots()[0]["preemptions"] == 1

    def test_program_is_killed_with_its_descendants_after_its_grace(self, filling: FillSite) -> None:
        filling.program("miner-run", DEAF)
        filler = filling.fill("--config", filling.config(on_both("grace = 1s")))
        processes = filling.wait_for_start(2)
        begun = time.monotonic()
        filling.open_node(0)
        for process in processes:
            filling.wait_for_end(process)
        assert time.monotonic() - begun >= 0.9
        filler.wait_until_it_says("process-0 on GPUs 0, 1: has stopped")

    def test_process_that_only_the_driver_lists_is_another_user(self, filling: FillSite) -> None:
        config = filling.config("cmd = miner-run\ngpus = 0", "cmd = miner-run\ngpus = 1", defaults="interval = 0.2s")
        filling.fill("--config", config)
        filling.wait_for_start(2)
        other_user = filling.node_holders.run(["sh", "-c", "echo ready; exec sleep 300"])
        filling.machine.gpus[1].add_process(other_user.pid)
        filling.wait_for_why(rf"used by \w+'s \S+ \(pid {other_user.pid}\)", slot=1)
        assert filling.slots()[0]["state"] == "running"

    def test_no_program_runs_outside_the_configured_hours_and_the_reason_is_shown(self, filling: FillSite) -> None:
        # Half a day away, so that no midnight of this test's night matters.
        hour = (time.localtime().tm_hour + 12) % 24
        hours = f"[schedule]\nhours = {hour:02}:00-{hour:02}:59"
        filling.fill("--config", filling.config(on_both(), more=hours))
        filling.wait_for_why("^outside the scheduled hours$")
        assert "nothing runs now: outside the scheduled hours" in filling.stoker("fill", "status").out
        assert not filling.started()

    def test_program_stops_when_its_hours_end(self, filling: FillSite) -> None:
        filler = _filled_at_the_end_of_the_day(filling)
        (miner,) = filling.wait_for_start()
        filling.wait_for_end(miner)
        filler.wait_until_it_says("process-0 on GPUs 0, 1: stops, outside the scheduled hours")


class TestWhatCannotBeSeen:
    def test_nothing_starts_while_the_driver_hangs(self, filling: FillSite) -> None:
        filling.fill("--config", filling.config(on_both("idle_for = 1h"), defaults="interval = 0.1s"))
        filling.wait_for_why("^idle, and given to")
        filling.machine.fault("*", code=UNKNOWN_ERROR)
        why = filling.wait_for_why("^(?!idle).")
        assert "used by" not in why
        filling.machine.clear_faults()
        filling.wait_for_why("^idle, and given to process-0 in (1h|59m[0-9]+s)$")
        assert not filling.started()

    def test_short_driver_hang_stops_no_program(self, filling: FillSite) -> None:
        config = filling.config(on_both(), defaults="interval = 0.1s")
        filling.fill("--config", config, environment={"STOKER_DEADLINE": "0.3s"})
        (miner,) = filling.wait_for_start()
        filling.machine.fault("*", hang=60)
        filling.machine.wait_until_hanging()
        other_user = filling.open_node(0)
        filling.wait_for_end(miner)
        # It was the other_user, whom the nodes show, and not the silence.
        filling.wait_for_why(f"pid {other_user.pid}")
        assert filling.slots()[0]["preemptions"] == 1

    def test_long_driver_hang_stops_the_program(self, filling: FillSite) -> None:
        config = filling.config(on_both(), defaults="interval = 0.1s")
        filler = filling.fill("--config", config, environment=filling.fast_clock())
        (miner,) = filling.wait_for_start()
        filling.machine.fault("*", code=UNKNOWN_ERROR)
        filling.wait_for_end(miner)
        filler.wait_until_it_says("stops, it is unknown whether another user needs it: ")


class TestStatus:
    def test_status_before_the_first_fill_explains_how_to_start(self, filling: FillSite) -> None:
        done = filling.stoker("fill", "status")
        assert (done.code, done.out) == (1, "`stoker fill` has never run here\n")
        assert filling.stoker("fill", "status", "--json").json() == {"running": False, "status": None}

    def test_status_shows_state_and_reason_per_gpu(self, filling: FillSite) -> None:
        other_user = filling.open_node(1)
        filler = filling.fill("--config", filling.config("cmd = miner-run\ngpus = 0", "cmd = miner-run\ngpus = 1"))
        (miner,) = filling.wait_for_start()
        filling.wait_for_why(f"pid {other_user.pid}", slot=1)
        wait_for(lambda: filling.slots()[0]["pid"] == miner, named="the program in the status")
        words = filling.stoker("fill", "status")
        assert words.code == 0
        assert re.search(r"(?m)^0 +process-0 +running +\d+s +0\.0 +0 +the GPU was idle", words.out)
        assert re.search(
            rf"(?m)^1 +process-1 +waiting +\d+s +0\.0 +0 +used by \w+'s \S+ \(pid {other_user.pid}\)", words.out
        )
        assert "0.0 GPU-hours given to background work, 0 preemptions" in words.out
        result = filling.stoker("fill", "status", "--json").json()
        assert result["running"] is True
        assert result["status"]["owner"] == "stoker fill"
        assert result["status"]["pid"] == filler.process.pid
        first, second = result["status"]["slots"]
        assert (first["pid"], first["state"], first["gpus"]) == (miner, "running", [filling.uuids[0]])
        assert (second["pid"], second["state"], second["indices"]) == (None, "waiting", [1])

    def test_status_after_the_end_shows_the_last_state(self, filling: FillSite) -> None:
        filler = filling.fill("--config", filling.config(on_both()))
        filling.wait_for_start()
        assert filler.stop() == 0
        words = filling.stoker("fill", "status")
        assert words.code == 1
        assert re.search(r"(?m)^0, 1 +process-0 +not watched ", words.out)
        assert words.out.endswith("`stoker fill` is not running: this is its last state\n")
        result = filling.stoker("fill", "status", "--json").json()
        assert result["running"] is False
        assert [(slot["state"], slot["pid"]) for slot in result["status"]["slots"]] == [("waiting", None)]

    def test_gpu_time_is_summed_over_all_starts(self, filling: FillSite) -> None:
        config = filling.config(on_both())
        given = 0.0
        for time_of_it in (1, 2):
            # Twenty times as fast, half a minute of two GPUs is a hundredth of an hour and more.
            filler = filling.fill("--config", config, environment=filling.fast_clock())
            (*_, miner) = filling.wait_for_start(time_of_it)
            slot = wait_for(partial(_slot_of, filling, miner), named="the program in the status")
            assert slot["gpu_hours"] >= given
            if time_of_it == 1:
                wait_for(lambda: filling.slots()[0]["gpu_hours"] >= 0.0166, named="half a minute of two GPUs")
            other_user = filling.open_node(0)
            filling.wait_for_end(miner)
            filling.wait_for_why(f"pid {other_user.pid}")
            assert filler.stop() == 0
            filling.leave(other_user)
            (slot,) = filling.slots()
            assert slot["preemptions"] == time_of_it
            assert slot["gpu_hours"] > given
            given = slot["gpu_hours"]


class TestTheEnd:
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_end_of_the_filler_leaves_no_process(self, filling: FillSite, how: signal.Signals) -> None:
        filling.program("miner-run", f"setsid sleep 1000 & {MINER}")
        filler = filling.fill("--config", filling.config(on_both()))
        (miner,) = filling.wait_for_start()
        assert filler.stop(how) == 0
        assert filling.asked_to_end() == {miner}
        assert_nothing_is_left(filling)

    def test_second_ctrl_c_kills_at_once_and_a_signal_from_a_program_does_not(self, filling: FillSite) -> None:
        filling.program("miner-run", DEAF)
        config = filling.config(on_both("grace = 10m"), defaults="interval_seconds = 1")
        command = ["env", *(f"{name}={value}" for name, value in filling.environment.items())]
        with terminal([*command, stoker_command(), "fill", "--config", config]) as screen:
            processes = filling.wait_for_start(2)
            for how in (signal.SIGTERM, signal.SIGINT):
                os.kill(screen.pid, how)
                filling.wait_for_why("the filler ends")
            filling.machine.reset_calls()
            wait_for(lambda: filling.machine.calls("nvmlDeviceGetSamples") >= 3, named="another two looks")
            assert all(map(alive, processes))
            screen.press("\x03")
            assert screen.code() == 0
        assert_nothing_is_left(filling)

    def test_programs_of_a_killed_filler_end_and_the_next_filler_starts_new_ones(self, filling: FillSite) -> None:
        config = filling.config(on_both())
        filler = filling.fill("--config", config)
        (miner,) = filling.wait_for_start()
        filler.process.kill()
        filling.wait_for_end(miner)
        assert filling.asked_to_end() == {miner}
        filling.fill("--config", config)
        (_, second) = filling.wait_for_start(2)
        assert alive(second)

    def test_second_filler_is_refused(self, filling: FillSite) -> None:
        config = filling.config(on_both())
        first = filling.fill("--config", config)
        (miner,) = filling.wait_for_start()
        for again in (filling.fill("--config", config), filling.gpu_mon("-c", config)):
            assert again.process.wait(timeout=PATIENCE) == 1
            expected = f"the GPUs here are being filled already (pid {first.process.pid}): `stoker fill status` shows"
            assert expected in again.said
            assert len(again.said.splitlines()) == 1
        homes = [{"STOKER_HOME": str(filling.directory / name)} for name in ("second", "third")]
        for again in (
            filling.fill("--config", config, environment=homes[0]),
            filling.gpu_mon("-c", config, environment=homes[1]),
        ):
            assert again.process.wait(timeout=PATIENCE) == 1
            assert f"GPU 0 is being filled already by {getpass.getuser()} (pid {first.process.pid})" in again.said
            assert len(again.said.splitlines()) == 1
        assert filling.wait_for_start() == [miner]

    def test_closed_console_stops_no_program(self, filling: FillSite) -> None:
        reader, writer = os.pipe()
        filler = filling.fill("--config", filling.config(on_both()), output=writer)
        os.close(reader)
        os.close(writer)
        (miner,) = filling.wait_for_start()
        other_user = filling.open_node(0)
        filling.wait_for_end(miner)
        filling.wait_for_why(f"pid {other_user.pid}")
        assert filler.stop() == 0


class TestConfiguration:
    def test_check_accepts_a_valid_configuration_and_starts_nothing(self, filling: FillSite) -> None:
        config = filling.config(on_both())
        done = filling.stoker("fill", "--check", "--config", config)
        assert (done.code, done.out, done.err) == (0, f"{config}: 1 program, no errors\n", "")
        assert not filling.started()

    def test_suspicious_settings_are_reported_but_allowed(self, filling: FillSite) -> None:
        config = filling.config(on_both(), more="[tty]\nwhitelist = no-such-user")
        done = filling.stoker("fill", "--check", "--config", config)
        assert done.code == 0
        assert f"{config}: whitelist: there is no user 'no-such-user'" in done.err

    def test_configuration_is_found_in_the_settings_and_then_at_the_gpu_mon_paths(self, filling: FillSite) -> None:
        settings = Path(os.environ["XDG_CONFIG_HOME"]) / "stoker/stoker.toml"
        home = filling.directory / "home"
        filling.environment["HOME"] = str(home)
        nothing = filling.stoker("fill", "--check")
        assert nothing.code == 2
        assert str(settings) in nothing.err
        assert str(home / ".config/gpu_mon.conf") in nothing.err
        (home / ".config").mkdir(parents=True)
        (home / ".config/gpu_mon.conf").write_text("[gpu-all]\ngpus = all\n[process-0]\ncmd = miner-run\n")
        assert str(home) in filling.stoker("fill", "--check").out
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text('[[fill.program]]\nname = "a"\ncommand = ["miner-run"]\n')
        assert str(settings) in filling.stoker("fill", "--check").out

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("[process-0]\ncmd = miner-run\n", ["no GPU is watched: add a section [gpu-all]"]),
            ("[gpu-all]\ngpus = all\n", ["there is no program to run: add a section"]),
            (
                "[defaults]\ninterval_seconds = often\n[gpu-all]\n[process-0]\ncmd = miner-run\n",
                ["[defaults] interval_seconds: 'often'"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = miner-run\ngpus = 0\n[process-1]\ncmd = miner-run\ngpus = 0,1\n",
                ["process-1 gpus: process-0 has GPU 0 already: give each GPU to one program only"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = miner-run\ngpus = 7\n",
                ["process-0 gpus: there is no GPU 7 here: this machine has 0, 1"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = miner-run\nlog = {directory}/not/there\n",
                ["process-0: {directory}/not/there cannot be written: create its directory"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = miner-run\nlog = {directory}\n",
                ["process-0: {directory} cannot be written"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = miner-run\ndir = {directory}/nowhere\n",
                ["process-0: {directory}/nowhere is not a directory that you may enter"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = no-such-miner --fast\n",
                ["process-0: no-such-miner is not a program that can be run: install it"],
            ),
            (
                "[gpu-all]\n[process-0]\ncmd = nix\ngpus = 9\n",
                ["process-0 gpus: there is no GPU 9", "process-0: nix is not a program"],
            ),
        ],
        ids=[
            "nothing watched", "no program", "wrong type", "overlapping", "GPU that is not there",
            "log in no directory", "log is a directory", "missing directory", "missing command", "several at once",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("options", [(), ("--check",)], ids=["fill", "check"])
    def test_configuration_error_is_reported_and_nothing_starts(
        self, filling: FillSite, options: tuple[str, ...], text: str, expected: list[str]
    ) -> None:
        directory = str(filling.directory)
        file = filling.write(text.replace("{directory}", directory))
        done = filling.stoker("fill", *options, "--config", file)
        assert (done.code, done.out) == (2, "")
        lines = done.err.removeprefix("stoker: ").splitlines()
        assert len(lines) == len(expected)
        for line, wanted in zip(lines, expected, strict=True):
            assert line.startswith(f"{file}: {wanted.replace('{directory}', directory)}")
        assert not filling.started()


def _slot_of(filling: FillSite, miner: int) -> dict[str, Any] | None:
    """The status of the only program, once it names this process."""
    (slot,) = filling.slots() or [{}]
    return slot if slot.get("pid") == miner else None


def _filled_at_the_end_of_the_day(filling: FillSite) -> RunningFiller:
    """Has started its program, and may run until 23:59: a day that is over in a moment, whatever the time is."""
    config = filling.config(on_both(), more="[schedule]\nhours = 00:00-23:59", defaults="interval = 0.1s")
    # A busy machine has started nothing before the end of a short one: then it gets a longer one.
    for left in (4, 14, 44):
        ends = time.monotonic() + left
        zone = _zone_where_it_is(f"23:58:{60 - left}")
        filler = filling.fill("--config", config, environment={"TZ": zone})
        wait_for(lambda ends=ends: filling.started() or time.monotonic() > ends)  # type: ignore[misc]  # bound now
        if filling.started():
            return filler
        assert filler.stop() == 0
        filling.journal.unlink(missing_ok=True)
    raise AssertionError("nothing was started in any of the days")


def _zone_where_it_is(clock: str) -> str:
    """The name of a time zone in which the clock on the wall shows this now."""
    hours, minutes, seconds = map(int, clock.split(":"))
    # POSIX counts to the west: seconds behind UTC.
    behind = (int(time.time()) - (hours * 3600 + minutes * 60 + seconds)) % 86400
    behind -= 86400 if behind > 43200 else 0
    sign = "-" if behind < 0 else ""
    return f"TST{sign}{abs(behind) // 3600}:{abs(behind) % 3600 // 60:02}:{abs(behind) % 60:02}"
