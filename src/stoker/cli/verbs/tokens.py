"""`stoker tokens`: access to the page."""

import itertools
import sys
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.output import count_of, json_option, note, print_json
from stoker.paths import state_home

if TYPE_CHECKING:
    from stoker.web.auth.keys import DeviceSession, Keys, Token


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
    token = keys.add(name or _free_name(keys, "viewer" if viewer else "operator"), "viewer" if viewer else "operator")
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


def _free_name(keys: "Keys", role: str) -> str:
    taken = {token.name for token in keys.tokens()}
    names = (role if number == 1 else f"{role}-{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


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

    columns = (
        Column("name", gives="cut"),
        Column("role"),
        Column("id"),
        Column("made", "right", left_out=2),
        Column("devices", "right", left_out=1),
        Column("last seen", "right"),
    )
    rows = [
        (token.name, token.role, token.id, _ago(token.created), str(len(devices)), _ago(_seen(token, devices)))
        for token, devices in ((token, by_token[token.id]) for token in tokens)
    ]
    print_table(columns, rows)


def _token_json(token: "Token", devices: "list[DeviceSession]") -> dict[str, object]:
    """One token as `--json` prints it: without its secret."""
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "created": token.created,
        "seen": _seen(token, devices),
        "devices": [{"agent": one.agent, "created": one.created, "seen": one.seen} for one in devices],
    }


def _seen(token: "Token", devices: "list[DeviceSession]") -> float | None:
    return max((at for at in (token.seen, *(one.seen for one in devices)) if at is not None), default=None)


def _ago(at: float | None) -> str:
    from stoker.queue.explanation import spoken

    return "never" if at is None else f"{spoken(max(0.0, time.time() - at))} ago"
