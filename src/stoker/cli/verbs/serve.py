"""`stoker serve`, `tokens` and `notify`: the page, access to it, and messages about the queue."""

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from stoker.cli.options.queue import opened, opened_or_created, queue_option, queue_url_of
from stoker.cli.output import count_of, json_option, log, note, print_json
from stoker.errors import BadInputError, StokerError
from stoker.paths import open_privately, private_directory, state_home
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.streams import OUTPUT, emit

if TYPE_CHECKING:
    import socket

    from stoker.settings import Notifications
    from stoker.web.auth.key_file import Role
    from stoker.web.auth.keys import DeviceSession, Keys, Token
    from stoker.web.config import Config

Function = Callable[..., Any]

# Enough for a few weeks of a busy page; the oldest part is dropped.
_LOG_SIZE: Final = 8 * 2**20
_LOGS_KEPT: Final = 2
# The notifier stops within a second, unless it is sending a message.
_NOTIFIER_STOPS_WITHIN: Final = 10.0


PAGE_OPTIONS: Final = ("host", "port", "cert", "key", "url", "names")


def page_options(command: Function) -> Function:
    """The options of the page: a command takes them as `**page`."""
    options = (
        click.option("--host", metavar="ADDRESS", help="Listen here [127.0.0.1]; 0.0.0.0 admits other machines."),
        click.option(
            "--port", type=click.IntRange(0, 65535), metavar="N", help="Listen on this port [7865]; 0: any free port."
        ),
        click.option("--cert", type=click.Path(path_type=Path), metavar="FILE", help="Certificate (PEM), for https."),
        click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="The key of --cert."),
        click.option("--url", metavar="URL", help="The public address behind a proxy."),
        click.option(
            "--name", "names", multiple=True, metavar="HOST", help="Another name of this machine (repeatable)."
        ),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


@click.command("serve")
@page_options
@queue_option
def serve_command(queue_url: str | None, **page: Any) -> int:
    """Serve the page and the HTTP API, to see and control the queue from a phone or another machine. It runs no jobs:
    use `stoker work`, here or elsewhere; `stoker up` starts both. Anyone with the link can submit jobs, that is, run
    commands as you.
    """
    from stoker.web.config import listening_socket

    config = page_config(page, queue_url_of(queue_url))
    listener = listening_socket(config)
    opened_or_created(queue_url).close()
    with until_signalled(), notifying(config):
        run_page(config, listener)
    return 0


def page_config(
    page: Mapping[str, Any], queue: str | None, home: Path | None = None, *, notifies: bool = True
) -> "Config":
    """The options, with defaults from `[web]` of the configuration file."""
    from stoker.web.config import Config

    given = {name: value for name, value in page.items() if value not in (None, ())}
    settings = load_settings()
    chosen = {**msgspec.structs.asdict(settings.web), **given}
    config = Config(**chosen, queue=queue, home=home or state_home(), notify=settings.notify if notifies else None)
    try:
        config.check()
    except BadInputError as error:
        raise BadInputError(f"--{error}") from None
    return config


@contextlib.contextmanager
def until_signalled() -> Iterator[None]:
    """Ends the block at Ctrl-C, SIGTERM or SIGHUP, which are not failures."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        yield


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Raises KeyboardInterrupt after the block instead of in it.

    Extension modules that are interrupted during their import print a traceback, or ignore the interrupt.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    delayed = [number for number, handler in handlers.items() if handler is signal.default_int_handler]
    for number in delayed:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number in delayed:
            signal.signal(number, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


def run_page(config: "Config", listener: "socket.socket") -> None:
    try:
        with delayed_interrupts():
            from stoker.web.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stoker":
            raise
        raise StokerError("the page needs packages that are not installed: pip install 'stoker[web]'") from None
    # Strangers can cause errors in the server, so these go to a file, not to the terminal.
    errors = _log_file(config.home / "page.log", "%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "asyncio", "stoker.web"):
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(errors)
    requests = logging.Logger("stoker.access", logging.INFO)
    requests.addHandler(_log_file(config.home / "access.log", "%(message)s"))
    serve(config, listener, requests.info, lambda port, keys: _welcome(config, port, keys))


class PrivateLog(RotatingFileHandler):
    """A log file readable only by its owner."""

    def __init__(self, path: Path, form: str, size: int = _LOG_SIZE) -> None:
        super().__init__(path, maxBytes=size, backupCount=_LOGS_KEPT, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(form))

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=open_privately)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Ignored: the page continues when the disk is full."""


def _log_file(path: Path, form: str) -> PrivateLog:
    try:
        private_directory(path.parent)
        return PrivateLog(path, form)
    except OSError as error:
        raise StokerError(f"the log {path} cannot be written: {error.strerror}") from None


def _welcome(config: "Config", port: int, keys: "Keys") -> None:
    """Prints the page's address, and a link and a QR code for login."""
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
    """Sends notifications while the page is served; refuses a URL that cannot work before that.

    Also without URLs in the settings: jobs have their own, and people add some on the page.
    """
    from stoker.notifications.notifier import Notifier
    from stoker.queue import open_queue, prepare_types

    prepare_types()
    wanted = config.notify or load_settings().notify
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
@click.option("--test", is_flag=True, help="Send one message to every URL, and report failures.")
@queue_option
def notify_command(test: bool, queue_url: str | None) -> int:
    """Send notifications about the queue until Ctrl-C.

    They go to the URLs under [notify] in stoker.toml, those that were added on the page, and those of jobs with
    --notify. `stoker serve` and `stoker up` do this too. Several at once send every message once.
    """
    wanted = load_settings().notify
    return _send_test(wanted, queue_url) if test else _notify_until_stopped(wanted, queue_url)


def _send_test(wanted: "Notifications", queue_url: str | None) -> int:
    from stoker.notifications.senders import send_test

    urls = [*wanted.urls]
    with contextlib.suppress(StokerError), opened(queue_url) as store:
        urls += [one.url for one in store.notices.urls() if one.url not in urls]
    if not urls:
        raise BadInputError(
            f'there is no URL to notify: write urls = ["…"] under [notify] in {config_path(os.environ)}'
            " (docs/how-to/notifications.md)"
        )
    code = 0
    for number, url in enumerate(urls, 1):
        label = f"URL {number} of {len(urls)}"
        try:
            scheme = send_test(url, wanted.link, f"[notify]: {label}")
        except StokerError as error:
            code = 1
            note(f"{label}: {error}")
        else:
            sys.stdout.write(f"{label} ({scheme}): sent\n")
    return code


def _notify_until_stopped(wanted: "Notifications", queue_url: str | None) -> int:
    from stoker.notifications.notifier import Notifier

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: stop.set())
    notifier = Notifier(wanted, "", lambda: opened(queue_url), log)
    if wanted.urls:
        log(f"notifying {count_of(len(wanted.urls), 'URL')} of: {', '.join(wanted.events)}")
    else:
        log("notifying the URLs of jobs and of the page: there is none under [notify]")
    notifier.run(stop)
    return 0


# Access to the page


@click.group("tokens", invoke_without_command=True)
@click.option("--demo", is_flag=True, help="The tokens of `stoker up --demo`.")
@json_option()
@click.pass_context
def tokens_command(context: click.Context, demo: bool, as_json: bool) -> int:
    """List, make and revoke tokens for the page of `stoker serve` and `stoker up`.

    An operator can submit jobs, and so run any command as this user on the machines of the queue. A viewer can read
    everything, including commands and logs, and change nothing.
    """
    from stoker.web.auth.keys import Keys

    context.obj = Keys(state_home() / "demo" if demo else state_home())
    if as_json:
        # `tokens --json add` means `tokens add --json`.
        context.default_map = {verb: {"as_json": True} for verb in tokens_command.commands}
    if context.invoked_subcommand is None:
        _list(context.obj, as_json)
    return 0


@tokens_command.command("add", short_help="Make a token, and print its link.")
@click.option("--viewer", is_flag=True, help="Read-only access.")
@click.option("--name", metavar="NAME", help="A name for the list and the access log.")
@click.option("--url", metavar="URL", help="The address of the page [where it last started].")
@json_option()
@click.pass_obj
def add(keys: "Keys", viewer: bool, name: str | None, url: str | None, as_json: bool) -> int:
    """Make a token, and print the link to log in with it.

    Without --viewer it is an operator's: anyone with the link can run any command as this user.
    """
    address = _address(keys, url)
    role: Role = "viewer" if viewer else "operator"
    token = keys.add(name or keys.free_name(role), role)
    if as_json:
        print_json({**_token_json(token, []), "token": token.secret, "link": _link(address, token)})
        return 0
    _print_link(address, token)
    return 0


@tokens_command.command("revoke", short_help="Revoke a token, and log out its devices.")
@click.argument("called", metavar="ID")
@json_option()
@click.pass_obj
def revoke(keys: "Keys", called: str, as_json: bool) -> int:
    """Revoke the token with this id or name, and log out its devices. A running page follows within a second."""
    token, devices = keys.revoke(called)
    if as_json:
        print_json({"id": token.id, "name": token.name, "role": token.role, "devices": devices})
        return 0
    sys.stdout.write(f"{token.id} ({token.name}): revoked, {count_of(devices, 'device')} logged out\n")
    return 0


@tokens_command.command("link", short_help="Print a token's link again.")
@click.argument("called", metavar="[ID]", required=False)
@click.option("--url", metavar="URL", help="The address of the page [where it last started].")
@json_option()
@click.pass_obj
def link(keys: "Keys", called: str | None, url: str | None, as_json: bool) -> int:
    """Print the link of the token with this id or name, with a QR code on a terminal.

    Without ID: the oldest operator token, which is made if there is none.
    """
    address = _address(keys, url)
    token = keys.first() if called is None else keys.token(called)
    if as_json:
        print_json({"id": token.id, "name": token.name, "role": token.role, "link": _link(address, token)})
        return 0
    _print_link(address, token)
    return 0


def _address(keys: "Keys", url: str | None) -> str:
    """The given address, the page's last one, or its default."""
    if url is None and (known := keys.address()):
        return known
    from stoker.cli.verbs.serve import page_config

    return page_config({} if url is None else {"url": url}, None).address()


def _link(address: str, token: "Token") -> str:
    return f"{address}/login#{token.secret}"


def _print_link(address: str, token: "Token") -> None:
    from stoker.web.qr import qr_code

    may = "run any command as this user" if token.role == "operator" else "read everything, and change nothing"
    sys.stdout.write(f"{_link(address, token)}\n")
    if (code := qr_code(_link(address, token))) is not None:
        sys.stdout.write(f"{code}\n")
    note(f"anyone with this link is logged in as {token.name} ({token.role}) and can {may}")


def _list(keys: "Keys", as_json: bool) -> None:
    tokens, sessions = keys.tokens(), keys.sessions()
    by_token = {token.id: [session for session in sessions if session.token == token.id] for token in tokens}
    if as_json:
        print_json([_token_json(token, by_token[token.id]) for token in tokens])
        return
    if not tokens:
        sys.stdout.write("no tokens yet: `stoker serve` or `stoker tokens link` makes the first\n")
        return
    from stoker.cli.tables.table import Column, print_table
    from stoker.web.auth.keys import last_seen

    columns = (
        Column("name", gives="cut"),
        Column("role"),
        Column("id"),
        Column("made", "right", left_out=2),
        Column("devices", "right", left_out=1),
        Column("last seen", "right"),
    )
    rows = [
        (token.name, token.role, token.id, _ago(token.created), str(len(devices)), _ago(last_seen(token, devices)))
        for token, devices in ((token, by_token[token.id]) for token in tokens)
    ]
    print_table(columns, rows)


def _token_json(token: "Token", devices: "list[DeviceSession]") -> dict[str, object]:
    """One token as `--json` prints it: without its secret."""
    from stoker.web.auth.keys import last_seen

    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "created": token.created,
        "seen": last_seen(token, devices),
        "devices": [{"agent": one.agent, "created": one.created, "seen": one.seen} for one in devices],
    }


def _ago(at: float | None) -> str:
    from stoker.queue.explanation import spoken

    return "never" if at is None else f"{spoken(max(0.0, time.time() - at))} ago"
