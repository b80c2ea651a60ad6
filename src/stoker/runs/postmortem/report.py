"""The report on a stopped run: what happened, what to do next, and the evidence.

Imported only at the stop, to keep a supervisor small that runs for days.
"""

import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.gpus.model import Gpu, Maybe, Reading, Unknown, known
from stoker.gpus.report import describe, title
from stoker.logs.terminal import plain_line, plain_text
from stoker.masking import masked_command
from stoker.rules.idle import DEFAULT_WINDOW
from stoker.rules.registry import policies_of
from stoker.rules.rule import DEFAULT_EVERY, Verdict
from stoker.runs.postmortem.facts import NodeFacts, RunFacts, without_messages
from stoker.runs.postmortem.hints import hints
from stoker.runs.postmortem.outputs import Output, last_lines, last_outputs
from stoker.runs.postmortem.processes import read_processes
from stoker.runs.postmortem.ranks import Comparison, compare_ranks
from stoker.runs.postmortem.stacks import collect_stacks
from stoker.runs.postmortem.text import (
    block,
    chart,
    clipped,
    code,
    listed,
    process_tree,
    prose,
    series_of,
    stacks_as_markdown,
    where_it_was,
)
from stoker.runs.processes.signals import SignalStream
from stoker.runs.record import Ending, Journal, Record, Status
from stoker.step_file import RankSteps, read_steps
from stoker.streams import ERROR, emit
from stoker.units import capitalized, format_duration, format_memory
from stoker.version import __version__

OUTPUT_LINES: Final = 40
# The minimum for each of several files.
FEWEST_LINES: Final = 10
# Two lines of a usual terminal; the report has the whole sentence.
BRIEF_WIDTH: Final = 160
# Collecting delays the first signal by at most the interval of looks, within these limits: py-spy takes a second on a
# busy machine.
SHORTEST_PATIENCE: Final = 1.0
LONGEST_PATIENCE: Final = 10.0
ASKED_WITHIN: Final = 15.0
# The chart also shows the time before the window.
WINDOWS_SHOWN: Final = 1.5

# Markdown markup to strip.
_MARKS: Final = re.compile(r"\*\*|`|\\(?=\W)")

_TITLES: Final[dict[Ending, str]] = {
    "time limit": "Stopped: time limit reached",
    "signal": "Stopped by a signal",
    "exited": "Exited on its own",
    "could not start": "Could not be started",
    "supervisor killed": "Stopped: its supervisor was killed",
}


class Postmortem:
    """The report of one run, written in two steps: before the stop and after it."""

    def __init__(
        self,
        record: Record,
        status: Status,
        journal: Journal,
        *,
        judged: frozenset[str] | None,
        verdict: Verdict | None,
        job: str | None,
        log: Path | None,
    ) -> None:
        """`judged`: the uuids of the judged GPUs, for a run that was seen on none; None for all.

        `verdict`: the verdict of the rule that stops the run. `job` and `log`: id and log of a queued job.
        """
        self._record = record
        self._log = log
        spec = record.spec()
        policies = policies_of(spec.policy)
        self._every = min((policy.every for policy in policies), default=DEFAULT_EVERY)
        rule_window = max((policy.window for policy in policies), default=DEFAULT_WINDOW)
        lasted = time.monotonic() - verdict.since if verdict is not None and verdict.since is not None else 0.0
        window = max(rule_window, lasted) * WINDOWS_SHOWN
        self._facts = RunFacts(
            spec=spec,
            status=_ended_now(status),
            job=job,
            verdict=verdict,
            exit="being stopped",
            # Another machine of the run may request them a little after the verdict.
            looks=journal.recent(window if verdict is not None else window + ASKED_WITHIN),
            window=window,
            idle_window=rule_window,
            below=next((policy.below for policy in policies), None),
            judged=status.used or judged,
            steps=_steps(record),
            driver=_driver(),
        )

    def collect(self, pids: Sequence[int], *, hurry: SignalStream) -> None:
        """Reads processes, output and stacks within a time limit. Ctrl-C cuts it short."""
        patience = min(max(self._every, SHORTEST_PATIENCE), LONGEST_PATIENCE)
        processes = read_processes(pids)
        outputs = last_outputs(pids, self._log)
        stacks = collect_stacks(pids, deadline=patience, enough=lambda: bool(hurry.read()))
        self._facts = msgspec.structs.replace(self._facts, processes=processes, outputs=outputs, stacks=stacks)

    @property
    def facts(self) -> RunFacts:
        return self._facts

    def add_nodes(self, here: str, others: Sequence[NodeFacts]) -> None:
        """Adds the facts of the other machines. `here`: this machine's name for people."""
        self._facts = msgspec.structs.replace(self._facts, node=here, others=others)
        self.write()

    def publish(self, how: str, status: Status) -> None:
        """Completes the report with the outcome of the stop, and logs a summary."""
        self._facts = msgspec.structs.replace(self._facts, exit=how, status=_ended_now(status))
        written = self.write()
        emit(ERROR, brief(self._facts, str(self._record.report) if written else None) + "\n")

    def write(self) -> bool:
        """Writes the report. True on success."""
        if not self._record.is_kept:
            return False
        try:
            self._record.write_report(render(self._facts))
        except StokerError as error:
            emit(ERROR, f"stoker: {error}\n")
            return False
        return True


def _steps(record: Record) -> Sequence[RankSteps]:
    try:
        return read_steps(str(record.directory)) if record.is_kept else ()
    except OSError:
        return ()


def _ended_now(status: Status) -> Status:
    return msgspec.structs.replace(status, ended=time.time())


def _driver() -> Maybe[str]:
    """The driver version from the kernel module, without a driver call, which might block."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as version:  # noqa: PTH123 - a file of /proc
            return version.readline().strip()
    except OSError:
        return Unknown("there is no NVIDIA kernel driver here")


def render(facts: RunFacts) -> str:
    """The report as GitHub's Markdown."""
    ranks = compare_ranks(facts)
    sections = (
        (f"# {_title(facts)}", _verdict(facts)),
        *_evidence(facts, ranks),
        ("## What to do next", _advice(facts)),
        *_machine(facts, ranks),
        *(section for other in facts.others for section in _other_machine(other, ranks)),
        ("## Facts", _facts(facts)),
    )
    return "\n\n".join(part for section in sections for part in section) + "\n"


def _machine(facts: RunFacts, ranks: Comparison | None) -> Iterator[tuple[str, str]]:
    """The sections of one machine."""
    of = f" of {prose(facts.node)}" if facts.node else ""
    yield f"## GPUs{of}", _gpus(facts)
    yield f"## Processes{of}", block(process_tree(facts)) if facts.processes else "No process was left."
    yield f"## Stacks{of}", stacks_as_markdown(facts, ranks.suspects_on(facts.node) if ranks is not None else ())
    yield f"## Last output{of}", _output(facts)


def _other_machine(other: NodeFacts, ranks: Comparison | None) -> Iterator[tuple[str, str]]:
    if other.facts is not None:
        yield from _machine(other.facts, ranks)
    else:
        yield f"## {prose(other.node)}", f"Nothing is known of it. {prose(other.problem)}"


def brief(facts: RunFacts, path: str | None = None) -> str:
    """The report in at most eight lines, for a terminal."""
    which = f"run {facts.spec.id}: " if facts.spec.id else ""
    first = f"stoker: {which}{facts.status.reason.rstrip('. ')}; {facts.exit}"
    ranks = compare_ranks(facts) if facts.verdict is not None else None
    rest = [_MARKS.sub("", sentence) for sentence in ranks.sentences[:1]] if ranks is not None else []
    rest += [f"it was in {place}" for place in islice(where_it_was(facts), 2)]
    rest += [f"hint: {hint.title}" for hint in hints(facts)[:2]]
    if facts.status.left:
        rest.append(f"left behind: {listed(list(facts.status.left), most=3)}")
    lines = [clipped(plain_line(first), BRIEF_WIDTH), *(f"  {clipped(plain_line(line), BRIEF_WIDTH)}" for line in rest)]
    # A path must not be truncated.
    return "\n".join([*lines, *([f"  report: {plain_line(path)}"] if path else [])])


def _title(facts: RunFacts) -> str:
    if facts.verdict is not None:
        return f"Stopped: {facts.verdict.cause or facts.verdict.kind}"
    return _TITLES.get(facts.status.ending or "", "Stopped")


def _verdict(facts: RunFacts) -> str:
    sentence = prose(facts.status.reason).rstrip(".") or "The reason is unknown"
    lasted = format_duration(max((facts.status.ended or 0.0) - facts.spec.started, 0.0))
    how = prose(facts.exit).rstrip(".")
    where = listed([code(node) for node in (facts.node or facts.spec.host, *(one.node for one in facts.others))])
    return f"**{sentence}.**\n\nRun {code(facts.spec.id)} on {where}, after {lasted}: {how}."


def _evidence(facts: RunFacts, ranks: Comparison | None) -> Iterator[tuple[str, str]]:
    """The evidence for the verdict, then the comparison of ranks."""
    verdict = facts.verdict
    if verdict is None or not (verdict.evidence or ranks is not None):
        return
    lines = [f"- {prose(capitalized(line))}." for line in verdict.evidence]
    if ranks is not None:
        lines += [f"- {sentence}" for sentence in ranks.sentences]
    why = "Why this is a hang" if verdict.hang else f"Why this counts as {prose(verdict.kind)}"
    yield f"## {why if verdict.evidence else 'Its ranks'}", "\n".join(lines)


def _advice(facts: RunFacts) -> str:
    lines = []
    for number, hint in enumerate(hints(facts), 1):
        lines.append(f"{number}. **{prose(hint.title)}{'' if hint.title.endswith('?') else '.'}**")
        # An empty bullet would turn the previous line into a heading.
        lines += [f"   - {step}" for step in hint.steps if step]
    return "\n".join(lines)


def _gpus(facts: RunFacts) -> str:
    series = series_of(facts.looks, facts.judged)
    if not series:
        problem = next((look.problem.reason for look in reversed(facts.looks) if look.problem), None)
        return f"They could not be read: {prose(problem)}." if problem else "There are no readings."
    drawn = block(chart(series, facts.window, below=facts.below))
    gpus = [f"- {_gpu(gpu, reading)}" for gpu, reading in facts.last_readings()]
    return "\n\n".join([drawn, "\n".join(gpus), *_remarks(facts)])


def _gpu(gpu: Gpu, reading: Reading) -> str:
    used, total = reading.memory_used, reading.memory_total
    amount = f", {format_memory(used)} of {format_memory(total)} in use" if known(used) and known(total) else ""
    holders = [prose(describe(process)) for process in reading.processes] if known(reading.processes) else []
    held = f", held by {listed(holders, most=4)}" if holders else ""
    unread = (
        "" if known(reading.utilization) else f"; could not be read at the end: {prose(reading.utilization.reason)}"
    )
    return f"GPU {gpu.index}: {prose(title(gpu))}{amount}{held}{unread}"


def _remarks(facts: RunFacts) -> Iterator[str]:
    """Explains apparent contradictions between chart and verdict."""
    if facts.stopped_as_idle and facts.has_other_processes() and not (facts.peak() or 0.0) < facts.limit:
        yield "The chart shows all work on these GPUs, including that of others; the rule counted only this run's."
    note = facts.looks[-1].note
    if note:
        yield prose(note)


def _output(facts: RunFacts) -> str:
    """The end of each output, and reasons for missing ones."""
    texts = {output: plain_text(output.text) for output in facts.outputs if known(output.text)}
    quoted = [output for output, text in texts.items() if without_messages(text).strip()]
    lines = max(OUTPUT_LINES // max(len(quoted), 1), FEWEST_LINES)
    parts = []
    for output in quoted:
        parts += [f"{capitalized(_source(output))}:", block(last_lines(texts[output], lines))]
    empty = [_source(output) for output in texts if output not in quoted]
    if empty and not quoted:
        parts.append(f"It wrote nothing: {listed(empty)} {'is' if len(empty) == 1 else 'are'} empty.")
    elif empty:
        parts.append(f"Empty: {listed(empty)}.")
    parts += [
        f"Not available: {_source(output)}; {prose(output.text.reason)}."
        for output in facts.outputs
        if not known(output.text)
    ]
    return "\n\n".join(parts) or "Not available: no process was left."


def _source(output: Output) -> str:
    return f"{prose(output.name)} ({code(output.file)})" if output.file else prose(output.name)


def _facts(facts: RunFacts) -> str:
    """A list, since a table with a long command scrolls sideways on a phone."""
    rows = {
        "run": code(facts.spec.id),
        "command": code(masked_command(" ".join(facts.spec.command))),
        "directory": code(facts.spec.directory),
        "host": code(facts.spec.host),
        **({"nodes": prose(", ".join([facts.node, *(one.node for one in facts.others)]))} if facts.others else {}),
        "user": code(facts.spec.user),
        "started": _moment(facts.spec.started),
        "ended": _moment(facts.status.ended or 0.0),
        "rule": prose(facts.spec.rule),
        "ending": prose(facts.status.ending or "signal"),
        "driver": prose(facts.driver if known(facts.driver) else f"unknown: {facts.driver.reason}"),
        "GPU source": code(facts.looks[-1].source) if facts.looks else "none",
        "stoker": __version__,
    }
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _moment(wall: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(wall))
    except (OverflowError, ValueError, OSError):
        return "unknown"
