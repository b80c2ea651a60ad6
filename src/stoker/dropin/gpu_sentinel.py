"""`gpu_sentinel`: armed by activity on the GPUs, it exits, shuts down or reboots when the activity stops."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stoker.actions.action import Action, facts_of
from stoker.dropin.common import fraction, steady_looks, whole
from stoker.dropin.usage import Devices
from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, Unknown, known
from stoker.rules.rule import Activity, Observation, Verdict
from stoker.rules.sentinel import SentinelPolicy, SentinelRule
from stoker.streams import ERROR, OUTPUT, emit, open_missing
from stoker.units import format_percent

INTERRUPTED: Final = 130
FAILED: Final = 1


class SentinelArguments(NamedTuple):
    """The command line."""

    policy: SentinelPolicy
    kill_action: str
    gpu_devices: tuple[int, ...]


def main() -> None:
    """The `gpu_sentinel` command."""
    open_missing()
    try:
        code = SentinelWatch(parse(sys.argv[1:])).run()
    except StokerError as error:
        _complain(str(error))
        code = error.exit_code if isinstance(error, BadInputError) else FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


class SentinelWatch:
    """The sentinel rule with one look per tick."""

    def __init__(self, options: SentinelArguments) -> None:
        self._options = options
        self._action = _power(options.kill_action)
        self._policy = options.policy
        self._devices = Devices(options.gpu_devices)
        self._unknown: str | None = None
        self._checked = False

    def run(self) -> int:
        if self._action is not None:
            # Warn now, while somebody can read it.
            for warning in self._action.prepare():
                _complain(warning)
        rule = SentinelRule(self._policy)
        self._announce()
        was_armed = False
        for look in steady_looks(self._policy.every):
            self._log_unknown(look)
            verdict = rule.observe(self._observation(look))
            if rule.armed and not was_armed:
                _say(
                    f"GPU Sentinel is armed: {self._options.kill_action} follows when GPU usage is "
                    f"{self._idle_in_words()}"
                )
            was_armed = rule.armed
            if verdict.effect == "act" and self._act(verdict, look.at):
                return 0
        raise AssertionError("unreachable: looks never end")

    def _act(self, verdict: Verdict, at: float) -> bool:
        try:
            if self._action is not None:
                self._action.act(facts_of(verdict, (), at, platform.node()))
        except StokerError as error:
            # The machine is still idle and costs money: the rule stays armed and acts again after its window.
            _complain(f"{self._options.kill_action} failed: {error}")
            return False
        _say(f"GPU usage was {self._idle_in_words()}: {self._options.kill_action}")
        return True

    def _observation(self, look: Look) -> Observation:
        """The chosen devices; a missing device is unknown."""
        gone = Unknown("it is no longer there")
        activities = [
            Activity(uuid, uuid, reading.vouched, used.peak if known(used := reading.utilization) else used, reading)
            if reading is not None
            else Activity(uuid, uuid, 0.0, gone)
            for uuid, reading in self._devices.readings(look).items()
        ]
        return Observation(look.at, activities, look.problem.reason if look.problem else None)

    def _announce(self) -> None:
        _say(
            "Starting GPU Sentinel: it will be armed when the mean GPU usage is above "
            f"{format_percent(self._policy.arm_threshold)} for {self._policy.arm_duration} seconds"
        )
        chosen = ", ".join(map(str, self._options.gpu_devices))
        _say(f"Monitoring GPUs {chosen}" if chosen else "Monitoring all GPUs")

    def _idle_in_words(self) -> str:
        return f"below {format_percent(self._policy.kill_threshold)} for {self._policy.kill_duration} seconds"

    def _log_unknown(self, look: Look) -> None:
        """Logs each reason once."""
        if look.gpus and not self._checked:
            self._checked = True
            self._check_devices({gpu.index for gpu in look.gpus})
        unknown = self._devices.why_unknown(look)
        if unknown is not None and unknown != self._unknown:
            _complain(f"GPU usage is unknown: {unknown}")
        self._unknown = unknown

    def _check_devices(self, present: set[int]) -> None:
        missing = [index for index in self._options.gpu_devices if index not in present]
        if not missing:
            return
        there = ", ".join(map(str, sorted(present)))
        message = f"there is no GPU {', '.join(map(str, missing))} here: this machine has {there}"
        if len(missing) == len(self._options.gpu_devices):
            raise BadInputError(message)
        _complain(f"{message}; the others are watched")


def _power(kill_action: str) -> Action | None:
    if kill_action == "end_process":
        return None
    from stoker.actions.catalogue import ActionSettings, parse_action

    return parse_action(kill_action, ActionSettings(environment=os.environ))


def parse(arguments: Sequence[str]) -> SentinelArguments:
    parser = argparse.ArgumentParser(
        prog="gpu_sentinel",
        description="Waits until the GPUs are in use, and then until they no longer are, and acts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options: dict[str, dict[str, Any]] = {
        "arm_duration": {
            "type": whole(0),
            "default": 30,
            "help": "How many seconds of activity to wait before arming the sentinel.",
        },
        "arm_threshold": {
            "type": fraction(zero=True, one=False),
            "default": 0.8,
            "help": "What level of utilization is considered activity",
        },
        "kill_duration": {
            "type": whole(1),
            "default": 30,
            "help": "How many seconds of inactivity to wait before running the kill function.",
        },
        "kill_threshold": {
            "type": fraction(zero=False, one=True),
            "default": 0.7,
            "help": "What level of utilization is considered inactivity",
        },
        "kill_action": {
            "choices": ["end_process", "shutdown", "reboot"],
            "default": "end_process",
            "help": "What to do when the kill trigger is hit",
        },
        "gpu_devices": {
            "type": whole(0),
            "nargs": "*",
            "default": [],
            "help": "Which GPU devices to average (empty for all)",
        },
    }
    for name, settings in options.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", **settings)
    given = vars(parser.parse_args(arguments))
    kill_action, devices = given.pop("kill_action"), tuple(given.pop("gpu_devices"))
    return SentinelArguments(SentinelPolicy(**given), kill_action, devices)


def _say(message: str) -> None:
    emit(OUTPUT, f"{message}\n")


def _complain(message: str) -> None:
    emit(ERROR, f"gpu_sentinel: {message}\n")


if __name__ == "__main__":
    main()
