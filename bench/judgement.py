"""How often Stoker's rules and those of its peers are right, on the labelled traces of tests/corpus.

A stop of a healthy job, or of one of which too little is known, is a false kill at any time. A stop of an idle or a
stalled job is right from the moment at which it will not go on by itself; before that it is a false kill too, and the
job counts as missed.
"""

import argparse
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from bench.judgement_peers import PEERS, Device, Job, Sample
from bench.table import Figure, print_figures
from stoker.actions.watcher import Watched
from stoker.actions.whose import CpuAndIo, judged_processes
from stoker.gpus.model import Reading, known
from stoker.procfs import Identity
from stoker.rules.judge import Judge
from stoker.rules.registry import policies_of
from stoker.rules.rule import Policy
from stoker.rules.samples import SamplesPolicy
from stoker.rules.scope import JobScope, MachineScope, Scope
from stoker.rules.sentinel import SentinelPolicy
from tests.corpus import HALVES, SEED, Half, Label, Trace, corpus, trace_classes
from tests.corpus.player import Moment

RUN: Final = "stoker run, defaults"
WATCH: Final = "stoker watch, defaults"
STOKER: Final = (RUN, WATCH)
# What the rules are meant to reach on the half that they were not tuned on, as a share of the traces of a label.
MOST_IDLE_MISSED: Final = 10 / 124
MOST_STALLED_MISSED: Final = 15 / 82


class Outcome(NamedTuple):
    """What one rule did with one trace."""

    rule: str
    trace: str
    of: str
    label: Label
    half: Half
    stopped: float | None
    """Hours after the start of the job."""
    right_from: float | None
    """The first such hour at which a stop is right."""
    warned: bool = False
    by: str = ""
    """The rule of Stoker that asked for the stop."""

    @property
    def is_false_kill(self) -> bool:
        return self.stopped is not None and (self.right_from is None or self.stopped < self.right_from)

    @property
    def is_missed(self) -> bool:
        return self.right_from is not None and (self.stopped is None or self.stopped < self.right_from)


class Score(NamedTuple):
    """How a rule did on many traces."""

    healthy: int = 0
    healthy_killed: int = 0
    unknown: int = 0
    unknown_killed: int = 0
    idle: int = 0
    idle_missed: int = 0
    stalled: int = 0
    stalled_missed: int = 0
    killed_early: int = 0
    """Idle and stalled jobs that were stopped while they still worked; they count as missed as well."""


def judge_trace(trace: Trace) -> list[Outcome]:
    """What Stoker and its peers do with one trace."""
    moments = list(trace.moments())
    job = job_of(trace, moments)
    found = [stoker_run(trace, moments), stoker_watch(trace, moments)]
    found += [_judged(trace, moments, name, policy, _machine(trace)) for name, policy in _dropins(trace).items()]
    found += [_outcome(trace, name, peer(job)) for name, peer in PEERS.items()]
    return found


def stoker_run(trace: Trace, moments: Sequence[Moment]) -> Outcome:
    """As the supervisor of the job judges: its own processes, with what it sees of their progress."""
    scope = JobScope({}, trace.user)
    return _judged(trace, moments, RUN, policies_of({"every": trace.setting.every}), scope)


def stoker_watch(trace: Trace, moments: Sequence[Moment]) -> Outcome:
    """As the job's user watches the machine: the GPUs, the CPU time and I/O of listed processes, and no steps."""
    policies = policies_of({"every": trace.setting.every})
    measured = {moment.look.at: moment.look.job for moment in moments}

    def meter(at: float, _listed: Set[Identity]) -> CpuAndIo:
        # It sees the sessions of the job's processes, and before the first is listed, all processes of its user.
        job = measured[at]
        return (job.cpu, job.io) if job else (None, None)

    watched = Watched("all", policies, {}, judged_processes(None, (), trace.user), meter)
    return _judged(trace, moments, WATCH, policies, watched)


def score(outcomes: Sequence[Outcome]) -> Score:
    total = Counter(outcome.label for outcome in outcomes)
    killed = Counter(outcome.label for outcome in outcomes if outcome.is_false_kill)
    missed = Counter(outcome.label for outcome in outcomes if outcome.is_missed)
    return Score(
        total["healthy"], killed["healthy"], total["unknown"], killed["unknown"], total["idle"], missed["idle"],
        total["stalled"], missed["stalled"], killed["idle"] + killed["stalled"],
    )  # fmt: skip


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


def _judged(trace: Trace, moments: Sequence[Moment], name: str, policies: Sequence[Policy], scope: Scope) -> Outcome:
    judge = Judge(policies, trace.begun, "stop the job")
    warned = False
    for moment in moments:
        judgement = judge.observe(scope.observe(moment.look))
        warned = warned or any(message.is_warning for message in judgement.messages)
        if judgement.fired:
            return _outcome(trace, name, moment.look.at, warned=warned, by=judgement.verdict.rule)
    return _outcome(trace, name, None, warned=warned)


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


def _outcome(trace: Trace, name: str, stopped: float | None, *, warned: bool = False, by: str = "") -> Outcome:
    def hours(at: float | None) -> float | None:
        return None if at is None else (at - trace.begun) / 3600

    return Outcome(
        name, trace.id, trace.of.name, trace.label, trace.half, hours(stopped), hours(trace.from_when), warned, by
    )


def _judge_part(seed: int, part: int, parts: int) -> list[Outcome]:
    return [outcome for trace in corpus(seed)[part::parts] for outcome in judge_trace(trace)]


def judge_corpus(seed: int = SEED, processes: int | None = None) -> list[Outcome]:
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


def _rules(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.rule for outcome in outcomes))


def _print_table(half: Half, outcomes: Sequence[Outcome]) -> None:
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


def _print_classes(rule: str, outcomes: Sequence[Outcome]) -> None:
    print(f"\n{rule}: every class of the corpus")
    for of in trace_classes():
        mine = [outcome for outcome in outcomes if outcome.of == of.name]
        print(f"  {of.label:8} {of.name}: {_class_in_words(mine)}\n           {of.words} ({of.source})")


def _class_in_words(outcomes: Sequence[Outcome]) -> str:
    parts = []
    for half in HALVES:
        mine = [outcome for outcome in outcomes if outcome.half == half]
        wrong = _count(mine, lambda one: one.is_false_kill)
        missed = _count(mine, lambda one: one.is_missed)
        warned = _count(mine, lambda one: one.is_missed and one.warned)
        words = f"{half} {len(mine)} traces, {wrong} killed wrongly"
        if mine and mine[0].right_from is not None:
            words += f", {missed} missed ({warned} of them warned about)"
        parts.append(words)
    return "; ".join(parts)


def _count(outcomes: Sequence[Outcome], condition: Callable[[Outcome], bool]) -> int:
    return sum(map(condition, outcomes))


def _as_data(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
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
