"""The syntax of searches, and the text that jobs are found by."""

import re
from datetime import datetime

import pytest

from stoker.errors import BadInputError
from stoker.queue import JobSpec
from stoker.queue.search import EVERY_JOB, Query, Sort, Term, parse_query, parse_sort, texts, trigrams


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", EVERY_JOB),
        ("  ResNet  ", Query((Term("any", "resnet"),))),
        ('"train.py  --lr"', Query((Term("any", "train.py  --lr"),))),
        ('name:"big run" Command:x.py', Query((Term("name", "big  run"), Term("command", "x.py")))),
        # One or two characters begin a word, which has two spaces before it.
        ("v2 name:a", Query((Term("any", "  v2"), Term("name", "  a")))),
        ("state:failed,CANCELLED", Query(states=("failed", "cancelled"))),
        ("tag:Night user:alice", Query((Term("tag", "  #night  "), Term("user", "alice")))),
        ("machine:GPU1", Query((Term("machine", "gpu1"),))),
        ("id:3FA1", Query((Term("id", "  3fa1"),))),
        ("since:2d before:90m", Query((Term("since", at=172800.0, ago=True), Term("before", at=5400.0, ago=True)))),
        ("lr=1e-3 --batch-size=64", Query((Term("parameter", "  lr=0.001  "), Term("parameter", "  batch_size=64  ")))),
        ("lr=", Query((Term("parameter", "  lr="),))),
        ('note="two words"', Query((Term("parameter", "  note=two words  "),))),
        ('"lr=1e-3"', Query((Term("any", "lr=1e-3"),))),
        ('"http://x"', Query((Term("any", "http://x"),))),
        ('""', EVERY_JOB),
    ],
)  # fmt: skip
def test_search_is_parsed(text: str, query: Query) -> None:
    assert parse_query(text) == query


def test_date_is_by_the_clock_of_this_machine() -> None:
    (term,) = parse_query("since:2026-01-31T22:00").terms
    assert term == Term("since", at=datetime.fromisoformat("2026-01-31T22:00").astimezone().timestamp())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour:red", "jobs cannot be searched by 'colour': the fields are name, .* \\(quotes .*: \"colour:red\"\\)"),
        ("state:done", "'done' is not a state of a job: those are queued, held,"),
        ("state:failed state:held", "several states: write them as state:failed,cancelled"),
        ("since:yesterday", "since:yesterday is not a time: write how long ago, like since:2d"),
        ("before:99999d", "before:99999d is not a time"),
        ("name:", "name: says nothing to search for: write it like name:resnet"),
        ('"two', "has a quote that is not closed"),
        ("x" * 501, "501 characters: at most 500"),
        ("a " * 21, "21 words: at most 20"),
    ],
)
def test_bad_search_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message) as error:
        parse_query(text)
    assert "\n" not in str(error.value)


def test_search_is_narrowed_by_states_and_a_tag() -> None:
    query = parse_query("x state:failed,held")
    assert query.narrowed(("failed",), "n").states == ("failed",)
    assert query.narrowed(tag="n").terms[-1] == Term("tag", "  #n  ")
    assert query.narrowed() == query
    with pytest.raises(BadInputError, match="no job is held or failed and queued at once"):
        query.narrowed(("queued",))


def test_order_is_parsed() -> None:
    assert parse_sort("") == parse_sort("submitted") == Sort("submitted", True)
    assert (parse_sort("name"), parse_sort("-name")) == (Sort("name", False), Sort("name", True))
    assert [str(parse_sort(text)) for text in ("name", "-name", "when", "-when")] == ["name", "-name", "when", "-when"]
    with pytest.raises(BadInputError, match="cannot be sorted by 'colour': choose submitted, when, name"):
        parse_sort("colour")


def parameters(command: str | tuple[str, ...], name: str = "") -> list[str]:
    marks = texts("0000000a", JobSpec(command=command, name=name)).marks
    return marks.split()[1:]


def test_parameters_are_found_in_commands_and_names() -> None:
    assert parameters("python t.py --lr 1e-3 --seed=4 hidden.size=128 --flag --decay -0.5") == [
        *("lr=0.001", "seed=4", "hidden.size=128", "decay=-0.5"),
    ]
    assert parameters(("python", "t.py", "--note", "two words")) == ["note=two", "words"]
    assert parameters("x", name="bert lr=1e-3 seed=1.0") == ["lr=0.001", "seed=1"]
    assert parameters("echo 'unclosed") == []
    assert parameters("x --big=" + "9" * 400)[0].startswith("big=999")


def test_text_has_no_secret() -> None:
    job = JobSpec(command="WANDB_API_KEY=abcdef123456 python t.py --token hunter2secret", submitter="Alice")
    found = texts("0000000a", job)
    assert not re.search("abcdef|hunter2", " ".join(found))
    assert found.owner == "  alice  "


def test_text_of_a_long_script_is_cut() -> None:
    assert len(texts("0000000a", JobSpec(command="x" * 100_000)).command) < 2100


def test_short_word_has_a_trigram() -> None:
    assert trigrams("  q") == ["  q"]
    assert trigrams("abcd", "bcde") == ["abc", "bcd", "cde"]
    assert trigrams("ab") == []
