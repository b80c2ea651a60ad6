"""The start of one attempt: everything on disk that it takes to find it again, then the word to its attendant."""

import shutil
import time

import msgspec
from msgspec.structs import replace

from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempt_spec import ATTEMPT_TAG, AttemptSpec
from stoker.engines.local.capacity import ResourceRequest
from stoker.engines.local.fitting import BatchSizeFit
from stoker.engines.local.gpu_tracker import GpuTracker
from stoker.engines.local.preparation import check_policy, is_fitted, prepare
from stoker.engines.local.running_attempt import RunningAttempt
from stoker.engines.local.shim_pool import ShimPool
from stoker.engines.options import WorkerOptions
from stoker.errors import BadInputError, StokerError
from stoker.fit.spec import FitSpec
from stoker.queue import Attempt, Job, queue_address
from stoker.runs.plan import OF_THE_JOB, UNWATCHED, Plan


def start(
    orders: WorkerOptions,
    home: WorkerIdentity,
    crew: ShimPool,
    machine: GpuTracker,
    job: Job,
    want: ResourceRequest,
    attempt: Attempt,
    claimed_at: float,
) -> RunningAttempt:
    """`claimed_at`: when the claim was about to be made, on the clock of leases.

    Raises BadInputError when the job itself is at fault, StokerError or OSError when the machine is; nothing runs then.
    """
    gpus = [machine.known[uuid] for uuid in attempt.gpus]
    surroundings = home.surroundings
    prepared = prepare(job, gpus, surroundings, attempt.number, present=machine.present)
    check_policy(job)
    plan = Plan(
        command=prepared.command,
        policy=job.policy,
        gpus=OF_THE_JOB if job.gpus else UNWATCHED,
        grace=orders.grace,
        max_time=job.time_limit,
        source=orders.source,
        deadline=orders.deadline,
        directory=prepared.directory,
    )
    environment = {name: value for name, value in prepared.environment.items() if surroundings.get(name) != value}
    environment[ATTEMPT_TAG] = attempt.id
    channel, keepers = crew.take()
    record = home.new_record(attempt)
    attempt_spec = AttemptSpec(
        attempt=attempt.id,
        job=job.id,
        number=attempt.number,
        queue=_address(orders.queue),
        host=home.host,
        boot=home.boot,
        keepers=keepers,
        want=want,
        plan=plan,
        environment=environment,
        without=tuple(name for name in surroundings if name not in prepared.environment),
        gpus=attempt.gpus,
        lease=orders.lease,
        lease_until=claimed_at + orders.lease,
        log_limit=orders.log_limit,
        fitting=_fitting(job, attempt.number, prepared.command, orders.rules.slots_per_gpu),
        commit=job.commit if job.pin else None,
        started=time.time(),
    )
    try:
        record.assign(attempt_spec)
        running_attempt = RunningAttempt(record, attempt_spec, channel)
        crew.engage(running_attempt)
    except (StokerError, OSError):
        # Nothing was started: nobody is to find it and take it for something that runs.
        shutil.rmtree(record.directory, ignore_errors=True)
        raise
    return running_attempt


def _fitting(job: Job, number: int, command: tuple[str, ...], slots: int) -> BatchSizeFit | None:
    if not is_fitted(job):
        return None
    try:
        wish = msgspec.convert(job.fit, FitSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(f"how job {job.id} is to be fitted cannot be understood: {error}") from None
    # Text for a shell was made words of, of which the last is the text.
    if slots > wish.terms.per_gpu:
        wish = replace(wish, terms=replace(wish.terms, per_gpu=slots))
    words = command[-1] if isinstance(job.command, str) else command
    # One that shares a GPU has promised its neighbours to stay below what it asked for.
    return BatchSizeFit(
        wish=wish, command=words, job=job.id, number=number, most_memory=job.memory if job.share else None
    )


def _address(url: str | None) -> str:
    """As it is understood also from another directory and by another environment."""
    return queue_address(url).whole
