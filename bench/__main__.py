"""`make bench`: what Stoker costs, as ratios against peers in the same run.

python -m bench [NAME…] [--quick]  run some of them, or all; --quick: smaller sizes
python -m bench … --document[=LABEL]  append the results to docs/performance.md
python -m bench compare            fail when a ratio is more than 20 % worse than in bench/baseline.json
python -m bench baseline           make the results of the last run the committed ones
"""

import itertools
import signal
import sys

from bench import (
    dispatch,
    fill,
    fit,
    fleet,
    judgement,
    looks,
    machine,
    page,
    presence,
    queue,
    scale,
    slurm,
    startup,
    supervisor,
    workers,
)
from bench.site import end_all
from bench.table import QUICK, Result, commit_baseline, compare_files, document, keep, take_printed
from stoker.runs.processes.syscalls import become_subreaper

BENCHES = {
    "dispatch": dispatch.main,
    "fill": fill.main,
    "fit": fit.main,
    "fleet": fleet.main,
    "judgement": judgement.main,
    "looks": looks.main,
    "machine": machine.main,
    "page": page.main,
    "presence": presence.main,
    "queue": queue.main,
    "scale": scale.main,
    "slurm": slurm.main,
    "startup": startup.main,
    "supervisor": supervisor.main,
    "workers": workers.main,
}

# Of rules, not of speed: run when a rule or the corpus has changed.
ONLY_BY_NAME = {"judgement"}
# Those with smaller sizes; together they take two minutes.
QUICK_ONES = ("dispatch", "machine", "startup")


def main() -> int:
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    if named == ["compare"]:
        return 1 if compare_files() else 0
    if named == ["baseline"]:
        commit_baseline()
        return 0
    chosen = named or (list(QUICK_ONES) if QUICK else [name for name in BENCHES if name not in ONLY_BY_NAME])
    if unknown := [name for name in chosen if name not in BENCHES]:
        sys.exit(f"no such benchmark: {', '.join(unknown)} (there are: {', '.join(BENCHES)})")
    missed, results = 0, list[Result]()
    become_subreaper()  # what a bench leaves behind ends here, and its processor time is counted
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in chosen:
        try:
            missed += BENCHES[name]()
        finally:
            end_all()
        results += take_printed(name)
        keep(results)
    for option in (word for word in sys.argv if word.startswith("--document")):
        document(results, option.partition("=")[2])
    if "--json" in sys.argv:
        return 0
    print(f"\n{missed} goal(s) missed" if missed else "\nall goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
