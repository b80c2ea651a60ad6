"""An internal error may lose readings or a report, never the job and never its stop."""

import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from stoker.gpus.model import Unknown
from stoker.runs import supervisor as supervisor_module
from stoker.runs.record import Status
from stoker.runs.supervisor import Supervisor
from tests.support.looks import a_gpu, a_look, a_process, a_reading

PROGRAM = """
import sys
from stoker.runs import run, supervisor
from stoker.runs.postmortem import report
from stoker.runs.plan import Plan

def broken(*_arguments, **_more):
    raise ZeroDivisionError("a mistake of ours")

{mistake}
policy = {{"below": 0.05, "window": 0.5, "after": 0.0, "every": 0.1}}
sys.exit(run.supervise(Plan(command=("sh", "-c", {command!r}), policy=policy, source="sim:1", grace=5.0)))
"""
DEADLINE_PASSED = """
import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

from stoker.gpus.prober import Prober
from stoker.runs.plan import UNWATCHED, Plan
from stoker.runs.processes.reaper import fork_reaper
from stoker.runs.record import Records
from stoker.runs.processes.signals import FORWARDED, SignalStream
from stoker.runs.supervisor import Controller, StopRequest, Supervisor

deaf = "trap '' TERM; touch deaf; while :; do sleep 0.05; done"
controller = Mock(spec=Controller)
controller.fileno.return_value = os.pipe()[0]
controller.due.side_effect = lambda: time.monotonic() + 0.05
controller.poll.side_effect = lambda: StopRequest("lease", "Over.", 143) if Path("deaf").exists() else None
controller.on_signal.return_value = None
controller.max_grace.return_value = 0.0
with SignalStream(FORWARDED) as signals:
    plan = Plan(command=("sh", "-c", deaf), gpus=UNWATCHED, source="sim:1", grace=600.0)
    record, reaper = Records(Path.cwd()).create(), fork_reaper()
    sys.exit(Supervisor(plan, record, Prober("sim:1"), os.environ, signals, reaper, controller).run())
"""
TOO_LATE = """
import os
import select
import sys
from pathlib import Path
from unittest.mock import Mock

from stoker.gpus.prober import Prober
from stoker.rules.rule import Verdict
from stoker.runs.plan import UNWATCHED, Plan
from stoker.runs.processes.reaper import fork_reaper
from stoker.runs.processes.reaper_process import FAST_START
from stoker.runs.processes.signals import FORWARDED, SignalStream
from stoker.runs.processes.syscalls import boot_clock
from stoker.runs.record import Records
from stoker.runs.supervisor import Controller, StopRequest, Supervisor, launch_request

controller = Mock(spec=Controller)
controller.on_exit.return_value = None
verdict = Verdict("idle", "GPU 0 stayed below 1%", effect="act", rule="idle")
with SignalStream(FORWARDED) as signals:
    plan = Plan(command=("true",), gpus=UNWATCHED, source="sim:1")
    record, reaper = Records(Path.cwd()).create(), fork_reaper(keeps_output=True, has_fast_path=True)
    request = launch_request(plan, record, dict(os.environ), signals, str(record.directory / "output"), 1000)
    request = request._replace(id=b"a" * 16, success=b"done")
    reaper.prepare(request)
    reaper.set_deadline(boot_clock() + 600.0, with_start=True)
    reaper.start(request, waits=False, is_ordered=True)
    worker = reaper.take_connection()
    worker.send(FAST_START.pack(b"a" * 16, boot_clock() + 600.0))
    supervisor = Supervisor(plan, record, Prober("sim:1"), os.environ, signals, reaper, controller)
    assert select.select([worker], [], [], 60.0)[0]
    code = {stop}
    status = record.status()
    print(code, status.state, status.ending, repr(status.rule), supervisor.stopped_by)
    reaper.close()
"""
# A job that ends once the error was logged, or after a minute.
UNTIL_LOGGED = "for look in $(seq 3000); do [ -e logged ] && exit 7; sleep 0.02; done"


@pytest.mark.parametrize(
    ("mistake", "command", "code", "sentence"),
    [
        ("supervisor.Judge.observe = broken", UNTIL_LOGGED, 7, "the command continues"),
        ("supervisor.Journal.append = broken", UNTIL_LOGGED, 7, "the command continues"),
        ("report.collect_stacks = broken", "sleep 60", 124, "the report is incomplete"),
        ("report.render = broken", "sleep 60", 124, "the report is incomplete"),
        ("report.RunFacts = broken", "sleep 60", 124, "the report is incomplete"),
    ],
    ids=["rule", "journal", "stacks", "page", "evidence"],
)
def test_internal_error_neither_stops_a_job_nor_prevents_its_stop(
    mistake: str, command: str, code: int, sentence: str, tmp_path: Path
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(mistake=mistake, command=command)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        assert supervisor.stderr is not None
        said = []
        for line in supervisor.stderr:
            said.append(line)
            if sentence in line:
                (tmp_path / "logged").touch()
    assert supervisor.returncode == code, said
    assert sentence in "".join(said)
    assert "Traceback" not in "".join(said)


def test_job_with_expired_lease_is_killed_without_grace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEADLINE_PASSED], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 143, done.stderr
    assert "had to be killed" in done.stderr


@pytest.mark.parametrize(
    "stop",
    [
        "supervisor._stop_by_rule(verdict)",
        "supervisor._stop('time limit', 'It had run too long.', code=124)",
        "supervisor._stop_as_requested(StopRequest('cancelled', 'It was cancelled.', 143))",
    ],
    ids=["rule", "time-limit", "cancellation"],
)
def test_success_that_was_reported_is_not_stopped_afterwards(stop: str, tmp_path: Path) -> None:
    """The actions of a rule, such as a shutdown of the machine, would follow."""
    program = TOO_LATE.format(stop=stop)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "0 ended exited '' None\n", done.stderr


def test_look_requested_before_the_end_of_the_job_does_not_prove_that_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "MEMORY_POLL", 0.0)
    alive, gone = a_process(), a_process(started=Unknown("it has ended"))
    now = time.monotonic()
    before = a_look(0.0, at=now - 1.0, readings=(a_reading(processes=(alive,)),))
    after = a_look(0.0, at=now + 3600.0, readings=(a_reading(processes=(gone,)),))
    supervisor = object.__new__(Supervisor)
    supervisor._status = Status(used=(a_gpu().uuid,))
    supervisor._prober = Mock(look=Mock(side_effect=[before, after]))
    supervisor._signals = Mock(read=Mock(side_effect=[[], ["SIGINT"]]))
    supervisor._reaper = Mock(owns=Mock(return_value=False))
    (left,) = supervisor._gpus_still_held()
    assert str(gone.pid) in left
