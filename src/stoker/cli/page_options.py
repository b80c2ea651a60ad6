"""What `stoker serve` and `stoker up` have in common: where the page listens, and what is said when it does."""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker.errors import BadInputError, StokerError
from stoker.places import state_home
from stoker.settings import load_settings

if TYPE_CHECKING:
    import logging
    import socket

    from stoker.web.config import Config
    from stoker.web.keys import Keys

Function = Callable[..., Any]

# A few weeks of a busy page; the oldest part is dropped.
_LOG_SIZE: Final = 8 * 2**20
_LOGS_KEPT: Final = 2


def page_options(command: Function) -> Function:
    """Gives the command an argument `page`: the options as they were given."""

    @click.option("--host", metavar="ADDRESS", help="Listen here [127.0.0.1]; 0.0.0.0 lets other machines in.")
    @click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Listen on this port [7865]; 0: any.")
    @click.option("--cert", type=click.Path(path_type=Path), metavar="FILE", help="Certificate (PEM), for https.")
    @click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="The key of --cert.")
    @click.option("--url", metavar="URL", help="The address that people use, when a proxy is in between.")
    @click.option(
        "--name", "names", multiple=True, metavar="HOST", help="This machine is called so too. May be repeated."
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        host: str | None,
        port: int | None,
        cert: Path | None,
        key: Path | None,
        url: str | None,
        names: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        given = {"host": host, "port": port, "cert": cert, "key": key, "url": url, "names": names or None}
        return command(*args, page={name: value for name, value in given.items() if value is not None}, **rest)

    return wrapped


def page_config(page: Mapping[str, Any], queue: str | None, home: Path | None = None) -> "Config":
    """The options over the file's table `[web]`."""
    import msgspec

    from stoker.web.config import Config

    chosen = {**load_settings().web, **page}
    try:
        config = msgspec.convert({**chosen, "queue": queue, "home": home or state_home()}, Config, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise BadInputError(f"mistake in the table [web] of the configuration file: {error}") from None
    if unknown := set(chosen) - set(Config.__struct_fields__):
        raise BadInputError(f"the table [web] of the configuration file has no setting {min(unknown)!r}")
    if config.url and not config.url.startswith(("http://", "https://")):
        raise BadInputError(f"--url {config.url!r} is no address: write it like https://stoker.example.org")
    return config


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    raise ValueError(f"expected {kind.__name__}")


@contextlib.contextmanager
def until_signalled() -> Iterator[None]:
    """Whoever ends it, and how: what it started is told, and that it was ended is no failure."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        yield


def run_page(config: "Config", listener: "socket.socket") -> None:
    """Serves it until a signal comes."""
    try:
        from stoker.web.serving import serve
    except ImportError:
        raise StokerError("the page needs packages that are not installed: pip install 'stoker[web]'") from None
    import logging

    # What went wrong in the server is for whoever mends it, and strangers can make it complain: not for the terminal.
    complaints = logging.getLogger("uvicorn")
    complaints.propagate = False
    complaints.addHandler(_log_file(config.home / "page.log", "%(asctime)s %(levelname)s %(message)s"))
    requests = logging.Logger("stoker.access", logging.INFO)
    requests.addHandler(_log_file(config.home / "access.log", "%(message)s"))
    serve(config, listener, requests.info, lambda port, keys: welcome(config, port, keys))


def _log_file(path: Path, form: str) -> "logging.Handler":
    """A file that only its owner reads, and that does not grow for ever."""
    import logging.handlers

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=_LOG_SIZE, backupCount=_LOGS_KEPT, encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        raise StokerError(f"the log {path} cannot be written: {error.strerror}") from None
    # A full disk is no reason not to answer.
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # noqa: ARG005 - as logging documents it
    handler.setFormatter(logging.Formatter(form))
    return handler


def welcome(config: "Config", port: int, keys: "Keys") -> None:
    """Says where the page is, and lets a person in: by a link, and by a code for a phone's camera."""
    from stoker.web.qr import qr_code

    address = config.address(port)
    keys.remember_address(address)
    link = f"{address}/login#{keys.first().secret}"
    sys.stdout.write(f"The page is at {address}\n")
    sys.stdout.write(f"Open it with this link, once per device: {link}\n")
    if config.is_private and not config.url:
        sys.stdout.write("Only this machine can reach it; --host 0.0.0.0 lets your phone in (docs/security.md).\n")
    elif (code := qr_code(link)) is not None:
        sys.stdout.write(f"Or with a phone's camera:\n{code}\n")
    if not config.is_private and not config.is_encrypted:
        sys.stdout.write("The connection is not encrypted: use it in a network you trust, or see --cert.\n")
    sys.stdout.write("Whoever has the link can run commands as you: `stoker tokens` makes links that only show.\n")
    sys.stdout.flush()
