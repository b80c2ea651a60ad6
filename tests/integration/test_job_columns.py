"""A column that is registered in one place is shown by `list` (table and JSON), `top` and the page."""

import json
from collections.abc import Iterator

import pytest

from stoker.cli.top.screen import TopView, frame
from stoker.cli.verbs.show import list_command
from stoker.queue import Store
from stoker.status.job_columns import COLUMNS, JobColumn
from stoker.web.answers import Page
from stoker.web.pages.sections import render_list
from tests.support.queue_jobs import queue, submit
from tests.support.snapshots import snapshot

__all__ = ["queue"]


@pytest.fixture(autouse=True)
def column() -> Iterator[JobColumn]:
    added = JobColumn(key="experiment", title="experiment", text=lambda row: f"of-{row.job.name}")
    COLUMNS.append(added)
    yield added
    COLUMNS.remove(added)


def test_registered_column_is_in_the_table_and_in_json(queue: Store, capsys: pytest.CaptureFixture[str]) -> None:
    submit(queue, "vit")
    list_command.main([], standalone_mode=False)
    heading, row, *_rest = capsys.readouterr().out.splitlines()
    assert (heading.split()[-1], row.split()[-1]) == ("experiment", "of-vit")
    list_command.main(["--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["experiment"] == "of-vit"


def test_registered_column_is_in_top() -> None:
    screen = "\n".join(line.plain for line in frame(snapshot(), TopView(), 200, 40))
    assert all(f"of-{name}" in screen for name in ("wait-0", "end-0"))


def test_registered_column_is_on_the_page(queue: Store) -> None:
    (name,) = submit(queue, "vit")
    html = render_list(Page(items=[queue.jobs.get(name)]), None, None, "operator")["list"]
    assert '<th scope="col" class="experiment">Experiment</th>' in html
    assert '<td class="experiment">of-vit</td>' in html
