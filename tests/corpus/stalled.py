"""Jobs that are stuck while their GPUs look busy: a collective that waits for ever, or a loop that gets nowhere."""

from collections.abc import Sequence
from typing import Final

from tests.corpus.boards import (
    A10,
    A100_40,
    A100_80,
    A6000,
    B200,
    GB10,
    GB200,
    H100,
    H200,
    L40S,
    RADEON,
    RTX_2080,
    RTX_3090,
    RTX_4090,
    SERVERS,
    T4,
    V100_PCIE,
    V100_SXM,
    WITH_MEMORY_COUNTER,
    Board,
)
from tests.corpus.healthy import SEVERAL, health_check
from tests.corpus.script import NEVER, Draw, Load, Script
from tests.corpus.trace import STEPS, setting, trace_class

AFTER: Final = (3.0, 8.0)
"""Hours that a trace goes on after its job got stuck."""


def _stuck(
    script: Script,
    loads: Load | tuple[Load, ...] | None = None,
    *,
    line_every: float = NEVER,
    collective: bool = True,
    cpu: float | None = None,
    telemetry_every: float = NEVER,
) -> Script:
    """From here on no step is made. Every rank polls on a core of its own."""
    draw = script.draw
    script.hang()
    script.add(
        draw.hours(*AFTER),
        script.spinning() if loads is None else loads,
        line_every=line_every,
        cpu=script.setting.used * draw.between(0.98, 1.06) if cpu is None else cpu,
        io=draw.between(0, 3e3),
        collective=collective,
        telemetry_every=telemetry_every,
    )
    return script


def _collective_hang(draw: Draw, boards: Sequence[Board]) -> Script:
    script = Script(draw, setting(draw, boards, gpus=SEVERAL, trusts=STEPS))
    script.start()
    script.train(draw.hours(0.4, 4))
    # Horovod and JAX have no watchdog of PyTorch.
    return _stuck(script, collective=draw.chance(0.6))


@trace_class(
    "stalled",
    "All ranks wait in a collective: 100 % at 40 to 77 W on V100, little above idle on T4.",
    "nccl#199, nccl#968, horovod#3611, pytorch#22671",
    8,
)
def hang_on_volta_and_turing(draw: Draw) -> Script:
    return _collective_hang(draw, (V100_PCIE, V100_SXM, T4, RTX_2080))


@trace_class(
    "stalled", "All ranks wait in a collective on GeForce boards, at up to 43 % of the limit.", "sglang#10489", 8
)
def hang_on_geforce(draw: Draw) -> Script:
    return _collective_hang(draw, (RTX_3090, RTX_4090))


@trace_class("stalled", "All ranks wait in a collective: A100 at about 71 W of 300 W.", "DeepSpeedExamples#310", 8)
def hang_on_ampere(draw: Draw) -> Script:
    return _collective_hang(draw, (A10, A6000, A100_40, A100_80))


@trace_class(
    "stalled", "All ranks wait in a collective: L40S at 94 to 97 W, below idle with a context.", "vllm-backport#14", 6
)
def hang_on_ada(draw: Draw) -> Script:
    return _collective_hang(draw, (L40S,))


@trace_class("stalled", "All ranks wait in a collective: H100 at about 100 W of 700 W.", "NeMo#9291, horovod#777", 8)
def hang_on_hopper(draw: Draw) -> Script:
    return _collective_hang(draw, (H100, H200))


@trace_class("stalled", "All ranks wait in a collective: GB200 at 232 to 280 W of 1200 W.", "marin#7344", 8)
def hang_on_blackwell(draw: Draw) -> Script:
    return _collective_hang(draw, (B200, GB200))


@trace_class(
    "stalled", "Some GPUs of the job at 100 %, the others at 0 %, and nothing moves.", "nccl#1033, nccl#1550", 10
)
def some_at_0_percent(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=STEPS))
    script.start()
    script.train(draw.hours(0.4, 4))
    used = script.setting.used
    spinning = draw.count(1, used - 1)
    ranks = [script.spinning() if rank < spinning else script.resting() for rank in range(used)]
    return _stuck(script, script.each(*ranks))


@trace_class(
    "stalled", "The process of one rank is gone; the others wait for it at 100 %.", "nccl#1033, horovod#777", 10
)
def dead_rank(draw: Draw) -> Script:
    kind = setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=STEPS, listings=("shares", "no shares"))
    script = Script(draw, kind)
    script.start()
    script.train(draw.hours(0.4, 4))
    dead = draw.count(0, script.setting.used - 1)
    ranks = [script.bare() if rank == dead else script.spinning() for rank in range(script.setting.used)]
    return _stuck(script, script.each(*ranks), collective=draw.chance(0.5))


@trace_class("stalled", "Stuck while a checkpoint is written: rank 0 at 0 %, the others at 100 %.", "torchtune#2093", 8)
def hang_in_a_checkpoint(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=STEPS))
    script.start()
    resting = script.everywhere(script.resting())
    for _ in range(draw.count(1, 3)):
        script.train(draw.minutes(20, 60), save_every=1e9)
        script.add(draw.between(20, 200), resting, saves=True, cpu=1.0, io=6e8)
    script.train(draw.minutes(20, 40), save_every=1e9)
    ranks = [script.resting(), *(script.spinning() for _ in range(script.setting.used - 1))]
    return _stuck(script, script.each(*ranks))


@trace_class("stalled", "Stuck while a thread goes on printing that the job is alive.", "marin#7344, PortOS#1381", 8)
def hang_with_heartbeats(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=(*STEPS, *STEPS, "output")))
    script.start()
    script.train(draw.hours(0.5, 4))
    return _stuck(script, line_every=draw.between(5, 60), collective=draw.chance(0.5))


@trace_class("stalled", "Stuck in the very first collective: no step was ever made.", "vllm-backport#14, nccl#968", 8)
def hang_at_the_first_collective(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL))
    script.start()
    return _stuck(script)


@trace_class("stalled", "Stuck after five to ten hours of work.", "nccl#1033", 6)
def hang_after_hours(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=(2, 4), trusts=STEPS))
    script.start()
    script.train(draw.hours(5, 10))
    return _stuck(script)


@trace_class(
    "stalled",
    "A loop that computes at moderate power without getting anywhere, no step any more.",
    "ClassyVision#546",
    8,
)
def livelock(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2), trusts=STEPS))
    script.start()
    script.train(draw.hours(0.5, 3))
    load = script.light(draw.between(0.97, 1.0), depth=0.3, memory=draw.between(0.0, 0.04))
    load = load._replace(watts=script.watts_of(0.15, 0.45), peak=1.0, tensor=0.0)
    return _stuck(script, load, collective=False)


@trace_class("stalled", "Stuck; of its progress only the output was ever seen, which has stopped.", "horovod#777", 8)
def hang_seen_by_output(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=("output",)))
    script.start()
    script.train(draw.hours(0.5, 4))
    return _stuck(script)


@trace_class("stalled", "Stuck; of its progress only checkpoint files were ever seen.", "nccl#306", 6)
def hang_seen_by_checkpoints(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=("checkpoint",)))
    script.start()
    script.train(draw.hours(2, 5), save_every=draw.minutes(8, 40))
    return _stuck(script)


@trace_class("stalled", "Stuck; nothing of its progress can be seen.", "nccl#306", 6)
def hang_unseen(draw: Draw) -> Script:
    kind = setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=("none",), seen=draw.chance(0.5))
    script = Script(draw, kind)
    script.start()
    script.train(draw.hours(0.5, 4))
    return _stuck(script)


@trace_class("stalled", "One node of a job with 512 GPUs, stuck for a reason on another node.", "marin#7344", 8)
def hang_of_512_gpus(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (H100, H200, B200, GB200), gpus=(8,), spare=(0,), trusts=STEPS))
    script.start()
    script.train(draw.hours(1, 4), step_every=draw.between(5, 60))
    # The watchdog of NCCL itself was silent.
    return _stuck(script, line_every=draw.one_of((30.0, NEVER)), collective=draw.chance(0.3))


@trace_class("stalled", "Stuck while the workers of the data loader fill their queues for a while.", "common", 6)
def hang_with_busy_loaders(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=STEPS))
    script.start()
    script.train(draw.hours(0.5, 3))
    script.hang()
    since = script.from_when
    spinning = script.everywhere(script.spinning())
    script.add(draw.minutes(3, 25), spinning, cpu=draw.between(4, 30), io=draw.between(1e6, 1e8), collective=True)
    _stuck(script, spinning)
    script.from_when = since
    return script


@trace_class("stalled", "Stuck on a node where a health check uses each GPU every hour.", "autopilot#75", 6)
def hang_health_checked(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=SEVERAL, trusts=STEPS, listings=("shares",)))
    script.guests.append(health_check(draw, script, 3000, 4200))
    script.start()
    script.train(draw.hours(0.5, 3))
    return _stuck(script)


@trace_class(
    "stalled",
    "Stuck on a board whose memory counter says nothing: always 0, or there is none.",
    "MEM_COPY_UTIL on GB10",
    6,
)
def hang_without_memory_counter(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (GB10, RADEON), gpus=(2, 4), trusts=STEPS))
    script.start()
    script.train(draw.hours(0.5, 3))
    return _stuck(script, collective=False)


@trace_class(
    "stalled", "Stuck, in a job that had made no step for half an hour before, in its evaluations.", "nccl#708", 8
)
def hang_after_long_evaluations(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=STEPS))
    script.start()
    waiting = script.each(script.resting(), *(script.spinning() for _ in range(script.setting.used - 1)))
    for _ in range(draw.count(1, 3)):
        script.train(draw.minutes(30, 80))
        script.add(draw.minutes(15, 45), waiting, cpu=script.setting.used + draw.between(0, 4), collective=True)
    script.train(draw.minutes(30, 80))
    return _stuck(script)


@trace_class(
    "stalled",
    "Stuck while a tracker goes on writing what the machine does into the event file that progress is read from.",
    "marin#7344: telemetry goes on",
    4,
)
def hang_with_growing_event_files(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WITH_MEMORY_COUNTER, gpus=SEVERAL, trusts=("events",)))
    script.start()
    script.train(draw.hours(0.5, 3), step_every=draw.between(1, 15))
    return _stuck(script, telemetry_every=draw.between(15, 30))
