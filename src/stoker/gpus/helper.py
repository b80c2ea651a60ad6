"""The helper process, the only one that calls the driver: it may block or die in a call, but the probers do not.

Its standard input is the connection to one prober, or a listening socket for all processes of a user. A request says
when to reply and how old the look may be; a newer request replaces it. A look covers the time since the same prober's
last look.
"""

import contextlib
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.gpus.faults import appended_xids
from stoker.gpus.history import SHORTEST_SPAN, LookHistory
from stoker.gpus.model import Gpu, Holder, Look, Reading, SourceChoice, Unknown, known
from stoker.gpus.sharing import BACKLOG, peer_user
from stoker.gpus.source import AbsentError, Source, import_source, open_source
from stoker.procfs import close_inherited_descriptors

NAME: Final = "stoker-gpus"
_NO_GPUS: Final[tuple[Gpu, ...]] = ()
# A shared helper without clients stays this long, since the next command may follow at once.
_LINGER: Final = 1.0
# The delay before another try to accept a client on a machine short of descriptors or memory.
_ACCEPT_AGAIN: Final = 0.05
_CHUNK: Final = 4096

# The number of the request, the time to reply, and the earliest time of the look, in monotonic seconds.
REQUEST: Final = struct.Struct("=Idd")
# The length of the reply, and the number of the request.
HEADER: Final = struct.Struct("=II")


class HelperReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to a request. With `same_gpus`, `look.gpus` is empty, since GPUs rarely change."""

    look: Look | None
    same_gpus: bool = False
    absent: str | None = None
    """Why there is no source."""
    choices: tuple[SourceChoice, ...] = ()
    """With the first look: why sources were chosen or rejected."""
    holders: tuple[tuple[Holder, ...], ...] = ()
    """The identified processes on each GPU, for clients that do not decode all readings."""


def main() -> None:
    """Runs the helper as a program."""
    _name, spec, root = sys.argv
    serve(spec, root)


def serve(spec: str, root: str) -> None:
    """Answers requests until the last client disconnects."""
    # Ctrl-C is for the foreground program; the helper ends with its probers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Keeps searches for GPU users from counting this process.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    close_inherited_descriptors()
    with contextlib.suppress(OSError, ValueError):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    reader = _Reader(spec, Path(root))
    server = _Server(socket.socket(fileno=os.dup(0)), reader)
    with contextlib.suppress(OSError):
        os.chdir("/")  # must not keep a file system from being unmounted
    # While the prober that started this process gets ready to ask.
    import_source(spec)
    try:
        server.run()
    finally:
        # Processes that connect now start another helper.
        server.close()
        reader.close()


class _Reader:
    """Reads the source. It is opened at the first request, so that the deadline covers a driver that blocks then."""

    def __init__(self, spec: str, root: Path) -> None:
        self.history = LookHistory()
        self.absent: str | None = None
        """Why the last look failed for lack of a source."""
        self.choices: tuple[SourceChoice, ...] = ()
        self._spec = spec
        self._root = root
        self._source: Source | None = None
        self._fresh: Look | None = None

    def read(self) -> None:
        """Takes a look."""
        self.absent = None
        look = self._guarded(self._look)
        if look is not None:
            self.history.add(look)

    def first_look(self, not_before: float) -> Look | None:
        """The latest look for a new prober, which covers no more than a usual first look."""
        if self.history.span <= SHORTEST_SPAN or self.absent is not None:
            return self.history.latest
        if self._fresh is None or self._fresh.at < not_before:
            self._fresh = self._guarded(self._look_anew)
        return self._fresh

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _look(self) -> Look:
        if self._source is None:
            self._source, self.choices = open_source(self._spec, self._root)
        return self._source.look()

    def _look_anew(self) -> Look:
        source, _choices = open_source(self._spec, self._root)
        try:
            return source.look()
        finally:
            source.close()

    def _guarded(self, look: Callable[[], Look]) -> Look | None:
        try:
            return look()
        except AbsentError as absent:
            self.absent = str(absent)
            return None
        except StokerError as error:
            return self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - any failure must become an unknown look, not the end of the helper
            return self._failed(f"Stoker's reader failed: {type(error).__name__}: {error}")

    def _failed(self, reason: str) -> Look:
        name = self._source.name if self._source else self._spec
        return Look(name, time.monotonic(), time.time(), (), (), problem=Unknown(reason))


class _Client:
    """A prober with its request and its history."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.request = 0
        """The number of its last request."""
        self.due = math.inf
        """The time to reply; infinite after the reply."""
        self.not_before = 0.0
        """The earliest time of the look."""
        self.unsent = b""
        self.mark: int | None = None
        """Its position in the history; None before its first look."""
        self.gpus: tuple[Gpu, ...] | None = None
        """The GPUs that it knows."""
        self.xids: dict[str, tuple[int, ...]] = {}
        """The errors of each GPU before it connected."""
        connection.setblocking(False)


class _Server:
    """Waits for requests, reads the GPUs once for all waiting clients, and replies."""

    def __init__(self, first: socket.socket, reader: _Reader) -> None:
        """`first`: listens, or is the only client."""
        self._reader = reader
        self._history = reader.history
        self._clients: dict[int, _Client] = {}
        self._poll = select.poll()
        self._listener: socket.socket | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._joined: dict[int, Look] = {}
        self._encoded: dict[tuple[int, bool], bytes] = {}
        """Encoded replies to clients with the same history, by mark, until the next look."""
        if first.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            first.setblocking(False)
            first.listen(BACKLOG)  # again, so that SO_PEERCRED shows this process's pid
            self._listener = first
            self._poll.register(first.fileno(), select.POLLIN)
        else:
            self._add(first)

    def run(self) -> None:
        while self._clients or self._listener is not None:
            ready = self._poll.poll(self._timeout())
            if not ready and not self._clients:
                return
            for descriptor, events in ready:
                if descriptor in self._clients:
                    self._serve(self._clients[descriptor], events)
                elif self._listener is not None:
                    self._accept(self._listener)
            self._answer()

    def _timeout(self) -> float | None:
        """The timeout of `poll` in milliseconds."""
        if not self._clients:
            return _LINGER * 1000
        due = min(client.due for client in self._clients.values())
        return None if due == math.inf else max(due - time.monotonic(), 0.0) * 1000

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        os.close(0)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_ACCEPT_AGAIN)
            return
        if peer_user(connection) == os.geteuid():
            self._add(connection)
        else:
            connection.close()

    def _add(self, connection: socket.socket) -> None:
        self._clients[connection.fileno()] = _Client(connection)
        self._poll.register(connection.fileno(), select.POLLIN)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._send(client)
            if events & ~select.POLLOUT:
                data = client.connection.recv(_CHUNK)
                if not data:
                    raise ConnectionResetError
                *_, (client.request, client.due, client.not_before) = REQUEST.iter_unpack(data)
        except BlockingIOError:
            return
        except (OSError, struct.error):
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        descriptor = client.connection.fileno()
        self._poll.unregister(descriptor)
        del self._clients[descriptor]
        client.connection.close()
        if client.mark is not None:
            self._history.release(client.mark)

    def _answer(self) -> None:
        now = time.monotonic()
        asking = [client for client in self._clients.values() if client.due <= now]
        if not all(map(self._is_served, asking)):
            self._reader.read()
            self._joined.clear()
            self._encoded.clear()
        for client in asking:
            try:
                reply = self._reply(client)
                client.unsent += HEADER.pack(len(reply), client.request) + reply
                client.due = math.inf
                self._send(client)
            except OSError:
                self._drop(client)

    def _is_served(self, client: _Client) -> bool:
        """True if the latest look is new to the client and young enough."""
        latest = self._history.latest
        if latest is None or latest.at < client.not_before or self._reader.absent is not None:
            return False
        return client.mark is None or not self._history.is_at_end(client.mark)

    def _reply(self, client: _Client) -> bytes:
        if self._reader.absent is not None:
            return self._encode(HelperReply(None, absent=self._reader.absent))
        if client.mark is None:
            return self._first_reply(client)
        before, client.mark = client.mark, self._history.mark()
        look = self._joined.get(before) or self._history.since(before)
        self._joined[before] = look
        self._history.release(before)
        is_same = bool(look.gpus) and look.gpus == client.gpus
        client.gpus = look.gpus or client.gpus
        if client.xids:
            return self._encoded_look(_without_earlier(look, client.xids), is_same=is_same)
        key = (before, is_same)
        if key not in self._encoded:
            self._encoded[key] = self._encoded_look(look, is_same=is_same)
        return self._encoded[key]

    def _encoded_look(self, look: Look, *, is_same: bool) -> bytes:
        sent = msgspec.structs.replace(look, gpus=_NO_GPUS) if is_same else look
        return self._encode(HelperReply(sent, is_same, holders=_holders(look)))

    def _first_reply(self, client: _Client) -> bytes:
        look = self._reader.first_look(client.not_before)
        if look is None:
            return self._encode(HelperReply(None, absent=self._reader.absent))
        if not self._history.is_first:
            client.xids = self._xids()
        client.mark = self._history.mark()
        client.gpus = look.gpus or None
        sent = _without_earlier(look, client.xids)
        return self._encode(HelperReply(sent, choices=self._reader.choices, holders=_holders(look)))

    def _xids(self) -> dict[str, tuple[int, ...]]:
        """All errors so far, by GPU."""
        readings = () if self._history.latest is None else self._history.latest.readings
        return {one.uuid: one.health.xids for one in readings if known(one.health) and one.health.xids}

    def _send(self, client: _Client) -> None:
        """Sends as much as the connection takes. A suspended client reads the rest later."""
        with contextlib.suppress(BlockingIOError):
            sent = client.connection.send(client.unsent, socket.MSG_NOSIGNAL)
            client.unsent = client.unsent[sent:]
        events = select.POLLIN | (select.POLLOUT if client.unsent else 0)
        self._poll.modify(client.connection.fileno(), events)


def _holders(look: Look) -> tuple[tuple[Holder, ...], ...]:
    return tuple(
        [
            tuple([(process.pid, process.started) for process in reading.processes if known(process.started)])
            if known(reading.processes)
            else ()
            for reading in look.readings
        ]
    )


def _without_earlier(look: Look, xids: Mapping[str, tuple[int, ...]]) -> Look:
    """The look without errors from before the client connected."""
    if not xids:
        return look
    readings = tuple([_newer(reading, xids.get(reading.uuid, ())) for reading in look.readings])
    return msgspec.structs.replace(look, readings=readings)


def _newer(reading: Reading, earlier: tuple[int, ...]) -> Reading:
    if not earlier or not known(reading.health):
        return reading
    return msgspec.structs.replace(
        reading, health=reading.health._replace(xids=appended_xids(earlier, reading.health.xids))
    )
