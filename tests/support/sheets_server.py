"""A web server on loopback that speaks as much of Google's Sheets API and token endpoint as gspread uses."""

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

KEY = "1AbC-dEf_the-key-of-a-sheet"
EMAIL = "feeder@project.iam.gserviceaccount.com"
TOKEN = "a-token"
_RANGE = re.compile(r"(?:'((?:[^']|'')*)'!)?([A-Z]+)(\d+)?(?::([A-Z]+)(\d+)?)?")


class Refusal(NamedTuple):
    code: int
    status: str
    message: str


QUOTA = Refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Read requests' of service")
UNAVAILABLE = Refusal(503, "UNAVAILABLE", "The service is currently unavailable.")
FORBIDDEN = Refusal(403, "PERMISSION_DENIED", "The caller does not have permission")
NOT_FOUND = Refusal(404, "NOT_FOUND", "Requested entity was not found.")
BAD_RANGE = Refusal(400, "INVALID_ARGUMENT", "Unable to parse range")
TOO_WIDE = Refusal(400, "INVALID_ARGUMENT", "Range exceeds grid limits")


class RefusedError(Exception):
    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


class Worksheet:
    """Cells by row and column, both from 1."""

    def __init__(self, identity: int, title: str) -> None:
        self.identity = identity
        self.title = title
        self.columns = 26
        self._cells: dict[tuple[int, int], str | int] = {}

    def __getitem__(self, address: str) -> str:
        """The cell as it is shown."""
        (row, column), _ = _corners(address)
        return str(self._cells.get((row, column), ""))

    def __setitem__(self, address: str, value: str | int) -> None:
        (row, column), _ = _corners(address)
        if column > self.columns:
            raise RefusedError(TOO_WIDE)
        if value == "":
            self._cells.pop((row, column), None)
        else:
            self._cells[row, column] = value

    def column(self, letters: str, first: int, last: int) -> list[str]:
        return [self[f"{letters}{row}"] for row in range(first, last + 1)]

    def insert_row(self, at: int) -> None:
        self._cells = {(row + (row >= at), column): value for (row, column), value in self._cells.items()}

    def delete_row(self, at: int) -> None:
        self._cells = {(row - (row > at), column): value for (row, column), value in self._cells.items() if row != at}

    def values(self, address: str) -> list[list[str]]:
        (top, left), (bottom, right) = _corners(address)
        rows = []
        for row in range(top, min(bottom, max((row for row, _ in self._cells), default=0)) + 1):
            cells = [str(self._cells.get((row, column), "")) for column in range(left, right + 1)]
            rows.append(_trimmed(cells, ""))
        return _trimmed(rows, [])

    def update(self, address: str, values: list[list[Any]]) -> None:
        (top, left), _ = _corners(address)
        for down, cells in enumerate(values):
            for right, value in enumerate(cells):
                self[f"{_letters(left + right)}{top + down}"] = value


class SheetsServer:
    """One spreadsheet, `KEY`, with one worksheet to begin with. The faults are met by the next requests, in order."""

    def __init__(self) -> None:
        self.worksheets = [Worksheet(0, "Sheet1")]
        self.refusals: list[Refusal] = []
        self.drops = 0
        """That many requests get a closed connection instead of an answer."""
        self.delay = 0.0
        self.token_refusal: Refusal | None = None
        self.read_only = False
        """Whether the sheet is shared with its feeder as a viewer."""
        self.captive_after: int | None = None
        """After that many requests a captive portal answers all others with its page."""
        self.may_write = threading.Event()
        """While it is not set, requests that write wait."""
        self.may_write.set()
        self.asked: list[str] = []
        self.written: list[list[str]] = []
        """The ranges of each request that wrote."""
        self.lock = threading.RLock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._serve(self)

            def do_POST(self) -> None:
                server._serve(self)

            def do_PUT(self) -> None:
                server._serve(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                """Tests say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)

    @property
    def sheet(self) -> Worksheet:
        return self.worksheets[0]

    @property
    def environment(self) -> dict[str, str]:
        """What sends a feeder here. All other requests, which Google's library makes by itself, go nowhere."""
        return {"STOKER_SHEETS_URL": self.url, "HTTPS_PROXY": "http://127.0.0.1:9"}

    def credentials(self, path: Path) -> Path:
        """A file as Google gives it for a service account of this server."""
        path.write_text(
            json.dumps(
                {
                    "type": "service_account",
                    "project_id": "project",
                    "private_key_id": "1",
                    "private_key": _private_key(),
                    "client_email": EMAIL,
                    "client_id": "1",
                    "token_uri": f"{self.url}/token",
                }
            )
        )
        path.chmod(0o600)
        return path

    @contextlib.contextmanager
    def listening(self) -> Iterator["SheetsServer"]:
        self._thread.start()
        try:
            yield self
        finally:
            self.may_write.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self.lock:
            self.asked.append(f"{request.command} {request.path}")
            drop = self.drops > 0
            self.drops -= drop
        if drop:
            request.close_connection = True
            return
        time.sleep(self.delay)
        try:
            answer, code = self._answer(request, body), 200
        except RefusedError as error:
            answer, code = {"error": error.refusal._asdict()}, error.refusal.code
        is_captive = self.captive_after is not None and len(self.asked) > self.captive_after
        text = b"<html>Welcome!</html>" if is_captive else json.dumps(answer).encode()
        with contextlib.suppress(ConnectionError):  # a test has killed who asked
            request.send_response(code)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(text)))
            request.end_headers()
            request.wfile.write(text)

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> dict[str, Any]:
        path = urlsplit(request.path)
        if path.path == "/token":
            return self._token(body)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(Refusal(401, "UNAUTHENTICATED", "Request had invalid authentication credentials."))
        is_write = request.command in {"POST", "PUT"}
        if is_write:
            self.may_write.wait(60)
        with self.lock:
            if is_write and self.read_only:
                raise RefusedError(FORBIDDEN)
            if self.refusals:
                raise RefusedError(self.refusals.pop(0))
            key, slash, rest = path.path.removeprefix("/v4/spreadsheets/").partition("/")
            if key != KEY:
                raise RefusedError(NOT_FOUND)
            place = slash + rest
            if is_write:
                return self._write(place, json.loads(body))
            return self._read(place, parse_qs(path.query))

    def _token(self, body: bytes) -> dict[str, Any]:
        if self.token_refusal is not None:
            raise RefusedError(self.token_refusal)
        asked = parse_qs(body.decode())
        assert asked["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
        return {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}

    def _read(self, place: str, query: dict[str, list[str]]) -> dict[str, Any]:
        if place == "":
            sheets = [
                {"properties": {"sheetId": sheet.identity, "title": sheet.title, "index": index, "gridProperties": {}}}
                for index, sheet in enumerate(self.worksheets)
            ]
            return {"spreadsheetId": KEY, "properties": {"title": "Experiments"}, "sheets": sheets}
        if place == "/values:batchGet":
            return {"spreadsheetId": KEY, "valueRanges": [self._range(text) for text in query["ranges"]]}
        return self._range(unquote(place.removeprefix("/values/")))

    def _range(self, text: str) -> dict[str, Any]:
        values = self._named(text).values(text)
        return {"range": text, "majorDimension": "ROWS"} | ({"values": values} if values else {})

    def _write(self, place: str, body: dict[str, Any]) -> dict[str, Any]:
        data = body["data"] if place == "/values:batchUpdate" else [body | {"range": unquote(place[len("/values/") :])}]
        for one in data:
            self._named(one["range"]).update(one["range"], one["values"])
        self.written.append([one["range"].rpartition("!")[2] for one in data])
        return {"spreadsheetId": KEY, "totalUpdatedCells": len(data)}

    def _named(self, text: str) -> Worksheet:
        found = _RANGE.fullmatch(text)
        for sheet in self.worksheets:
            if found and (found[1] or "").replace("''", "'") == sheet.title:
                return sheet
        raise RefusedError(BAD_RANGE)


def _corners(address: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and the last cell of `C3`, `C3:C` or `C3:D9`."""
    found = _RANGE.fullmatch(address)
    if found is None:
        raise RefusedError(BAD_RANGE)
    top, left = int(found[3] or 1), _number(found[2])
    if found[4] is None:
        return (top, left), (top, left)
    return (top, left), (int(found[5] or 10**6), _number(found[4]))


def _number(letters: str) -> int:
    return functools.reduce(lambda number, letter: number * 26 + ord(letter) - 64, letters, 0)


def _letters(number: int) -> str:
    return "" if number == 0 else _letters((number - 1) // 26) + chr(65 + (number - 1) % 26)


def _trimmed(cells: list[Any], empty: Any) -> list[Any]:
    while cells and cells[-1] == empty:
        cells.pop()
    return cells


@functools.cache
def _private_key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
