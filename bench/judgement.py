"""How often Stoker's rules and those of its peers are right, on the labelled traces of tests/corpus.

What counts as right is in `stoker.rules.score`.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec

from bench.judgement_peers import PEERS, Device, Job, Sample
from bench.table import Figure, print_figures
from stoker.actions.watcher import Watched
from stoker.actions.whose import judged_processes
from stoker.gpus.model import Reading, known
from stoker.procfs import Identity
from stoker.rules.registry import policies_of
from stoker.rules.rule import Policy
from stoker.rules.samples import SamplesPolicy
from stoker.rules.scope import JobScope, MachineScope, Scope
from stoker.rules.score import TraceOutcome, class_in_words, first_stop, hours_after, score
from stoker.rules.sentinel import SentinelPolicy
from stoker.runs.processes.usage import ProcessUsage
from tests.corpus import HALVES, SEED, Half, Trace, corpus, trace_classes
from tests.corpus.player import Moment

RUN: Final = "stoker run, defaults"
WATCH: Final = "stoker watch, defaults"
STOKER: Final = (RUN, WATCH)
# What the rules are meant to reach on the half that they were not tuned on, as a share of the traces of a label.
MOST_IDLE_MISSED: Final = 10 / 124
MOST_STALLED_MISSED: Final = 15 / 82


def judge_trace(trace: Trace) -> list[TraceOutcome]:
    """What Stoker and its peers do with one trace."""
    moments = list(trace.moments())
    job = job_of(trace, moments)
    found = [stoker_run(trace, moments), stoker_watch(trace, moments)]
    found += [_judged(trace, moments, name, policy, _machine(trace)) for name, policy in _dropins(trace).items()]
    found += [_outcome(trace, name, peer(job)) for name, peer in PEERS.items()]
    return found


def stoker_run(trace: Trace, moments: Sequence[Moment]) -> TraceOutcome:
    """As the supervisor of the job judges: its own processes, with what it sees of their progress."""
    scope = JobScope({}, trace.user)
    return _judged(trace, moments, RUN, policies_of({"every": trace.setting.every}), scope)


def stoker_watch(trace: Trace, moments: Sequence[Moment]) -> TraceOutcome:
    """As the job's user watches the machine: the GPUs, the CPU time and I/O of listed processes, and no steps."""
    policies = policies_of({"every": trace.setting.every})
    measured = {moment.look.at: moment.look.job for moment in moments}

    def meter(at: float, _listed: Set[Identity]) -> ProcessUsage:
        # It sees the sessions of the job's processes, and before the first is listed, all processes of its user.
        job = measured[at]
        return ProcessUsage(job.cpu, job.io) if job else ProcessUsage()

    watched = Watched("all", policies, {}, judged_processes(None, (), trace.user), meter)
    return _judged(trace, moments, WATCH, policies, watched)


def job_of(trace: Trace, moments: Sequence[Moment]) -> Job:
    """What the peers are given: the GPUs of the job, and what was true inside of it."""
    seen: dict[int, tuple[Device, ...]] = {}
    used = trace.setting.used
    samples = []
    for moment in moments:
        readings = moment.look.readings
        devices = seen.get(id(readings))
        if devices is None:
            devices = seen[id(readings)] = tuple(_device(reading) for reading in readings[:used])
        samples.append(Sample(moment.look.at, devices, moment.step, moment.line, moment.collective_since))
    return Job(trace.begun, samples, trace.script.sends_heartbeats, alone=not trace.script.guests)


def _device(reading: Reading) -> Device:
    used, power, limit = reading.utilization, reading.power, reading.power_limit
    return Device(
        used.peak if known(used) else None,
        used.mean if known(used) else None,
        power / limit if known(power) and known(limit) else None,
        reading.memory_used if known(reading.memory_used) else 0,
        len(reading.processes) if known(reading.processes) else 0,
    )


def _judged(
    trace: Trace, moments: Sequence[Moment], name: str, policies: Sequence[Policy], scope: Scope
) -> TraceOutcome:
    stop = first_stop((moment.look for moment in moments), policies, scope, trace.begun)
    return _outcome(trace, name, stop.at, warned=stop.warned, by=stop.rule)


def _dropins(trace: Trace) -> dict[str, tuple[Policy, ...]]:
    """gpu_idle_timeout and GPU Sentinel with their defaults, which are counted in samples, at this trace's rhythm."""
    every = trace.setting.every
    samples = SamplesPolicy(
        every=every, sample_freq=round(every), num_samples=math.ceil(300 / every), delay_samples=math.ceil(60 / every)
    )
    # One low sample of many seconds would be less evidence than its own thirty.
    ticks = max(math.ceil(30 / every), 2)
    return {
        "gpu_idle_timeout": (samples,),
        "GPU Sentinel": (SentinelPolicy(every=every, arm_duration=ticks, kill_duration=ticks),),
    }


def _machine(trace: Trace) -> MachineScope:
    return MachineScope(",".join(str(index) for index in range(trace.setting.used)), {})


def _outcome(trace: Trace, name: str, stopped: float | None, *, warned: bool = False, by: str = "") -> TraceOutcome:
    stopped_after, right_from = (hours_after(trace.begun, at) for at in (stopped, trace.from_when))
    return TraceOutcome(name, trace.id, trace.of.name, trace.label, trace.half, stopped_after, right_from, warned, by)


def _judge_part(seed: int, part: int, parts: int) -> list[TraceOutcome]:
    return [outcome for trace in corpus(seed)[part::parts] for outcome in judge_trace(trace)]


def judge_corpus(seed: int = SEED, processes: int | None = None) -> list[TraceOutcome]:
    """All outcomes, with as many processes as there are cores."""
    parts = processes or os.cpu_count() or 1
    if parts == 1:
        return _judge_part(seed, 0, 1)
    with ProcessPoolExecutor(parts) as pool:
        found = pool.map(partial(_judge_part, seed, parts=parts * 8), range(parts * 8))
        return [outcome for part in found for outcome in part]


def main() -> int:
    options = _options()
    outcomes = judge_corpus(options.seed, options.processes)
    if options.json:
        print(msgspec.json.encode(_as_data(outcomes, options.seed)).decode())
        return 0
    for half in HALVES:
        _print_table(half, [outcome for outcome in outcomes if outcome.half == half])
    if options.by_class:
        for name in STOKER:
            _print_classes(name, [outcome for outcome in outcomes if outcome.rule == name])
    own = score([outcome for outcome in outcomes if outcome.rule == RUN and outcome.half == "held-out"])
    return print_figures(
        "stoker run on the half that it was not tuned on",
        [
            Figure("healthy jobs killed", own.healthy_killed + own.killed_early, 0, ""),
            Figure("unknown killed", own.unknown_killed, 0, ""),
            Figure("idle missed", own.idle_missed, math.floor(own.idle * MOST_IDLE_MISSED), ""),
            Figure("stalled missed", own.stalled_missed, math.floor(own.stalled * MOST_STALLED_MISSED), ""),
        ],
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench judgement", description=__doc__)
    parser.add_argument("--by-class", action="store_true", help="also each class in words, for Stoker")
    parser.add_argument("--json", action="store_true", help="all figures and classes as JSON")
    parser.add_argument("--seed", type=int, default=SEED, help="make another corpus of the same classes")
    parser.add_argument("--processes", type=int, help="how many processes judge [one per core]")
    return parser.parse_args(list(itertools.dropwhile(lambda word: not word.startswith("-"), sys.argv[1:])))


def _rules(outcomes: Sequence[TraceOutcome]) -> list[str]:
    return list(dict.fromkeys(outcome.rule for outcome in outcomes))


def _print_table(half: Half, outcomes: Sequence[TraceOutcome]) -> None:
    rules = _rules(outcomes)
    whole = score([outcome for outcome in outcomes if outcome.rule == rules[0]])
    print(
        f"\nThe {half} half: {whole.healthy} healthy, {whole.unknown} unknown, {whole.idle} idle, "
        f"{whole.stalled} stalled"
    )
    width = max(map(len, rules))
    print(f"  {'rule':{width}}  healthy killed  unknown killed  idle missed  stalled missed  killed early")
    for rule in rules:
        one = score([outcome for outcome in outcomes if outcome.rule == rule])
        print(
            f"  {rule:{width}}  {one.healthy_killed:14}  {one.unknown_killed:14}  {one.idle_missed:11}  "
            f"{one.stalled_missed:14}  {one.killed_early:12}"
        )


def _print_classes(rule: str, outcomes: Sequence[TraceOutcome]) -> None:
    print(f"\n{rule}: every class of the corpus")
    for of in trace_classes():
        mine = [outcome for outcome in outcomes if outcome.of == of.name]
        print(f"  {of.label:8} {of.name}: {_class_in_words(mine)}\n           {of.words} ({of.source})")


def _class_in_words(outcomes: Sequence[TraceOutcome]) -> str:
    halves = {half: [outcome for outcome in outcomes if outcome.half == half] for half in HALVES}
    return "; ".join(f"{half} {class_in_words(mine)}" for half, mine in halves.items())


def _as_data(outcomes: Sequence[TraceOutcome], seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "rules": {
            rule: {
                half: score([one for one in outcomes if one.rule == rule and one.half == half])._asdict()
                for half in HALVES
            }
            for rule in _rules(outcomes)
        },
        "classes": [
            {"name": of.name, "label": of.label, "words": of.words, "source": of.source, "traces": of.traces}
            for of in trace_classes()
        ],
        "outcomes": [one._asdict() for one in outcomes],
    }
