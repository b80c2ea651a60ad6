"""The least that a durable queue can take between two jobs with Python processes in Stoker's arrangement.

A job has a reaper, a reaper has a shim, and a worker writes the outcome and the next claim in one transaction. Each of
them may be killed alone in Stoker, and none of them does anything else here: no lease, no record, no log, no rules.

    job ── reaper ── shim ── worker (one transaction) ── shim ── reaper ── job
"""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

# The tables have what a claim must have: a state by which the next job is found, and an attempt that only one can have.
SQLITE = (
    "CREATE TABLE jobs (id INTEGER PRIMARY KEY, state TEXT NOT NULL, spec TEXT NOT NULL)",
    "CREATE INDEX ready ON jobs (id) WHERE state = 'queued'",
    "CREATE TABLE attempts (id TEXT PRIMARY KEY, job INTEGER NOT NULL, ended REAL)",
    "CREATE UNIQUE INDEX running ON attempts (job) WHERE ended IS NULL",
)
POSTGRES = tuple(text.replace("REAL", "DOUBLE PRECISION") for text in SQLITE)
NEXT = """
WITH ended AS (UPDATE attempts SET ended = 1 WHERE id = %(ended)s AND ended IS NULL RETURNING job),
     done AS (UPDATE jobs SET state = 'succeeded' WHERE id IN (SELECT job FROM ended)),
     head AS (SELECT id FROM jobs WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED),
     claimed AS (UPDATE jobs SET state = 'running' WHERE id IN (SELECT id FROM head) RETURNING id, spec),
     attempt AS (INSERT INTO attempts SELECT %(attempt)s, id, NULL FROM claimed)
SELECT spec FROM claimed
"""
Claim = Callable[[str, str], str | None]
"""Ends the first attempt, and claims the next job with the second; its spec, or None when there is none."""


def serve(url: str, count: int, command: list[str]) -> None:
    """Runs this number of jobs, one after the other."""
    specs = [msgspec.json.encode({"command": command, "environment": dict(os.environ)}).decode()] * count
    # Before there is a connection.
    shims = [_forked(_shim) for _ in range(2)]
    claim = (_on_postgres if url.startswith("postgresql:") else _on_sqlite)(url, specs)
    ended, place = "", 0
    while (spec := claim(ended, attempt := os.urandom(16).hex())) is not None:
        shims[place].send(msgspec.msgpack.encode((attempt, spec)))
        ended = msgspec.msgpack.decode(shims[place].recv(65536))[0]
        place = 1 - place


def _shim(worker: socket.socket) -> None:
    reaper = _forked(_reaper)
    while packet := worker.recv(65536):
        attempt, spec = msgspec.msgpack.decode(packet)
        reaper.send(msgspec.msgpack.encode(msgspec.json.decode(spec)))
        worker.send(msgspec.msgpack.encode((attempt, msgspec.msgpack.decode(reaper.recv(64)))))


def _reaper(shim: socket.socket) -> None:
    while packet := shim.recv(65536):
        spec = msgspec.msgpack.decode(packet)
        with subprocess.Popen(spec["command"], env=spec["environment"], start_new_session=True, close_fds=False) as job:
            status = job.wait()
        shim.send(msgspec.msgpack.encode(status))


def _forked(body: Callable[[socket.socket], None]) -> socket.socket:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        try:
            body(there)
        finally:
            os._exit(0)
    there.close()
    return here


def _on_sqlite(path: str, specs: list[str]) -> Claim:
    connection = sqlite3.connect(path, isolation_level=None)
    for text in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", *SQLITE):
        connection.execute(text)
    with connection:
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO jobs (state, spec) VALUES ('queued', ?)", ((spec,) for spec in specs))

    def claim(ended: str, attempt: str) -> str | None:
        connection.execute("BEGIN IMMEDIATE")
        found = connection.execute("UPDATE attempts SET ended = 1 WHERE id = ? RETURNING job", (ended,)).fetchone()
        connection.execute("UPDATE jobs SET state = 'succeeded' WHERE id = ?", found or (0,))
        head = connection.execute("SELECT id, spec FROM jobs WHERE state = 'queued' ORDER BY id LIMIT 1").fetchone()
        if head is not None:
            connection.execute("UPDATE jobs SET state = 'running' WHERE id = ?", head[:1])
            connection.execute("INSERT INTO attempts VALUES (?, ?, NULL)", (attempt, head[0]))
        connection.execute("COMMIT")
        return None if head is None else str(head[1])

    return claim


def _on_postgres(url: str, specs: list[str]) -> Claim:
    import psycopg

    connection: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True)
    for text in POSTGRES:
        connection.execute(text.replace("INTEGER PRIMARY KEY", "SERIAL PRIMARY KEY").encode())
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(b"INSERT INTO jobs (state, spec) VALUES ('queued', %s)", [(spec,) for spec in specs])
    connection.execute(b"SET enable_seqscan = off")

    def claim(ended: str, attempt: str) -> str | None:
        found = connection.execute(NEXT.encode(), {"ended": ended, "attempt": attempt}, prepare=True).fetchone()
        return None if found is None else str(found[0])

    return claim


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
