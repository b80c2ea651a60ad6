"""The action `determined`: ends the Determined task around this process, by the master's API or by `det`."""

import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from time import sleep
from typing import Any, Final, NamedTuple

import msgspec

from stoker.actions.action import Action, ActionError, Facts
from stoker.paths import is_there
from stoker.program import find_program, run_program

_REQUEST_TIMEOUT: Final = 15.0
_DET_TIMEOUT: Final = 60.0
# A restarting master answers again within seconds; after that the `det` command is tried.
_PAUSES: Final = (2.0, 5.0)
# Kinds of task that end by task id: the word in the API's path, and in the command line.
_KINDS: Final = {
    "NOTEBOOK": ("notebooks", "notebook"),
    "SHELL": ("shells", "shell"),
    "COMMAND": ("commands", "command"),
    "TENSORBOARD": ("tensorboards", "tensorboard"),
    "GENERIC": ("tasks", "task"),
}
_REFUSED: Final = frozenset({401, 403})


class _Task(NamedTuple):
    path: str
    """The API path that ends the task."""
    words: tuple[str, ...]
    """The arguments of `det` that end the task."""
    title: str


class Determined(Action):
    """A trial is ended by its trial id, every other task by its task id."""

    patience = _REQUEST_TIMEOUT * 2 * (len(_PAUSES) + 1) + sum(_PAUSES) + _DET_TIMEOUT + 5.0

    def __init__(self, environment: Mapping[str, str], *, pauses: tuple[float, ...] = _PAUSES) -> None:
        """`pauses` are the seconds between tries at a master that does not answer."""
        self._environment = environment
        self._pauses = pauses
        self._master: _Master | None = None

    def describe(self) -> str:
        kind, task = self._environment.get("DET_TASK_TYPE", "task").lower(), self._environment.get("DET_TASK_ID", "")
        if kind == "trial":
            return f"end this Determined trial ({self._environment.get('DET_TRIAL_ID', '?')})"
        return f"end this Determined {kind} ({task})"

    def prepare(self) -> tuple[str, ...]:
        self._task()
        url = self._environment.get("DET_MASTER", "")
        if url and _credentials(self._environment):
            self._master = _Master(url, self._environment)
        if self._master is None:
            if self._det() is None:
                raise ActionError(
                    "the Determined master cannot be asked to end this task: DET_MASTER and DET_USER_TOKEN or "
                    "DET_SESSION_TOKEN are not set, and there is no det command on PATH"
                )
            return ()
        return self._try_out(self._master)

    def act(self, facts: Facts) -> None:  # noqa: ARG002 - the master has no field for a reason
        task = self._task()
        complaints: list[str] = []
        if self._master is not None:
            complaint = self._ask_until_answered(self._master, task.path)
            if complaint is None:
                return
            complaints.append(complaint)
        det = self._det()
        if det is not None:
            done = run_program((det, *task.words), self._environment, _DET_TIMEOUT)
            if done.code == 0:
                return
            complaints.append(f"'det {' '.join(task.words)}' failed: {done.complaint}")
        raise ActionError(f"{task.title} was not ended: {'; '.join(complaints)}")

    def _try_out(self, master: "_Master") -> tuple[str, ...]:
        """A refused token stays refused; a master that does not answer now may answer later."""
        refusal = master.ask("GET", "/api/v1/me")
        if refusal is None or self._det() is not None:
            return ()
        if refusal.code in _REFUSED:
            raise ActionError(f"the Determined master does not accept this task's token: {refusal.sentence}")
        return (f"{refusal.sentence}; it is asked again when the task is to be ended",)

    def _ask_until_answered(self, master: "_Master", path: str) -> str | None:
        """What went wrong, or None."""
        refusal = master.ask("POST", path)
        for pause in self._pauses:
            if refusal is None or refusal.final:
                break
            sleep(pause)
            refusal = master.ask("POST", path)
        return refusal.sentence if refusal else None

    def _task(self) -> _Task:
        kind = self._environment.get("DET_TASK_TYPE", "")
        task = self._environment.get("DET_TASK_ID", "")
        if not kind or not task:
            raise ActionError(
                "this is not the inside of a Determined task: DET_TASK_TYPE and DET_TASK_ID are not set, so there is "
                "no task to end"
            )
        if kind == "TRIAL":
            trial = self._environment.get("DET_TRIAL_ID", "")
            if not trial:
                raise ActionError("this Determined trial cannot be ended: DET_TRIAL_ID is not set")
            return _Task(f"/api/v1/trials/{_escaped(trial)}/kill", ("trial", "kill", trial), f"trial {trial}")
        if kind not in _KINDS:
            raise ActionError(
                f"Determined has no way to end a task of type {kind} (only TRIAL, {', '.join(_KINDS)} can be ended)"
            )
        plural, word = _KINDS[kind]
        return _Task(f"/api/v1/{plural}/{_escaped(task)}/kill", (word, "kill", task), f"{word} {task}")

    def _det(self) -> str | None:
        return find_program("det", self._environment)


class _Refusal(NamedTuple):
    sentence: str
    code: int | None = None
    """The status of the answer; None without an answer."""

    @property
    def final(self) -> bool:
        """Whether a retry would get the same answer: 5xx errors are temporary, 4xx errors are final."""
        return self.code is not None and self.code < 500


class _Master:
    """The master's HTTP API, called with the tokens of this task."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        self._url = _canonical(url)
        self._credentials = _credentials(environment)
        self._opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=_tls(environment)))

    def ask(self, method: str, path: str) -> _Refusal | None:
        """The error of the last token that was tried, or None if one was accepted."""
        refusal: _Refusal | None = None
        for header, value in self._credentials:
            body = b"{}" if method == "POST" else None
            headers = {header: value, "Content-Type": "application/json"}
            request = urllib.request.Request(self._url + path, data=body, headers=headers, method=method)  # noqa: S310 - only http and https get through _canonical
            refusal = self._open(request)
            if refusal is None or refusal.code not in _REFUSED:
                return refusal
        return refusal

    def _open(self, request: urllib.request.Request) -> _Refusal | None:
        try:
            with self._opener.open(request, timeout=_REQUEST_TIMEOUT) as response:
                response.read(1)
            return None
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error)
            return _Refusal(f"the Determined master answered {error.code} {said}".rstrip(), error.code)
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            return _Refusal(f"the Determined master at {self._url} does not answer: {reason}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, whose success would be mistaken for the end of the task."""

    def redirect_request(self, *_: object) -> None:
        """None makes it an error."""


class _NamedContext(ssl.SSLContext):
    """Checks the master's certificate against the name from Determined, not against the address."""

    name: str | None = None

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        if self.name:
            options["server_hostname"] = self.name
        return super().wrap_socket(*arguments, **options)


def _tls(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Trusts the same certificates as the task's libraries."""
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.name = environment.get("DET_MASTER_CERT_NAME") or None
    file = environment.get("DET_MASTER_CERT_FILE", "")
    if file.lower() == "noverify":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif file and is_there(file):
        try:
            context.load_verify_locations(cafile=file)
        except (OSError, ssl.SSLError) as error:
            raise ActionError(f"the certificate in DET_MASTER_CERT_FILE ({file}) cannot be used: {error}") from None
    else:
        context.load_default_certs()
    return context


def _credentials(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The owner's token, then the task's own, each in the header that the master expects."""
    headers = (("DET_USER_TOKEN", "Authorization"), ("DET_SESSION_TOKEN", "Grpc-Metadata-x-allocation-token"))
    return tuple((header, f"Bearer {environment[name]}") for name, header in headers if environment.get(name))


def _canonical(url: str) -> str:
    """The master's address with scheme and port; both `localhost:8080` and `https://master` are common."""
    whole = url if "://" in url else f"http://{url}"
    wrong = ActionError(f"DET_MASTER={url} is not the address of a Determined master")
    try:
        parts = urllib.parse.urlsplit(whole)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise wrong from None
    if not host or parts.scheme not in ("http", "https"):
        raise wrong
    default = {"http": 80 if "://" in url else 8080, "https": 443}[parts.scheme]
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}:{port or default}{parts.path.rstrip('/')}"


def _escaped(word: str) -> str:
    return urllib.parse.quote(word, safe="")


def _message(error: urllib.error.HTTPError) -> str:
    """The message of the master's error."""
    try:
        body = msgspec.json.decode(error.read(10_000), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, OSError, HTTPException):
        return str(error.reason)
    inner = body.get("error")
    said = body.get("message") or (inner.get("message") if isinstance(inner, dict) else inner) or error.reason
    return f"({said})"
