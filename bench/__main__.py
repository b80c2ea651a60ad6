"""`make bench`: what Stoker costs, as ratios against peers in the same run; `python -m bench NAME…` runs some."""

import sys

from bench import dispatch, fill, fit, looks, page, presence, queue, startup, submit, supervisor

BENCHES = {
    "dispatch": dispatch.main,
    "fill": fill.main,
    "fit": fit.main,
    "looks": looks.main,
    "page": page.main,
    "presence": presence.main,
    "queue": queue.main,
    "startup": startup.main,
    "submit": submit.main,
    "supervisor": supervisor.main,
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(BENCHES)
    if unknown := [name for name in chosen if name not in BENCHES]:
        sys.exit(f"no such benchmark: {', '.join(unknown)} (there are: {', '.join(BENCHES)})")
    missed = sum(BENCHES[name]() for name in chosen)
    print(f"\n{missed} goal(s) missed" if missed else "\nall goals met")
    sys.exit(1 if missed else 0)
