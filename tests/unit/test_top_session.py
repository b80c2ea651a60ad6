"""What `stoker top` does when its queue is away, and what it shows then."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from rich.text import Text

from stoker.cli.top.session import TopSession
from stoker.cli.top.terminal import TopTerminal
from stoker.queue import QueueAwayError, Store, init_queue
from stoker.queue.fields import JobSpec
from stoker.queue.jobs import Jobs


class Scripted:
    """A terminal on which each key is pressed when the frame before it was drawn."""

    size = (100, 30)
    leaves_with = None

    def __init__(self, *keys: str) -> None:
        self._keys = list(keys)
        self.frames: list[str] = []

    def draw(self, lines: Sequence[Text]) -> None:
        self.frames.append("\n".join(line.plain for line in lines))

    def wait(self, others: Sequence[int], seconds: float) -> list[str]:  # noqa: ARG002 - as a terminal has it
        return [self._keys.pop(0)]


@pytest.fixture
def store() -> Iterator[Store]:
    with init_queue() as found:
        yield found


def used(store: Store, home: Path, *keys: str) -> list[str]:
    """What was drawn before each of the keys."""
    terminal = Scripted(*keys, "q")
    assert TopSession(store, home, cast(TopTerminal, terminal), None).run() == 0
    return terminal.frames


def test_unreachable_queue_is_reported_and_the_last_state_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.jobs.submit([JobSpec(command="x", name="train")])
    answers = iter([False, True, False])

    def paused(self: Store) -> bool:
        if next(answers, False):
            raise QueueAwayError("the database does not answer")
        return False

    monkeypatch.setattr(Store, "paused", paused)
    monkeypatch.setattr("stoker.cli.top.session._LOOK_EVERY", 0.0)
    first, away, back = used(store, tmp_path, "x", "x")
    assert "train" in first
    assert "train" in away
    assert "the database does not answer (waiting; this state is outdated)" in away
    # What it came to when it was last asked is no answer now.
    assert "  The database does not answer" in away
    assert "1 job waits, and no worker is there" in first
    assert "2 things are wrong" in away
    assert "things are wrong" not in back
    assert "this state is outdated" not in back


def test_action_on_an_unreachable_queue_is_reported_as_not_done(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.jobs.submit([JobSpec(command="x", name="train")])

    def hold(self: Jobs, ids: object) -> list[str]:
        raise QueueAwayError("the database does not answer")

    monkeypatch.setattr(Jobs, "hold", hold)
    assert "nothing was done: the database does not answer" in used(store, tmp_path, "h")[-1]


def test_action_without_a_selected_job_is_refused(store: Store, tmp_path: Path) -> None:
    assert "no job is selected" in used(store, tmp_path, "c")[-1]


def test_open_job_stays_open_when_the_list_changes(store: Store, tmp_path: Path) -> None:
    (job,) = store.jobs.submit([JobSpec(command="x", name="train")])
    store.jobs.cancel([job])
    frames = used(store, tmp_path, "enter", "r", "q")
    assert "cancelled before it started" in frames[1]
    assert f"train ({job}): queued again" in frames[2]
    assert "waiting (1)" in frames[3]


def test_own_jobs_filter_is_toggled(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.cli.top.session.login_name", lambda: "alice")
    store.jobs.submit(
        [JobSpec(command="x", name="hers", submitter="alice"), JobSpec(command="x", name="his", submitter="bob")]
    )
    both, hers, again = used(store, tmp_path, "a", "a")
    assert "his" in both
    assert "his" not in hers
    assert "hers" in hers
    assert "his" in again


def test_group_is_unfolded_folded_and_changed_as_a_whole(store: Store, tmp_path: Path) -> None:
    one, two, three = store.jobs.submit([JobSpec(command="x", name=f"lr={n}", group="sweep") for n in range(3)])
    store.attempts.claim([one], "w", [], 600)
    store.jobs.submit([JobSpec(command="x", name="other")])
    keys = ("right", "down", "left", "enter", "left", "c", "n", "h", "y", "h", "y", "c", "y", "r", "y", "l")
    frames = used(store, tmp_path, *keys)
    assert "> ▸ sweep" in frames[0]
    assert "lr=" not in frames[0]
    assert "> ▾ sweep" in frames[1]
    assert "  lr=2" in frames[1]
    assert ">   lr=0" in frames[2]
    assert "> ▸ sweep" in frames[3]  # ← on one of its jobs
    assert "> ▾ sweep" in frames[4]
    assert "> ▸ sweep" in frames[5]
    assert "cancel 3 jobs of sweep, 1 of them running? y/n" in frames[6]
    assert "nothing was done" in frames[7]
    assert "hold 2 jobs of sweep? y/n" in frames[8]
    assert "sweep: 2 jobs held" in frames[9]
    assert "release 2 jobs of sweep? y/n" in frames[10]
    assert "sweep: 2 jobs released" in frames[11]
    assert "cancel 3 jobs of sweep, 1 of them running? y/n" in frames[12]
    assert "sweep: 2 jobs cancelled, 1 job asked to stop" in frames[13]
    assert "retry 2 jobs of sweep? y/n" in frames[14]
    assert "sweep: 2 jobs queued again" in frames[15]
    assert "that is for one job: → unfolds the group" in frames[16]
    assert [store.jobs.get(job).state for job in (one, two, three)] == ["running", "queued", "queued"]


def test_details_move_between_jobs_across_groups(store: Store, tmp_path: Path) -> None:
    store.jobs.submit([JobSpec(command="x", name=f"lr={n}", group="sweep") for n in range(2)])
    store.jobs.submit([JobSpec(command="x", name=name) for name in ("alone", "last")])
    frames = used(store, tmp_path, "down", "enter", "up", "down", "q")
    assert frames[2].startswith("alone ")
    assert frames[3].startswith("alone ")
    assert frames[4].startswith("last ")
