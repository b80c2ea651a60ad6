"""Random deaths at full size: 300 jobs and 200 kills, or as many as asked for."""

import argparse
import contextlib
import os
import random
import sys
import tempfile
from pathlib import Path

from stoker.queue import init_queue
from tests.support.havoc import Extent, Havoc
from tests.support.postgres import DURABLE, running_server
from tests.support.work_site import WorkSite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=float, default=0.15, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--sqlite", action="store_true", help="a file, and one worker")
    asked = parser.parse_args()
    with contextlib.ExitStack() as place:
        directory = Path(place.enter_context(tempfile.TemporaryDirectory(prefix="stoker-chaos-")))
        os.environ["STOKER_HOME"] = str(directory / "nobody")
        server = None if asked.sqlite else place.enter_context(running_server(DURABLE))
        url = str(directory / "queue.db") if server is None else server.create_database()
        store = place.enter_context(init_queue(url))
        site = place.enter_context(contextlib.closing(WorkSite(directory, store, queue=url)))
        extent = Extent(asked.jobs, asked.kills, asked.every, workers=1 if asked.sqlite else 2)
        havoc = Havoc(site, url, extent, asked.seed, server)
        havoc.run()
        findings = havoc.findings()
    killed = ", ".join(f"{count} × {kind}" for kind, count in sorted(havoc.killed.items()))
    sys.stdout.write(f"{asked.jobs} jobs in {havoc.seconds:.0f} s, killed: {killed}\n")
    sys.stdout.write("".join(f"{wrong}\n" for wrong in findings) or "nothing is lost\n")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
