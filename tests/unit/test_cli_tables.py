"""Tables on terminals of any width: what identifies a row stays whole, and a pipe gets everything."""

import io
from typing import cast

import msgspec
import pytest
from rich.console import Console

from stoker.cli.tables import gpus as gpu_table
from stoker.cli.tables.table import Column, Styled, cut_in_the_middle, print_lines, rich_text, table_lines
from stoker.gpus.model import DeviceHealth, Look
from tests.support.looks import GIB, a_gpu, a_process, a_reading

COLUMNS = (
    Column("id"),
    Column("state", gives="cut", least=12),
    Column("when", "right", left_out=1),
    Column("for", "right", left_out=2),
    Column("command", gives="cut"),
)
COMMAND = "python train.py --config /data/configs/experiment.yaml " * 5
ROWS = [
    ("0a0a0a0a", "running", "2h03m ago", "2h03m", COMMAND),
    ("1b1b1b1b", "queued, after 0a0a0a0a and 3 more", "10s ago", "", "true"),
]


def plain(width: int | None) -> list[str]:
    return [*table_lines(COLUMNS, ROWS, width)]


@pytest.mark.parametrize("width", [200, 120, 80, 60, 45])
def test_ids_and_states_stay_whole_and_commands_are_cut(width: int) -> None:
    heading, running, queued = plain(width)
    assert max(len(line) for line in (heading, running, queued)) <= width
    assert running.startswith("0a0a0a0a  running ")
    assert queued.startswith("1b1b1b1b  queued, ")
    assert "python train.p" in running
    assert running.endswith("…")


def test_less_important_columns_are_dropped_one_by_one() -> None:
    assert plain(80)[0].split() == ["id", "state", "when", "for", "command"]
    assert plain(52)[0].split() == ["id", "state", "when", "command"]
    assert plain(40)[0].split() == ["id", "state", "command"]


def test_required_columns_wrap_on_a_narrow_terminal() -> None:
    assert plain(12)[1].startswith("0a0a0a0a  running")


def test_row_without_a_width_is_one_complete_line() -> None:
    heading, running, queued = plain(None)
    assert running.endswith(COMMAND.rstrip())
    assert "queued, after 0a0a0a0a and 3 more" in queued
    assert heading.index("command") == running.index("python") == queued.index("true")


def test_cell_has_no_line_breaks_or_control_sequences() -> None:
    columns = (Column("a"), Column("b", gives="cut", least=4))
    lines = table_lines(columns, [("x", "1\n2\x1b[2J"), (Styled(("y", "red")), "漢字漢字")], 9)
    assert list(lines) == ["a  b", "x  1 2 […", "y  漢字 …"]


def test_lines_are_printed_as_rich_prints_them() -> None:
    columns = (Column("job"), Column("state", gives="cut"), Column("for", "right"), Column("command", gives="cut"))
    rows = [
        ("a1", Styled(("running", "bold green")), "9s", "train"),
        ("日本", Styled(("failed", "red"), (", again", "")), "1h05m", "a command that is far too long for the line"),
        ("b2", Styled(("", "red")), "", ""),
    ]
    lines = list(table_lines(columns, rows, 40))
    ours, theirs = (Console(force_terminal=True, color_system="standard", file=io.StringIO()) for _ in range(2))
    print_lines(ours, lines)
    for line in lines:
        theirs.print(rich_text(line), no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    printed = [cast("io.StringIO", screen.file).getvalue() for screen in (ours, theirs)]
    assert printed[0] == printed[1]
    assert "\x1b[1;32mrunning\x1b[0m" in printed[0]


def test_end_of_a_path_is_kept() -> None:
    assert cut_in_the_middle("gpu-box-17.example.org:0,1", 14) == "gpu-bo…org:0,1"
    assert cut_in_the_middle("gpu-box:0,1", 14) == "gpu-box:0,1"


@pytest.fixture
def look() -> Look:
    gpu = a_gpu(7, name="NVIDIA A100-SXM4-80GB")
    who = a_process(4242, memory=40 * GIB, user="alexandra", name="python")
    return Look("nvml", 1.0, 0.0, (gpu,), (a_reading(gpu, processes=(who, who)),))


@pytest.mark.parametrize("width", [120, 80, 60])
def test_gpu_row_keeps_index_state_and_user(look: Look, width: int) -> None:
    lines = gpu_table.table_of(look, width)
    assert max(map(len, lines)) <= width
    assert lines[0].split()[0] == "GPU"
    assert lines[1].split()[0] == "7"
    assert " idle " in lines[1]
    shown = "".join(line[lines[0].index("who") :] for line in lines[1:]).replace(" ", "")
    assert shown == "alexandra'spython(pid4242)40GiB," + "alexandra'spython(pid4242)40GiB"


@pytest.mark.parametrize("width", [None, 120, 80])
def test_fault_of_a_gpu_has_a_column_only_where_there_is_one(look: Look, width: int | None) -> None:
    assert "fault" not in gpu_table.table_of(look, width)[0]
    broken = msgspec.structs.replace(look.readings[0], health=DeviceHealth((79,)))
    lines = gpu_table.table_of(msgspec.structs.replace(look, readings=(broken,)), width)
    column = lines[0].index("fault")
    shown = " ".join(line[column:].strip() for line in lines[1:]).strip()
    assert shown == "XID 79: the GPU has fallen off the bus; needs a reset"


def test_gpu_row_in_a_pipe_is_one_line_without_bars(look: Look) -> None:
    heading, line = gpu_table.table_of(look, None)
    assert line.endswith("alexandra's python (pid 4242) 40 GiB, alexandra's python (pid 4242) 40 GiB")
    assert not set(heading + line) & set("█·…│")
