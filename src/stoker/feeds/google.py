"""Google Sheets through gspread. Imported only when used: gspread comes with `stoker[sheets]`."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import gspread
import msgspec
from google.auth.exceptions import GoogleAuthError, RefreshError
from requests import RequestException, Response
from requests.exceptions import JSONDecodeError

from stoker.errors import BadInputError
from stoker.feeds.rows import Cell, Values
from stoker.feeds.sheet import SheetAwayError, SheetRefusedError
from stoker.paths import may_be_read_by_others
from stoker.streams import warn

GOOGLE: Final = "https://sheets.googleapis.com"
# Access to Google Drive is not needed.
SCOPES: Final = ("https://www.googleapis.com/auth/spreadsheets",)
# Timeouts in seconds: to connect, and between two bytes of an answer.
TIMEOUT: Final = (10.0, 30.0)
# Temporary answers of a proxy or an overloaded Google.
TEMPORARY: Final = frozenset({408, 429, 500, 502, 503, 504})
_URL: Final = re.compile(r"/spreadsheets/d/([\w-]+)")
_KEY: Final = re.compile(r"[\w-]+")


def key_in(text: str) -> str:
    """The key of a sheet, also from its URL."""
    if found := _URL.search(text):
        return found[1]
    if not _KEY.fullmatch(text):
        raise BadInputError(f"{text!r} is not the key of a sheet: it is the long word in its address, after /d/")
    return text


class GoogleSheet:
    """One worksheet, opened on first use and reopened after every error."""

    def __init__(self, credentials: Path, key: str, title: str | None, address: str = GOOGLE) -> None:
        self._key = key
        self._title = title
        self._account, self._client = _authorized(credentials, address.rstrip("/"))
        self._client.set_timeout(TIMEOUT)
        self._opened: gspread.Worksheet | None = None

    @property
    def identity(self) -> str:
        """Identifies this worksheet even after a change of its title."""
        with self._explained():
            return f"{self._key}:{self._worksheet().id}"

    def read(self, ranges: Sequence[str]) -> Values:
        with self._explained():
            return self._worksheet().batch_get(ranges)

    def write(self, cells: Sequence[Cell]) -> None:
        """Writes all cells in one request, as text: an id like 12e45678 is not a number."""
        with self._explained():
            self._worksheet().batch_update([{"range": cell.address, "values": [[cell.value]]} for cell in cells])

    def close(self) -> None:
        self._client.http_client.session.close()

    def _worksheet(self) -> gspread.Worksheet:
        if self._opened is None:
            sheet = self._client.open_by_key(self._key)
            self._opened = sheet.sheet1 if self._title is None else sheet.worksheet(self._title)
        return self._opened

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except gspread.exceptions.WorksheetNotFound:
            raise self._refused(
                f"the sheet {self._key} has no worksheet {self._title!r}: --worksheet names one"
            ) from None
        except gspread.exceptions.SpreadsheetNotFound:
            raise self._refused(
                f"there is no sheet with the key {self._key}: it is the long word in its address, after /d/",
                exit_code=2,
            ) from None
        except PermissionError:
            raise self._refused(self._not_shared()) from None
        except gspread.exceptions.APIError as error:
            raise self._answered(error) from None
        except RefreshError as error:
            if error.retryable:
                raise self._away("Google issues no token now") from None
            raise self._refused(
                f"Google does not accept the credentials of {self._account}: {_reason(error)}; "
                "create a new key for it, and check this machine's clock"
            ) from None
        except (JSONDecodeError, TypeError, LookupError):
            # The libraries raise these if another server answers.
            raise self._away(
                "Google cannot be reached: another server answers for it, as the login page of a hotel's network does"
            ) from None
        except (RequestException, GoogleAuthError, ValueError) as error:
            raise self._away(f"Google cannot be reached: {_reason(error)}") from None

    def _answered(self, error: gspread.exceptions.APIError) -> SheetAwayError | SheetRefusedError:
        code = error.response.status_code
        message = " ".join(str(error.error.get("message", "")).split())[:200]
        if code == 429 or (code == 403 and "rate" in str(error.error).lower()):
            return self._away("Google's quota for reading and writing sheets is used up")
        if code in TEMPORARY or error.code == -1:
            return self._away(f"Google answered {code}")
        if code == 404:
            return self._refused(f"there is no sheet with the key {self._key} any more")
        if code == 403:
            return self._refused(f"{self._not_shared()} (Google says: {message})")
        return self._refused(f"Google refused a request for the sheet {self._key}: {message}")

    def _not_shared(self) -> str:
        return f"{self._account} may not edit the sheet {self._key}: share the sheet with that address, as an editor"

    def _away(self, message: str) -> SheetAwayError:
        self._opened = None
        return SheetAwayError(message)

    def _refused(self, message: str, *, exit_code: int | None = None) -> SheetRefusedError:
        self._opened = None
        return SheetRefusedError(message, exit_code=exit_code)


def _authorized(credentials: Path, address: str) -> tuple[str, gspread.Client]:
    class AtAddress(gspread.HTTPClient):
        """Replaces Google's server by a proxy, or in tests."""

        def request(self, method: str, endpoint: str, *args: Any, **options: Any) -> Response:
            return super().request(method, endpoint.replace(GOOGLE, address, 1), *args, **options)

    try:
        key = msgspec.json.decode(credentials.read_bytes(), type=dict[str, Any])
        if may_be_read_by_others(credentials.stat()):
            warn(f"other users of this machine can read the key {credentials}: run `chmod 600 {credentials}`")
        client = gspread.service_account_from_dict(key, scopes=SCOPES, http_client=AtAddress)
    except OSError as error:
        raise BadInputError(f"the credentials {credentials} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, GoogleAuthError) as error:
        raise BadInputError(
            f"{credentials} is not the key of a service account as Google gives it, in JSON: {_reason(error)}"
        ) from None
    return str(key.get("client_email", "the service account")), client


def _reason(error: BaseException) -> str:
    """The innermost reason; requests wraps errors several times."""
    inner: Any = error.args[0] if error.args else error
    while (deeper := getattr(inner, "reason", None)) is not None:
        inner = deeper
    words = " ".join(str(inner).split())
    return re.sub(r"<[^>]*>:? ?|^.*?object at 0x\w+>: ?", "", words)[:200] or type(error).__name__
