"""`stoker cancel`: jobs that wait are cancelled, and those that run are asked to stop."""

from typing import TYPE_CHECKING, Final

import click

from stoker.cli.steering import Request, Verb, it_ended, request_options, steer

if TYPE_CHECKING:
    from stoker.queue import Job, Store


def _apply(store: "Store", ids: list[str]) -> dict[str, str]:
    did = store.cancel(ids)
    return dict.fromkeys(did.cancelled, "cancelled") | dict.fromkeys(did.asked, "asked to stop")


def _expected(job: "Job") -> str:
    return "asked to stop" if job.state == "running" else "cancelled"


CANCEL: Final = Verb(
    name="cancel",
    done="cancelled",
    among=("queued", "held", "running"),
    obstacle=lambda job, _now: it_ended(job),
    expected=_expected,
    apply=_apply,
)


@click.command("cancel")
@request_options(*CANCEL.among)
def command(request: Request) -> int:
    """Cancel jobs. One that runs is asked to stop: `stoker wait` waits until it has.

    JOB is an id, the beginning of one, or a name.
    """
    return steer(CANCEL, request)
