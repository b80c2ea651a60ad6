"""How soon a background program gets out of the way. The bounds leave room for other tests; `bench` measures."""

import os
import stat
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.fill_stage import FillStage, Visitor, visit
from tests.support.openers import NUMBERS, needs_root
from tests.support.waiting import wait_for

TRIALS = 10
GRACE = 5.0
# As a program that writes a small checkpoint.
LINGER = 0.2
INTERVAL = 2.0
# Between what is promised and what a machine with other tests on it takes.
LATE = 1.0

Prepare = Callable[..., FillStage]


@pytest.fixture
def prepare(tmp_path: Path) -> Iterator[Prepare]:
    with ExitStack() as stack:

        def make(
            gpus: int, *, linger: float, interval: float, idle_for: float = 0.0, grace: float = GRACE
        ) -> FillStage:
            keys = f"idle_for = {idle_for}\ngrace = {grace}"
            stage = FillStage(tmp_path / "stage", gpus=gpus, linger=linger, interval=interval, keys=keys)
            return stack.enter_context(closing(stage))

        yield make


@pytest.fixture
def visitor() -> Iterator[Visitor]:
    with closing(Visitor()) as visitor:
        yield visitor


def test_a_program_is_asked_at_once_when_its_node_is_opened_and_gone_before_its_grace(
    prepare: Prepare, visitor: Visitor
) -> None:
    stage = prepare(2, linger=LINGER, interval=10.0)
    stage.fill(eager=True)
    found = []
    for trial in range(TRIALS):
        gpu = list(stage.nodes)[trial % 2]
        stage.wait_until_running(list(stage.nodes))
        found.append(visit(stage, visitor, gpu))

    assert statistics.median(aside.asked for aside in found) <= 0.5
    assert max(aside.asked for aside in found) <= 0.5 + LATE
    assert max(aside.gone for aside in found) < GRACE


def test_only_the_program_on_that_gpu_is_stopped(prepare: Prepare, visitor: Visitor) -> None:
    stage = prepare(2, linger=0.0, interval=10.0)
    stage.fill()
    stage.wait_until_running(list(stage.nodes))
    first, second = stage.nodes
    stays = stage.running(second)

    visit(stage, visitor, first)

    assert stage.running(second) == stays
    assert [entry.gpu for entry in stage.diary() if entry.what == "asked"] == [first]


def test_a_program_that_does_not_end_is_killed_when_its_grace_is_over(prepare: Prepare, visitor: Visitor) -> None:
    stage = prepare(1, linger=-1.0, interval=10.0, grace=1.0)
    stage.fill()
    stage.wait_until_running(list(stage.nodes))

    aside = visit(stage, visitor, next(iter(stage.nodes)))

    assert aside.gone - aside.asked >= 0.9
    assert aside.gone <= 1.0 + 0.5 + LATE


def test_a_visitor_while_another_program_starts_is_not_kept_waiting(prepare: Prepare, visitor: Visitor) -> None:
    stage = prepare(4, linger=0.0, interval=10.0)
    stage.fill(eager=True)
    first = wait_for(lambda: next(filter(stage.running, stage.nodes), None), deadline=30, named="the first program")

    assert visit(stage, visitor, first).asked <= 0.5 + LATE


@needs_root
def test_a_container_s_own_node_is_seen_by_the_next_scan(prepare: Prepare, visitor: Visitor, tmp_path: Path) -> None:
    stage = prepare(1, linger=0.0, interval=INTERVAL)
    (gpu,) = stage.nodes
    own = tmp_path / "node-of-a-container"
    stage.nodes[gpu].unlink()
    for node in (stage.nodes[gpu], own):
        os.mknod(node, stat.S_IFCHR | 0o666, NUMBERS[1])
    stage.fill(eager=True)
    for _ in range(2):
        stage.wait_until_running([gpu])

        assert visit(stage, visitor, gpu, own).asked <= INTERVAL + LATE


def test_who_leaves_is_followed_after_idle_for_and_not_before(prepare: Prepare, visitor: Visitor) -> None:
    stage = prepare(1, linger=0.0, interval=10.0, idle_for=2.0)
    stage.fill(eager=True)
    (gpu,) = stage.nodes
    stage.wait_until_running([gpu])
    before = stage.running(gpu)
    visitor.open(stage.nodes[gpu])
    wait_for(lambda: not stage.running(gpu), named="stepping aside")

    left = visitor.leave()
    stage.wait_until_running([gpu])

    again = stage.latest(gpu)
    assert again is not None
    assert again.pid != before
    assert 2.0 <= again.at - left <= 2.0 + 3.0 + LATE
