"""`stoker logs`: the output of a job, so far or live."""

import shutil
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import click
import msgspec

from stoker.cli.options.queue import SLOW_POLL, Listener, opened, patiently, queue_option
from stoker.cli.options.selection import JobName
from stoker.cli.output import json_option, note, print_json
from stoker.errors import BadInputError
from stoker.logs.reader import (
    LastLines,
    LogUpdate,
    attempt_directory,
    has_log,
    last_lines,
    node_names,
    stored_lines,
)
from stoker.logs.search import LONGEST_LINE, LineFinder
from stoker.paths import state_home
from stoker.status.job_text import job_title
from stoker.status.log_follower import LogFollower, RunQuery, log_updates, queries_on
from stoker.units import list_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Unpack

    from stoker.queue import Attempt, Job, Store

_CLEAR_LINE: Final = "\r\x1b[K"
_POLL_JOB: Final = 0.3


@click.command("logs")
@click.argument("job", type=JobName())
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job has ended, through its retries.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="LINES", help="Only the last LINES lines.")
@click.option(
    "--attempt", "number", type=click.IntRange(min=1), metavar="N", help="The log of this attempt [the last]."
)
@click.option(
    "--node",
    metavar="NODE",
    help="For a job over several nodes: the log of this node, by rank or name, or all [0].",
)
@click.option(
    "--from", "first", type=click.IntRange(min=1), metavar="LINE", help="Start at this line; -n limits the number."
)
@click.option("--grep", "text", metavar="TEXT", help="Only lines with TEXT, ignoring case, numbered.")
@click.option("--errors", is_flag=True, help="Only lines that report an error, numbered.")
@json_option("Print one JSON object; with -f, one per line.")
@queue_option
def logs_command(
    job: str,
    follow: bool,
    lines: int | None,
    number: int | None,
    node: str | None,
    as_json: bool,
    queue_url: str | None,
    **chosen: "Unpack[_Chosen]",
) -> int:
    """Print the output of JOB. JOB is an id, the beginning of an id, or a name.

    Prints the whole log, also from another machine if its worker is alive; otherwise the end, which is stored in the
    queue. For a job over several nodes, prints the log of the first; with `--node all`, each line begins with the name
    of its node.

    \b
    stoker logs JOB --errors          tracebacks, memory that ran out, NCCL, …
    stoker logs JOB --grep nan -n 5   the last five lines with "nan"; the exit code is 1 if there is none
    stoker logs JOB --from 1000 -n 50
    """
    finder = _finder(follow, **chosen)
    _remove_copies_on_signals()
    with opened(queue_url) as store:
        found = store.jobs.get(job)
        attempt = _attempt(store, found, number)
        nodes = _nodes(found, attempt, node)
        if follow:
            with Listener(store) as listener:
                screen = JsonScreen(found.id) if as_json else _screen()
                follower = JobFollower(store, listener, screen, lines, nodes)
                if number is not None and attempt is not None:
                    follower.follow_attempt(attempt)
                else:
                    follower.follow_job(found)
        elif attempt is None:
            note(f"job {found.id} has printed nothing: {_why(store, found)[1]}")
            if as_json:
                print_json({"job": found.id, "attempt": None, "whole": True, "text": ""})
        elif finder is not None:
            return _print_matches(_matches(store, attempt, nodes, finder, lines), attempt, as_json)
        else:
            _print(store, attempt, nodes, lines, as_json, chosen["first"])
    return 0


class _Chosen(TypedDict):
    """Selects lines."""

    first: int | None
    text: str | None
    errors: bool


def _finder(follow: bool, first: int | None, text: str | None, errors: bool) -> LineFinder | None:
    if sum((first is not None, text is not None, errors)) > 1:
        raise BadInputError("choose one of --from, --grep and --errors")
    if follow and (first is not None or text is not None or errors):
        raise BadInputError("--from, --grep and --errors do not follow: leave out -f")
    return LineFinder(text, LONGEST_LINE) if errors or text is not None else None


def _remove_copies_on_signals() -> None:
    """Removes the copy of another machine's log when the terminal is closed, as after Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _attempt(store: "Store", job: "Job", number: int | None) -> "Attempt | None":
    """The attempt with this number, or the last one; None if there is none yet."""
    attempts = store.attempts.of(job.id)
    if number is None:
        return attempts[-1] if attempts else None
    chosen = next((attempt for attempt in attempts if attempt.number == number), None)
    if chosen is None:
        had = "it has not started yet" if not attempts else f"its last one is {attempts[-1].number}"
        raise BadInputError(f"job {job.id} has no attempt {number}: {had}")
    return chosen


class _Nodes(NamedTuple):
    """The nodes to show."""

    ranks: tuple[int, ...] = (0,)
    named: bool = False
    """Whether each line begins with the name of its node."""
    chosen: bool = False
    """Whether the user asked for a node."""

    def prefix(self, attempt: "Attempt", rank: int) -> bytes:
        if not self.named:
            return b""
        names = node_names(attempt_directory(state_home(), attempt))
        return f"{names[rank] if rank < len(names) else f'node {rank}'}: ".encode()


_FIRST_NODE: Final = _Nodes()


def _nodes(job: "Job", attempt: "Attempt | None", asked: str | None) -> _Nodes:
    if asked is None:
        return _FIRST_NODE
    directory = None if attempt is None else attempt_directory(state_home(), attempt)
    names = () if directory is None else node_names(directory)
    if asked == "all":
        ranks = tuple(range(job.nodes))
    elif asked in names:
        ranks = (names.index(asked),)
    elif asked.isascii() and asked.isdigit() and int(asked) < job.nodes:
        ranks = (int(asked),)
    else:
        there = [f"{rank} ({name})" for rank, name in enumerate(names)] or [str(rank) for rank in range(job.nodes)]
        raise BadInputError(f"job {job.id} has no node {asked!r}: choose {list_all(there)}, or all")
    if max(ranks) and directory is not None and attempt is not None and not directory.is_dir():
        raise BadInputError(
            f"the queue has only the log of the first node of job {job.id}: read those of others where STOKER_HOME is "
            "that of its worker"
        )
    return _Nodes(ranks, asked == "all" and job.nodes > 1, chosen=True)


# Output


class PipeScreen:
    """Prints whole lines unchanged."""

    def begin(self, attempt: int, node: int | None = None) -> None:
        """The next output is of this attempt, and of this node if requested."""

    def show(self, update: LogUpdate) -> None:
        if update.finished:
            sys.stdout.buffer.write(update.finished)
            sys.stdout.buffer.flush()

    def pause(self) -> None:
        """Makes room for a note, or for the shell."""


class TerminalScreen(PipeScreen):
    """Rewrites the unfinished line in place, cut to the width, because a wrapped line cannot be rewritten."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, update: LogUpdate) -> None:
        from stoker.logs.terminal import for_terminal

        preview = self._preview(update.unfinished)
        if not update.finished and preview == self._shown:
            return
        clear = _CLEAR_LINE if self._shown else ""
        sys.stdout.buffer.write(clear.encode() + for_terminal(update.finished) + preview.encode())
        sys.stdout.buffer.flush()
        self._shown = preview

    def pause(self) -> None:
        if self._shown:
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
            self._shown = ""

    def _preview(self, line: bytes) -> str:
        if not line:
            return ""
        from rich.cells import cell_len, set_cell_size

        from stoker.logs.terminal import plain_text

        width = shutil.get_terminal_size().columns - 1
        # Only the beginning is visible, and an unfinished line may be long.
        plain = plain_text(line[: 16 * width].decode(errors="replace")).partition("\n")[0]
        return plain if cell_len(plain) <= width else set_cell_size(plain, width)


class JsonScreen(PipeScreen):
    """One object per line."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._attempt = 0
        self._node: int | None = None

    def begin(self, attempt: int, node: int | None = None) -> None:
        self._attempt, self._node = attempt, node

    def show(self, update: LogUpdate) -> None:
        import msgspec

        for line in update.finished.split(b"\n")[:-1]:
            shown = {"job": self._job, "attempt": self._attempt, "line": line.decode(errors="replace")}
            if self._node is not None:
                shown["node"] = self._node
            sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
        if update.finished:
            sys.stdout.flush()


def _screen() -> PipeScreen:
    return TerminalScreen() if sys.stdout.isatty() else PipeScreen()


# Present output


class _Match(NamedTuple):
    node: str
    """The prefix of a line; empty for one node."""
    line: int
    text: str


class _Matches(NamedTuple):
    found: list[_Match]
    is_whole: bool


def _matches(store: "Store", attempt: "Attempt", nodes: _Nodes, finder: LineFinder, count: int | None) -> _Matches:
    """The matching lines, or the last `count` of them."""
    found: deque[_Match] = deque(maxlen=count)
    is_whole = True
    for rank in nodes.ranks:
        prefix, before, unfinished = nodes.prefix(attempt, rank).decode(), 0, b""
        for update, is_tail in _updates(store, attempt, rank, None):
            if is_tail and is_whole:
                _note_tail(store, attempt)
                is_whole = False
            unfinished = update.unfinished
            found += (_Match(prefix, *msgspec.structs.astuple(one)) for one in finder.matches(update.finished, before))
            before += update.finished.count(b"\n")
        found += (_Match(prefix, *msgspec.structs.astuple(one)) for one in finder.matches(unfinished, before))
    return _Matches(list(found), is_whole)


def _print_matches(matches: _Matches, attempt: "Attempt", as_json: bool) -> int:
    """The exit code, like grep's: 1 without a match."""
    from stoker.logs.terminal import plain_line

    if as_json:
        items = [
            {"line": one.line, "text": one.text} | ({"node": one.node[:-2]} if one.node else {})
            for one in matches.found
        ]
        print_json({"job": attempt.job, "attempt": attempt.number, "whole": matches.is_whole, "matches": items})
    for one in () if as_json else matches.found:
        click.echo(f"{one.node}{one.line}: {plain_line(one.text)}")
    if not matches.found:
        note("no such line")
    return 0 if matches.found else 1


def _print(
    store: "Store", attempt: "Attempt", nodes: _Nodes, lines: int | None, as_json: bool, first: int | None = None
) -> None:
    collected: list[bytes] = []
    screen, is_whole = _screen(), True
    for rank in nodes.ranks:
        prefix, unfinished = nodes.prefix(attempt, rank), b""
        updates = _updates(store, attempt, rank, lines if first is None else None)
        for update, is_tail in updates if first is None else _part(updates, first, lines):
            if is_tail and is_whole:
                _note_tail(store, attempt)
                is_whole = False
            unfinished = update.unfinished
            if as_json:
                collected.append(_prefixed(update.finished, prefix))
            else:
                screen.show(LogUpdate(_prefixed(update.finished, prefix), b""))
        if as_json:
            collected.append(_prefixed(unfinished, prefix))
        else:
            screen.show(_ended(LogUpdate(b"", _prefixed(unfinished, prefix))))
    if as_json:
        text = b"".join(collected).decode(errors="replace")
        is_whole = is_whole and lines is None and first is None
        shown = {"job": attempt.job, "attempt": attempt.number, "whole": is_whole, "text": text}
        print_json(shown | ({"node": nodes.ranks[0]} if nodes.chosen and not nodes.named else {}))


def _part(
    updates: "Iterator[tuple[LogUpdate, bool]]", first: int, count: int | None
) -> "Iterator[tuple[LogUpdate, bool]]":
    """The lines from this one (from 1) on: `count` of them, or all."""
    before, left = first - 1, count
    for update, is_tail in updates:
        lines = [line + b"\n" for line in update.finished.split(b"\n")[:-1]]
        kept = lines[before:]
        before = max(0, before - len(lines))
        kept = kept if left is None else kept[:left]
        left = None if left is None else left - len(kept)
        unfinished = update.unfinished if not before and left != 0 else b""
        yield LogUpdate(b"".join(kept), unfinished), is_tail
        if left == 0:
            return


def _prefixed(lines: bytes, prefix: bytes) -> bytes:
    return b"".join(prefix + line for line in lines.splitlines(keepends=True)) if prefix else lines


def _updates(store: "Store", attempt: "Attempt", node: int, lines: int | None) -> "Iterator[tuple[LogUpdate, bool]]":
    """The present log of a node in steps, and whether it is only the tail."""
    from stoker.queue.logs import LAST_WITHIN

    if lines is None:
        yield from log_updates(store, attempt, state_home(), node)
        return
    if has_log(attempt_directory(state_home(), attempt)) or node:
        store.logs.wait(attempt.id)
    elif attempt.ended is not None and store.clock() - attempt.ended >= LAST_WITHIN:
        # If the tail has enough lines, nothing need be streamed.
        stored = stored_lines(store.logs.read(attempt.id), lines)
        if stored is not None:
            yield stored, False
            return
    follower = LogFollower(attempt, state_home(), continuous=True, complete=True, node=node)
    run = queries_on(store)
    try:
        while True:
            update = follower.read(run)
            if any(update):
                update = _last_of(follower, run, lines, update)
            yield update, follower.source == "tail" and any(update)
            if follower.is_caught_up:
                return
            time.sleep(follower.pause())
    finally:
        follower.close()


def _last_of(follower: LogFollower, run: RunQuery, count: int, first: LogUpdate) -> LogUpdate:
    """The last lines of the present log; `first` is already read."""
    last = LastLines(count)
    last.add(first)
    while follower.is_behind:
        last.add(patiently(lambda: follower.read(run)))
    return last_lines(last.update(), count)


def _ended(update: LogUpdate) -> LogUpdate:
    """The last update of a log, with its unfinished line finished."""
    return LogUpdate(update.finished + (update.unfinished + b"\n" if update.unfinished else b""), b"")


def _note_tail(store: "Store", attempt: "Attempt") -> None:
    host = next(
        (worker.host for worker in store.workers.all() if worker.id == attempt.worker), "the machine that ran it"
    )
    note(f"this is the end of the log, from the queue; the whole log is on {host}")


# Following


class JobFollower:
    """Follows the log of a job through its retries."""

    def __init__(
        self, store: "Store", listener: Listener, screen: PipeScreen, lines: int | None, nodes: _Nodes = _FIRST_NODE
    ) -> None:
        """`lines`: how many last lines of the first attempt to begin with; None for all."""
        self._store = store
        self._run_query = queries_on(store)
        self._listener = listener
        self._screen = screen
        self._lines = lines
        self._nodes = nodes
        self._noted = ""

    def follow_job(self, job: "Job") -> None:
        """Follows from the current attempt until the job has ended."""
        number = max(1, job.attempts)
        while (attempt := self._next_attempt(job.id, number)) is not None:
            self.follow_attempt(attempt)
            number = attempt.number + 1

    def follow_attempt(self, attempt: "Attempt") -> None:
        self._noted = ""
        followers = {rank: LogFollower(attempt, state_home(), continuous=True, node=rank) for rank in self._nodes.ranks}
        counts: dict[int, int | None] = dict.fromkeys(followers, self._lines)
        self._lines = None
        complete: set[int] = set()
        is_tail_noted = False
        try:
            while True:
                for rank in [rank for rank in followers if rank not in complete]:
                    follower = followers[rank]
                    update = patiently(lambda: follower.read(self._run_query))  # noqa: B023 - called at once
                    if (count := counts[rank]) is not None and any(update):
                        update, counts[rank] = _last_of(follower, self._run_query, count, update), None
                    if any(update) and follower.source == "tail" and not is_tail_noted:
                        self._screen.pause()
                        patiently(lambda: _note_tail(self._store, attempt))
                        is_tail_noted = True
                    if follower.is_complete:
                        complete.add(rank)
                        update = _ended(update)
                    self._show(attempt, rank, update)
                if len(complete) == len(followers):
                    return
                pauses = (follower.pause() for rank, follower in followers.items() if rank not in complete)
                self._listener.wait(min(pauses))
        finally:
            for follower in followers.values():
                follower.close()
            self._screen.pause()

    def _show(self, attempt: "Attempt", rank: int, update: LogUpdate) -> None:
        prefix = self._nodes.prefix(attempt, rank)
        self._screen.begin(attempt.number, rank if self._nodes.chosen else None)
        if prefix:
            # With several unfinished lines, none is the last.
            update = LogUpdate(_prefixed(update.finished, prefix), b"")
        self._screen.show(update)

    def _next_attempt(self, name: str, number: int) -> "Attempt | None":
        """The attempt with this number or a later one, when it exists; None if the job ended without it."""
        from stoker.queue.model import ENDED

        noted = -SLOW_POLL
        while True:
            # The order matters: a job that had ended before its attempts were read has no others.
            attempts = patiently(lambda: self._store.attempts.of(name))
            job = patiently(lambda: self._store.jobs.get(name))
            if found := [attempt for attempt in attempts if attempt.number >= number]:
                return found[0]
            if job.state in ENDED:
                if number == 1:
                    note(f"job {name} has printed nothing: {_why(self._store, job)[1]}")
                return None
            if time.monotonic() - noted >= SLOW_POLL:
                self._note_why(job)
                noted = time.monotonic()
            if self._listener.wait(_POLL_JOB):
                noted = -SLOW_POLL

    def _note_why(self, job: "Job") -> None:
        """Once per kind of reason, because its seconds change constantly."""
        kind, reason = patiently(lambda: _why(self._store, job))
        if kind != self._noted:
            self._noted = kind
            note(f"job {job_title(job)}: {reason}")


def _why(store: "Store", job: "Job") -> tuple[str, str]:
    from stoker.status.forecast import why

    reason = why(store, job)
    return reason.kind, reason.reason
