"""The screen of `stoker top`: a snapshot as lines that fit a terminal of any size."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stoker.cli.tables.table import bar, rich_text
from stoker.queue.explanation import spoken
from stoker.queue.fields import State
from stoker.queue.groups import Group
from stoker.queue.listing import GROUP_PREFIX
from stoker.queue.model import ClusterNode, GpuUse, Job, WorkerGpu
from stoker.status.job_columns import JobRow, columns_of
from stoker.status.job_text import job_label, one_line
from stoker.status.machines import cluster_gpus
from stoker.status.model import EndedJob, Level, Machine, Progress, RunningJob, Snapshot, WaitingJob
from stoker.units import clock_time, format_duration, format_memory, format_percent

AnyJob = RunningJob | WaitingJob | EndedJob


class GroupRow(msgspec.Struct, frozen=True):
    """A group instead of its jobs, or above them."""

    group: Group
    unfolded: bool = False


class MemberRow(msgspec.Struct, frozen=True):
    """A job below its group."""

    one: AnyJob


AnyRow = AnyJob | GroupRow | MemberRow


class Section(NamedTuple):
    """Rows under one heading."""

    name: str
    total: int
    """Their number, shown or not."""
    rows: Sequence[AnyRow]


_LEVELS: Final[dict[Level, str]] = {"good": "green", "attention": "yellow", "bad": "red"}
_GPU_STATES: Final[dict[GpuUse, tuple[str, str]]] = {
    "job": ("job", "green"),
    "background": ("background", "cyan"),
    "somebody": ("somebody else", "magenta"),
    "free": ("free", "yellow"),
    "unknown": ("unknown", "red"),
}
_STATES: Final[dict[State, str]] = {"failed": "red", "succeeded": "green", "cancelled": "dim", "held": "yellow"}
_HINT: Final = "q quit  ? help  Enter details  l log  c cancel  r retry  h hold  u/d move  s snooze  p pause"
# From this width on, bars fit.
_ROOM_FOR_BARS: Final = 72
UNCUT: Final = 1_000_000
"""As a width: cut nothing, for output without a terminal."""
# The share of the lines between the health and the last line.
_GPU_SHARE: Final = 0.4


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """The user's choices."""

    selected: str | None = None
    """The id of a job, or `group:NAME`."""
    place: int = 0
    """Its position among the shown jobs, in case it vanishes."""
    mine: str = ""
    """Show only jobs of this submitter."""
    unfolded: frozenset[str] = frozenset()
    """Unfolded groups."""
    note: str = ""
    """The result of the last action, or a question."""
    away: str = ""
    """Why the shown state is outdated."""


def chosen(snapshot: Snapshot, view: TopView) -> tuple[Sequence[RunningJob], Sequence[WaitingJob], Sequence[EndedJob]]:
    """The jobs that are shown."""

    def wanted(one: AnyJob) -> bool:
        return not view.mine or one.job.submitter == view.mine

    return (
        [one for one in snapshot.running if wanted(one)],
        [one for one in snapshot.waiting if wanted(one)],
        [one for one in snapshot.ended if wanted(one)],
    )


def sections(snapshot: Snapshot, view: TopView) -> list[Section]:
    """The rows of the screen: groups first, each one row until unfolded, then all other jobs."""
    parts = chosen(snapshot, view)
    names = {one.job.group for part in parts for one in part}
    groups = {group.name: group for group in snapshot.groups if group.name in names}
    running, waiting, ended = ([one for one in part if one.job.group not in groups] for part in parts)
    rows: list[AnyRow] = []
    for name, group in groups.items():
        rows.append(GroupRow(group, name in view.unfolded))
        if name in view.unfolded:
            rows += [MemberRow(one) for part in parts for one in part if one.job.group == name]
    pending = [one for one in running if one.job.is_pending]
    begun = running[: len(running) - len(pending)]
    all_pending = snapshot.pending - sum(one.job.is_pending for one in parts[0]) + len(pending)

    def alone(*states: State) -> int:
        """Number of jobs in these states outside the groups."""
        inside = sum(group.counts.get(state, 0) for group in groups.values() for state in states)
        return sum(snapshot.counts.get(state, 0) for state in states) - inside

    def section(name: str, number: int, shown: Sequence[AnyRow]) -> Section:
        return Section(name, len(shown) if view.mine else max(number, len(shown)), shown)

    return [
        *([Section("groups", len(groups), rows)] if groups else []),
        section("running", alone("running") - all_pending, begun),
        *([section("pending", all_pending, pending)] if pending else []),
        section("waiting", alone("queued", "held"), waiting),
        section("ended", alone("succeeded", "failed", "cancelled"), ended),
    ]


def key_of(row: AnyRow) -> str:
    """The identity of a row for the selection."""
    return f"{GROUP_PREFIX}{row.group.name}" if isinstance(row, GroupRow) else job_of(row).id


def job_of(row: AnyJob | MemberRow) -> Job:
    return row.one.job if isinstance(row, MemberRow) else row.job


def selected(snapshot: Snapshot, view: TopView, step: int = 0) -> TopView:
    """The view with an existing row selected, `step` lines further down."""
    ids = [key_of(row) for section in sections(snapshot, view) for row in section.rows]
    if not ids:
        return msgspec.structs.replace(view, selected=None, place=0)
    place = ids.index(view.selected) if view.selected in ids else view.place
    place = min(max(place + step, 0), len(ids) - 1)
    return msgspec.structs.replace(view, selected=ids[place], place=place)


def frame(snapshot: Snapshot, view: TopView, width: int, height: int) -> list[Text]:
    head = [_title(snapshot, view, width), *_health(snapshot, width, most=3 if height >= 30 else 1)]
    room = max(0, height - len(head) - 1)
    machines = _machines(snapshot, width, int(room * _GPU_SHARE))
    jobs = _jobs(snapshot, view, width, room - len(machines))
    return filled([*head, *machines, *jobs], view, width, height)


def filled(lines: Sequence[Text], view: TopView, width: int, height: int, hint: str = _HINT) -> list[Text]:
    """Exactly `height` lines; the last has the keys, the result of the last action, or the problem."""
    shown = [cut(line, width) for line in lines[: height - 1]]
    blank = [Text("")] * (height - 1 - len(shown))
    return [*shown, *blank, _last_line(view, width, hint)][-height:]


def whole(snapshot: Snapshot, width: int) -> list[Text]:
    """Everything, for output without a terminal."""
    view = TopView()
    head = [_title(snapshot, view, width), *_health(snapshot, width, most=100)]
    machines = [line for machine in snapshot.machines for line in _machine(machine, snapshot.now, width)]
    return [*head, *machines, *_jobs(snapshot, view, width, 10_000)]


def _last_line(view: TopView, width: int, hint: str) -> Text:
    text, style = (view.away, "red") if view.away else (view.note, "bold") if view.note else (hint, "dim")
    return cut(Text(one_line(text), style=style), width)


def cut(text: Text, width: int) -> Text:
    if width < UNCUT:
        text.truncate(width, overflow="ellipsis")
    else:
        text.rstrip()
    text.no_wrap = True
    return text


def share(room: int, wants: Sequence[int]) -> list[int]:
    """The lines of each section: as many as needed, or an equal share."""
    given = [0] * len(wants)
    while room > 0 and (hungry := [number for number, want in enumerate(wants) if given[number] < want]):
        for number in hungry[:room]:
            given[number] += 1
        room -= min(room, len(hungry))
    return given


# The parts


def _title(snapshot: Snapshot, view: TopView, width: int) -> Text:
    import time

    text = Text.assemble(
        (time.strftime("%H:%M:%S", time.localtime(snapshot.now)), "dim"), "  ", (one_line(snapshot.place), "dim")
    )
    if snapshot.simulated:
        text.append("  these GPUs are simulated", "bold magenta")
    if snapshot.paused:
        text.append("  the queue is paused", "bold yellow")
    if view.mine:
        text.append(f"  only jobs of {one_line(view.mine)}", "bold")
    return cut(text, width)


def _health(snapshot: Snapshot, width: int, most: int) -> list[Text]:
    health = snapshot.health
    lines = [Text(one_line(health.headline), style=f"bold {_LEVELS[health.level]}")]
    # A single issue is the headline already.
    points = [point for point in health.points if point.message != health.headline]
    lines += [Text(f"  {one_line(point.message)}", style=_LEVELS[point.level]) for point in points[:most]]
    if len(points) > most:
        lines[-1].append(f" (and {len(points) - most} more)")
    return [cut(line, width) for line in lines]


def _machines(snapshot: Snapshot, width: int, room: int) -> list[Text]:
    """A line per GPU if there is room, otherwise a line per machine."""
    full = [line for machine in snapshot.machines for line in _machine(machine, snapshot.now, width)]
    if len(full) <= room:
        return full
    short = [_in_short(machine, snapshot.now, width) for machine in snapshot.machines]
    if len(short) <= max(1, room):
        return short
    kept = max(1, room) - 1
    return [*short[:kept], Text(f"and {len(short) - kept} more machines", style="dim")]


def _machine(machine: Machine, now: float, width: int) -> list[Text]:
    head = Text.assemble((one_line(machine.host), "bold"), *_condition(machine, now))
    if machine.cluster:
        return [cut(_cluster(head, machine), width), *(_node(node, width) for node in machine.nodes)]
    return [cut(head, width), *(_gpu(gpu, now, width) for gpu in machine.gpus)]


def _cluster(head: Text, machine: Machine) -> Text:
    head.append(f"  cluster {one_line(machine.cluster)}")
    if machine.nodes:
        head.append(f"  {len(machine.nodes)} nodes, {cluster_gpus(machine.nodes)}", "dim")
    return head


def _node(node: ClusterNode, width: int) -> Text:
    others = max(0, node.gpus_allocated - node.own)
    used = f"{node.gpus_free} of {node.gpus} free" if node.gpus else f"{node.cpus - node.cpus_allocated} CPUs free"
    text = Text.assemble(
        f"  {_column(node.name, 12 if width < 100 else 20, width)} ",
        ("#" * node.own, "green"),
        ("#" * others, "magenta"),
        ("-" * node.gpus_free, "yellow"),
        ("x" * node.gpus_down, "red"),
        f"{' ' * max(0, 8 - node.gpus)} {_column(used, 13, UNCUT)} ",
        (_column(",".join(node.partitions), 16, width), "dim"),
    )
    if not node.available:
        text.append(f" {one_line(node.state)}", "red")
        text.append(f": {one_line(node.reason)}" if node.reason else "", "dim")
    if node.jobs:
        text.append(f" {' '.join(node.jobs)}", "green")
    return cut(text, width)


def _condition(machine: Machine, now: float) -> list[tuple[str, str]]:
    found = []
    if not machine.there:
        word = "left" if machine.left else "not seen for"
        ago = f"{spoken(now - machine.seen)}{' ago' if machine.left else ''}"
        found.append((f"  {word} {ago}", "dim" if machine.left else "red"))
    if machine.paused:
        found.append(("  paused", "yellow"))
    if machine.problem:
        found.append((f"  {one_line(machine.problem)}", "dim" if machine.absent else "red"))
    return found


def _gpu(gpu: WorkerGpu, now: float, width: int) -> Text:
    word, colour = (one_line(gpu.note.removeprefix("is ")), "cyan") if gpu.kept_for else _GPU_STATES[gpu.state]
    if gpu.quarantine:
        when = "" if gpu.quarantined_since is None else f" since {clock_time(gpu.quarantined_since, now)}"
        job = "job, " if gpu.state == "job" else ""
        word, colour = f"{job}quarantined: {one_line(gpu.quarantine)}{when}", "red"
    for_user = f" for {one_line(gpu.user)}" if gpu.user else ""
    since = f", {spoken(now - gpu.since)}" if gpu.since is not None and not gpu.quarantine else ""
    memory = "?" if gpu.memory_used is None else format_memory(gpu.memory_used)
    of = f" of {format_memory(gpu.memory_total)}" if gpu.memory_total is not None else ""
    text = Text.assemble(
        f"  {gpu.index:>2} {_column(gpu.name.removeprefix('NVIDIA '), 12 if width < 100 else 24, width)} ",
        _utilization(gpu, width),
        f" {_column(f'{memory}{of}', 17, UNCUT)} ",
        (word, colour),
        f"{for_user}{since}",
    )
    if gpu.note and gpu.state != "job" and not gpu.kept_for and not gpu.quarantine:
        text.append(f": {one_line(gpu.note)}", "dim")
    return cut(text, width)


def _utilization(gpu: WorkerGpu, width: int) -> Text:
    caption = "?" if gpu.utilization is None else format_percent(gpu.utilization)
    shown = f"{caption:>4}"
    return rich_text(bar(gpu.utilization or 0.0, shown)) if _ROOM_FOR_BARS <= width < UNCUT else Text(shown)


def _in_short(machine: Machine, now: float, width: int) -> Text:
    text = Text.assemble((_column(machine.host, 14, width), "bold"), *_condition(machine, now))
    if machine.cluster:
        return cut(_cluster(text, machine), width)
    for gpu in machine.gpus:
        shown = "?" if gpu.utilization is None or gpu.state == "unknown" else format_percent(gpu.utilization)
        text.append(f"  {gpu.index} ", "dim")
        text.append(shown, _GPU_STATES[gpu.state][1])
    return cut(text, width)


def _jobs(snapshot: Snapshot, view: TopView, width: int, room: int) -> list[Text]:
    found = sections(snapshot, view)
    given = share(room, [len(section.rows) + 1 for section in found])
    lines = []
    for section, lent in zip(found, given, strict=True):
        shown = _window(section.rows, view, lent - 1)
        if lent:
            lines.append(_heading(section, shown))
        lines += [_row(row, snapshot.now, view, width) for row in shown]
    if not any(section.rows for section in found) and len(lines) < room:
        lines.append(Text("no jobs: `stoker submit -- COMMAND` makes one", style="dim"))
    return lines


def _heading(section: Section, shown: Sequence[AnyRow]) -> Text:
    # Jobs below their group are not counted.
    counted = sum(not isinstance(row, MemberRow) for row in shown)
    hidden = f", {counted} shown" if counted < section.total else ""
    return Text(f"{section.name} ({section.total:,}{hidden})", style="dim underline", no_wrap=True)


def _window(rows: Sequence[AnyRow], view: TopView, size: int) -> Sequence[AnyRow]:
    """The rows that fit, including the selected one."""
    if size <= 0:
        return []
    place = next((number for number, row in enumerate(rows) if key_of(row) == view.selected), 0)
    first = min(max(0, place - size // 2), max(0, len(rows) - size))
    return rows[first : first + size]


def _row(row: AnyRow, now: float, view: TopView, width: int) -> Text:
    mark, style = ("> ", "reverse") if key_of(row) == view.selected else ("  ", "")
    room = min(max(14, width // 4), 48)
    match row:
        case GroupRow():
            name = _column(f"{'▾' if row.unfolded else '▸'} {one_line(row.group.name)}", room, width)
            text = Text.assemble((f"{mark}{name} {'group':8} ", style))
            text.append_text(_group_progress(row.group, width))
        case _:
            job, indent = job_of(row), "  " if isinstance(row, MemberRow) else ""
            name = _column(f"{indent}{job_label(job)}", room, width)
            text = Text.assemble((f"{mark}{name} {job.id} ", style))
            text.append_text(_of_job(row.one if isinstance(row, MemberRow) else row, now, width))
    return cut(text, width)


def _group_progress(group: Group, width: int) -> Text:
    """`12 of 15 done, 1 failed, 2 running`, with a bar if there is room."""
    share_done = group.ended / group.total if group.total else 0.0
    text = Text("")
    if _ROOM_FOR_BARS <= width < UNCUT:
        text.append_text(rich_text(bar(share_done, f"{format_percent(share_done):>4}")))
        text.append(" ")
    text.append(group.progress, _STATES["failed"] if group.counts.get("failed") else "")
    if group.at_most is not None:
        text.append(f", at most {group.at_most} at once", "dim")
    return text


def _of_job(one: AnyJob, now: float, width: int) -> Text:
    """Its state, after its name and id."""
    text = Text("")
    match one:
        case RunningJob() if one.job.is_pending:
            text.append(_column(_wanted(one.job), 9, UNCUT), "dim")
            text.append(f" pending  {one_line(one.why.word)}".rstrip(), "cyan")
            text.append(f"  {one_line(one.why.reason)}", "dim")
        case RunningJob():
            text.append(_where(one, 12 if width < 100 else 20, width))
            text.append(f" {_lasted(one.job.started, now):>6} ")
            text.append_text(_activity(one, now, width))
        case WaitingJob():
            text.append(_column(_wanted(one.job), 9, UNCUT), "dim")
            text.append(f" {'held' if one.job.state == 'held' else 'queued'}", _STATES.get(one.job.state, ""))
            text.append(f"  {one_line(one.why.word or one.why.reason)}", "dim")
        case EndedJob():
            text.append(_column(one.job.state, 10, UNCUT), _STATES.get(one.job.state, ""))
            text.append(f"{_lasted(one.job.ended, now):>6} ago  ")
            if one.stopped:
                text.append(f"{one.stopped}  ", "yellow")
            code = f"exit code {one.job.exit_code}" if one.job.exit_code else ""
            text.append(one_line(one.job.reason) or code, "dim")
    row = JobRow(job=one.job, now=now)
    for column in columns_of("top"):
        text.append(f"  {one_line(column.text(row))}", "dim")
    return text


def _activity(one: RunningJob, now: float, width: int) -> Text:
    """Its progress, or its last line."""
    snoozed = f"snoozed for {spoken(one.snoozed_until - now)}  " if one.snoozed_until is not None else ""
    text = Text(snoozed, style="")
    if one.why.word:
        text.append(f"{one.why.word}  ", "yellow")
    if one.progress is not None and one.progress.fraction is not None:
        text.append_text(progress_bar(one.progress, bars=width < UNCUT))
    else:
        text.append(one_line(one.progress.text if one.progress is not None else one.last_line), "dim")
    return text


def progress_bar(progress: Progress, *, bars: bool = True) -> Text:
    percent = "" if progress.fraction is None else format_percent(progress.fraction)
    shown = rich_text(bar(progress.fraction or 0.0, f"{percent:>4}") if bars else f"{percent:>4}")
    return Text.assemble(shown, (f" {one_line(progress.text)}", "dim"))


def _wanted(job: Job) -> str:
    if not job.gpus:
        return "no GPU"
    gpus = "1 GPU" if job.gpus == 1 else f"{job.gpus} GPUs"
    return gpus if job.memory is None else f"{job.gpus}x{format_memory(job.memory).replace(' ', '')}"


def _lasted(since: float | None, now: float) -> str:
    return "" if since is None else format_duration(max(0, round(now - since)))


def _where(one: RunningJob, width: int, of: int) -> str:
    """The machine and its GPUs; a long host name is cut, the numbers are not."""
    if one.where:
        # Its end names the nodes.
        shown = one_line(one.where)
        return _column(shown if len(shown) <= width or of >= UNCUT else f"…{shown[1 - width :]}", width, of)
    gpus = f":{','.join(one.gpus) or '-'}"
    host = _column(one.host, max(4, width - len(gpus)), of).rstrip()
    return _column(f"{host}{gpus}", width, UNCUT)


def _column(text: str, width: int, of: int) -> str:
    """Padded or cut to `width` in a line of width `of`; not cut without a terminal."""
    shown = one_line(text)
    if cell_len(shown) <= width:
        return set_cell_size(shown, width)
    return shown if of >= UNCUT else f"{set_cell_size(shown, width - 1)}…"
