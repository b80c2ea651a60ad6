"""`gpu_mon`: programs on idle GPUs, with the configuration file and command line of the original."""

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from stoker.dropin.common import open_prober
from stoker.errors import StokerError
from stoker.fill.claims import KILLED_LATELY
from stoker.fill.config_files import check, gpu_mon_path, read_ini
from stoker.fill.filler import Filler
from stoker.fill.status import lock
from stoker.gpus.source import AbsentError
from stoker.gpus.spawn import spawned
from stoker.paths import state_home
from stoker.streams import ERROR, OUTPUT, emit, open_missing

INTERRUPTED: Final = 130


def main() -> None:
    """The `gpu_mon` command."""
    open_missing()
    try:
        code = run(sys.argv[1:])
    except StokerError as error:
        emit(ERROR, f"gpu_mon: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_mon", description="Runs programs on GPUs while nobody else uses them.")
    parser.add_argument("-c", "--conf", metavar="FILE", default=str(gpu_mon_path()), help="default: %(default)s")
    options = parser.parse_args(arguments)
    with open_prober(spawned) as prober:
        try:
            look = prober.look()
        except AbsentError as absent:
            raise StokerError(f"{absent}: there is nothing to fill") from None
        config = read_ini(Path(options.conf).expanduser())
        check(config, look.gpus if look.problem is None else None)
        lock(state_home(), socket.gethostname(), KILLED_LATELY)
        root = Path(os.environ.get("STOKER_ROOT", "/"))
        # As with the original, the device nodes are enough.
        config = msgspec.structs.replace(config, holders_suffice=True)
        return Filler(config, prober, state_home(), _log, owner="gpu_mon", root=root).run()


def _log(message: str) -> None:
    emit(OUTPUT, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
