"""`stoker why`: in one sentence, why a job is as it is."""

import sys

import click

from stoker.cli.queue_options import opened, queue_option
from stoker.cli.selection import JobName


@click.command("why")
@click.argument("job", type=JobName())
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@queue_option
def command(job: str, as_json: bool, queue_url: str | None) -> int:
    """Say why JOB (an id, the beginning of one, or a name) waits, or what became of it."""
    from stoker.queue.surroundings import why

    with opened(queue_url) as store:
        found = store.job(job)
        reason = why(store, found)
    if as_json:
        import msgspec

        told = {"job": found.id, "state": found.state, "why": reason}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
    else:
        sys.stdout.write(f"{found.id}: {reason.sentence}\n")
    return 0
