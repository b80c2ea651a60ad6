"""Machines of which too little can be read to stop anything."""

from tests.corpus.boards import A100_SLICE, DATA_CENTRE, SERVERS, WHOLE
from tests.corpus.healthy import neighbour
from tests.corpus.script import Draw, Fault, Script
from tests.corpus.trace import setting, trace_class


def _then_quiet(script: Script, hours: float) -> float:
    """The readings that would be there say nothing is done; when that begins."""
    begun = script.now
    script.add(hours * 3600, script.resting(), cpu=script.draw.between(0, 0.3), io=0)
    return begun


@trace_class("unknown", "The driver hangs: no call comes back for hours.", "open-gpu-kernel-modules#446, gpud#117", 6)
def hung_driver(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 2))
    begun = _then_quiet(script, draw.between(2, 5))
    script.faults.append(Fault(begun, script.now, "look", "the driver did not answer within 5s"))
    return script


@trace_class("unknown", "One GPU of the job has fallen off the bus; the others rest.", "NVSentinel#1748", 6)
def lost_gpu(draw: Draw) -> Script:
    script = Script(draw, setting(draw, SERVERS, gpus=(2, 4, 8), spare=(0,)))
    script.start()
    script.train(draw.hours(0.5, 2))
    begun = _then_quiet(script, draw.between(2, 5))
    gpu = draw.count(0, script.setting.used - 1)
    fault = Fault(begun, script.now, "gpu", "the GPU has fallen off the bus", gpu)
    script.faults.append(fault._replace(kind="gone") if draw.chance(0.4) else fault)
    return script


@trace_class(
    "unknown", "A MIG slice of an A100: no utilization, no power, no memory activity.", "DCGM#80, dcgm-exporter#216", 6
)
def slice_without_counters(draw: Draw) -> Script:
    script = Script(draw, setting(draw, (A100_SLICE,), gpus=(1, 2)))
    script.start()
    script.train(draw.hours(1, 3))
    _then_quiet(script, draw.between(2, 4))
    return script


@trace_class(
    "unknown", "In a container with pids of the host, on a GPU that somebody keeps busy.", "nvidia-docker#1483", 6
)
def foreign_pids_on_a_shared_gpu(draw: Draw) -> Script:
    script = Script(draw, setting(draw, DATA_CENTRE, gpus=(1,), listings=("foreign",), trusts=("none",), spare=(0,)))
    script.guests.append(neighbour(draw, script))
    script.start()
    script.train(draw.hours(0.5, 2))
    _then_quiet(script, draw.between(2, 5))
    return script


@trace_class("unknown", "Nothing but the names of the GPUs may be read.", "py-spy#395, NO_PERMISSION", 5)
def no_permission(draw: Draw) -> Script:
    script = Script(draw, setting(draw, listings=("hidden",)))
    script.start()
    script.train(draw.hours(0.5, 2))
    _then_quiet(script, draw.between(2, 5))
    for gpu in range(script.setting.gpus):
        script.faults.append(Fault(0.0, script.now, "look", "insufficient permissions", gpu))
    return script


@trace_class("unknown", "Values that cannot be: 9223372036854776000 %.", "gpu-monitoring-tools#152, nvtop#110", 5)
def absurd_values(draw: Draw) -> Script:
    script = Script(draw, setting(draw, gpus=(1, 1, 2), spare=(0,)))
    script.start()
    script.train(draw.hours(0.5, 2))
    begun = _then_quiet(script, draw.between(2, 5))
    reason = "the driver reported 9.22337e+18 %, which is impossible"
    script.faults.append(Fault(begun, script.now, "gpu", reason, draw.count(0, script.setting.used - 1)))
    return script


@trace_class(
    "unknown", "The source of readings is gone for hours, then back while the job works.", "dcgm-exporter#84", 5
)
def absent_source(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 2))
    begun = _then_quiet(script, draw.between(2, 5))
    script.faults.append(Fault(begun, script.now, "absent", "libnvidia-ml.so.1 cannot be loaded"))
    script.train(draw.minutes(20, 60))
    return script


@trace_class("unknown", "Looks with holes, and a clock that jumps: the machine sleeps or is overloaded.", "common", 6)
def gaps_between_looks(draw: Draw) -> Script:
    script = Script(draw, setting(draw, WHOLE, gpus=(1, 2), trusts=("none",)))
    script.start()
    script.train(draw.hours(0.5, 2))
    begun = _then_quiet(script, draw.between(3, 6))
    at = begun
    every = script.setting.every
    while at < script.now:
        hole = max(every * draw.between(5, 12), 60.0) + 10
        script.faults.append(Fault(at, at + hole, "gap"))
        seen = at + hole + every * draw.between(1.0, 4.0)
        if draw.chance(0.2):
            script.faults.append(Fault(at + hole, seen, "clock"))
        at = seen
    return script


@trace_class("unknown", "The driver answers for some minutes, then not for some minutes, for hours.", "gpud#117", 6)
def driver_comes_and_goes(draw: Draw) -> Script:
    script = Script(draw, setting(draw))
    script.start()
    script.train(draw.hours(0.5, 2))
    at = _then_quiet(script, draw.between(2, 5))
    while at < script.now:
        silent = draw.minutes(3, 10)
        script.faults.append(Fault(at, at + silent, "look", "the driver did not answer within 5s"))
        at += silent + draw.minutes(3, 12)
    return script
