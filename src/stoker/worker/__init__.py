"""The worker: claims jobs for an engine and sees them through; the same for every engine."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from stoker.engines.engine import EngineModule, Log, WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.errors import StokerError
from stoker.paths import state_home
from stoker.queue import QueueAwayError, queue_address
from stoker.worker.loop import WorkerLoop


def work(
    options: WorkerOptions,
    engine_module: EngineModule,
    engine_options: Mapping[str, Any],
    log: Log,
    create_queue: Callable[[], None],
) -> int:
    """Works until a signal asks for its end."""
    # Before there is any connection, and before the home is taken: an engine may fork.
    engine = engine_module.create(options, engine_options, log)
    try:
        identity = WorkerIdentity(state_home())
    except StokerError:
        engine.close()
        raise
    try:
        # A wrong address of the queue is an error now; a queue that is away is waited for.
        with contextlib.suppress(QueueAwayError):
            create_queue()
        log(f"at work for {queue_address(options.queue)}")
        engine.open(identity)
        return WorkerLoop(options, identity, engine, log).run()
    finally:
        engine.close()
        identity.leave()
