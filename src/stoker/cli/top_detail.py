"""One job on the screen of `stoker top`: why it is as it is, the attempts at it, and what it printed last."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.text import Text

from stoker.cli.top_keys import HELP
from stoker.cli.top_screen import View, cut, last_line, progress_bar
from stoker.logs.readers import directory_of, has_output
from stoker.queue.explanation import clock_time, spoken
from stoker.queue.model import Attempt
from stoker.runs.output import read_tail
from stoker.runs.transcript import harmless
from stoker.status.detail import AttemptDetail, Detail
from stoker.status.job_text import called, command_text, on_one_line

if TYPE_CHECKING:
    from stoker.queue import Store

# More than the largest terminal shows.
_TAIL: Final = 32 * 1024
_MOST_ATTEMPTS: Final = 5


def last_words(store: "Store", home: Path, attempt: Attempt) -> list[str]:
    """The lines at the end of its output, without anything that could speak to the terminal."""
    directory = directory_of(home, attempt)
    text = read_tail(directory / "output", _TAIL) if has_output(directory) else store.log(attempt.id)[-_TAIL:]
    return [on_one_line(line) for line in harmless(text).rstrip("\n").split("\n")]


def detail_frame(detail: Detail, output: Sequence[str], view: View, width: int, height: int) -> list[Text]:
    """Exactly so many lines."""
    head = [cut(line, width) for line in _about(detail)]
    room = max(0, height - 1 - len(head))
    tail = [cut(Text(line), width) for line in output[-room:]] if room else []
    blank = [Text("")] * (height - 1 - len(head) - len(tail))
    hint = View(note=view.note or "q back  l log  c cancel  r retry  h hold  u/d move  s snooze", away=view.away)
    return [*head[: height - 1], *tail, *blank, last_line(hint, width)][-height:]


def help_frame(view: View, width: int, height: int) -> list[Text]:
    lines = [Text("stoker top", style="bold"), Text("")]
    lines += [Text.assemble((f"  {keys:<10}", "bold"), does) for keys, does in HELP]
    blank = [Text("")] * (height - 1 - len(lines))
    hint = View(note=view.note or "q back", away=view.away)
    return [*(cut(line, width) for line in lines[: height - 1]), *blank, last_line(hint, width)][-height:]


def _about(detail: Detail) -> list[Text]:
    job = detail.job
    lines = [
        Text.assemble((f"{job.id}  {called(job)}", "bold")),
        Text(on_one_line(detail.why.sentence)),
        Text.assemble(("command   ", "dim"), on_one_line(command_text(job))),
        Text.assemble(("in        ", "dim"), on_one_line(job.directory)),
    ]
    facts = [f"submitted {clock_time(job.submitted, detail.now)}"]
    facts += [f"by {on_one_line(job.submitter)}"] if job.submitter else []
    facts += [f"priority {job.priority}"] if job.priority else []
    facts += [f"tagged {on_one_line(', '.join(job.tags))}"] if job.tags else []
    lines.append(Text(", ".join(facts), style="dim"))
    if job.link:
        lines.append(Text.assemble(("page      ", "dim"), on_one_line(job.link)))
    if detail.snoozed_until is not None:
        lines.append(Text(f"left alone for {spoken(detail.snoozed_until - detail.now)} more", style="yellow"))
    if detail.progress is not None:
        lines.append(progress_bar(detail.progress))
    lines += [_attempt(one, detail.now) for one in detail.attempts[-_MOST_ATTEMPTS:]]
    if detail.last is not None:
        where = "" if detail.last.whole_here else f" (its end; the whole is on {on_one_line(detail.last.host)})"
        lines.append(Text(f"output{where}", style="dim underline"))
    return lines


def _attempt(one: AttemptDetail, now: float) -> Text:
    attempt = one.attempt
    gpus = ",".join(one.gpus) or "no GPU"
    outcome = attempt.outcome or "running"
    lasted = spoken((attempt.ended if attempt.ended is not None else now) - attempt.started)
    because = f": {on_one_line(attempt.sentence)}" if attempt.sentence else ""
    return Text.assemble(
        (f"attempt {attempt.number} ", "dim"),
        f"on {on_one_line(one.host)} ({gpus}), {clock_time(attempt.started, now)}, {lasted}, ",
        (outcome, "red" if outcome in {"failed", "lost"} else "green" if outcome == "succeeded" else ""),
        because,
    )
