"""A stand-in for the `nvidia-smi` executable: a shell script that prints what a test configures."""

import os
from pathlib import Path

_SCRIPT = """#!/bin/sh
cd '{folder}' || exit 99
case "$1" in
    --query-gpu=*) part=gpus ;;
    --query-compute-apps=*) part=apps ;;
    topo) part=topo ;;
    *) echo "unexpected: $*"; exit 2 ;;
esac
echo "$LC_ALL $*" >> calls
for field in $(cat unknown-fields 2>/dev/null); do
    case "$1" in *"$field"*) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;; esac
done
echo $$ > $part.pid
if [ -p $part.stuck ]; then read line < $part.stuck; fi
[ -f $part.err ] && cat $part.err >&2
[ -f $part.out ] && cat $part.out
[ -f $part.signal ] && kill -s "$(cat $part.signal)" $$
exit "$(cat $part.code)"
"""


def uuid(number: int) -> str:
    """The full uuid of the n-th pretended GPU."""
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


def gpu_line(
    number: int,
    *,
    name: str = "NVIDIA A100-SXM4-80GB",
    bus: str | None = None,
    utilization: str = "37",
    memory: str = "1024, 81920",
    power: str = "250.50, 400.00",
    temperature: str = "45",
    more: str | None = "21, 1410, 0x0000000000000004, 0",
    identity: str | None = None,
) -> str:
    """A line of `--query-gpu`, healthy but for what is given. `more` is None for a version that knows no more."""
    address = bus if bus is not None else f"00000000:{number + 1:02X}:00.0"
    who = identity if identity is not None else uuid(number)
    line = f"{number}, {who}, {name}, {address}, {utilization}, {memory}, {power}, {temperature}"
    return f"{line}\n" if more is None else f"{line}, {more}\n"


class FakeNvidiaSmi:
    """The script in a separate folder, and its next output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(_SCRIPT.format(folder=folder))
        script.chmod(0o755)
        self.lists_gpus(gpu_line(0), gpu_line(1))
        self.lists_processes()
        self.connects("no matrix", code=2)

    @property
    def path(self) -> str:
        """A PATH on which this nvidia-smi is found first."""
        return f"{self.folder}:{os.environ['PATH']}"

    def lists_gpus(self, *lines: str, code: int = 0, signal: str = "", errors: str = "") -> None:
        self._says("gpus", lines, code, signal, errors)

    def lists_processes(self, *lines: str, code: int = 0, signal: str = "", errors: str = "") -> None:
        self._says("apps", lines, code, signal, errors)

    def connects(self, matrix: str, code: int = 0) -> None:
        """What `topo -m` prints."""
        self._says("topo", (matrix,), code, "", "")

    def does_not_know(self, *fields: str) -> None:
        """A query with one of these fails as a whole."""
        (self.folder / "unknown-fields").write_text(" ".join(fields))

    def gets_stuck(self) -> None:
        """From now on a query for GPUs blocks until it is ended, as it does inside a sick driver."""
        os.mkfifo(self.folder / "gpus.stuck")

    def recovers(self) -> None:
        """Lets a query that is stuck go on, and the next ones not get stuck."""
        stuck = self.folder / "gpus.stuck"
        if stuck.exists():
            # Opened for both, a pipe can be written to whether or not a reader waits at the other end.
            pipe = os.open(stuck, os.O_RDWR)
            os.write(pipe, b"\n")
            stuck.unlink()
            os.close(pipe)

    def calls(self) -> list[str]:
        """What it was called with so far, each with its LC_ALL before."""
        return (self.folder / "calls").read_text().splitlines()

    def _says(self, part: str, lines: tuple[str, ...], code: int, signal: str, errors: str) -> None:
        (self.folder / f"{part}.out").write_text("".join(lines))
        (self.folder / f"{part}.code").write_text(str(code))
        for suffix, content in (("signal", signal), ("err", errors)):
            file = self.folder / f"{part}.{suffix}"
            file.write_text(content) if content else file.unlink(missing_ok=True)
