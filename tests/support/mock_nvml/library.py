"""Compiles the mock `libnvidia-ml.so.1`, once for each state of its source."""

import fcntl
import functools
import hashlib
import importlib.util
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.mock_nvml import layout

SONAME: Final = "libnvidia-ml.so.1"
SOURCE: Final = Path(__file__).with_name("nvml.c")
CACHE: Final = Path(__file__).parents[3] / ".cache" / "mock_nvml"
COMMAND: Final = (
    "cc",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
    f"-Wl,-soname,{SONAME}",
)
TRAP_535: Final = frozenset({"nvmlDeviceGetConfComputeMemSizeInfo", "nvmlDeviceGetRunningProcessDetailList"})
"""With only the first of these nvitop takes the driver for an early 535 and reads garbage for process ids."""


class Plan(NamedTuple):
    """What there is to compile: the source, and the part of it that is generated."""

    source: str
    generated: str
    functions: dict[str, int]
    """The number under which each function is counted and faulted."""
    fingerprint: int
    """Different for every source: a library refuses the state of another one."""


@functools.cache
def plan() -> Plan:
    source = SOURCE.read_text()
    written = set(re.findall(r"^(?:API [^(]*?\b|LISTS_PROCESSES\()(nvml\w+)", source, re.MULTILINE))
    names = sorted(written | _named_by_bindings() | TRAP_535)
    if len(names) > layout.FUNCTIONS:
        raise ValueError(f"nvidia-ml-py names {len(names)} functions: raise FUNCTIONS in the mock's layout.py")
    generated = "\n".join(
        [
            f"#define MAGIC {layout.MAGIC:#x}ull",
            layout.c_declarations(),
            "enum {",
            *(f"    F_{name}," for name in names),
            "};",
            "#define STUBS " + " ".join(f"STUB({name})" for name in names if name not in written),
            "",
        ]
    )
    digest = hashlib.sha256("\0".join((source, generated, *COMMAND, platform.machine())).encode()).digest()
    functions = {name: number for number, name in enumerate(names)}
    return Plan(source, generated, functions, int.from_bytes(digest[:8], "big"))


def build(directory: Path = CACHE) -> Path:
    """The directory, inside `directory`, with the compiled library. Several processes may ask at once."""
    return build_plan(plan(), directory)


def build_plan(wanted: Plan, directory: Path = CACHE) -> Path:
    built = directory / f"{wanted.fingerprint:016x}"
    if built.exists():
        return built
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            scratch = Path(tempfile.mkdtemp(dir=directory))
            try:
                _compile(wanted, scratch)
                scratch.rename(built)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return built


def _compile(wanted: Plan, directory: Path) -> None:
    header = f"#define FINGERPRINT {wanted.fingerprint:#x}ull\n{wanted.generated}"
    (directory / "generated.h").write_text(header)
    (directory / SOURCE.name).write_text(wanted.source)
    outcome = subprocess.run(
        [*COMMAND, "-o", SONAME, SOURCE.name], cwd=directory, capture_output=True, text=True, check=False
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"the mock {SONAME} does not compile:\n{outcome.stderr}")
    (directory / "libnvidia-ml.so").symlink_to(SONAME)


def _named_by_bindings() -> set[str]:
    """Every function that nvidia-ml-py may look up. Read, not imported: importing would be state."""
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        raise RuntimeError("nvidia-ml-py is not installed: the mock NVML takes the names of its functions from it")
    return set(re.findall(r"""_nvmlGetFunctionPointer\(["'](nvml\w+)["']\)""", Path(found.origin).read_text()))
