"""`stoker serve` and `stoker notify`: the page, and messages about the queue."""

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from stoker.cli.options.queue import opened, opened_or_created, queue_option, queue_url_of
from stoker.cli.output import count_of, log, note
from stoker.errors import BadInputError, StokerError
from stoker.paths import open_privately, private_directory, state_home
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.streams import OUTPUT, emit

if TYPE_CHECKING:
    import socket

    from stoker.settings import Notifications
    from stoker.web.auth.keys import Keys
    from stoker.web.config import Config

Function = Callable[..., Any]

# A few weeks of a busy page; the oldest part is dropped.
_LOG_SIZE: Final = 8 * 2**20
_LOGS_KEPT: Final = 2
# The notifier stops within a second, unless it is sending a message.
_NOTIFIER_STOPS_WITHIN: Final = 10.0


def page_options(command: Function) -> Function:
    """The options of the page: a command takes them as `**page`."""
    options = (
        click.option("--host", metavar="ADDRESS", help="Listen here [127.0.0.1]; 0.0.0.0 admits other machines."),
        click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Listen on this port [7865]; 0: any."),
        click.option("--cert", type=click.Path(path_type=Path), metavar="FILE", help="Certificate (PEM), for https."),
        click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="The key of --cert."),
        click.option("--url", metavar="URL", help="The address that people use, when it is behind a proxy."),
        click.option(
            "--name", "names", multiple=True, metavar="HOST", help="Another name of this machine (repeatable)."
        ),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


@click.command("serve")
@page_options
@queue_option
def serve_command(queue_url: str | None, **page: Any) -> int:
    """Serve the page and the HTTP API: see and control the queue from a phone or another machine.

    It runs no jobs: `stoker work` does, here or elsewhere; `stoker up` starts both. Anyone with the link can submit
    jobs, and so run commands as you.
    """
    from stoker.web.config import listening_socket

    config = page_config(page, queue_url_of(queue_url))
    listener = listening_socket(config)
    opened_or_created(queue_url).close()
    with until_signalled(), notifying(config):
        run_page(config, listener)
    return 0


def page_config(page: Mapping[str, Any], queue: str | None, home: Path | None = None) -> "Config":
    """The options over the table `[web]` of the configuration file."""
    from stoker.web.config import Config

    given = {name: value for name, value in page.items() if value not in (None, ())}
    chosen = {**msgspec.structs.asdict(load_settings().web), **given}
    config = Config(**chosen, queue=queue, home=home or state_home())
    try:
        config.check()
    except BadInputError as error:
        raise BadInputError(f"--{error}") from None
    return config


@contextlib.contextmanager
def until_signalled() -> Iterator[None]:
    """Ends the block at Ctrl-C, SIGTERM or SIGHUP; none of them is a failure."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        yield


def run_page(config: "Config", listener: "socket.socket") -> None:
    try:
        from stoker.web.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stoker":
            raise
        raise StokerError("the page needs packages that are not installed: pip install 'stoker[web]'") from None
    # Strangers can cause errors in the server: they go to a file, not to the terminal.
    errors = _log_file(config.home / "page.log", "%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "asyncio", "stoker.web"):
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(errors)
    requests = logging.Logger("stoker.access", logging.INFO)
    requests.addHandler(_log_file(config.home / "access.log", "%(message)s"))
    serve(config, listener, requests.info, lambda port, keys: _welcome(config, port, keys))


class PrivateLog(RotatingFileHandler):
    """A log file that only its owner can read."""

    def __init__(self, path: Path, form: str, size: int = _LOG_SIZE) -> None:
        super().__init__(path, maxBytes=size, backupCount=_LOGS_KEPT, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(form))

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=open_privately)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Ignored: the page goes on when the disk is full."""


def _log_file(path: Path, form: str) -> PrivateLog:
    try:
        private_directory(path.parent)
        return PrivateLog(path, form)
    except OSError as error:
        raise StokerError(f"the log {path} cannot be written: {error.strerror}") from None


def _welcome(config: "Config", port: int, keys: "Keys") -> None:
    """Prints where the page is, and a link and a QR code to log in with."""
    from stoker.web.qr import qr_code

    address = config.address(port)
    keys.remember_address(address)
    link = f"{address}/login#{keys.first().secret}"
    emit(OUTPUT, f"The page is at {address}\n")
    emit(OUTPUT, f"Open it with this link, once per device: {link}\n")
    if config.is_private and not config.url:
        emit(OUTPUT, "Only this machine can reach it; --host 0.0.0.0 admits your phone (docs/how-to/security.md).\n")
    elif (code := qr_code(link)) is not None:
        emit(OUTPUT, f"Or with a phone's camera:\n{code}\n")
    if not config.is_private and not config.is_encrypted:
        emit(OUTPUT, "The connection is not encrypted: use it in a network you trust, or see --cert.\n")
    emit(OUTPUT, "Anyone with the link can run commands as you; `stoker tokens add --viewer` makes read-only links.\n")


@contextlib.contextmanager
def notifying(config: "Config") -> Iterator[None]:
    """Sends notifications while the page is served; refuses a URL that cannot work before that."""
    wanted = load_settings().notify
    if not wanted.urls:
        yield
        return
    from stoker.notifications.notifier import Notifier
    from stoker.queue import open_queue

    # With --port 0 the address is not known yet, so messages have no link.
    link = "" if config.port == 0 and not config.url else config.address()
    notifier = Notifier(wanted, link, lambda: open_queue(config.queue), log)
    stop = threading.Event()
    thread = threading.Thread(target=notifier.run, args=(stop,), name="notifier", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_NOTIFIER_STOPS_WITHIN)


@click.command("notify")
@click.option("--test", is_flag=True, help="Send one message to every URL, and say which failed.")
@queue_option
def notify_command(test: bool, queue_url: str | None) -> int:
    """Send notifications about the queue to the URLs under [notify] in stoker.toml, until Ctrl-C.

    `stoker serve` and `stoker up` do this too. Several at once send every message once.
    """
    wanted = load_settings().notify
    if not wanted.urls:
        raise BadInputError(
            f'there is no URL to notify: write urls = ["…"] under [notify] in {config_path(os.environ)}'
            " (docs/how-to/notifications.md)"
        )
    return _send_test(wanted) if test else _notify_until_stopped(wanted, queue_url)


def _send_test(wanted: "Notifications") -> int:
    from stoker.actions.notify import AppriseChannel

    link = f"\n{wanted.link}" if wanted.link else ""
    text = f"This is a test: messages of Stoker on {os.uname().nodename} arrive here.{link}"
    code = 0
    for number, url in enumerate(wanted.urls, 1):
        channel = AppriseChannel(url)
        label = f"URL {number} of {len(wanted.urls)}"
        try:
            channel.prepare(f"[notify]: {label}")
            channel.send("Stoker: a test", text)
        except StokerError as error:
            code = 1
            note(f"{label}: {error}")
        else:
            sys.stdout.write(f"{label} ({channel.scheme}): sent\n")
    return code


def _notify_until_stopped(wanted: "Notifications", queue_url: str | None) -> int:
    from stoker.notifications.notifier import Notifier

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: stop.set())
    notifier = Notifier(wanted, "", lambda: opened(queue_url), log)
    log(f"notifying {count_of(len(wanted.urls), 'URL')} of: {', '.join(wanted.events)}")
    notifier.run(stop)
    return 0
