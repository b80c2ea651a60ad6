"""What `stoker serve` and `stoker up` have in common: where the page listens, and what is said when it does."""

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker.errors import BadInputError, StokerError
from stoker.paths import private_directory, state_home
from stoker.settings import load_settings
from stoker.streams import OUTPUT, emit

if TYPE_CHECKING:
    import logging
    import socket

    from stoker.web.auth.keys import Keys
    from stoker.web.config import Config

Function = Callable[..., Any]

# Fields of its configuration that the page gets from elsewhere, with where those are set.
_SET_ELSEWHERE: Final = {"queue": "`queue` stands above the tables", "home": "STOKER_HOME says where it is"}


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
    if unknown := set(chosen) - (set(Config.__struct_fields__) - set(_SET_ELSEWHERE)):
        name = min(unknown)
        instead = f": {_SET_ELSEWHERE[name]}" if name in _SET_ELSEWHERE else ""
        raise BadInputError(f"the table [web] of the configuration file has no setting {name!r}{instead}")
    if config.url:
        _check_url(config.url)
    return config


def _check_url(url: str) -> None:
    """Refuses what no browser could come to the page by."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = None
    if parts is None or not parts.hostname or not url.startswith(("http://", "https://")):
        raise BadInputError(f"--url {url!r} is no address: write it like https://stoker.example.org")
    if url.rstrip("/") != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc:
        raise BadInputError(
            f"--url {url!r} is more than a host: the page cannot live below a path of another site,"
            " so write it like https://stoker.example.org"
        )


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
        from stoker.web.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stoker":
            raise
        raise StokerError("the page needs packages that are not installed: pip install 'stoker[web]'") from None
    import logging

    # What went wrong in the server is for whoever mends it, and strangers can make it complain: not for the terminal.
    complaints = _log_file(config.home / "page.log", "%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "asyncio", "stoker.web"):
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(complaints)
    requests = logging.Logger("stoker.access", logging.INFO)
    requests.addHandler(_log_file(config.home / "access.log", "%(message)s"))
    serve(config, listener, requests.info, lambda port, keys: welcome(config, port, keys))


def _log_file(path: Path, form: str) -> "logging.Handler":
    from stoker.cli.verbs.up import PrivateLog

    try:
        private_directory(path.parent)
        return PrivateLog(path, form)
    except OSError as error:
        raise StokerError(f"the log {path} cannot be written: {error.strerror}") from None


def welcome(config: "Config", port: int, keys: "Keys") -> None:
    """Says where the page is, and lets a person in: by a link, and by a code for a phone's camera."""
    from stoker.web.qr import qr_code

    address = config.address(port)
    keys.remember_address(address)
    link = f"{address}/login#{keys.first().secret}"
    emit(OUTPUT, f"The page is at {address}\n")
    emit(OUTPUT, f"Open it with this link, once per device: {link}\n")
    if config.is_private and not config.url:
        emit(OUTPUT, "Only this machine can reach it; --host 0.0.0.0 lets your phone in (docs/how-to/security.md).\n")
    elif (code := qr_code(link)) is not None:
        emit(OUTPUT, f"Or with a phone's camera:\n{code}\n")
    if not config.is_private and not config.is_encrypted:
        emit(OUTPUT, "The connection is not encrypted: use it in a network you trust, or see --cert.\n")
    emit(OUTPUT, "Whoever has the link can run commands as you: `stoker tokens` makes links that only show.\n")
