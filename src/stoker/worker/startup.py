"""The start of a worker: everything in the order that its parts need."""

import contextlib
from collections.abc import Callable

from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.background_fill import BackgroundFill, FillRequest
from stoker.engines.local.fork_server import ForkServer
from stoker.engines.local.shim_pool import ShimPool
from stoker.engines.options import WorkerOptions
from stoker.gpus.prober import Prober
from stoker.paths import state_home
from stoker.queue import QueueAwayError, queue_address
from stoker.worker.loop import WorkerLoop


def work(
    orders: WorkerOptions,
    tell: Callable[[str], None],
    create_queue: Callable[[], None],
    fill: FillRequest | None = None,
) -> int:
    """Works until it is told to end. `fill`: what runs on GPUs that no job needs."""
    # Before there is any connection, and before the home is taken: attendants are forks of forks of this process, and
    # one that outlives it must not keep the next worker out.
    nursery = ForkServer(orders.queue, state_home())
    filling = BackgroundFill(fill, orders, state_home(), tell) if fill is not None else None
    home = WorkerIdentity(state_home())
    # What is wrong with the queue is said now; one that is merely away is waited for.
    with contextlib.suppress(QueueAwayError):
        create_queue()
    tell(f"at work for {queue_address(orders.queue)}")
    with Prober(orders.source, deadline=orders.deadline) as prober:
        try:
            return WorkerLoop(orders, home, ShimPool(nursery), prober, tell, filling).run()
        finally:
            if filling is not None:
                filling.close()
            home.leave()
