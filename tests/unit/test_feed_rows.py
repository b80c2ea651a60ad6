"""Rows of a sheet: where each thing is, which are to be taken, where the counter goes, what is written back."""

import pytest

from stoker.errors import BadInputError
from stoker.feeds.gpu_words import words
from stoker.feeds.rows import (
    Cell,
    Content,
    CounterError,
    Layout,
    changes,
    content_of,
    left_behind,
    parse_columns,
    parse_layout,
    to_take,
)
from stoker.queue import Attempt, Job, View, Worker, WorkerGpu

LAYOUT = Layout("B1", "C", 3, {"state": "D", "id": "F"})


def content(counter: str, *rows: str, ids: tuple[str, ...] = (), states: tuple[str, ...] = ()) -> Content:
    """As Google gives it: nothing for empty cells at the ends."""
    values = [[[counter]] if counter else []]
    values += [[[cell] if cell else [] for cell in cells] for cells in (rows, states, ids)]
    return content_of(LAYOUT, values)


def job(name: str, command: str, state: str = "queued") -> Job:
    return Job(
        id=name,
        command=command,
        state=state,  # type: ignore[arg-type]  # one of them
        position=1.0,
        submitted=0.0,
        started=None,
        ended=None,
        not_before=0.0,
        retries_left=0,
        attempts=0,
        attempt=None,
        exit_code=None,
        sentence="",
        link="",
        cancel_requested=None,
        origin=None,
    )


def taken(found: Content, limit: int = 10) -> tuple[list[int], int]:
    rows, counter = to_take(found, LAYOUT, limit)
    return [row.number for row in rows], counter


def test_the_counter_is_the_number_of_the_next_row_counted_from_the_first() -> None:
    assert taken(content("", "one", "two")) == ([3, 4], 3)
    assert taken(content("2", "one", "two")) == ([4], 3)
    assert taken(content("3", "one", "two")) == ([], 3)
    assert taken(content("9", "one", "two")) == ([], 9)


def test_empty_rows_are_skipped_only_before_others() -> None:
    assert taken(content("1", "", "", "one", "", "")) == ([5], 4)
    assert taken(content("1", "  ", "\n")) == ([], 1)


def test_comments_are_counted_but_not_taken() -> None:
    assert taken(content("1", "# night runs", "one", "# end")) == ([4], 4)


def test_no_more_than_the_limit_are_taken_and_counted() -> None:
    assert taken(content("1", "one", "", "two", "three"), limit=2) == ([3, 5], 4)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "１２", "123456789"])
def test_a_counter_that_is_none_is_one_sentence(text: str) -> None:
    with pytest.raises(CounterError, match="cell B1 says"):
        content(text, "one")


def test_only_cells_that_are_wrong_are_written() -> None:
    there = content("3", "one", "two", ids=("aaaaaaaa", ""), states=("queued", ""))
    jobs = [(3, job("aaaaaaaa", "one", "running")), (4, job("bbbbbbbb", "two"))]
    assert changes(there, LAYOUT, jobs, {}) == [
        Cell("D3", "running"),
        Cell("D4", "queued"),
        Cell("F4", "bbbbbbbb"),
    ]


def test_a_job_is_written_where_its_id_is_and_else_only_beside_its_command() -> None:
    moved = content("3", "two", ids=("bbbbbbbb",), states=("queued",))
    jobs = [(3, job("aaaaaaaa", "one", "failed")), (4, job("bbbbbbbb", "two", "failed"))]
    assert changes(moved, LAYOUT, jobs, {}) == [Cell("D3", "failed")]
    assert changes(content("3", "something else"), LAYOUT, [(3, job("aaaaaaaa", "one"))], {}) == []


def test_a_newer_job_takes_its_row_over() -> None:
    there = content("2", "new", ids=("aaaaaaaa",), states=("failed",))
    jobs = [(3, job("aaaaaaaa", "old", "failed")), (3, job("bbbbbbbb", "new"))]
    assert changes(there, LAYOUT, jobs, {}) == [Cell("D3", "queued"), Cell("F3", "bbbbbbbb")]


def test_rows_before_the_counter_and_after_all_taken_ones_are_left_behind() -> None:
    assert [row.number for row in left_behind(content("4", "one", "two", "three", ids=("aaaaaaaa",)), LAYOUT)] == [4, 5]
    assert left_behind(content("4", "one", "two", "three"), LAYOUT) == []


@pytest.mark.parametrize(
    ("counter", "commands", "columns"),
    [
        ("7", "C", "off"),
        ("B0", "C", "off"),
        ("B1", "C3", "off"),
        ("B1", "C", "state=C"),
        ("B1", "C", "state=D,id=d"),
        ("D9", "C", "state=D"),
        ("C3", "C", "off"),
    ],
)
def test_a_layout_in_which_things_collide_is_refused(counter: str, commands: str, columns: str) -> None:
    with pytest.raises(BadInputError):
        parse_layout(counter, commands, 3, parse_columns(columns))


@pytest.mark.parametrize("text", ["", "state", "state=", "colour=D", "state=4", "state=ABCD"])
def test_columns_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="does not say what goes where"):
        parse_columns(text)


def test_a_counter_above_the_rows_may_be_in_any_column() -> None:
    assert parse_layout(" d1", "c", 3, parse_columns("state=D, id=aa")) == Layout(
        "D1", "C", 3, {"state": "D", "id": "AA"}
    )


def test_gpus_are_named_by_number_and_machine_as_far_as_known() -> None:
    gpus = tuple(WorkerGpu(uuid=f"GPU-{index}", index=index, name="H100") for index in range(2))
    worker = Worker(id="w", host="lab1", view=View(gpus=gpus), started=0.0, seen=0.0, paused=False)
    attempt = Attempt(id="a", job="j", worker="w", number=1, gpus=("GPU-1", "GPU-0"), started=0.0, lease_expires=0.0)
    assert words(attempt, [worker]) == "GPU 1 and 0 on lab1"
    assert words(attempt, []) == "GPU 1 and 0"
    alone = Attempt(id="a", job="j", worker="w", number=1, gpus=(), started=0.0, lease_expires=0.0)
    assert words(alone, [worker]) == "lab1"
