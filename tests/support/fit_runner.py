"""Runs a fitter in a separate process, as a worker would, and prints what it found or why it did not.

The first argument is JSON: `command`, and any of `search_options`, `limits`, `gpus`, `directory`, `most_memory`,
`deadline`, `stop_after` (how often its hook may be called before it ends everything) and `hang_after` (the same before
the driver hangs).
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import StokerError
from stoker.fit.fitter import FitRequest, Fitter
from stoker.fit.model import ProbeOptions, SearchOptions
from stoker.gpus.prober import Prober
from stoker.gpus.sim import SimMachine
from stoker.gpus.sim.faults import add_fault, parse_fault


class Hook:
    """Called ten times a second."""

    def __init__(self, stop_after: int | None, hang_after: int | None) -> None:
        self._stop_after = stop_after
        self._hang_after = hang_after
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == self._hang_after:
            machine = SimMachine.of_environment(os.environ)
            add_fault(machine, parse_fault("hang", None, None, machine.clock(), None))
        if self._stop_after is not None and self._calls > self._stop_after:
            raise StokerError("the search is to end")


def main() -> None:
    asked: dict[str, Any] = msgspec.json.decode(sys.argv[1])
    request = FitRequest(
        command=tuple(asked["command"]),
        search_options=SearchOptions(**asked.get("search_options", {})),
        limits=ProbeOptions(**asked.get("limits", {})),
        environment=dict(os.environ),
        gpus=tuple(asked.get("gpus", ())),
        directory=asked.get("directory"),
        most_memory=asked.get("most_memory"),
        outputs=Path(os.environ["STOKER_HOME"]),
    )
    messages: list[str] = []
    hook = Hook(asked.get("stop_after"), asked.get("hang_after"))
    with Prober(os.environ["STOKER_GPUS"], deadline=asked.get("deadline", 60.0)) as prober:
        try:
            fitter = Fitter(request, prober, messages.append, hook)
            answer: dict[str, Any] = {"fitted": fitter.fit(), "gpus": [gpu.index for gpu in fitter.gpus]}
        except StokerError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
    sys.stdout.buffer.write(msgspec.json.encode({**answer, "messages": messages}))


if __name__ == "__main__":
    main()
