"""Jobs that hold GPUs and will not use them again."""

from typing import Final

from stoker.gpus.model import Trust
from tests.corpus.boards import A100_40, DATA_CENTRE, DESKTOPS, H100_SLICE, SERVERS, V100_PCIE, V100_SXM, WHOLE
from tests.corpus.healthy import SEVERAL, desktop, flaky, health_check, neighbour
from tests.corpus.script import MINUTE, Draw, Load, Script
from tests.corpus.trace import ANY_TRUST, setting, trace_class

_UNSEEN: Final[tuple[Trust, ...]] = ("none",)


def _quiet(script: Script, hours: float, load: Load | tuple[Load, ...] | None = None, *, cpu: float = 0.0) -> None:
    """From here on the job does nothing."""
    draw = script.draw
    script.from_when = script.now + draw.between(20, 120)
    # What is left in the process: nothing, or the threads of a tracker that report on the machine.
    threads, written = (0.03, 0.0) if draw.chance(0.6) else (0.12, draw.between(500, 2e4))
    script.add(
        hours * 3600, script.resting() if load is None else load, cpu=cpu or draw.between(0, threads), io=written
    )


@trace_class("idle", "The main process has crashed; its parent waits for workers that never end.", "pytorch#1223", 10)
def crashed_main_process(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 3))
    held = draw.chance(0.6)
    _quiet(script, draw.between(2, 6), script.resting() if held else script.everywhere_bare())
    return script


@trace_class("idle", "The script is done; the shell around it sleeps and keeps the allocation.", "jobstats#28", 8)
def finished_script(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 4))
    _quiet(script, draw.between(2, 8), script.everywhere_bare())
    return script


@trace_class(
    "idle", "A notebook that was used for a while and then forgotten, on a GPU of its own.", "kubeflow#6920", 10
)
def forgotten_notebook(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1,), trusts=_UNSEEN, seen=draw.chance(0.7)))
    _cells(script)
    _quiet(script, draw.between(2, 10))
    return script


@trace_class(
    "idle", "A forgotten notebook on a GPU where another user's job is busy.", "gpu-reaper skips shared nodes", 10
)
def forgotten_notebook_beside_a_job(draw: Draw) -> Script:
    script = Script(draw, setting(draw, DATA_CENTRE, gpus=(1,), trusts=_UNSEEN, listings=("shares",), spare=(0, 0, 1)))
    _cells(script)
    script.guests.append(neighbour(draw, script))
    _quiet(script, draw.between(2, 8))
    return script


@trace_class("idle", "A forgotten notebook on a desktop whose screen the GPU draws, at 1 to 5 %.", "common", 10)
def forgotten_notebook_on_a_desktop(draw: Draw) -> Script:
    boards = tuple(board for board in DESKTOPS if board.vendor == "nvidia")
    script = Script(draw, setting(draw, boards, gpus=(1,), trusts=_UNSEEN, listings=("shares",), spare=(0,)))
    script.guests += desktop(draw)
    _cells(script)
    _quiet(script, draw.between(2, 8))
    return script


@trace_class(
    "idle",
    "A forgotten notebook; a health check of the cluster uses its GPU every 10 to 60 minutes.",
    "autopilot#75",
    10,
)
def forgotten_notebook_health_checked(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(1, 1, 2), trusts=_UNSEEN, listings=("shares", "own")))
    script.guests.append(health_check(draw, script))
    _cells(script)
    _quiet(script, draw.between(3, 8))
    return script


@trace_class(
    "idle",
    "Done, on a machine whose driver cannot be read for up to a minute now and then.",
    "gpu-monitoring-tools#46",
    10,
)
def idle_with_flaky_driver(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 2))
    _quiet(script, draw.between(3, 7))
    script.faults += flaky(draw, script)
    return script


@trace_class("idle", "A job that never uses its GPU in 3 to 12 hours, nor CPU or disk.", "job_defense_shield", 10)
def never_used(draw: Draw) -> Script:
    script = Script(draw, setting(draw, trusts=_UNSEEN))
    script.sends_heartbeats = False
    context = draw.chance(0.4)
    script.add(draw.minutes(0.5, 3), script.everywhere_bare(), cpu=1.0, io=1e7)
    _quiet(script, draw.between(3, 12), script.resting(0.4) if context else script.everywhere_bare())
    return script


@trace_class("idle", "The workers of a data loader wait for each other; the GPU stays at 0 %.", "pytorch#1355", 10)
def loader_deadlock(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.3, 4))
    _quiet(script, draw.between(2, 6), cpu=draw.between(0.0, 0.15))
    return script


@trace_class("idle", "An inference server at rest, each of whose workers spins on a core of the CPU.", "vllm#16226", 10)
def spinning_server_at_rest(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 2, 4), trusts=("log", "output", "none")))
    script.sends_heartbeats = False
    script.start(2, 10)
    busy, rest = script.everywhere(script.training(0.3)), script.everywhere(script.resting())
    for _ in range(draw.count(4, 20)):
        script.add(draw.between(5, 200), busy, ends_step=True)
        script.add(draw.between(5, 600), rest, cpu=script.setting.used * 1.0)
    _quiet(script, draw.between(4, 9), rest, cpu=script.setting.used * draw.between(0.97, 1.03))
    return script


@trace_class(
    "idle",
    "A server whose ranks wait for the next request inside a collective: 100 % at 66 W of 300 W.",
    "GLM-130B#32, peft#194",
    8,
)
def server_at_rest_in_a_collective(draw: Draw) -> Script:
    script = Script(
        draw, setting(draw, (V100_SXM, V100_SXM, V100_PCIE, A100_40), gpus=SEVERAL, trusts=("log", "output"))
    )
    script.sends_heartbeats = False
    script.start(3, 12)
    busy, waiting = script.everywhere(script.training(0.3)), script.everywhere(script.spinning())
    for _ in range(draw.count(6, 25)):
        script.add(draw.between(5, 90), busy, ends_step=True)
        script.add(draw.between(10, 700), waiting, cpu=script.setting.used * 1.0)
    _quiet(script, draw.between(4, 8), waiting, cpu=script.setting.used * 1.0)
    return script


@trace_class("idle", "Worked, then waits for a licence, a lock or the network for ever.", "common", 8)
def waits_for_a_lock(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.3, 3))
    script.from_when = script.now + draw.between(30, 120)
    lines = draw.one_of((60.0, 600.0, 1e9))
    # A line that says that it still waits is not a step.
    script.add(
        draw.hours(2, 6), script.resting(), line_every=lines, cpu=draw.between(0.0, 0.05), io=draw.between(0, 500)
    )
    return script


@trace_class("idle", "Done; the watcher has one nvidia-smi sample every 60 seconds.", "slurm_gpu_idle_killer", 8)
def idle_sampled_seldom(draw: Draw) -> Script:
    script = Script(draw, setting(draw, samplings=("momentary",), every=60.0))
    script.start()
    script.train(draw.hours(0.5, 3))
    _quiet(script, draw.between(2, 8))
    return script


@trace_class("idle", "The job was stopped; data workers that nobody reaped hold its GPUs.", "EgoVerse#682", 6)
def orphaned_workers(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(4, 8)))
    script.start()
    script.train(draw.hours(0.5, 2))
    _quiet(script, draw.between(2, 5), script.resting(1.0), cpu=draw.between(0.0, 0.1))
    return script


@trace_class("idle", "Stopped at a breakpoint by an exception while nobody is there.", "jupyterhub-idle-culler#79", 6)
def debugger_prompt(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2), trusts=ANY_TRUST))
    script.start()
    script.train(draw.minutes(10, 80))
    _quiet(script, draw.between(2, 8))
    return script


@trace_class(
    "idle", "In a container, where the driver's pids mean nothing: done, on GPUs of its own.", "nvidia-docker#1483", 6
)
def idle_in_a_container(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (*WHOLE, H100_SLICE), listings=("foreign",), spare=(0,)))
    script.start()
    script.train(draw.hours(0.4, 2))
    _quiet(script, draw.between(2, 6))
    return script


@trace_class("idle", "Worked, then polls for something on one core of the CPU for ever.", "vllm#16226", 8)
def polls_for_ever(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 3))
    _quiet(script, draw.between(3, 8), cpu=draw.between(0.95, 1.05))
    return script


@trace_class("idle", "Done, on some GPUs of a machine whose other GPUs are busy for other users.", "jobstats#28", 8)
def idle_beside_busy_gpus(draw: Draw) -> Script:
    script = Script(draw, setting(draw, DATA_CENTRE, gpus=(1, 2, 4), spare=(1, 2, 4), listings=("shares", "no shares")))
    others = tuple(range(script.setting.used, script.setting.gpus))
    script.guests.append(neighbour(draw, script)._replace(gpus=others))
    script.start()
    script.train(draw.hours(0.5, 3))
    _quiet(script, draw.between(2, 6))
    return script


@trace_class("idle", "Done, on a MIG slice of an H100.", "DCGM#80", 6)
def idle_slice(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (H100_SLICE,), gpus=(1, 1, 2), spare=(0,)))
    script.start()
    script.train(draw.hours(0.5, 3))
    _quiet(script, draw.between(2, 6))
    return script


@trace_class("idle", "All ranks but one have ended; the last one waits for nobody at 0 %.", "mosaicml/composer#917", 6)
def last_rank_waits(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=SEVERAL))
    script.start()
    script.train(draw.hours(0.5, 3))
    gone = [script.bare() for _ in range(script.setting.used - 1)]
    _quiet(script, draw.between(2, 6), script.each(script.resting(), *gone))
    return script


def _cells(script: Script) -> None:
    """A person works in a notebook for a while."""
    draw = script.draw
    script.sends_heartbeats = False
    rest = script.everywhere(script.resting())
    for _ in range(draw.count(2, 8)):
        script.add(draw.between(5, 240), script.light(draw.between(0.2, 0.95)), cpu=1.0)
        script.add(draw.minutes(1, 12), rest, cpu=draw.between(0.0, 0.1), io=1e2)
    script.add(draw.between(10, MINUTE), script.light(0.5), cpu=1.0)
