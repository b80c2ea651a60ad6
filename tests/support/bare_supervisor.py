"""A supervisor without rules and record in its own process, for tests: launches one program and prints its events.

`BareSupervisor(command, ...)` is the handle of a test. It exits when the job is gone.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from stoker.runs.processes.reaper import (
    Empty,
    Ended,
    Failed,
    OrphanStop,
    Program,
    ReaperEvent,
    ReaperKilled,
    Started,
    Stopped,
    launch,
)
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.termination import stop

HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
ROOT: Final = Path(__file__).parents[2]


class BareSupervisor:
    """The test's side. Orders are those of `_Supervisor`; `popen` goes to `subprocess.Popen`."""

    def __init__(self, *command: str, popen: dict[str, Any] | None = None, **orders: object) -> None:
        orders_end, self._orders = os.pipe()
        order = json.dumps({"command": command, "orders": orders_end, **orders})
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT, **(popen or {})}
        options["pass_fds"] = [orders_end, *options.get("pass_fds", ())]
        self.process = subprocess.Popen([sys.executable, "-m", "tests.support.bare_supervisor", order], **options)
        os.close(orders_end)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def hear(self, word: str, *, deadline: float = 60.0) -> Any:
        """Waits for the message with this key; other lines are skipped."""
        ends = time.monotonic() + deadline
        while True:
            try:
                line = self._lines.get(timeout=max(ends - time.monotonic(), 0))
            except queue.Empty:
                raise AssertionError(f"the supervisor did not say {word!r} within {deadline:g} s") from None
            if not line:
                raise AssertionError(f"the supervisor left without saying {word!r}")
            if line.startswith(b"{") and word in (said := json.loads(line)):
                return said[word]

    def order_stop(self, signal_name: str, grace: float) -> None:
        os.write(self._orders, f"{signal_name} {grace}".encode())

    def __enter__(self) -> "BareSupervisor":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._orders)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._reader.join(timeout=60)
        assert not self._reader.is_alive(), "a process outlived the supervisor: its output is still held"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")


class _Supervisor:
    """`command`, and as wanted `environment`, `directory`, `session`, `grace`, `cgroup`, `output` (a file), `orphaned`
    (a file that is written when this process is killed), `let_go` (descriptors that only the job is to hold), `helper`
    (a command that is started here after the launch, in a separate session)."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._orders: int = order["orders"]
        os.set_inheritable(self._orders, False)
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._signals = SignalStream(HANDLED)
        output = order.get("output")
        program = Program(
            order["command"],
            order.get("environment", os.environ),
            directory=order.get("directory"),
            output=os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if output else None,
            session=order.get("session", False),
            mask=self._signals.original,
        )
        self._reaper = launch(
            program,
            grace=order.get("grace", 10.0),
            orphaned=self._orphaned,
            helpers=lambda: {helper.pid for helper in self._helpers},
            contain_cgroup=order.get("cgroup", True),
        )
        for descriptor in order.get("let_go", ()):
            os.close(descriptor)
        if order.get("helper"):
            self._helpers.append(subprocess.Popen(order["helper"], start_new_session=True))
            say(helper=self._helpers[0].pid)
        say(reaper=self._reaper.pid)

    def run(self) -> None:
        poll = select.poll()
        for source in (self._reaper, self._signals, self._orders):
            poll.register(source, select.POLLIN)
        over = False
        while not over:
            ready = dict(poll.poll())
            if self._orders in ready:
                poll.unregister(self._orders)
                self._obey(os.read(self._orders, 4096).decode().split())
            for received in self._signals.read():
                from_job = self._reaper.owns(received.sender)
                say(signal={"number": received.signal, "from_kernel": received.from_kernel, "from_job": from_job})
            while (event := self._reaper.next_event()) is not None:
                self._repeat(event)
            over = self._reaper.empty
        self._reaper.close()
        say(finished={"status": self._reaper.status, "containment": self._reaper.containment})
        for helper in self._helpers:
            say(helper_left_alone=helper.poll() is None)
            os.killpg(helper.pid, signal.SIGKILL)
            helper.wait()

    def _obey(self, words: list[str]) -> None:
        if words:
            outcome = stop(self._reaper, getattr(signal, words[0]), float(words[1]), hurry=self._signals)
            say(outcome={**outcome._asdict(), "words": outcome.in_words(), "status": self._reaper.status})

    def _repeat(self, event: ReaperEvent) -> None:
        match event:
            case Started(job):
                say(started=job.pid)
            case Failed():
                say(failed=event._asdict())
            case Ended(status):
                say(ended=status)
            case Stopped(signum):
                say(stopped=signum)
            case ReaperKilled():
                say(gone=[process.pid for process in self._reaper.processes()])
            case Empty():
                say(empty=True)

    def _orphaned(self, stop: OrphanStop) -> None:
        if self._order.get("orphaned"):
            Path(self._order["orphaned"]).write_text(json.dumps(stop._asdict()))


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _Supervisor(json.loads(sys.argv[1])).run()
