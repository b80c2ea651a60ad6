"""A connection to a server that a test can cut: data waits until it is restored."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path


class Relay:
    """Passes TCP connections on to a server's socket file. Runs in a thread."""

    def __init__(self, target: Path, host: str) -> None:
        self._target = target
        self._host = host
        self._whole = asyncio.Event()
        self._whole.set()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._listening: Future[int] = Future()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self.port = self._listening.result(timeout=60)

    def cut(self) -> None:
        """Nothing gets through and no error is reported, as with a network fault on the way."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def restore(self) -> None:
        """What was said in the meantime arrives now."""
        self._loop.call_soon_threadsafe(self._whole.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, self._host, 0)
        self._listening.set_result(server.sockets[0].getsockname()[1])
        await self._over.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_server, to_server = await asyncio.open_unix_connection(str(self._target))
            try:
                await asyncio.gather(self._pass_on(reader, to_server), self._pass_on(from_server, writer))
            finally:
                to_server.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        await self._whole.wait()
        writer.close()


@contextlib.contextmanager
def relay_to(socket: Path, host: str = "127.0.0.1") -> Iterator[Relay]:
    relay = Relay(socket, host)
    try:
        yield relay
    finally:
        relay.close()
