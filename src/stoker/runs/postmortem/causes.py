"""Common causes of hangs and failures of training programs, recognized by stack and output."""

import itertools
import re
from typing import Final, NamedTuple

from stoker.logs.search import COLLECTIVE_ERROR, FULL_DISK, GPU_ERROR, NO_SHARED_MEMORY, OUT_OF_MEMORY
from stoker.runs.postmortem.stacks import Frame, Thread

# A helper that waits for work is recognized by one of this many innermost calls.
_INNERMOST: Final = 8


class Cause(NamedTuple):
    """A cause with its remedies, in Markdown, where `{delay}` stands for the name of an option."""

    pattern: re.Pattern[str]
    """Matches `function file` lines of the innermost library calls, or the output."""
    title: str
    steps: tuple[str, ...]


def _calls(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.MULTILINE)


INPUT: Final = Cause(
    _calls(r" (?:pdb|cmd|getpass)\.py$", r" (?:ipdb|pudb|IPython/terminal)/", r"(?:interact|raw_input) code\.py"),
    "It is waiting for keyboard input",
    ("Remove the breakpoint or the prompt from the program, or answer it on its terminal.",),
)
EXIT: Final = Cause(
    _calls(
        r"_shutdown threading\.py",
        r"_exit_function multiprocessing/util\.py",
        r"_python_exit concurrent/futures/",
        r"\bfinish wandb/",
    ),
    "The main program had finished, but the process did not exit",
    (
        "If nothing else was left to do, its results are probably complete: check them before you run it again.",
        "A thread or child process never ends: make it a `daemon`, or close the data loader, pool or logger.",
    ),
)
RENDEZVOUS: Final = Cause(
    _calls(
        r"(?:init_process_group|_rendezvous_handler|_store_based_barrier|_create_c10d_store) torch/distributed/",
        r" torch/distributed/rendezvous\.py",
        r"initialize jax/_src/distributed",
    ),
    "It is waiting for other ranks to join",
    (
        "Not all ranks arrived: check that each one was started and is alive.",
        "Compare `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` on all ranks, and check that the port is reachable.",
    ),
)
COLLECTIVE: Final = Cause(
    _calls(
        r" torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger)",
        r" deepspeed/comm/",
        r" horovod/",
        r" mpi4py/",
    ),
    "It is waiting in a collective operation that other ranks have not joined",
    (
        "Compare the stacks of all ranks, also on other machines: the rank that is elsewhere is the cause.",
        "Common causes: a rank that died, unequal numbers of batches, a collective under `if rank == 0`.",
        "`TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and `NCCL_DEBUG=INFO` give more detail next time.",
    ),
)
LOCK_FILE: Final = Cause(
    _calls(r" filelock/", r" torch/utils/file_baton\.py", r" (?:portalocker|fasteners)/"),
    "It is waiting for a lock file",
    (
        "Another process holds the lock, or a killed process left it behind.",
        "Look for `*.lock` in its cache (Hugging Face, `torch_extensions`) and delete it if nothing else is running.",
    ),
)
NETWORK: Final = Cause(
    _calls(
        # Excludes servers that accept connections, which is no hang.
        r"^(?!(?:\S*\.)?accept ).* (?:ssl|socket|http/client|urllib/request)\.py$",
        r" (?:urllib3|requests|httpx|aiohttp|botocore|boto3|s3fs|gcsfs|huggingface_hub|wandb|grpc|google/cloud)/",
    ),
    "It is waiting for the network",
    ("Try the same address from this machine, and add a timeout and a retry to the call.",),
)
CHECKPOINT: Final = Cause(
    _calls(
        r"(?:save|load)\w* torch/serialization\.py",
        r" torch/distributed/checkpoint/",
        r" (?:safetensors|orbax)/",
        r"_save_checkpoint ",
    ),
    "It was reading or writing a checkpoint",
    (
        "If that normally takes so long, run `stoker snooze 30m` right before it, from within the job.",
        "Otherwise check the disk: free space (`df -h`) and write speed.",
    ),
)
COMPILE: Final = Cause(
    _calls(
        r" torch/_inductor/(?:compile_fx|codegen|async_compile|select_algorithm|scheduler|graph)",
        r" torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph)",
        r" triton/compiler/",
        r" torch/utils/cpp_extension\.py",
        r" jax/_src/compiler\.py",
    ),
    "It was compiling",
    ("Compilation does not use the GPU: allow it more time with {delay} or `--for`, or keep the compiler's cache.",),
)
LOADER: Final = Cause(
    _calls(
        r" torch/utils/data/",
        r" tensorflow/python/data/",
        r" (?:webdataset|litdata|streaming/base|nvidia/dali|datasets)/",
    ),
    "It is waiting for data",
    (
        "Run it once with `num_workers=0`: the error or the slow line is then directly visible.",
        "Check that the data is still readable and that `/dev/shm` is not full (`df -h /dev/shm`).",
    ),
)
SERVER: Final = Cause(
    _calls(r" (?:ipykernel|uvicorn|gunicorn|tornado)/", r"serve_forever socketserver\.py"),
    "It is a notebook or a server that gets no requests",
    ("Shut it down when it is not in use, or run it with a longer `--for`.",),
)
CHILD: Final = Cause(
    _calls(r"(?:wait|communicate|_wait|_communicate) subprocess\.py"),
    "It is waiting for a program that it started",
    ("Look at its children in the process tree below: the one that does not end is the cause.",),
)
QUEUE: Final = Cause(
    _calls(
        r"\b(?:get|_?recv\w*|poll) (?:queue|multiprocessing/(?:queues|connection|managers|pool))\.py",
        r"\bresult concurrent/futures/",
    ),
    "It is waiting for data from another thread or process",
    ("The sender died, hangs or was never started: look at the other stacks and the last output.",),
)
JOIN: Final = Cause(
    _calls(
        r"\bjoin (?:threading|multiprocessing/\w+|torch/multiprocessing/spawn)\.py",
        r"_wait_for_tstate_lock",
        r"\b(?:wait|poll) multiprocessing/popen_",
    ),
    "It is waiting for its threads or child processes to end",
    ("Look at their stacks below: the one that does not end is the cause.",),
)
LOCK: Final = Cause(
    _calls(r"\b(?:acquire|__enter__) (?:threading|multiprocessing/synchronize)\.py"),
    "It is waiting for a lock",
    ("Find its holder among the other stacks: two threads that wait for each other are a deadlock.",),
)
EVENT: Final = Cause(
    _calls(r"\b(?:wait|wait_for) (?:threading|multiprocessing/synchronize)\.py"),
    "It is waiting for an event or condition that another thread or process sets",
    ("The other side died, hangs or was never started: look at the other stacks and the last output.",),
)
EVENT_LOOP: Final = Cause(
    _calls(r"\A(?:\S*\.)?select selectors\.py\n(?:\S*\.)?_run_once asyncio/base_events\.py"),
    "Its event loop is idle: every task is waiting",
    (
        "A stack does not show for what: it may be an `asyncio.Event`, a queue, a timer or the network.",
        "Print `asyncio.all_tasks()` now and then to see which tasks exist and where each one waits.",
    ),
)

# The first match wins, so specific causes come first.
CAUSES: Final = (
    INPUT, EXIT, RENDEZVOUS, COLLECTIVE, LOCK_FILE, NETWORK, CHECKPOINT, COMPILE, LOADER, SERVER, CHILD, QUEUE, JOIN,
    LOCK, EVENT, EVENT_LOOP,
)  # fmt: skip

# Causes recognized in the output.
OUTPUT_CAUSES: Final = (
    Cause(
        re.compile(OUT_OF_MEMORY, re.IGNORECASE),
        "Its output reports that memory ran out",
        ("Use a smaller batch, or see what else holds memory on the GPU: `stoker gpus`.",),
    ),
    Cause(
        re.compile(FULL_DISK, re.IGNORECASE),
        "Its output reports a full disk",
        ("`df -h` shows which one; `/dev/shm` and `/tmp` count too.",),
    ),
    Cause(
        re.compile(NO_SHARED_MEMORY, re.IGNORECASE),
        "Its output reports that shared memory ran out",
        ("Give the container more (`--shm-size=16g` or `--ipc=host`), or use fewer data loader workers.",),
    ),
    Cause(
        re.compile(COLLECTIVE_ERROR, re.IGNORECASE),
        "Its output reports an error between ranks (NCCL)",
        ("Look at the first rank that reported an error: the others only wait for it.",),
    ),
    Cause(
        re.compile(GPU_ERROR, re.IGNORECASE),
        "Its output reports a GPU error",
        ("`dmesg | grep -i xid` shows whether the GPU is at fault; if not, `CUDA_LAUNCH_BLOCKING=1` finds the line.",),
    ),
)

_WAITS_FOR_WORK: Final = _calls(
    r" multiprocessing/(?:resource_tracker|forkserver)\.py",
    r"\bworker multiprocessing/pool\.py",
    r"_process_worker concurrent/futures/process\.py",
    r" torch/_inductor/compile_worker/",
    r" torch/distributed/(?:run|launch|launcher/\w+|elastic/.*)\.py",
    r" wandb/sdk/.*service",
    r" (?:ray/_private|debugpy|tensorboard)/",
)


def cause_of(thread: Thread) -> Cause | None:
    """Why this thread waits, if the library calls of the innermost user code show it."""
    calls = "\n".join(map(_call, library_calls(thread)))
    has_finished = own_call(thread) is None
    return next(
        (cause for cause in CAUSES if cause.pattern.search(calls) and (cause is not EXIT or has_finished)), None
    )


def waits_for_work(thread: Thread) -> bool:
    """True for a library's helper that waits for work, which is no sign of a hang."""
    return any(_WAITS_FOR_WORK.search(_call(frame)) for frame in library_calls(thread)[:_INNERMOST])


def own_call(thread: Thread) -> Frame | None:
    """The innermost call in user code."""
    return next((frame for frame in thread.frames if frame.own), None)


def library_calls(thread: Thread) -> list[Frame]:
    """The library calls of the innermost user code, or all calls without user code."""
    return list(itertools.takewhile(lambda frame: not frame.own, thread.frames))


def _call(frame: Frame) -> str:
    return f"{frame.function} {frame.short_file}"
