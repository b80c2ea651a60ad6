"""A long queue with a long history, beside an empty one: lists, searches, pages and claims, on both databases."""

import http.client
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from bench.page import served
from bench.queue import claim_and_finish
from bench.site import environment_of, postgres, scratch, stoker_command, undisturbed
from bench.table import QUICK, Figure, print_figures
from stoker.queue import JobSpec, Store, init_queue
from stoker.queue.model import View, WorkerGpu
from stoker.status.snapshot import SnapshotBuilder
from stoker.web.auth.keys import Keys
from tests.support.postgres import PostgresServer
from tests.support.queue_history import write_history, write_texts, write_waiting

# As many as a screen shows: what the answers themselves cost.
FEW = 100
QUEUED = 10_000 if QUICK else 100_000
ENDED = 100_000 if QUICK else 1_000_000
# A million in a month: some ten thousand of them ended yesterday.
MONTH = 30 * 86400.0
ROUNDS = 7 if QUICK else 15
TURNS = 100 if QUICK else 300
GOAL = 3.0
SNAPSHOT = "snapshot of the page"
DATABASES = ("SQLite", "PostgreSQL")
# What many jobs have, what one has, and what none has; by each way in which jobs are found.
SEARCHES = (
    "run",
    f"name:{ENDED - 1234}",
    "state:failed since:2d",
    "state:cancelled since:2d",
    "tag:sweep",
    "lr=1e-3",
    f"seed={ENDED // 2}",
    "user:alice",
    "user:alice state:cancelled",
    "train.py since:1m",
    "nowhere",
    "tag:nowhere",
    "machine:nowhere",
)
LISTED = ("", "name:run", "state:failed since:2d", "tag:sweep", f"seed={ENDED // 2}", "user:alice", "nowhere")
PAGES = ("/", "/jobs", "/jobs?q=state%3Afailed+since%3A2d", "/api/v1/status", "/api/v1/jobs")


def main() -> int:
    with undisturbed(), scratch() as directory, postgres() as server:
        return sum(_beside(database, directory, server) for database in DATABASES)


class Place(NamedTuple):
    """A queue, and a page that shows it."""

    home: Path
    url: str
    store: Store
    port: int
    token: str


Work = Callable[[Place], object]


def _beside(database: str, directory: Path, server: PostgresServer) -> int:
    """Each of these takes turns on the three queues."""
    with ExitStack() as stack:
        sizes = {"empty": (0, 0), "few": (FEW, FEW), "many": (QUEUED, ENDED)}
        places = [stack.enter_context(_place(directory / f"{database}-{name}", database, server)) for name in sizes]
        for place, (queued, ended) in zip(places, sizes.values(), strict=True):
            if ended:
                _fill(place.store, queued, ended)
        took = {name: _in_turns(work, places) for name, work in _works().items()}
        # Last: it needs jobs.
        for place in places:
            place.store.jobs.submit([JobSpec(command="true")] * (TURNS + 1))
        took["claim and finish"] = _in_turns(lambda place: claim_and_finish(place.store), places, TURNS)
    title, width = f"{QUEUED:,} queued and {ENDED:,} ended jobs", max(map(len, took))
    print(f"\n{database}: medians in ms of {ROUNDS} in turns: no jobs; {FEW} queued and {FEW} ended; {title}")
    for name, values in took.items():
        print(f"  {name:{width}}" + "".join(f"{value * 1e3:10.2f}" for value in values))
    figures = [
        Figure(f"{name} ÷ empty, {database}", many / none, GOAL)
        for name, (none, _few, many) in took.items()
        # A snapshot explains why jobs wait, and an empty queue has none: it is compared with few jobs only.
        if name != SNAPSHOT
    ]
    figures += [Figure(f"{name} ÷ few, {database}", many / few, GOAL) for name, (_none, few, many) in took.items()]
    return print_figures(f"{title}, {database}", figures)


def _works() -> dict[str, Work]:
    return {
        **{f"stoker list {text}".strip(): _listing(text) for text in LISTED},
        **{f"GET {path}": _request(path) for path in PAGES},
        **{f"search {text}": _request(f"/api/v1/jobs?q={quote(text)}") for text in SEARCHES},
        SNAPSHOT: _snapshot(),
    }


def _in_turns(work: Work, places: Sequence[Place], rounds: int = ROUNDS) -> list[float]:
    """The medians, in seconds."""
    for place in places:
        work(place)  # modules, connections and plans are there
    took: list[list[float]] = [[] for _ in places]
    for _ in range(rounds):
        for place, values in zip(places, took, strict=True):
            begun = time.perf_counter()
            work(place)
            values.append(time.perf_counter() - begun)
    return list(map(statistics.median, took))


@contextmanager
def _place(home: Path, database: str, server: PostgresServer) -> Iterator[Place]:
    home.mkdir(mode=0o700)
    url = server.create_database() if database == "PostgreSQL" else str(home / "queue.db")
    token = Keys(home).first().secret
    with init_queue(url) as store:
        gpus = tuple(WorkerGpu(uuid=f"GPU-{index}", index=index, name="Bench", state="free") for index in range(8))
        store.workers.heartbeat("bench", "bench", View(gpus=gpus))
        with served(home, url) as (_pid, port):
            yield Place(home, url, store, port, token)


def _fill(store: Store, queued: int, ended: int) -> None:
    now = store.clock()
    every = MONTH / ENDED
    write_history(store, ended, began=now - ended * every, every=every)
    write_waiting(store, queued, began=now - queued, behind=ended)
    write_texts(store)


def _listing(text: str) -> Work:
    def listed(place: Place) -> None:
        command = [stoker_command(), "list", *text.split()]
        subprocess.run(command, env=environment_of(place.home, place.url), check=True, stdout=subprocess.DEVNULL)

    return listed


def _request(path: str) -> Work:
    def requested(place: Place) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
        connection.request("GET", path, headers={"Authorization": f"Bearer {place.token}"})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body[:200])
        connection.close()

    return requested


def _snapshot() -> Work:
    """As the page's thread does it: what takes long is read less often."""
    builders: dict[str, SnapshotBuilder] = {}

    def observed(place: Place) -> None:
        builders.setdefault(place.url, SnapshotBuilder(place.home)).observe(place.store)

    return observed
