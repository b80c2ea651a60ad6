"""What a feed remembers of what it reads, in the queue: it changes together with the jobs that are made of it."""

from collections.abc import Sequence
from typing import NamedTuple

from stoker.queue.driver import Driver, Parameters
from stoker.queue.entry import insert
from stoker.queue.fields import JobSpec
from stoker.queue.rows import json_text


class Remembered(NamedTuple):
    version: int
    """0 for a feed that has remembered nothing yet."""
    memory: str


def remembered(driver: Driver, feed: str) -> Remembered:
    rows = driver.fetch("read feed", {"name": feed})
    return Remembered(*rows[0]) if rows else Remembered(0, "")


def take(driver: Driver, feed: str, version: int, memory: str, jobs: Sequence[JobSpec]) -> bool:
    """In a transaction: False, and nothing is done, when another process has changed the memory since `version`."""
    parameters: Parameters = {"name": feed, "version": version, "memory": memory}
    if not driver.fetch("write feed" if version else "begin feed", parameters):
        return False
    if jobs:
        insert(driver, jobs)
    return True


def known_origins(driver: Driver, origins: Sequence[str]) -> set[str]:
    """Those of them that are, or once were, jobs."""
    return {origin for origin, _ in driver.fetch("taken origins", {"origins": json_text(list(origins))})}
