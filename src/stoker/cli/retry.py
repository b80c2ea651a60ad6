"""`stoker retry`: jobs that have ended wait for a GPU again, under the same id."""

from typing import TYPE_CHECKING, Final

import click

from stoker.cli.steering import Request, Verb, request_options, steer

if TYPE_CHECKING:
    from stoker.queue import Job


def _obstacle(job: "Job", now: float) -> str | None:
    match job.state:
        case "running":
            return "it is running"
        case "held":
            return "it is held (`stoker release` lets it start)"
        case "queued" if job.not_before <= now:
            return "it waits in the queue already"
    return None


RETRY: Final = Verb(
    name="retry",
    done="queued again",
    # Who retries a whole sweep means what went wrong in it, not the days of GPU time that went well.
    among=("failed", "cancelled"),
    obstacle=_obstacle,
    expected=lambda _job: "queued again",
    apply=lambda store, ids: dict.fromkeys(store.retry(ids), "queued again"),
)


@click.command("retry")
@request_options(*RETRY.among)
def command(request: Request) -> int:
    """Let jobs that ended run again, with all their retries; one that waits for its next try starts at once.

    JOB is an id, the beginning of one, or a name. --tag and --all mean those that failed or were cancelled; to repeat
    what succeeded name it, or write --state succeeded.
    """
    return steer(RETRY, request)
