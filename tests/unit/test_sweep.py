"""Expansion of sweeps and placeholders to commands."""

import math
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.queue.commands import Command, check_command, filled, mentioned, wants_batch_size
from stoker.queue.field_kinds import LONGEST_LABEL
from stoker.queue.sweep import MOST_JOBS, Sweep, job_specs, parse_sweep


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=1e-3,1e-4", ["1e-3", "1e-4"]),
        ("seed=1..5", ["1", "2", "3", "4", "5"]),
        ("seed=0..10..2", ["0", "2", "4", "6", "8", "10"]),
        ("seed=0..9..4", ["0", "4", "8"]),
        ("seed=3..1", ["3", "2", "1"]),
        ("seed=10..0..-5", ["10", "5", "0"]),
        ("seed=-1..1", ["-1", "0", "1"]),
        ("seed=7..7", ["7"]),
        ("seed=1..3,10,20..21", ["1", "2", "3", "10", "20", "21"]),
        ("data=../a,../b", ["../a", "../b"]),
        ("data=a..b", ["a..b"]),
        ("expression=a=b,c", ["a=b", "c"]),
        (r"layers=64\,64,128", ["64,64", "128"]),
        ("model.lr=1", ["1"]),
        ("text= a , b", [" a ", " b"]),
    ],
)
def test_sweep_expands_to_its_values(text: str, values: list[str]) -> None:
    sweep = parse_sweep(text)
    assert sweep.name == text.partition("=")[0]
    assert list(sweep.values) == values


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "is not a sweep: write it like"),
        ("=1,2", "is not a sweep"),
        ("a b=1", "is not a sweep"),
        ("1x=1", "is not a sweep"),
        ("lr=", "has an empty value"),
        ("lr=1,,2", "has an empty value"),
        ("lr=0.1..0.5", "is not a range of whole numbers"),
        ("lr=1e-5..1e-3", "is not a range of whole numbers"),
        ("seed=1..5..0", "never reaches its end"),
        ("seed=1..5..-1", "never reaches its end"),
        ("seed=5..1..1", "never reaches its end"),
        ("id=1,2", "{id} stands for the job's id"),
        ("gpus=1,2", "{gpus} stands for how many GPUs"),
        (f"seed=1..{MOST_JOBS + 1}", "that would be 100,001 jobs: at most 100,000"),
        ("seed=0..99999999999999999999999999", "jobs: at most 100,000"),
        (f"seed=1..{'9' * 5000}", "is not a range that can be counted"),
    ],
)
def test_invalid_sweep_is_refused_with_one_message(text: str, says: str) -> None:
    with pytest.raises(BadInputError) as refused:
        parse_sweep(text)
    assert says in str(refused.value)


def test_products_keep_the_order_given_and_the_last_varies_fastest() -> None:
    sweeps = [Sweep("lr", ["a", "b"]), Sweep("seed", ["1", "2", "3"])]
    labels = [job.name for job in job_specs({}, ["train"], sweeps)]
    assert labels == ["lr=a seed=1", "lr=a seed=2", "lr=a seed=3", "lr=b seed=1", "lr=b seed=2", "lr=b seed=3"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "t.py"), ("python", "t.py", "--lr=a b")),
        (("python", "t.py", "x/{lr}/{lr}"), ("python", "t.py", "x/a b/a b")),
        (("{lr}", "--version={id}"), ("a b", "--version={id}")),
        (("python", "{{lr}}"), ("python", "{lr}", "--lr=a b")),
        ("python t.py", "python t.py '--lr=a b'"),
        ("python t.py {lr} | tee {lr}.log", "python t.py 'a b' | tee 'a b'.log"),
        ("awk '{print}' {lr}", "awk '{print}' 'a b'"),
        ("python t.py\n", "python t.py '--lr=a b'"),
    ],
)
def test_value_replaces_its_placeholder_or_is_appended(
    command: str | tuple[str, ...], expected: str | tuple[str, ...]
) -> None:
    (job,) = job_specs({}, [command], [Sweep("lr", ["a b"])])
    if isinstance(expected, str) and isinstance(job.command, str) and "|" not in expected:
        assert shlex.split(job.command) == shlex.split(expected)
    else:
        assert job.command == expected


def test_value_that_looks_like_a_placeholder_is_unchanged() -> None:
    sweeps = [Sweep("a", ["{b}"]), Sweep("b", ["1"])]
    (job,) = job_specs({}, [("{a}", "{b}")], sweeps)
    assert job.command == ("{b}", "1")


def test_command_without_sweeps_is_unchanged() -> None:
    (job,) = job_specs({}, ["echo {x}  \n"])
    assert (job.command, job.name) == ("echo {x}  \n", "")


def test_conflicting_sweeps_are_refused() -> None:
    with pytest.raises(BadInputError, match="'lr' is swept twice"):
        job_specs({}, ["train"], [Sweep("lr", ["1"]), Sweep("lr", ["2"])])
    many = [Sweep("a", ["x"] * 1000), Sweep("b", ["x"] * 100)]
    with pytest.raises(BadInputError, match="that would be 200,000 jobs"):
        job_specs({}, ["train", "train"], many)
    few = [Sweep("a", ["x", "y"])]
    assert len(job_specs({}, ["train"], few, most=2)) == 2
    with pytest.raises(BadInputError, match="that would be 4 jobs: at most 3"):
        job_specs({}, ["train", "train"], few, most=3)


def test_job_name_has_its_values_on_one_line() -> None:
    def named(name: str, **values: str) -> str:
        (job,) = job_specs({"name": name}, ["train"], [Sweep(key, [value]) for key, value in values.items()])
        return job.name

    assert named("", lr="1", seed="2") == "lr=1 seed=2"
    assert named("base", lr="1") == "base lr=1"
    assert named("base") == "base"
    assert named("", text="a\nb") == "text=a b"
    long = named("base", text="x" * 1000)
    assert len(long) == LONGEST_LABEL
    assert long.endswith("…")


values = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=8)


@given(st.lists(st.lists(values, min_size=1, max_size=3), min_size=1, max_size=3), values)
def test_every_combination_occurs_once_and_survives_the_shell(lists: list[list[str]], word: str) -> None:
    sweeps = [Sweep(f"p{number}", list(dict.fromkeys(some))) for number, some in enumerate(lists)]
    text = f"train {shlex.quote(word)}" + "".join(f" {{{sweep.name}}}" for sweep in sweeps[1:])
    if mentioned(word, [sweep.name for sweep in sweeps]):
        return
    found = [shlex.split(str(job.command)) for job in job_specs({}, [text], sweeps)]
    assert len(found) == len({tuple(words) for words in found}) == math.prod(len(sweep.values) for sweep in sweeps)
    for words in found:
        assert words[:2] == ["train", word]
        assert words[-1].removeprefix("--p0=") in sweeps[0].values


def test_doubled_braces_are_a_literal_placeholder() -> None:
    assert filled("{id} {{id}} {other} {{other}} {} {", {"id": "7"}) == "7 {id} {other} {{other}} {} {"
    assert mentioned("{id} {{gpus}} {x}", ("id", "gpus")) == {"id"}
    assert filled("{x}", {}) == "{x}"


def test_only_a_real_placeholder_requires_a_batch_size() -> None:
    assert wants_batch_size("train --bs {batch_size}")
    assert wants_batch_size(("train", "--bs={batch_size}"))
    assert not wants_batch_size(("train", "--bs={{batch_size}}", "{id}"))


@pytest.mark.parametrize(
    ("command", "suggested"),
    [
        ("python t.py —lr 1e-3", "python t.py --lr 1e-3"),
        ("python t.py –n 5 —-lr 2", "python t.py -n 5 --lr 2"),
        ("echo “a b”", 'echo "a b"'),
        ("t --name=‘a b’", "t --name='a b'"),
        (("python", "t.py", "—lr", "1"), "python t.py --lr 1"),
        (("echo", "“hello", "world”"), 'echo "hello world"'),
    ],
)
def test_typographic_dashes_and_quotes_are_refused(command: Command, suggested: str) -> None:
    with pytest.raises(BadInputError) as refused:
        check_command(command)
    assert f": {suggested} is probably meant" in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        "python t.py --prompt '“hi” —said'",
        'python t.py --prompt "it’s “x”"',
        "echo It’s 1–5 — or so",
        "true # “so”",
        "cat <<E\n“x” —y\nE",
        ("echo", "“hello” she said —now"),
    ],
)
def test_typographic_text_in_arguments_is_accepted(command: Command) -> None:
    check_command(command)
