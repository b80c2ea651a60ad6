"""What a chaos run takes for a fault of Stoker, and what for one of the machine that it runs on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import chaos
from tests.support.chaos_judge import Condition, Evidence, Submitted, judge
from tests.support.job_journal import JobJournal

LEASE = 8.0


def findings(
    tmp_path: Path, *conditions: Condition, more: str = "", output: str = "attempt 1 says line 1\n"
) -> list[str]:
    """Of a job over two nodes, whose first attempt began on one of them at 100 and was lost.

    `more`: another line of its journal; `output`: what its file has.
    """
    journal = JobJournal(tmp_path / "journal")
    lines = ["1 11 start 0 100.0 node1 0 0", "1 11 line 1 106.0 node1 0 0", *([more] if more else [])]
    for rank in (0, 1):
        lines += [f"2 {20 + rank} {word} 0 {at} node{rank + 1} {rank} 0" for word, at in (("start", 120), ("end", 121))]
    journal.path.write_text("".join(f"{line}\n" for line in lines))
    lost = SimpleNamespace(id="1", number=1, outcome="lost", exit_code=None, reason="", worker="w")
    good = SimpleNamespace(id="2", number=2, outcome="succeeded", exit_code=0, reason="", worker="w")
    store: Any = SimpleNamespace(
        jobs=SimpleNamespace(get=lambda _: SimpleNamespace(state="succeeded", reason="")),
        attempts=SimpleNamespace(of=lambda _: [lost, good]),
        logs=SimpleNamespace(read=lambda _: "attempt 1 says line 1\n"),
    )
    place = tmp_path / "attempts" / "job-1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "output").write_text(output)
    jobs = {"job": Submitted(journal, 0, nodes=2)}
    return list(judge(store, Evidence(jobs, {}, list(conditions), {}, [tmp_path], LEASE)))


def test_loss_while_the_machine_was_suspended_for_most_of_a_lease_is_accepted(tmp_path: Path) -> None:
    (wrong,) = findings(tmp_path)
    assert "attempt 1 was lost without a reason" in wrong
    assert findings(tmp_path, Condition("held up", None, 97.0, 98.0)), "too short"
    assert findings(tmp_path, Condition("held up", None, 60.0, 80.0)), "long before"
    assert findings(tmp_path, Condition("held up", None, 97.0, 102.0)) == []


def test_late_output_of_a_lost_attempt_is_accepted_in_its_file_only(tmp_path: Path) -> None:
    held_up = Condition("held up", None, 97.0, 102.0)
    both = "attempt 1 says line 1\nattempt 1 says line 2\n"
    late, early = "1 11 line 2 120.5 node1 0 0", "1 11 line 2 119.0 node1 0 0"
    assert not [one for one in findings(tmp_path, held_up, more=late, output=both) if "printed" in one]
    (wrong,) = [one for one in findings(tmp_path, held_up, more=late) if "printed" in one]
    assert "the file has" in wrong
    (wrong,) = [one for one in findings(tmp_path, held_up, more=early, output=both) if "printed" in one]
    assert "the queue has" in wrong


def test_machine_is_held_up_while_this_process_waits_for_a_core_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, times = 0.0, (0.0, 0.0)
    monkeypatch.setattr("tests.support.chaos.time.monotonic", lambda: now)
    monkeypatch.setattr(chaos, "journal_clock", lambda: now)
    monkeypatch.setattr(chaos, "_core_times", lambda: times)
    run: Any = object.__new__(chaos.ChaosRun)
    run._conditions, run._cores = [], (0.0, 0.0, 0.0)
    # Had a core for a tenth of each second, and waited for one for as much longer.
    for second, waited in enumerate([0.0, 0.1, 0.8, 0.9, 0.4], start=1):
        now, times = float(second), (times[0] + 0.1, times[1] + waited)
        run._note_load()
    assert [(one.kind, one.began, one.ended) for one in run._conditions] == [
        ("held up", 2.0, 3.0),
        ("held up", 3.0, 4.0),
    ]
    assert chaos._core_times()[0] >= 0.0
