"""The command line: one module per verb, imported only when that verb is typed."""

import gc
import sys


def main() -> None:
    """The `stoker` command."""
    try:
        _main()
    except KeyboardInterrupt:
        sys.exit(130)  # it was still loading: later, `run` handles it


def _main() -> None:
    # Imports create no garbage; collecting it takes a tenth of the start. The verb enables it again.
    gc.disable()
    from stoker.streams import open_missing

    open_missing()
    if sys.argv[1:] == ["--version"]:
        # Before any import, because scripts and completion call it most often.
        from stoker.version import __version__

        sys.stdout.write(f"stoker {__version__}\n")
        return
    if any("://" in word for word in sys.argv):
        from stoker.cli.startup import hide_passwords
        from stoker.streams import warn

        if not hide_passwords(sys.argv[1:]):
            warn(
                "other users of this machine can see the password in --queue:"
                " set it in STOKER_QUEUE, stoker.toml or ~/.pgpass instead"
            )
    from stoker.cli.startup import helper_for

    early = helper_for(sys.argv[1:])
    from stoker.cli.app import run

    sys.exit(run(sys.argv[1:], early))
