"""Searches, on both databases: what is found, page by page, in every order."""

import itertools

import pytest

from stoker.errors import BadInputError
from stoker.queue import JobSpec, Store, View, search
from stoker.queue.search import SORTS, parse_query, parse_sort
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import end, moment, start, submit

__all__ = ["queue", "url"]


@pytest.fixture(autouse=True, params=[(3, 4), (200, 1000)])
def looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few jobs are found by looking at the newest: so the indexes are asked as well."""
    monkeypatch.setattr(search, "_LOOKED_AT", request.param)


def found(queue: Store, text: str, sort: str = "", size: int = 2) -> str:
    """The names of the jobs, page by page; and that all at once are the same."""
    query, order, names, after = parse_query(text), parse_sort(sort), list[str](), None
    for _page in range(20):
        matches = queue.jobs.search(query, order, after, size)
        names += [job.name for job in matches.jobs]
        after = matches.next
        if after is None:
            break
    assert after is None, "the pages have no end"
    if not sort:
        assert [job.name for job in queue.jobs.matching(query)] == names
    return " ".join(names)


def test_searches_find_what_they_say(queue: Store) -> None:
    specs = [
        JobSpec(name="resnet-a", command="python train.py --m resnet50 --lr 1e-3", tags=("night",), submitter="alice"),
        JobSpec(name="resnet-b", command="python train.py --lr=1e-2", tags=("Night", "v2 final"), submitter="bob"),
        JobSpec(name="Straße", command=("python", "eval.py", "lr=0.001"), hold=True),
        JobSpec(name="bert", command="python train.py --lr 1e-30 # resnet"),
        JobSpec(name="q7", command="sleep 100%_done", group="night two"),
    ]  # fmt: skip
    a, b, held, bert, _q7 = queue.jobs.submit(specs)
    queue.workers.heartbeat("w-one", "gpu-box-1", View())
    end(queue, b)
    start(queue, a, "w-one")
    between = moment(queue)
    queue.jobs.cancel([bert])
    for text, names in {
        "": "q7 bert Straße resnet-b resnet-a",
        "resnet": "bert resnet-b resnet-a",
        "name:RESNET": "resnet-b resnet-a",
        "command:resnet": "bert resnet-a",
        "tag:night": "resnet-b resnet-a",
        "tag:nigh": "",
        'group:"Night two"': "q7",
        "group:night": "",
        "nigh": "q7 resnet-b resnet-a",
        "user:ali": "resnet-a",
        "lr=1e-3": "Straße resnet-a",
        "lr=0.001 train": "resnet-a",
        "lr=": "bert Straße resnet-b resnet-a",
        "lr=1e": "",
        "STRASSE": "Straße",
        "q": "q7",
        "v2": "resnet-b",
        "tag:v2": "",
        'tag:"V2 final"': "resnet-b",
        '"train.py --lr 1e-3"': "bert",
        '"train.py   --LR"': "bert resnet-b",
        "100%_d": "q7",
        "100x": "",
        f"id:{a[:5]}": "resnet-a",
        f"{bert}": "bert",
        "id:zz": "",
        "machine:BOX-1": "resnet-a",
        "machine:box-2": "",
        "state:running": "resnet-a",
        "state:held,queued": "q7 Straße",
        "state:held resnet": "",
        "resnet state:failed,cancelled": "bert resnet-b",
        "resnet state:running,held": "resnet-a",
        "since:1h": "q7 bert Straße resnet-b resnet-a",
        "before:1h": "",
        "resnet since:1h": "bert resnet-b resnet-a",
        "since:1h state:failed": "resnet-b",
        "machine:box since:1h resnet": "resnet-a",
        "nothing": "",
        "0%_": "q7",
        "'; DROP": "",
        'a"b c"d': "",
    }.items():
        assert found(queue, text) == names, text
    assert [job.name for job in queue.jobs.search(search.Query((search.Term("since", at=between),))).jobs] == ["bert"]
    assert found(queue, "resnet", "-submitted") == "resnet-a resnet-b bert"
    assert found(queue, "lr= state:held,running,failed", "-submitted", 1) == "resnet-a resnet-b Straße"
    assert found(queue, "", "-submitted") == "resnet-a resnet-b Straße bert q7"
    # After an edit it is found by its new text only, and after its end in the queue not at all.
    queue.jobs.edit(held, {"name": "renamed", "tags": ("morning",)})
    assert (found(queue, "straße"), found(queue, "tag:morning name:nam")) == ("", "renamed")
    queue.jobs.cancel([held])
    assert queue.jobs.clean(-1.0, ("cancelled",)) == 2
    assert found(queue, "morning") == found(queue, "renamed") == found(queue, f"id:{bert}") == ""
    assert queue.check() == []


def test_lists_are_sorted_by_every_column(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [
        JobSpec(command="x", name=name, priority=priority, gpus=gpus)
        for name, priority, gpus in (("b", 1, 4), ("C", 3, 0), ("a", 2, 1), ("d", 1, 2))
    ]
    b, c, _a, d = queue.jobs.submit(specs)
    for job, outcome in ((d, "failed"), (c, "succeeded")):
        moment(queue)
        end(queue, job, outcome)  # type: ignore[arg-type]  # both are outcomes
    moment(queue)
    start(queue, b)
    orders = {
        "name": "a b C d", "-name": "d C b a", "priority": "C a", "gpus": "b d a C", "-gpus": "C a d b",
        "state": "b a d C", "when": "b C d a", "lasted": "", "submitted": "d a C b",
    }  # fmt: skip
    assert set(orders) >= set(SORTS)
    for sort, names in orders.items():
        assert found(queue, "", sort).startswith(names), sort
        assert sorted(found(queue, "", sort, 3).split()) == ["C", "a", "b", "d"]
    assert found(queue, "state:failed,succeeded", "name") == "C d"
    matches = queue.jobs.search(parse_query("x"), parse_sort("name"), limit=1)
    for sort in ("submitted", "priority"):
        with pytest.raises(BadInputError, match="another order"):
            queue.jobs.search(parse_query("x"), parse_sort(sort), matches.next)
    assert not matches.cut
    monkeypatch.setattr("stoker.queue.listing.MOST_SORTED", 2)
    cut = queue.jobs.search(parse_query("x"), parse_sort("name"))
    assert ([job.name for job in cut.jobs], cut.cut) == (["a", "d"], True)


def test_pages_of_many_jobs_of_one_moment_hold_each_once(queue: Store) -> None:
    names = [f"sweep-{number}" for number in range(30)]
    ids = submit(queue, *names)
    for job in ids[::3]:
        queue.jobs.hold([job])
    for text, size in itertools.product(("sweep", "sweep state:held,queued", "sweep state:queued", "since:1d"), (1, 7)):
        expected = [name for name in reversed(names) if "state:queued" not in text or int(name[6:]) % 3]
        assert sorted(found_names(queue, text, size)) == sorted(expected), (text, size)


def found_names(queue: Store, text: str, size: int) -> list[str]:
    matches = queue.jobs.search(parse_query(text), limit=size)
    names = [job.name for job in matches.jobs]
    while matches.next is not None:
        matches = queue.jobs.search(parse_query(text), after=matches.next, limit=size)
        names += [job.name for job in matches.jobs]
    return names
