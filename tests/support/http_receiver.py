"""A web server on loopback that writes down what it was asked and answers as a test wants."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: str

    def json(self) -> Any:
        return json.loads(self.body)


class Answer(NamedTuple):
    status: int = 200
    body: str = "{}"
    headers: tuple[tuple[str, str], ...] = ()
    after: float = 0.0
    """Seconds to wait before answering."""


class Receiver:
    """`answers` are given one after the other, the last one for ever."""

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self._answers = list(answers) or [Answer()]
        self._leaving = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                receiver._serve(self)

            def do_POST(self) -> None:
                receiver._serve(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                """Tests say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length).decode()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.asked.append(Asked(request.command, request.path, dict(request.headers), body))
        self._leaving.wait(answer.after)
        request.send_response(answer.status)
        for name, value in answer.headers:
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(answer.body)))
        request.end_headers()
        request.wfile.write(answer.body.encode())

    @contextmanager
    def listening(self) -> Iterator["Receiver"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._leaving.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
