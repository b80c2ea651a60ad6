"""The `nvidia-smi` source, for machines where NVML cannot be loaded.

It misses bursts between looks (each has one driver sample), energy, XID errors, and graphics-only processes. A query
that is stuck in the driver blocks the look, which the prober's deadline covers. If a signal ends this process during a
query, nvidia-smi continues alone until the driver releases it.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from stoker.gpus.model import (
    DeviceHealth,
    Gpu,
    Link,
    Look,
    Maybe,
    Process,
    Reading,
    Unknown,
    Utilization,
    plausible_celsius,
    plausible_fraction,
    plausible_megahertz,
    plausible_memory_total,
    plausible_memory_used,
    plausible_watts,
)
from stoker.gpus.nvidia import throttle_reasons
from stoker.gpus.processes import ProcessCache
from stoker.gpus.source import AbsentError, Source

T = TypeVar("T")

_ALWAYS: Final = (
    "index,uuid,name,pci.bus_id,"
    "utilization.gpu,memory.used,memory.total,power.draw,enforced.power.limit,temperature.gpu"
)
_MORE: Final = "utilization.memory,clocks.sm,{reasons}.active,ecc.errors.uncorrected.volatile.total"
# Most informative query first: one unknown field fails a whole query, and the field of the reasons was renamed.
_QUERIES: Final = (
    f"--query-gpu={_ALWAYS},{_MORE.format(reasons='clocks_throttle_reasons')}",
    f"--query-gpu={_ALWAYS},{_MORE.format(reasons='clocks_event_reasons')}",
    f"--query-gpu={_ALWAYS}",
)
# The number of fields after a GPU's name, in basic and extended queries.
_AFTER_NAME, _AFTER_NAME_WITH_MORE = 7, 11
_PROCESSES: Final = "--query-compute-apps=gpu_uuid,pid,used_memory"
_FORMAT: Final = "--format=csv,noheader,nounits"

# Even many GPUs need only a few kilobytes; a longer output is invalid.
_MOST_OUTPUT: Final = 2**20
# Enough for a healthy nvidia-smi to exit; one that is stuck in the driver does not exit in minutes either.
_SECONDS_TO_LEAVE: Final = 1.0
# The limit of a quoted message.
_MOST_QUOTED: Final = 200
_MIB: Final = 2**20
_MOST_MEMORY: Final = 2**50

# The documented codes for "the NVIDIA driver is not loaded" and "the NVML library could not be found".
_NO_DRIVER_CODES: Final = (9, 12)
_NO_DRIVER: Final = re.compile(
    r"couldn't communicate with the NVIDIA driver|Driver Not Loaded|couldn't find libnvidia-ml"
)
_NO_DEVICES: Final = re.compile(r"No devices were found", re.IGNORECASE)
_UNKNOWN_FIELD: Final = re.compile(r"is not a valid field to query", re.IGNORECASE)
_NO_PROCESSES: Final = re.compile(r"No running .*processes found", re.IGNORECASE)

_INDEX: Final = re.compile(r"[0-9]{1,4}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")
_MASK: Final = re.compile(r"0x[0-9a-f]{1,16}", re.IGNORECASE)
_REFUSAL: Final = re.compile(r"\[.*\]|N/A|ERR!|", re.IGNORECASE)
_BUS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_START_OF_ROW: Final = re.compile(r"([0-9]{1,4}), *(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:,|$)")
_PROCESS: Final = re.compile(r"([^,\s]+) *, *([^,]*),([^,]*)")
_MINOR: Final = re.compile(r"^Device Minor:\s*([0-9]{1,9})\s*$", re.MULTILINE)

# `topo -m` underlines its heading even in a pipe.
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
_GPU_NAME: Final = re.compile(r"GPU([0-9]{1,4})")
_NVLINK: Final = re.compile(r"NV[0-9]+")
_PCI_LINKS: Final[dict[str, Link]] = {
    "PIX": "switch", "PXB": "switch", "PHB": "node", "NODE": "node", "SYS": "system", "SOC": "system",
}  # fmt: skip

_NOT_REPORTED: Final = Unknown("nvidia-smi does not report it")
_NO_MINOR: Final = Unknown("the driver's files do not contain this GPU's device number")


def open_source(root: Path = Path("/"), argument: str = "", *, command: str = "nvidia-smi") -> Source:  # noqa: ARG001 - the signature of a source's factory
    """Opens the source. Raises AbsentError without the command, a driver or a GPU."""
    asker = _Asker(command)
    try:
        query, answer = _first_answer(asker)
    except FileNotFoundError:
        raise AbsentError(f"{command} is not on PATH") from None
    except OSError as problem:
        raise AbsentError(f"{command} cannot be started: {problem.strerror}") from None
    finally:
        asker.close()
    rows, _ = _parse(answer.text, query)
    if not rows:
        if _NO_DEVICES.search(answer.text):
            raise AbsentError(f"{command} found no GPU")
        if answer.code in _NO_DRIVER_CODES or _NO_DRIVER.search(answer.text):
            raise AbsentError(f"there is no NVIDIA driver at work here: {_failure(answer)}")
    source = NvidiaSmiSource(root, asker, query, rows)
    if len(rows) > 1:
        source.read_links()
    return source


def _first_answer(asker: "_Asker") -> "tuple[str, _Answer]":
    """The first query whose fields this version knows, with its answer."""
    *telling, plain = _QUERIES
    for query in telling:
        answer = asker.ask(query, _FORMAT)
        if not _UNKNOWN_FIELD.search(answer.text):
            return query, answer
    return plain, asker.ask(plain, _FORMAT)


class NvidiaSmiSource:
    """Runs nvidia-smi for each look, and remembers the GPUs."""

    name = "nvidia-smi"

    def __init__(self, root: Path, asker: "_Asker", query: str, rows: "list[_Row]") -> None:
        self._root = root
        self._asker = asker
        self._query = query
        self._process_cache = ProcessCache(root)
        self._gpus: dict[str, Gpu] = {}
        for row in rows:
            self._recognise(row)
        self._looked = time.monotonic()

    def read_links(self) -> None:
        """Queries the links between GPUs once, since they do not change."""
        answer = self._ask("topo", "-m")
        if isinstance(answer, Unknown):
            return
        uuids = {gpu.index: gpu.uuid for gpu in self._gpus.values()}
        for index, found in _links(answer.text).items():
            if (uuid := uuids.get(index)) is not None:
                links = tuple((uuids[other], link) for other, link in found.items() if other in uuids)
                self._gpus[uuid] = msgspec.structs.replace(self._gpus[uuid], links=links)

    def look(self) -> Look:
        self._process_cache.refresh()
        answer = self._ask(self._query, _FORMAT)
        at, wall = time.monotonic(), time.time()
        span, self._looked = at - self._looked, at
        if isinstance(answer, Unknown):
            return self._blind(answer, at, wall, span)
        rows, strays = _parse(answer.text, self._query)
        if not rows or answer.code < 0:
            return self._blind(Unknown(_failure(answer)), at, wall, span)

        complaint = _complaint(answer, strays)
        missing = "missing from nvidia-smi's list" + (f", which {complaint}" if complaint else "")
        seen = {gpu.uuid: row for row in rows if (gpu := self._recognise(row))}
        processes = self._processes(seen)
        gpus = self._in_order()
        readings = tuple(
            _reading(seen[gpu.uuid], gpu.uuid, span, processes[gpu.uuid])
            if gpu.uuid in seen
            else Reading.unknown(gpu.uuid, missing, span=span)
            for gpu in gpus
        )
        notes = [self._process_cache.note, f"nvidia-smi {complaint}." if complaint else None]
        return Look(self.name, at, wall, gpus, readings, note=" ".join(filter(None, notes)) or None)

    def close(self) -> None:
        self._asker.close()
        self._process_cache.close()

    def _ask(self, *arguments: str) -> "_Answer | Unknown":
        try:
            return self._asker.ask(*arguments)
        except _EarlierError:
            return Unknown("an earlier nvidia-smi has not ended yet")
        except OSError as problem:
            return Unknown(f"nvidia-smi cannot be started: {problem.strerror}")

    def _blind(self, problem: Unknown, at: float, wall: float, span: float) -> Look:
        gpus = self._in_order()
        readings = tuple(Reading.unknown(gpu.uuid, problem.reason, span=span) for gpu in gpus)
        return Look(self.name, at, wall, gpus, readings, problem, self._process_cache.note)

    def _in_order(self) -> tuple[Gpu, ...]:
        return tuple(sorted(self._gpus.values(), key=lambda gpu: gpu.index))

    def _recognise(self, row: "_Row") -> Gpu | None:
        """The GPU of a row. It keeps its first index."""
        bus = _bus(row.bus)
        if not row.uuid:
            # A failing GPU may not report its uuid, but has a known PCI address.
            in_slot = [gpu for gpu in self._gpus.values() if gpu.bus == bus] if isinstance(bus, str) else []
            return in_slot[0] if in_slot else None
        gpu = Gpu(row.uuid, row.number, _name(row.name), "nvidia", self._minor(bus), _memory_total(row), bus)
        before = self._gpus.get(row.uuid, gpu)
        self._gpus[row.uuid] = Gpu(
            uuid=row.uuid,
            index=before.index,
            name=_settled(before.name, gpu.name),
            vendor="nvidia",
            minor=_settled(before.minor, gpu.minor),
            memory=_settled(before.memory, gpu.memory),
            bus=_settled(before.bus, gpu.bus),
            links=before.links,
        )
        return self._gpus[row.uuid]

    def _minor(self, bus: Maybe[str]) -> Maybe[int]:
        if isinstance(bus, Unknown):
            return bus
        try:
            text = (self._root / "proc/driver/nvidia/gpus" / bus / "information").read_text(errors="replace")
        except OSError:
            return _NO_MINOR
        match = _MINOR.search(text)
        return int(match[1]) if match else _NO_MINOR

    def _processes(self, seen: "Mapping[str, _Row]") -> dict[str, Maybe[tuple[Process, ...]]]:
        """The processes on each GPU; unknown for all if a line is invalid, since it may belong to any GPU."""
        answer = self._ask(_PROCESSES, _FORMAT)
        if isinstance(answer, Unknown):
            return dict.fromkeys(seen, answer)
        if answer.code != 0:
            return dict.fromkeys(seen, Unknown(_failure(answer)))
        found: dict[str, Maybe[tuple[Process, ...]]] = dict.fromkeys(seen, ())
        for line in answer.text.splitlines():
            if not line.strip() or _NO_PROCESSES.search(line):
                continue
            match = _PROCESS.fullmatch(line.strip())
            if not match or match[1] not in seen:
                return dict.fromkeys(seen, Unknown(f"nvidia-smi said: {_quoted(line)}"))
            uuid, others = match[1], found[match[1]]
            pid = _number(match[2], _pid)
            if isinstance(pid, Unknown):
                found[uuid] = Unknown(f"nvidia-smi said: {_quoted(line)}")
            elif not isinstance(others, Unknown):
                memory = _memory_used(match[3], _memory_total(seen[uuid]))
                found[uuid] = (*others, self._process_cache.process(pid, memory, _NOT_REPORTED))
        return found


class _Row(NamedTuple):
    """A row of a GPU with unparsed fields."""

    number: int
    uuid: str
    """Empty if the GPU did not report it."""
    fault: str | None
    """Why this row is unusable."""
    name: str
    bus: str
    utilization: str
    memory_used: str
    memory_total: str
    power: str
    power_limit: str
    temperature: str
    memory_activity: str | None = None
    """None, like the following, if this version of nvidia-smi lacks the field."""
    sm_clock: str | None = None
    throttling: str | None = None
    uncorrected: str | None = None


def _parse(text: str, query: str) -> tuple[list[_Row], list[str]]:
    """The rows of GPUs in an answer, and all other lines."""
    after_name = _AFTER_NAME if query == _QUERIES[-1] else _AFTER_NAME_WITH_MORE
    rows: list[_Row] = []
    strays: list[str] = []
    for line in text.splitlines(keepends=True):
        row = _parse_row(line, after_name)
        if row is not None:
            rows.append(row)
        elif line.strip():
            strays.append(line)
    return rows, strays


def _parse_row(line: str, after_name: int) -> _Row | None:
    """The row of a line, with a fault if only its beginning is valid."""
    # A name may contain commas, so later fields are counted from the right.
    left = line.split(",", 2)
    right = left[-1].rsplit(",", after_name)
    if line.endswith("\n") and len(left) == 3 and len(right) == after_name + 1:
        number, uuid, bus = left[0].strip(), left[1].strip(), right[1].strip()
        if _INDEX.fullmatch(number) and (_BUS.fullmatch(bus) or _REFUSAL.fullmatch(bus)):
            if _REFUSAL.fullmatch(uuid):
                return _Row(int(number), "", f"nvidia-smi said {uuid or 'nothing'} for its uuid", *right)
            return _Row(int(number), uuid, None, *right)
    start = _START_OF_ROW.match(line.strip())
    if not start:
        return None
    fault = f"nvidia-smi's line about it makes no sense: {_quoted(line)}"
    return _Row(int(start[1]), start[2], fault, *[""] * 8)


def _links(text: str) -> dict[int, dict[int, Link]]:
    """Parses the matrix of `topo -m`: a heading with all devices, then a line per GPU with a cell for each device."""
    heading: list[str] = []
    found: dict[int, dict[int, Link]] = {}
    for line in text.splitlines():
        words = _ESCAPE.sub("", line).split()
        if words[:2] == ["GPU0", "GPU1"]:
            heading = words
        elif words and (row := _GPU_NAME.fullmatch(words[0])):
            columns = [(_GPU_NAME.fullmatch(name), cell) for name, cell in zip(heading, words[1:], strict=False)]
            links = {int(column[1]): _link(cell) for column, cell in columns if column}
            found[int(row[1])] = {index: link for index, link in links.items() if link is not None}
    return found


def _link(cell: str) -> Link | None:
    """The link of a cell; None for the GPU itself and for unknown values."""
    return "nvlink" if _NVLINK.fullmatch(cell) else _PCI_LINKS.get(cell)


def _reading(row: _Row, uuid: str, span: float, processes: Maybe[tuple[Process, ...]]) -> Reading:
    if row.fault:
        return Reading.unknown(uuid, row.fault, span=span)
    total = _memory_total(row)
    return Reading(
        uuid=uuid,
        span=span,
        utilization=_number(row.utilization, _one_sample),
        memory_used=_memory_used(row.memory_used, total),
        memory_total=total,
        power=_number(row.power, plausible_watts),
        power_limit=_number(row.power_limit, plausible_watts),
        energy=_NOT_REPORTED,
        temperature=_number(row.temperature, plausible_celsius),
        processes=processes,
        pipes=_NOT_REPORTED,
        memory_activity=_offered(row.memory_activity, lambda text: _number(text, _one_sample)),
        sm_clock=_offered(row.sm_clock, lambda text: _number(text, plausible_megahertz)),
        throttling=_offered(row.throttling, _throttling),
        health=_offered(row.uncorrected, _health),
    )


def _offered(text: str | None, read: Callable[[str], Maybe[T]]) -> Maybe[T]:
    return _NOT_REPORTED if text is None else read(text)


def _throttling(text: str) -> Maybe[tuple[str, ...]]:
    written = text.strip()
    return throttle_reasons(int(written, 16)) if _MASK.fullmatch(written) else _refused(written)


def _health(uncorrected: str) -> Maybe[DeviceHealth]:
    count = _number(uncorrected, lambda value: int(value) if value >= 0 else Unknown(f"{value:g} is not a count"))
    return DeviceHealth((), count, _NOT_REPORTED, _NOT_REPORTED)


def _number(text: str, judge: Callable[[float], Maybe[T]]) -> Maybe[T]:
    """The number in a field, if plausible."""
    written = text.strip()
    return judge(float(written)) if _NUMBER.fullmatch(written) else _refused(written)


def _refused(text: str) -> Unknown:
    return Unknown(f"nvidia-smi said {_quoted(text) or 'nothing'}")


def _one_sample(percent: float) -> Maybe[Utilization]:
    share = plausible_fraction(percent)
    return share if isinstance(share, Unknown) else Utilization(peak=share, mean=share, samples=1)


def _memory_total(row: _Row) -> Maybe[int]:
    return _number(row.memory_total, lambda mib: plausible_memory_total(int(mib * _MIB)))


def _memory_used(text: str, total: Maybe[int]) -> Maybe[int]:
    # With an unknown size of the GPU (unified memory), a blank value must still be rejected.
    most = _MOST_MEMORY if isinstance(total, Unknown) else total
    return _number(text, lambda mib: plausible_memory_used(int(mib * _MIB), most))


def _pid(value: float) -> Maybe[int]:
    return int(value) if value > 0 and value.is_integer() else Unknown(f"{value:g} is not a pid")


def _settled(before: Maybe[T], now: Maybe[T]) -> Maybe[T]:
    """The property of a GPU. It does not change, so a known value stays while the GPU fails."""
    return now if isinstance(before, Unknown) else before


def _name(text: str) -> Maybe[str]:
    return _refused(text) if _REFUSAL.fullmatch(text.strip()) else _quoted(text)


def _bus(text: str) -> Maybe[str]:
    """The PCI address in the kernel's form: nvidia-smi pads the domain to eight digits."""
    match = _BUS.fullmatch(text.strip())
    return f"{int(match[1], 16):04x}:{match[2].lower()}" if match else _refused(text)


def _failure(answer: "_Answer") -> str:
    """Why an answer is unusable."""
    if answer.code < 0:
        return f"nvidia-smi was killed by signal {-answer.code}"
    said = next((f"said: {_quoted(line)}" for line in answer.text.splitlines() if line.strip()), "said nothing")
    return f"nvidia-smi failed with exit code {answer.code} and {said}" if answer.code else f"nvidia-smi {said}"


def _complaint(answer: "_Answer", strays: list[str]) -> str | None:
    """A complaint in a usable answer, such as a warning about a corrupt infoROM."""
    ended = f"exit code {answer.code}" if answer.code else ""
    if strays:
        return f"also said: {_quoted(strays[0])}" + (f" ({ended})" if ended else "")
    return f"ended with {ended}" if ended else None


def _quoted(text: str) -> str:
    words = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(words.split()).rstrip(".")[:_MOST_QUOTED]


class _Answer(NamedTuple):
    """The output of the command. The code is negative after a signal."""

    text: str
    code: int


class _EarlierError(Exception):
    """The previous command has not ended. A second one would only get stuck as well."""


class _Asker:
    """Runs nvidia-smi, one at a time."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._child: int | None = None

    def ask(self, *arguments: str) -> _Answer:
        """Runs a command and waits for its answer. Raises OSError if it cannot be started."""
        if self._child is not None:
            if _exit_code(self._child, os.WNOHANG) is None:
                raise _EarlierError
            self._child = None
        reading, writing = os.pipe()
        try:
            try:
                self._child = self._start(arguments, writing)
            finally:
                os.close(writing)
            text = _read_to_end(reading)
        finally:
            os.close(reading)
        code = _exit_code(self._child, 0)
        self._child = None
        return _Answer(text, code or 0)

    def close(self) -> None:
        """Asks a running command to exit. If it is stuck in the driver, it outlives this process."""
        if self._child is None or _exit_code(self._child, os.WNOHANG) is not None:
            self._child = None
            return
        # Never SIGKILL: killing a client inside the driver has frozen a GPU until the next boot.
        os.kill(self._child, signal.SIGTERM)
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        while _exit_code(self._child, os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        self._child = None

    def _start(self, arguments: tuple[str, ...], output: int) -> int:
        return os.posix_spawnp(
            self._command,
            [self._command, *arguments],
            {**os.environ, "LC_ALL": "C"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            # The command must be killable and notice a closed pipe, whatever signals the caller blocks or ignores.
            setsigmask=(),
            setsigdef=(signal.SIGTERM, signal.SIGPIPE),
        )


def _exit_code(child: int, options: int) -> int | None:
    """The exit status of a child, negative for a signal; None while it runs."""
    try:
        pid, status = os.waitpid(child, options)
    except ChildProcessError:
        return 0  # It ended unrecorded: some launchers leave SIGCHLD ignored, and then the kernel keeps no code.
    return os.waitstatus_to_exitcode(status) if pid else None


def _read_to_end(descriptor: int) -> str:
    chunks: list[bytes] = []
    size = 0
    while size < _MOST_OUTPUT and (chunk := os.read(descriptor, 2**16)):
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks).decode(errors="replace")
