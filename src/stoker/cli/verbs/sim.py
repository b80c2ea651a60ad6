"""`stoker sim`: loads and faults on simulated GPUs, and a simulated training."""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import click

from stoker.cli.options.common import DURATION, MEMORY
from stoker.cli.output import json_option, note, print_json
from stoker.errors import BadInputError, StokerError
from stoker.units import format_duration, format_memory, parse_fraction, parse_memory

if TYPE_CHECKING:
    from stoker.gpus.model import Unknown
    from stoker.gpus.sim.faults import Fault
    from stoker.gpus.sim.load import Phase
    from stoker.gpus.sim.machine import LoadFile, SimMachine
    from stoker.gpus.sim.process import SimulatedProcess
    from stoker.gpus.sim.ranks import Hang

# A small model: visible in a table, and many fit on a GPU.
DEFAULT_MEMORY = "1GiB"
DEFAULT_MACHINE = "sim:4"
# The kernel's limit for one write.
_LONGEST_SLEEP: Final = 86_400.0
HANGS: "Final[tuple[Hang, ...]]" = ("nccl", "loader", "livelock", "rank-dead", "gpu-lost")


@click.group("sim")
@click.option(
    "--machine",
    "spec",
    metavar="SPEC",
    help=f"The machine: sim:4, sim:2x24GiB, sim:4@DIR (default: STOKER_GPUS, then {DEFAULT_MACHINE}).",
)
@click.pass_context
def sim_command(context: click.Context, spec: str | None) -> None:
    """Put load and faults on simulated GPUs, to try rules and settings before using them on real ones.

    Every verb that reads GPUs sees the same machine when STOKER_GPUS or --source names it.
    """
    context.obj = spec


def _machine(spec: str | None) -> "SimMachine":
    """The machine of --machine, of STOKER_GPUS, or the default one."""
    from stoker.gpus.sim.machine import SimMachine, is_simulated
    from stoker.settings import load_settings

    chosen = spec or load_settings().gpus
    if spec is None and not is_simulated(chosen):
        note(f"STOKER_GPUS names no simulated machine; using {DEFAULT_MACHINE}")
        chosen = DEFAULT_MACHINE
    return SimMachine.find(chosen, os.environ)


@sim_command.command("load")
@click.option(
    "--gpu",
    "gpus",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Which GPU, within CUDA_VISIBLE_DEVICES (repeatable) [0].",
)
@click.option("--memory", metavar="MEMORY", help=f"Memory to hold on each GPU, such as 8GiB [{DEFAULT_MEMORY}].")
@click.option("--utilization", metavar="PERCENT", help="Utilization of each GPU [90%].")
@click.option("--for", "lasts", type=DURATION, metavar="DURATION", help="Duration, such as 60s [until Ctrl-C].")
@click.option(
    "--phase",
    "phases",
    multiple=True,
    metavar="PHASE",
    help="A phase, instead of --utilization; repeat for the next phase: 'busy 90% 30s', 'idle 20s', "
    "'spin 60s', 'burst 80% 0.5s/10s 60s'.",
)
@click.option("--repeat", is_flag=True, help="Start again after the last phase.")
@click.pass_obj
def load(
    spec: str | None,
    gpus: tuple[int, ...],
    memory: str | None,
    utilization: str | None,
    lasts: float | None,
    phases: tuple[str, ...],
    repeat: bool,
) -> None:
    """Run a process that uses simulated GPUs."""
    script = _script(phases, utilization, repeat)
    held = parse_memory(memory or DEFAULT_MEMORY)
    _occupy(_machine(spec), gpus or (0,), held, script, repeat, lasts)


def _script(phases: tuple[str, ...], utilization: str | None, repeat: bool) -> "tuple[Phase, ...]":
    from stoker.gpus.sim.load import busy, parse_phase

    if not phases:
        if repeat:
            raise BadInputError("--repeat needs phases to repeat: give some --phase")
        return (busy(parse_fraction(utilization)) if utilization is not None else busy(),)
    if utilization is not None:
        raise BadInputError("--utilization and --phase exclude each other: write it into the phases, as 'busy 90% 30s'")
    script = tuple(parse_phase(text) for text in phases)
    endless = next((phase for phase in script if phase.seconds is None), None)
    if endless is not None and (repeat or endless is not script[-1]):
        raise BadInputError(f"the phase '{endless}' never ends, so nothing can follow it: give it a duration")
    return script


def _occupy(
    machine: "SimMachine",
    gpus: tuple[int, ...],
    memory: int,
    phases: "tuple[Phase, ...]",
    repeat: bool,
    limit: float | None,
) -> None:
    from stoker.gpus.sim.process import SimulatedProcess

    if len(set(gpus)) != len(gpus):
        raise BadInputError("--gpu names the same GPU twice")
    # Ctrl-C ends it at once by the signal, like any program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with ExitStack() as stack:
        processes = [stack.enter_context(SimulatedProcess.attach(gpu, machine=machine)) for gpu in gpus]
        for process in processes:
            process.hold(memory)
        began = machine.clock()
        ends = [process.play(phases, repeat=repeat, start=began).end for process in processes]
        words = ", ".join(str(phase) for phase in phases)
        click.echo(
            f"pid {os.getpid()} holds {format_memory(processes[0].memory)} on "
            + ", ".join(f"GPU {process.gpu.index}" for process in processes)
            + f": {words}"
            + (", repeatedly" if repeat else "")
            + (f", for {format_duration(limit)}" if limit is not None else "")
        )
        sys.stdout.flush()
        end = min(ends[0], math.inf if limit is None else began + limit)
        while (left := end - machine.clock()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP))


@sim_command.command("fault")
@click.argument("kind", required=False)
@click.argument("argument", metavar="[FIELD|NUMBER|SECONDS]", required=False)
@click.option("--gpu", type=click.IntRange(min=0), metavar="N", help="Only this GPU of the machine [all].")
@click.option("--for", "lasts", type=DURATION, metavar="DURATION", help="Duration, such as 30s [until cleared].")
@click.option("--clear", is_flag=True, help="Remove all faults, or those of KIND or of --gpu.")
@click.pass_obj
def fault(
    spec: str | None, kind: str | None, argument: str | None, gpu: int | None, lasts: float | None, clear: bool
) -> None:
    """Make simulated GPUs fail like real ones, or remove the fault.

    \b
    lost                 the GPU is lost: nothing can be read
    unsupported FIELD    it does not report FIELD
    absurd FIELD         it reports an impossible value of FIELD
    xid NUMBER           the driver reports this XID error
    ecc [COUNT]          memory errors that could not be corrected; the GPU needs a reset
    hang [SECONDS]       every look blocks this long, or until the fault is removed
    absent               the whole machine cannot be read

    FIELD is utilization, memory, power, processes, temperature or memory_activity.
    """
    from stoker.gpus.sim.faults import add_fault, clear_faults, parse_fault

    machine = _machine(spec)
    if gpu is not None and gpu >= machine.shape.count:
        raise BadInputError(f"there is no GPU {gpu}: the machine has {machine.shape.count}, counted from 0")
    if clear:
        if argument is not None or lasts is not None:
            raise BadInputError("--clear takes at most a kind of fault and --gpu")
        removed = clear_faults(machine, kind, gpu)
        click.echo("\n".join(f"removed: {one}" for one in removed) or "there was no fault to remove")
        return
    if kind is None:
        raise BadInputError("which fault? Write lost, unsupported, absurd, xid, ecc, hang or absent, or --clear")
    added = parse_fault(kind, argument, gpu, machine.clock(), lasts)
    add_fault(machine, added)
    click.echo(f"{added}, " + (f"for {format_duration(lasts)}" if lasts else "until 'stoker sim fault --clear'"))


@sim_command.command("status")
@json_option()
@click.pass_obj
def status(spec: str | None, as_json: bool) -> None:
    """Show the machine: directory, GPUs, loads, faults."""
    from stoker.gpus.sim.faults import read_faults

    machine = _machine(spec)
    now = machine.clock()
    try:
        loads = machine.loads()
    except OSError as error:
        raise StokerError(f"{machine.loads_directory} cannot be read: {error.strerror}") from error
    faults = read_faults(machine, now)
    if as_json:
        print_json(_status_json(machine, loads, faults, now))
        return
    for line in _status_lines(machine, loads, faults, now):
        click.echo(line)


def _status_lines(
    machine: "SimMachine", loads: "tuple[LoadFile, ...]", faults: "tuple[Fault, ...] | Unknown", now: float
) -> Iterator[str]:
    total = format_memory(machine.shape.memory)
    yield f"sim:{machine.shape} in {machine.directory}"
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}: {format_memory(machine.held(gpu.index, loads))} of {total} held, {gpu.uuid}"
    for found in loads:
        for use in found.present_uses():
            phase = use.phase_at(now) or "nothing"
            yield f"load: pid {found.identity[0]} holds {format_memory(use.held())} on GPU {use.gpu}: {phase}"
    if not isinstance(faults, tuple):
        yield f"fault: {faults.reason}; 'stoker sim fault --clear' removes it"
        return
    for fault in faults:
        left = "" if fault.until is None else f", for another {format_duration(fault.until - now)}"
        yield f"fault: {fault}{left}"


def _status_json(
    machine: "SimMachine", loads: "tuple[LoadFile, ...]", faults: "tuple[Fault, ...] | Unknown", now: float
) -> dict[str, object]:
    return {
        "machine": f"sim:{machine.shape}",
        "directory": str(machine.directory),
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory": machine.shape.memory,
                "held": machine.held(gpu.index, loads),
            }
            for gpu in machine.gpus
        ],
        "loads": [
            {
                "pid": found.identity[0],
                "started": found.identity[1],
                "gpu": use.gpu,
                "held": use.held(),
                "phase": str(phase) if (phase := use.phase_at(now)) else None,
            }
            for found in loads
            for use in found.present_uses()
        ],
        # null: the file of faults is unreadable, so every reading is unknown.
        "faults": [
            {
                "kind": fault.kind,
                "gpu": fault.gpu,
                "field": fault.field,
                "seconds": fault.seconds,
                "number": fault.number,
                "left": None if fault.until is None else round(fault.until - now, 3),
            }
            for fault in faults
        ]
        if isinstance(faults, tuple)
        else None,
    }


# Redraw interval of a bar, as in tqdm.
_BETWEEN_BARS: Final = 0.2
_WIDTH: Final = 24
_BLOCKS: Final = " ▏▎▍▌▋▊▉"
_BOLD: Final = "\x1b[1m"
_GREEN: Final = "\x1b[32m"
_YELLOW: Final = "\x1b[33m"
_PLAIN: Final = "\x1b[0m"


@sim_command.command("train")
@click.option("--epochs", type=click.IntRange(1), default=3, metavar="N", help="Number of epochs [3].")
@click.option("--steps", type=click.IntRange(1), default=200, metavar="N", help="Steps per epoch [200].")
@click.option(
    "--step", "step_time", type=DURATION, default="100ms", metavar="DURATION", help="Duration of a step [100ms]."
)
@click.option("--lr", type=float, default=1e-3, metavar="RATE", help="Learning rate: how fast the loss falls [1e-3].")
@click.option(
    "--batch-size", "--batch_size", type=click.IntRange(1), default=32, metavar="N", help="Examples per step [32]."
)
@click.option("--memory", type=MEMORY, default="2GiB", metavar="SIZE", help="Memory of the model [2GiB].")
@click.option("--per-example", type=MEMORY, default="64MiB", metavar="SIZE", help="Memory per example [64MiB].")
@click.option("--fail-at", type=click.IntRange(1), metavar="STEP", help="Fail at this step of the first epoch.")
@click.option("--hang-at", type=click.IntRange(1), metavar="STEP", help="Hang at this step of the first epoch.")
@click.option(
    "--ranks", type=click.IntRange(1), metavar="N", help="Train with N processes on a GPU each; print a line per step."
)
@click.option(
    "--hang",
    type=click.Choice(HANGS),
    metavar="KIND",
    help="Hang like a distributed training: nccl, loader, livelock, rank-dead, gpu-lost. Implies --ranks 2.",
)
@click.option(
    "--hang-after", type=click.IntRange(1), default=20, metavar="STEPS", help="Number of steps before the hang [20]."
)
@click.option("--report-steps", is_flag=True, help="With --ranks: report each step by stoker.step().")
def train(
    epochs: int,
    steps: int,
    step_time: float,
    lr: float,
    batch_size: int,
    memory: int,
    per_example: int,
    fail_at: int | None,
    hang_at: int | None,
    ranks: int | None,
    hang: "Hang | None",
    hang_after: int,
    report_steps: bool,
) -> None:
    """Run a simulated training: progress bars, a falling loss, and memory that depends on the batch size.

    \b
    --hang nccl          every rank waits in a collective: 100 %, little power, memory still
    --hang loader        every rank waits for data: 0 %
    --hang livelock      as nccl at more power, and a heartbeat goes on printing
    --hang rank-dead     the last rank is killed, the others wait for it
    --hang gpu-lost      the GPU of the last rank is lost until 'stoker sim fault --clear'
    """
    from stoker.gpus.report import title
    from stoker.gpus.sim.process import SimulatedProcess

    machine = _machine(None)
    # A small rate learns slowly, a large one not at all, like a real sweep.
    speed = math.exp(-abs(math.log10(lr) + 3))
    if ranks is not None or hang is not None:
        if fail_at is not None or hang_at is not None:
            raise BadInputError("--fail-at and --hang-at need a training of one process: leave out --ranks and --hang")
        from stoker.gpus.sim.ranks import RankPlan, launch

        held = memory + batch_size * per_example
        steps_in_all = epochs * steps
        plan = RankPlan(machine.spec, ranks or 2, held, steps_in_all, step_time, speed, hang, hang_after, report_steps)
        sys.exit(launch(plan))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    loss = 2.5
    dice = random.Random(f"{lr} {steps}")  # noqa: S311 - no secret depends on it
    with ExitStack() as stack:
        gpus = [stack.enter_context(SimulatedProcess.attach(number, machine=machine)) for number in range(len(visible))]
        names = ", ".join(title(gpu.gpu) for gpu in gpus)
        sys.stdout.write(f"{_BOLD}training{_PLAIN} on {names} · lr {lr:g} · batch size {batch_size}\n")
        for gpu in gpus:
            gpu.hold(memory + batch_size * per_example)
        for epoch in range(1, epochs + 1):
            _work(gpus, 0.86 + 0.12 * dice.random())
            began, drawn = time.monotonic(), -math.inf
            for step in range(1, steps + 1):
                time.sleep(step_time)
                done = (epoch - 1) * steps + step
                loss = 0.2 + 2.3 * math.exp(-done * speed / 300) * (0.97 + 0.06 * dice.random())
                if done == fail_at:
                    sys.stdout.flush()
                    sys.stderr.write(f"\nRuntimeError: the loss is nan at step {step}: the gradient exploded\n")
                    sys.exit(1)
                if done == hang_at:
                    _hang(gpus)
                if time.monotonic() - drawn >= _BETWEEN_BARS or step == steps:
                    drawn = time.monotonic()
                    _draw(f"Epoch {epoch}/{epochs}", step, steps, drawn - began, loss)
            _work(gpus, 0.15)
            sys.stdout.write(f"\nepoch {epoch}: {_YELLOW}val loss{_PLAIN} {loss * 1.04:.4f}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{_GREEN}done{_PLAIN}: {epochs} epochs, final loss {loss:.4f}\n")


def _work(gpus: "list[SimulatedProcess]", utilization: float) -> None:
    for gpu in gpus:
        gpu.work(utilization)


def _draw(label: str, step: int, steps: int, spent: float, loss: float) -> None:
    """A bar like tqdm's."""
    whole, part = divmod(round(step / steps * _WIDTH * 8), 8)
    bar = ("█" * whole + (_BLOCKS[part] if part else "")).ljust(_WIDTH)
    rate = step / spent if spent else 0.0
    left = (steps - step) / rate if rate else 0.0
    sys.stdout.write(
        f"\r{label}: {step / steps:4.0%}|{bar}| {step}/{steps} "
        f"[{_clock(spent)}<{_clock(left)}, {rate:.2f}it/s, loss={loss:.3f}]"
    )
    sys.stdout.flush()


def _hang(gpus: "list[SimulatedProcess]") -> None:
    """Like a rank that waits for a dead one: holds memory, does no work."""
    _work(gpus, 0.0)
    sys.stdout.write("\nwaiting for rank 1 …\n")
    sys.stdout.flush()
    _all_reduce_that_never_returns()


def _all_reduce_that_never_returns() -> None:
    while True:
        time.sleep(3600)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
