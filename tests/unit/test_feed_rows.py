"""Rows of a sheet: layout, selection of rows, the counter, and cells written back."""

import pytest

from stoker.errors import BadInputError
from stoker.feeds.rows import (
    Cell,
    Content,
    CounterError,
    Layout,
    RowField,
    changes,
    content_of,
    counter_after,
    parse_columns,
    parse_layout,
)
from stoker.feeds.sheet import words
from stoker.queue import Attempt, View, Worker, WorkerGpu

LAYOUT = Layout("B1", "C", 3, {"state": "D", "id": "F"})


def content(counter: str, *rows: str, ids: tuple[str, ...] = (), states: tuple[str, ...] = ()) -> Content:
    """As Google returns it: without trailing empty cells."""
    values = [[[counter]] if counter else []]
    values += [[[cell] if cell else [] for cell in cells] for cells in (rows, states, ids)]
    return content_of(LAYOUT, values)


def after(found: Content, floor: int = 1) -> int:
    return counter_after(found, LAYOUT, floor)


def test_counter_is_the_number_of_the_next_row_counted_from_the_first() -> None:
    assert after(content("", "one", "two")) == 3
    assert after(content("9", "one", "two")) == 3
    assert after(content("9", "one", "two"), floor=9) == 9


def test_empty_rows_count_only_before_others() -> None:
    assert after(content("1", "", "", "one", "", "")) == 4
    assert after(content("1", "  ", "\n")) == 1


def test_comments_are_counted() -> None:
    assert after(content("1", "# night runs", "one", "# end")) == 4


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "１２", "123456789"])
def test_invalid_counter_is_refused_with_one_message(text: str) -> None:
    with pytest.raises(CounterError, match="cell B1 says"):
        content(text, "one")


def test_only_differing_cells_are_written() -> None:
    there = content("3", "one", "two", ids=("aaaaaaaa", ""), states=("queued", ""))
    truth: dict[int, dict[RowField, str]] = {
        3: {"state": "running", "id": "aaaaaaaa", "link": "nowhere"},
        4: {"state": "queued", "id": "bbbbbbbb"},
    }
    assert changes(there, LAYOUT, truth) == [Cell("D3", "running"), Cell("D4", "queued"), Cell("F4", "bbbbbbbb")]


@pytest.mark.parametrize(
    ("counter", "commands", "columns"),
    [
        ("7", "C", "id=F"),
        ("B0", "C", "id=F"),
        ("B1", "C3", "id=F"),
        ("B1", "C", "state=C,id=F"),
        ("B1", "C", "state=D,id=d"),
        ("D9", "C", "state=D,id=F"),
        ("C3", "C", "id=F"),
    ],
)
def test_layout_with_overlapping_cells_is_refused(counter: str, commands: str, columns: str) -> None:
    with pytest.raises(BadInputError):
        parse_layout(counter, commands, 3, parse_columns(columns))


@pytest.mark.parametrize("text", ["", "state", "state=", "colour=D", "state=4", "state=ABCD", "off"])
def test_invalid_columns_are_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="does not say what goes where"):
        parse_columns(text)


def test_column_of_ids_is_required() -> None:
    with pytest.raises(BadInputError, match="no column for ids"):
        parse_columns("state=D,link=G")


def test_counter_above_the_rows_may_be_in_any_column() -> None:
    assert parse_layout(" d1", "c", 3, parse_columns("state=D, id=aa")) == Layout(
        "D1", "C", 3, {"state": "D", "id": "AA"}
    )


def test_gpus_are_named_by_index_and_machine_where_known() -> None:
    gpus = tuple(WorkerGpu(uuid=f"GPU-{index}", index=index, name="H100") for index in range(2))
    worker = Worker(id="w", host="lab1", view=View(gpus=gpus), started=0.0, seen=0.0, paused=False)
    attempt = Attempt(id="a", job="j", worker="w", number=1, gpus=("GPU-1", "GPU-0"), started=0.0, lease_expires=0.0)
    assert words(attempt, [worker]) == "GPU 1 and 0 on lab1"
    assert words(attempt, []) == "GPU 1 and 0"
    alone = Attempt(id="a", job="j", worker="w", number=1, gpus=(), started=0.0, lease_expires=0.0)
    assert words(alone, [worker]) == "lab1"
