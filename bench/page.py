"""The page under load: many that listen while jobs pass, what an answer takes then, what each sees in the end."""

import asyncio
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.table import Figure, print_figures
from stoker.queue import JobSpec, Store, init_queue
from stoker.queue.model import View, WorkerGpu
from stoker.web.auth.keys import Keys

PAGES = 200
# These read a little every second, as a phone on a bad network does.
SLOW_PAGES = 20
JOBS_A_SECOND = 20
SECONDS = 20
# How often somebody opens a page or asks for a piece of one meanwhile.
QUESTIONS_A_SECOND = 10
SECTIONS = ("health", "machines", "running", "waiting", "ended", "hours")
_NUMBER = re.compile(r"job-(\d+)")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory:
        home = Path(directory)
        queue = str(home / "queue.db")
        init_queue(queue).close()
        token = Keys(home).first().secret
        with served(home, queue) as (pid, port):
            return print_figures("The page", asyncio.run(measured(pid, port, queue, token)))


@contextmanager
def served(home: Path, queue: str) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "stoker.cli", "serve", "--port", "0", "--queue", queue]
    process = subprocess.Popen(
        command,
        env={**os.environ, "STOKER_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        found = re.search(r":(\d+)$", said.strip())
        if found is None:
            sys.exit(f"the page did not start: {said}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process.pid, int(found[1])
    finally:
        process.terminate()
        process.wait(10)


class Page:
    """One open page: the newest state of each section, and when it came."""

    def __init__(self, port: int, token: str, slow: bool) -> None:
        self._port = port
        self._token = token
        self.slow = slow
        self.sections: dict[str, str] = {}
        self.seen: dict[int, float] = {}
        """When the end of each job was first on this page."""
        self.received = 0

    async def listen(self, ending: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        writer.write(f"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._token}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head:
            raise RuntimeError(head.decode())
        over = asyncio.create_task(ending.wait())
        buffer = b""
        while not ending.is_set():
            if self.slow:
                await asyncio.sleep(1.0)
            piece = asyncio.create_task(_piece(reader))
            await asyncio.wait({piece, over}, return_when=asyncio.FIRST_COMPLETED)
            if not piece.done():
                piece.cancel()
                break
            self.received += len(piece.result())
            buffer = self._take(buffer + piece.result())
        writer.close()

    def _take(self, buffer: bytes) -> bytes:
        *events, rest = buffer.split(b"\n\n")
        for raw in events:
            text = raw.decode(errors="replace")
            name = re.search(r"^event: (\S+)$", text, re.MULTILINE)
            if name is None or name[1] not in SECTIONS:
                continue
            self.sections[name[1]] = text
            if name[1] == "ended":
                now = time.monotonic()
                for number in map(int, _NUMBER.findall(text)):
                    self.seen.setdefault(number, now)
        return rest


async def _piece(reader: asyncio.StreamReader) -> bytes:
    """The next piece of an answer whose length is not known beforehand."""
    size = int(await reader.readline(), 16)
    if not size:
        raise RuntimeError("the page was let go")
    return (await reader.readexactly(size + 2))[:-2]


class Traffic(threading.Thread):
    """Jobs that pass: submitted, claimed and finished at a steady rate, as a worker would."""

    def __init__(self, queue: str) -> None:
        super().__init__()
        self._queue = queue
        self.ended: dict[int, float] = {}
        """When the end of each was committed."""

    def run(self) -> None:
        with init_queue(self._queue) as store:
            gpus = tuple(
                WorkerGpu(uuid=f"GPU-{index}", index=index, name="Bench", state="free", utilization=0.5)
                for index in range(8)
            )
            store.workers.heartbeat("bench", "bench", View(gpus=gpus))
            store.jobs.submit([JobSpec(command="true", name=f"waits-{number}", hold=True) for number in range(40)])
            began = time.monotonic()
            for number in range(JOBS_A_SECOND * SECONDS):
                self._pass(store, number)
                time.sleep(max(0.0, began + (number + 1) / JOBS_A_SECOND - time.monotonic()))
            store.flush()

    def _pass(self, store: Store, number: int) -> None:
        (name,) = store.jobs.submit([JobSpec(command="true", name=f"job-{number}")])
        attempt = store.attempts.claim([name], "bench", ["GPU-0"], 60.0)
        assert attempt is not None
        store.attempts.finish(attempt.id, "succeeded", 0)
        store.flush()
        self.ended[number] = time.monotonic()


async def measured(pid: int, port: int, queue: str, token: str) -> list[Figure]:
    ending = asyncio.Event()
    pages = [Page(port, token, number < SLOW_PAGES) for number in range(PAGES)]
    listening = [asyncio.create_task(page.listen(ending)) for page in pages]
    while not all("ended" in page.sections for page in pages):
        for task in listening:
            if task.done():
                task.result()
        await asyncio.sleep(0.1)
    spent = cpu_seconds(pid)
    traffic = Traffic(queue)
    traffic.start()
    times = await asyncio.to_thread(questions, port, token, traffic)
    spent = cpu_seconds(pid) - spent
    memory = resident(pid)
    for page in pages:
        page.slow = False  # their network is back
    await asyncio.sleep(3.0)
    fresh = Page(port, token, slow=False)
    last = asyncio.create_task(fresh.listen(ending))
    while set(fresh.sections) != set(SECTIONS):
        await asyncio.sleep(0.1)
    stale = sum(any(page.sections[name] != fresh.sections[name] for name in SECTIONS) for page in pages)
    ending.set()
    await asyncio.gather(*listening, last)
    quick = pages[SLOW_PAGES:]
    delays = [page.seen[job] - at for page in quick for job, at in traffic.ended.items() if job in page.seen]
    p95, delay = (statistics.quantiles(values, n=20)[-1] * 1e3 for values in (times, delays))
    sent = sum(page.received for page in pages)
    print(f"\n{PAGES} pages ({SLOW_PAGES} of them slow), {JOBS_A_SECOND} jobs a second for {SECONDS} s")
    print(f"  a piece of a page: median {statistics.median(times) * 1e3:.0f} ms, p95 {p95:.0f} ms of {len(times)}")
    print(f"  end of a job to the page: median {statistics.median(delays) * 1e3:.0f} ms, p95 {delay:.0f} ms")
    print(f"  server: {memory / 2**20:.0f} MiB, {spent / SECONDS:.0%} of a core; {sent / 2**20:.0f} MiB sent")
    return [
        Figure("p95 of a piece of a page", p95, 100.0, "ms"),
        Figure("resident memory of the server", memory / 2**20, 150.0, "MiB"),
        Figure("pages that are not up to date in the end", float(stale), 0.0, ""),
    ]


def questions(port: int, token: str, traffic: Traffic) -> list[float]:
    """How long answers take, in seconds, while the jobs pass."""
    times = []
    asked = ["/", "/jobs", "/api/v1/status", "/api/v1/jobs?limit=50", "/submit"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    number = 0
    while traffic.is_alive():
        began = time.monotonic()
        connection.request("GET", asked[number % len(asked)], headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            sys.exit(f"{asked[number % len(asked)]} was answered by {answer.status}")
        times.append(time.monotonic() - began)
        number += 1
        time.sleep(max(0.0, 1 / QUESTIONS_A_SECOND - times[-1]))
    return times


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
