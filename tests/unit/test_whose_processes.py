"""Whose processes a watch judges."""

import os
import pwd

import pytest

from stoker.actions.action import Action
from stoker.actions.catalogue import ActionSettings, parse_action
from stoker.actions.stop import Stop
from stoker.actions.watcher import Watched
from stoker.actions.whose import judged_processes
from stoker.errors import BadInputError
from stoker.gpus.model import Maybe, Process, Unknown
from stoker.procfs import identify
from stoker.rules.idle import IdlePolicy
from stoker.runs.processes.usage import ProcessUsage
from tests.support.looks import a_gpu, a_look, a_process, a_reading

ELSEWHERE = Unknown("this pid is numbered outside this container")


def action(text: str) -> Action:
    return parse_action(text, ActionSettings(environment={}))


def counted(whose: str | None, user: str, *actions: str) -> list[str]:
    """Which of the usual programs on a GPU count."""
    judged = judged_processes(whose, [action(text) for text in actions], user)
    found = [
        a_process(10, name="python", user="alice"),
        a_process(11, name="python", user="bob"),
        a_process(12, name="python", user="root"),
        a_process(13, name="Xorg", user="root"),
        a_process(14, name="gnome-shell", user="alice"),
        a_process(15, name="nvtop", user="bob"),
    ]
    return [f"{process.name} of {process.user}" for process in found if judged.counts(process)]


EVERYONE = ["python of alice", "python of bob", "python of root"]


@pytest.mark.parametrize(
    ("whose", "user", "actions", "expected"),
    [
        (None, "alice", ["exit"], ["python of alice"]),
        (None, "alice", ["notify json://example.org"], ["python of alice"]),
        (None, "alice", ["exec 'true'"], ["python of alice"]),
        (None, "root", ["exit"], EVERYONE),
        (None, "alice", ["shutdown"], EVERYONE),
        (None, "alice", ["notify json://example.org", "reboot"], EVERYONE),
        (None, "alice", ["stop 1", "shutdown"], EVERYONE),
        ("all", "alice", ["exit"], EVERYONE),
        ("mine", "root", ["shutdown"], ["python of root"]),
        ("mine", "alice", ["shutdown"], ["python of alice"]),
    ],
)
def test_actions_and_user_decide_whose_processes_count(
    whose: str | None, user: str, actions: list[str], expected: list[str]
) -> None:
    assert counted(whose, user, *actions) == expected


def test_user_without_a_name_here_is_accepted() -> None:
    assert judged_processes("4711", (), "root").counts(a_process(user="4711"))


def test_user_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInputError, match="there is no such user here"):
        judged_processes("nobody-of-this-name", (), "root")


def test_root_counts_for_a_user_who_was_not_seen_yet() -> None:
    judged = judged_processes("mine", (), "alice")
    container = a_process(20, user="root")
    assert judged.counts(container)
    assert judged.counts(a_process(21, user="10001"))
    assert not judged.counts(a_process(22, user="bob"))
    assert judged.counts(a_process(23, user="alice"))
    assert not judged.counts(container)


def test_process_of_an_unknown_user_counts() -> None:
    assert judged_processes("mine", (), "alice").counts(a_process(user=ELSEWHERE, name=ELSEWHERE, started=ELSEWHERE))


def test_only_the_tree_counts_that_would_be_stopped() -> None:
    me = identify(os.getppid())
    assert me is not None
    stop = Stop(me.pid, grace=0.0)
    stop.prepare()
    judged = judged_processes(None, (stop, action("notify json://example.org")), "root")
    assert judged.counts(a_process(me.pid, started=me.started))
    assert not judged.counts(a_process(me.pid, started=me.started + 1))
    assert not judged.counts(a_process(1, started=1))
    assert judged.conditions() == ["only what would be stopped is judged"]


def peak(whose: str, *processes: Process, used: float = 0.6) -> Maybe[float]:
    judged = judged_processes(whose, (), pwd.getpwuid(0).pw_name)
    watched = Watched("all", [IdlePolicy()], {}, judged, lambda _at, _listed: ProcessUsage(1.5, 2e6))
    reading = a_reading(a_gpu(), used, processes=processes)
    return watched.observe(a_look(used, readings=(reading,))).activities[0].peak


def test_work_of_others_on_a_shared_gpu_does_not_count() -> None:
    idle, busy = a_process(10, user="root", utilization=0.0), a_process(11, user="bob", utilization=0.6)
    assert peak("mine", idle, busy) == 0
    assert peak("all", idle, busy) == 0.6


def test_whole_device_counts_where_no_process_is_identified() -> None:
    foreign = a_process(11, user=ELSEWHERE, name=ELSEWHERE, started=ELSEWHERE, utilization=ELSEWHERE)
    assert peak("mine", foreign) == 0.6
    assert peak("mine") == 0.6


def test_rules_see_cpu_time_and_io_of_what_counts_and_no_steps() -> None:
    judged = judged_processes("mine", (), "alice")
    watched = Watched("all", [IdlePolicy()], {}, judged, lambda _at, _listed: ProcessUsage(1.5, 2e6))
    processes = (a_process(10, user="alice"), a_process(11, user="bob"))
    observation = watched.observe(a_look(0.5, readings=(a_reading(a_gpu(), 0.5, processes=processes),)))
    progress = observation.progress
    assert (progress.cpu, progress.io, progress.pids, progress.steps) == (1.5, 2e6, (10,), None)
    assert [process.pid for process in observation.activities[0].processes] == [10]
