"""`make bench`: what Stoker costs, as ratios against peers in the same run.

`python -m bench NAME… [OPTION…]` runs some of them.
"""

import itertools
import sys

from bench import dispatch, fill, fit, judgement, looks, page, presence, queue, startup, submit, supervisor

BENCHES = {
    "dispatch": dispatch.main,
    "fill": fill.main,
    "fit": fit.main,
    "judgement": judgement.main,
    "looks": looks.main,
    "page": page.main,
    "presence": presence.main,
    "queue": queue.main,
    "startup": startup.main,
    "submit": submit.main,
    "supervisor": supervisor.main,
}

# Of rules, not of speed: run when a rule or the corpus has changed.
ONLY_BY_NAME = {"judgement"}

if __name__ == "__main__":
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    chosen = named or [name for name in BENCHES if name not in ONLY_BY_NAME]
    if unknown := [name for name in chosen if name not in BENCHES]:
        sys.exit(f"no such benchmark: {', '.join(unknown)} (there are: {', '.join(BENCHES)})")
    missed = sum(BENCHES[name]() for name in chosen)
    if "--json" in sys.argv:
        sys.exit(0)
    print(f"\n{missed} goal(s) missed" if missed else "\nall goals met")
    sys.exit(1 if missed else 0)
