"""What `stoker top` shows on terminals of any size, and which job is selected."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from stoker.cli.top.screen import UNCUT, TopView, chosen, frame, key_of, sections, selected, share, whole
from stoker.cli.top.session import help_frame
from stoker.queue.groups import Group
from stoker.status.job_text import job_label
from stoker.status.model import Snapshot
from stoker.units import clock_time
from tests.support.deep import examples
from tests.support.notification_parts import NOW
from tests.support.snapshots import card, ended, machine, running, snapshot, waiting


def shown(seen: Snapshot, view: TopView | None = None, width: int = 80, height: int = 24) -> str:
    return "\n".join(line.plain for line in frame(seen, view or TopView(), width, height))


def test_small_terminal_shows_part_of_every_section() -> None:
    screen = shown(snapshot())
    for text in (
        "1 thing needs attention",
        "job end-0 failed",
        "node7",
        "job for alice, 10 min",
        "18 GiB of 40 GiB",
        "running (2)",
        "█████·····  50% 5/10",
        "waiting (3)",
        "wait-0",
        "waits for 2 GPUs",
        "ended (2)",
        "failed",
        "? help",
    ):
        assert text in screen


def test_narrow_terminal_keeps_ids_states_and_gpus_whole() -> None:
    long = "gpu-box-17.cluster.example.org"
    command = "python train.py " + "--option value " * 20
    runs = msgspec.structs.replace(running(1, name="", command=command), host=long, gpus=("0", "7"))
    taken = card(0, state="somebody", user="")
    seen = snapshot(running=(runs,), machines=(machine(long, cards=(taken,)),))
    for width in (80, 60):
        screen = shown(seen, width=width)
        for text in (
            "  python train.p",
            f" {runs.job.id} ",
            "…:0,7 ",
            " queued ",
            " failed ",
            "  0 A100",
            " somebody else",
        ):
            assert text in screen, (width, text)
    piped = "\n".join(line.plain for line in whole(seen, UNCUT))
    assert " … " in piped  # a command in the place of a name is short everywhere
    assert f"{long}:0,7" in piped
    assert "█" not in piped


def test_many_gpus_are_shown_as_one_line_per_machine() -> None:
    many = snapshot(machines=tuple(machine(f"node{number}", gpus=8) for number in range(3)))
    lines = shown(many).splitlines()
    (line,) = [line for line in lines if line.startswith("node1")]
    assert line.split() == ["node1", *(word for number in range(8) for word in (str(number), "96%"))]
    assert sum(line.startswith("  ") and "A100" in line for line in shown(many, height=120).splitlines()) == 24


def test_unreadable_gpu_looks_different_from_an_idle_one() -> None:
    unknown = card(0, utilization=None, memory_used=None, state="unknown", user="", note="the driver does not answer")
    idle = card(1, utilization=0.0, memory_used=0, state="free", user="")
    seen = snapshot(machines=(machine(cards=(unknown, idle)),))
    lines = shown(seen, width=160).splitlines()
    assert any("?" in line and "unknown, 10 min: the driver does not answer" in line for line in lines)
    assert any("0%" in line and "0 B of 40 GiB" in line and "free" in line for line in lines)
    short = snapshot(machines=tuple(machine(f"n{i}", cards=(unknown, idle)) for i in range(9)))
    assert "0 ?  1 0%" in shown(short)


def test_quarantined_gpu_shows_reason_and_start() -> None:
    quarantine = {"quarantine": "XID 79: x", "quarantined_since": NOW - 60, "note": "is out of rotation (XID 79: x)"}
    cards = (card(0, state="unknown", user="", **quarantine), card(1, state="job", user="", **quarantine))
    lines = shown(snapshot(machines=(machine(cards=cards),)), width=160).splitlines()
    since = clock_time(NOW - 60, NOW)
    assert [line.rpartition("GiB ")[2].strip() for line in lines if "XID" in line] == [
        f"quarantined: XID 79: x since {since}",
        f"job, quarantined: XID 79: x since {since}",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"paused": True}, "the queue is paused"),
        ({"machines": (machine(simulated=True),)}, "these GPUs are simulated"),
        ({"machines": (machine(there=False),)}, "not seen for 2 s"),
        ({"machines": (machine(there=False, left=True),)}, "left 2 s ago"),
        ({"running": (), "waiting": (), "ended": (), "counts": {}}, "`stoker submit -- COMMAND` makes one"),
        ({"running": (running(0, fraction=None),)}, "loss=0.25"),
    ],
)
def test_unusual_states_are_shown(changes: dict[str, object], text: str) -> None:
    assert text in shown(snapshot(**changes))


def test_job_text_contains_no_control_characters() -> None:
    nasty = "x\x1b[2J\x1b]0;title\x07\ny\u202e"
    seen = snapshot(
        running=(running(1, name=nasty),),
        waiting=(waiting(1, name=nasty),),
        ended=(ended(1, name=nasty),),
        machines=(machine(host=nasty, cards=(card(0, user=nasty, note=nasty, state="unknown"),)),),
    )
    for lines in (frame(seen, TopView(note=nasty), 80, 24), whole(seen, 200)):
        assert all(letter.isprintable() for line in lines for letter in line.plain)


@settings(max_examples=examples(80), deadline=None)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 100),
    counts=st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(0, 9)),
    place=st.integers(0, 200),
)
def test_every_frame_fits_its_terminal_and_shows_the_selected_job(
    width: int, height: int, counts: tuple[int, int, int, int], place: int
) -> None:
    seen = snapshot(
        running=tuple(running(number, name="训练" * 9) for number in range(counts[0])),
        waiting=tuple(waiting(number) for number in range(counts[1])),
        ended=tuple(ended(number) for number in range(counts[2])),
        machines=tuple(machine(f"n{number}") for number in range(counts[3])),
    )
    view = selected(seen, TopView(), place)
    for lines in (frame(seen, view, width, height), help_frame(view, width, height)):
        assert len(lines) == height
        assert all(cell_len(line.plain) <= width for line in lines)
    if view.selected is not None and height >= 14 and width >= 20:
        # Its name comes first: a narrow terminal may have no room for the id behind it.
        jobs = [one.job for one in seen.running] + [one.job for one in seen.waiting] + [one.job for one in seen.ended]
        (job,) = [one for one in jobs if one.id == view.selected]
        shown = [line.plain for line in frame(seen, view, width, height)]
        assert any(view.selected in line or job_label(job)[:4] in line for line in shown)


def test_lines_are_distributed_evenly_between_sections() -> None:
    assert share(10, [20, 2, 20]) == [4, 2, 4]
    assert share(10, [3, 3, 3]) == [3, 3, 3]
    assert share(2, [5, 5, 5]) == [1, 1, 0]
    assert share(-1, [5]) == [0]


def test_selection_follows_its_job_and_moves_on_when_it_vanishes() -> None:
    seen = snapshot()
    view = selected(seen, TopView(), 3)
    assert view.selected == seen.waiting[1].job.id
    started = snapshot(running=(*seen.running, running(9)), waiting=seen.waiting[1:])
    assert selected(started, view).selected == view.selected
    gone = snapshot(waiting=(seen.waiting[0], seen.waiting[2]))
    assert selected(gone, view).selected == seen.waiting[2].job.id
    assert selected(snapshot(running=(), waiting=(), ended=()), view).selected is None


def test_jobs_are_filtered_by_submitter() -> None:
    seen = snapshot(running=(running(1, submitter="alice"), running(2, submitter="bob")))
    view = TopView(mine="bob")
    assert [one.job.name for section in chosen(seen, view) for one in section] == ["run-2"]
    assert "run-1" not in shown(seen, view)
    assert "only jobs of bob" in shown(seen, view)


SWEEP = Group(name="sweep", counts={"succeeded": 11, "failed": 1, "running": 1, "queued": 2})


def with_sweep() -> Snapshot:
    return snapshot(
        groups=(SWEEP,),
        running=(running(0), running(1, group="sweep", name="lr=1")),
        waiting=(waiting(0, group="sweep", name="lr=2"), waiting(1)),
        ended=(ended(0, group="sweep", name="lr=0"), ended(1)),
        counts={"running": 2, "queued": 3, "succeeded": 11, "failed": 2},
    )


def test_group_is_one_row_until_unfolded() -> None:
    seen = with_sweep()
    folded = shown(seen, width=120, height=40)
    assert "▸ sweep " in folded
    assert "80% 12 of 15 done, 1 failed, 1 running" in folded
    assert "lr=" not in folded
    for heading in ("groups (1)", "running (1)", "waiting (1)", "ended (1)"):
        assert heading in folded.splitlines(), heading
    unfolded = shown(seen, TopView(unfolded=frozenset({"sweep"})), width=120, height=40).splitlines()
    assert "groups (1)" in unfolded
    first = next(number for number, line in enumerate(unfolded) if "▾ sweep" in line)
    assert [line.split()[0] for line in unfolded[first + 1 : first + 4]] == ["lr=1", "lr=2", "lr=0"]
    assert all(line.startswith("    lr=") for line in unfolded[first + 1 : first + 4])
    piped = "\n".join(line.plain for line in whole(seen, UNCUT))
    assert "▸ sweep" in piped
    assert " group    12 of 15 done, 1 failed, 1 running" in piped


def test_selection_moves_through_groups_and_their_jobs() -> None:
    seen, unfolded = with_sweep(), TopView(unfolded=frozenset({"sweep"}))
    keys = [key_of(row) for section in sections(seen, TopView()) for row in section.rows]
    assert keys == ["group:sweep", "00000000", "00000101", "00000201"]
    assert [selected(seen, unfolded, step).selected for step in range(4)] == [
        *("group:sweep", "00000001", "00000100", "00000200")
    ]
    # Of a group that is folded while one of its jobs is selected, another row is.
    assert selected(seen, TopView(selected="00000001", place=1)).selected == "00000000"
    assert sections(seen, TopView(mine="nobody"))[0].name == "running"
