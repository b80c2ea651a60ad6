"""Performs actions after a rule has stopped a run or a queued job: sequentially, each with a time limit."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from stoker.actions.action import Action, Facts, RunningAction, log_to_stderr
from stoker.actions.catalogue import ActionSettings, parse_action
from stoker.errors import StokerError

# In this time the process only reads its request and forks.
_START_TIMEOUT: Final = 60.0
_COMMAND: Final = (sys.executable, "-m", "stoker.actions.perform")


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to a detached process."""

    then: tuple[str, ...]
    facts: Facts | None = None
    host: str = ""
    message: str = ""
    """Text for actions that send messages, used without facts."""


def prepared(then: Sequence[str], log: Callable[[str], None]) -> list[Action]:
    """Parses and prepares actions. Raises what their `prepare` raises."""
    settings = ActionSettings(environment=os.environ)
    actions = [parse_action(text, settings) for text in then]
    for action in actions:
        for warning in action.prepare():
            log(warning)
    return actions


def perform(actions: Sequence[Action], facts: Facts, log: Callable[[str], None]) -> bool:
    """Performs all actions; returns whether all succeeded. A failed or late action does not prevent the next."""
    succeeded = True
    for action in actions:
        log(f"now: {action.describe()}")
        done = threading.Event()
        running = RunningAction(functools.partial(action.act, facts), action.patience, done.set)
        done.wait(action.patience)
        if running.failure is not None:
            succeeded = False
            log(f"failed: {running.failure}")
    return succeeded


def perform_detached(then: Sequence[str], facts: Facts) -> None:
    """Performs actions in a process that outlives this one. Returns after its start."""
    request = msgspec.json.encode(ActionRequest(then=tuple(then), facts=facts))
    # Through standard input, because URLs of notifications are secrets and command lines are public.
    subprocess.run(_COMMAND, input=request, timeout=_START_TIMEOUT, check=False, start_new_session=True)


def send_detached(then: Sequence[str], host: str, message: str) -> None:
    """Sends a message in a detached process without waiting for it."""
    request = msgspec.json.encode(ActionRequest(then=tuple(then), host=host, message=message))
    with contextlib.suppress(OSError):
        process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, start_new_session=True)
        if process.stdin is not None:
            process.stdin.write(request)
            process.stdin.close()
        # It forks at once; its exit is reaped without blocking.
        threading.Thread(target=process.wait, daemon=True).start()


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ActionRequest)
    if os.fork():
        os._exit(0)
    try:
        actions = prepared(request.then, log_to_stderr)
        if request.facts is not None:
            perform(actions, request.facts, log_to_stderr)
        else:
            for action in actions:
                if action.sends_messages:
                    action.send_message(request.host, request.message)
    except StokerError as error:
        log_to_stderr(str(error))


if __name__ == "__main__":
    main()
