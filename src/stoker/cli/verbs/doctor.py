"""`stoker doctor`: what Stoker can read on this machine, missing signals, and a harmless hang for calibration."""

import contextlib
import importlib.resources
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from stoker.cli.options.common import DURATION, open_prober, source_options
from stoker.cli.options.queue import queue_option, queue_url_of
from stoker.cli.output import count_of, json_option, note, print_json
from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, Maybe, known
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError, is_simulated_source
from stoker.gpus.spawn import forked
from stoker.gpus.visible import visible_gpus
from stoker.procfs import user_name
from stoker.rules.signals import GpuSignals, signals_of
from stoker.runs.hang_test import GRACE, RANKS, STEPS, HangTest, Measured, Shown, Times, free_gpus, run_hang_test
from stoker.runs.postmortem.stacks import NOT_INSTALLED, find_py_spy
from stoker.runs.processes.cgroup import Cgroup, NoCgroupError
from stoker.units import format_duration
from stoker.version import __version__

# Counters need an earlier look, and the driver takes about six samples a second.
_BETWEEN_LOOKS: Final = 1.0
_TORCH_PATIENCE: Final = 60.0
_HAS_TORCH: Final = (
    "import torch, torch.distributed as d; assert torch.cuda.device_count() > 1 and d.is_nccl_available()"
)
_QUEUE_PATIENCE: Final = 5.0
# Enough looks, and shorter than the ranks wait for each other.
_SHORTEST_HANG: Final = 5.0
_LONGEST_HANG: Final = 3600.0


class _Check(NamedTuple):
    """One line of the result."""

    name: str
    words: str
    is_problem: bool = False


@click.command("doctor", epilog="Exit codes: 0 when all is well, 1 when something weakens Stoker's judgement or work.")
@click.option(
    "--hang-test",
    is_flag=True,
    help="Let two ranks hang in a collective on two free GPUs, and print what the counters show, as Markdown.",
)
@click.option("--for", "lasts", type=DURATION, default="2m", metavar="DURATION", help="Duration of the hang [2m].")
@click.option("--yes", is_flag=True, help="With --hang-test: do not ask.")
@json_option()
@queue_option
@source_options
def doctor_command(
    hang_test: bool,
    lasts: float,
    yes: bool,
    as_json: bool,
    queue_url: str | None,
    source: str | None,
    deadline: float | None,
) -> int:
    """Check what Stoker can read on this machine, and report what weakens its judgement."""
    with contextlib.ExitStack() as goodbye:
        prober = open_prober(source, deadline, start=forked, sharing="no")
        goodbye.callback(prober.leave)
        try:
            prober.look()
            time.sleep(_BETWEEN_LOOKS)
            look = prober.look()
        except AbsentError as absent:
            raise StokerError(f"there is no GPU to judge by: {absent}") from None
        if hang_test:
            return _test_hang(prober, look, Times(lasts), yes, as_json)
    return _examine(look, _checks(look, queue_url), as_json)


def _examine(look: Look, checks: Sequence[_Check], as_json: bool) -> int:
    gpus = signals_of(look)
    problems = sum(len(one.weaknesses) for one in gpus) + sum(one.is_problem for one in checks)
    if as_json:
        print_json(_as_data(look, gpus, checks, problems))
    else:
        sys.stdout.write("\n".join(_lines(gpus, checks, problems)) + "\n")
    return int(problems > 0)


def _lines(gpus: Sequence[GpuSignals], checks: Sequence[_Check], problems: int) -> Iterator[str]:
    width = max(len(one.name) for one in checks)
    yield from (f"{'!' if one.is_problem else ' '} {one.name:{width}}  {one.words}" for one in checks)
    for one in gpus:
        name = one.gpu.name if known(one.gpu.name) else "unknown model"
        yield f"\n  GPU {one.gpu.index}: {name}"
        there = [f"{each.name} ({each.words})" if each.words != "yes" else each.name
                 for each in one.signals if each.is_offered]  # fmt: skip
        yield f"    reports {', '.join(there) or 'nothing'}"
        yield from (f"    no {each.name}: {each.words}" for each in one.signals if not each.is_offered)
        yield from (f"!   {weakness}" for weakness in one.weaknesses)
    yield f"\n{count_of(problems, 'problem')}" if problems else "\nall is well"


def _as_data(look: Look, gpus: Sequence[GpuSignals], checks: Sequence[_Check], problems: int) -> dict[str, Any]:
    return {
        "source": look.source,
        "problems": problems,
        "checks": [one._asdict() for one in checks],
        "gpus": [
            {
                "index": one.gpu.index,
                "uuid": one.gpu.uuid,
                "name": one.gpu.name if known(one.gpu.name) else None,
                "signals": {each.name: each.words for each in one.signals if each.is_offered},
                "missing": {each.name: each.words for each in one.signals if not each.is_offered},
                "weaknesses": list(one.weaknesses),
            }
            for one in gpus
        ],
    }


def _checks(look: Look, queue_url: str | None) -> list[_Check]:
    found = [_Check("readings", f"{look.source}, {_driver(look)}")]
    if look.problem is not None:
        found.append(_Check("problem", f"the GPUs cannot be read: {look.problem.reason}", is_problem=True))
    if look.note:
        found.append(_Check("processes", look.note, is_problem=True))
    return [*found, _cgroup(), _stacks(), _queue(queue_url)]


def _driver(look: Look) -> str:
    if is_simulated_source(look.source):
        return "simulated GPUs"
    with contextlib.suppress(OSError):
        text = Path(os.environ.get("STOKER_ROOT", "/"), "proc/driver/nvidia/version").read_text()
        if match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text):
            return f"driver {match[1]}"
    return f"Linux {platform.release()}"


def _cgroup() -> _Check:
    try:
        Cgroup.create().remove()
    except NoCgroupError as error:
        return _Check("cgroup", f"none ({error}): processes of a job are found by descent and by their environment")
    return _Check("cgroup", "a job gets one")


def _stacks() -> _Check:
    return _Check("py-spy", "reports show Python stacks" if find_py_spy() else NOT_INSTALLED)


def _queue(queue_url: str | None) -> _Check:
    from stoker.queue import open_queue, queue_address

    url = queue_url_of(queue_url)
    address = queue_address(url)
    if address.path is not None and not address.path.exists():
        return _Check("queue", "none yet: the first `stoker submit` creates it")
    try:
        with open_queue(url, _QUEUE_PATIENCE) as store:
            store.jobs.counts()
    except StokerError as error:
        return _Check("queue", f"cannot be used: {error}", is_problem=True)
    return _Check("queue", "reachable")


# The hang test


def _test_hang(prober: Prober, look: Look, times: Times, yes: bool, as_json: bool) -> int:
    if not _SHORTEST_HANG <= times.hang <= _LONGEST_HANG:
        shortest, longest = format_duration(_SHORTEST_HANG), format_duration(_LONGEST_HANG)
        raise BadInputError(f"--for {format_duration(times.hang)}: a hang test takes {shortest} to {longest}")
    visible = {gpu.uuid for gpu in visible_gpus(look.gpus, os.environ)}
    gpus = tuple(gpu for gpu in free_gpus(look) if gpu.uuid in visible)[:RANKS]
    if len(gpus) < RANKS:
        raise StokerError(
            f"a hang needs {RANKS} GPUs that nobody uses, and {len(gpus)} are free here: see `stoker gpus`"
        )
    simulated = is_simulated_source(prober.spec)
    command = _simulated_ranks(times) if simulated else _torch_ranks(times)
    if not yes:
        names = " and ".join(f"GPU {gpu.index}" for gpu in gpus)
        click.confirm(
            f"Two processes will use {names} for about {format_duration(times.work + times.hang)}: first they work, "
            "then one waits for the other. Nothing else is touched. Go on?",
            abort=True,
            err=True,
        )
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus),
        "STOKER_GPUS": prober.spec,
        "PYTHONUNBUFFERED": "1",
    }
    supervised = [
        *(sys.executable, "-m", "stoker.cli", "run", "--idle", "off", "--stalled", "off"),
        *("--max-time", f"{times.limit:.0f}s", "--grace", f"{GRACE:.0f}s", "--"),
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    found = run_hang_test(prober, gpus, [*supervised, *command], environment, times, user_name(os.getuid()), note)
    if as_json:
        print_json(_hang_as_data(found, look, times))
    else:
        sys.stdout.write("\n".join(_hang_in_markdown(found, look, times)) + "\n")
    return 0


def _simulated_ranks(times: Times) -> list[str]:
    return [
        *(sys.executable, "-m", "stoker.cli", "sim", "train", "--ranks", str(RANKS), "--hang", "nccl"),
        *("--hang-after", str(STEPS), "--steps", str(STEPS * 100), "--step", f"{times.step * 1000:.0f}ms"),
    ]


def _torch_ranks(times: Times) -> list[str]:
    script = importlib.resources.files("stoker.runs").joinpath("hang_script.py")
    return [_python_with_torch(os.environ), str(script), str(STEPS), f"{times.step:.3f}"]


def _python_with_torch(environment: Mapping[str, str]) -> str:
    """This Python, or the one on PATH."""
    for python in (sys.executable, "python", "python3"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            checked = subprocess.run(
                [python, "-c", _HAS_TORCH], env=environment, capture_output=True, timeout=_TORCH_PATIENCE, check=False
            )
            if checked.returncode == 0:
                return python
    raise StokerError(
        "the hang test needs PyTorch with CUDA and NCCL for two GPUs, in Stoker's own environment or as `python`"
    )


def _hang_in_markdown(found: HangTest, look: Look, times: Times) -> Iterator[str]:
    names = sorted({gpu.name if known(gpu.name) else "unknown model" for gpu in found.gpus})
    limit = f", power limit {found.power_limit:.0f} W" if known(found.power_limit) else ""
    libraries = f", {found.libraries}" if found.libraries else ""
    yield "### What the counters show in a hang"
    yield ""
    yield f"- {RANKS} × {' and '.join(names)}{limit}"
    yield f"- {look.source}, {_driver(look)}{libraries}, Stoker {__version__}"
    yield (
        f"- {found.looks_working} looks while both ranks worked, {found.looks_hung} while rank 0 waited for rank 1 "
        f"({format_duration(times.hang)})"
    )
    yield f"- the stalled rule {'finds this hang' if found.is_seen else 'does not find this hang'}"
    yield ""
    ranks = range(len(found.gpus))
    yield "| counter | " + " | ".join(f"rank {rank} {phase}" for rank in ranks for phase in ("works", "hangs")) + " |"
    yield "|---" * (1 + 2 * len(found.gpus)) + "|"
    missing = [one for one in found.counters if not any(map(known, (*one.working, *one.hung)))]
    for one in found.counters:
        if one in missing:
            continue
        cells = [_cell(value, one.unit) for rank in ranks for value in (one.working[rank], one.hung[rank])]
        yield f"| {one.name} | {' | '.join(cells)} |"
    if missing:
        reasons = sorted({value.reason for one in missing for value in one.hung if not known(value)})
        yield f"\nNot reported: {', '.join(one.name for one in missing)} ({'; '.join(reasons)})."


def _cell(value: Maybe[Shown], unit: str) -> str:
    """`98% (95 to 100)`."""
    if not known(value):
        return value.reason.replace("|", " ")
    factor = {"%": 100.0, "MB/s": 1e-6}.get(unit, 1.0)
    low, high = (f"{number * factor:.0f}" for number in (value.lowest, value.highest))
    median = f"{value.median * factor:.1f}" if unit == "%" else f"{value.median * factor:.0f}"
    return f"{median}{'' if unit == '%' else ' '}{unit} ({low} to {high})"


def _hang_as_data(found: HangTest, look: Look, times: Times) -> dict[str, Any]:
    return {
        "gpus": [gpu.name if known(gpu.name) else None for gpu in found.gpus],
        "power_limit": found.power_limit if known(found.power_limit) else None,
        "source": look.source,
        "driver": _driver(look),
        "libraries": found.libraries or None,
        "version": __version__,
        "seconds": {"working": times.work, "hung": times.hang},
        "looks": {"working": found.looks_working, "hung": found.looks_hung},
        "found_by_the_stalled_rule": found.is_seen,
        "counters": [_counter_as_data(one) for one in found.counters],
    }


def _counter_as_data(one: Measured) -> dict[str, Any]:
    def phase(values: Sequence[Maybe[Shown]]) -> list[dict[str, float] | None]:
        return [value._asdict() if known(value) else None for value in values]

    return {"name": one.name, "unit": one.unit, "working": phase(one.working), "hung": phase(one.hung)}
