"""What a stack says of why a program waits: the calls in well-known libraries in which training programs hang."""

import itertools
import re
from typing import Final, NamedTuple

from stoker.runs.postmortem.stacks import Frame, Thread

# A helper that waits for work shows so within these innermost calls.
_INNERMOST: Final = 8


class Cause(NamedTuple):
    """One kind of waiting, with what a person can do about it (Markdown, with the option's name for `{delay}`)."""

    calls: re.Pattern[str]
    """Searched in `function file` of the library calls that the innermost own code made, a line each."""
    title: str
    steps: tuple[str, ...]


def _calls(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.MULTILINE)


PERSON: Final = Cause(
    _calls(r" (?:pdb|cmd|getpass)\.py$", r" (?:ipdb|pudb|IPython/terminal)/", r"(?:interact|raw_input) code\.py"),
    "It waits for a person at the keyboard",
    ("Take the breakpoint or the question out of the program, or answer it on its terminal.",),
)
EXIT: Final = Cause(
    _calls(
        r"_shutdown threading\.py",
        r"_exit_function multiprocessing/util\.py",
        r"_python_exit concurrent/futures/",
        r"\bfinish wandb/",
    ),
    "Its main program was over, but it did not exit",
    (
        "If nothing else was to be done, its results are probably complete: check them before you run it again.",
        "A thread or a child process never ends: make it a `daemon`, or close its data loader, pool or logger.",
    ),
)
RENDEZVOUS: Final = Cause(
    _calls(
        r"(?:init_process_group|_rendezvous_handler|_store_based_barrier|_create_c10d_store) torch/distributed/",
        r" torch/distributed/rendezvous\.py",
        r"initialize jax/_src/distributed",
    ),
    "It waits for other ranks to join",
    (
        "Not all ranks arrived: look at whether each one was started and is alive.",
        "Compare `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE` on all of them, and whether the port can be reached.",
    ),
)
COLLECTIVE: Final = Cause(
    _calls(
        r" torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger)",
        r" deepspeed/comm/",
        r" horovod/",
        r" mpi4py/",
    ),
    "It waits in a collective operation that other ranks have not joined",
    (
        "Compare the stacks of all ranks, also on other machines: the one that is somewhere else is the cause.",
        "Usual causes: a rank that died, unequal numbers of batches, a collective under an `if rank == 0`.",
        "`TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and `NCCL_DEBUG=INFO` tell more the next time.",
    ),
)
LOCK_FILE: Final = Cause(
    _calls(r" filelock/", r" torch/utils/file_baton\.py", r" (?:portalocker|fasteners)/"),
    "It waits for a lock file",
    (
        "Another process holds the lock, or one that was killed left it behind.",
        "Look for `*.lock` in its cache (Hugging Face, `torch_extensions`) and delete it if nobody else runs.",
    ),
)
NETWORK: Final = Cause(
    _calls(
        # Who accepts connections waits for nothing in particular.
        r"^(?!(?:\S*\.)?accept ).* (?:ssl|socket|http/client|urllib/request)\.py$",
        r" (?:urllib3|requests|httpx|aiohttp|botocore|boto3|s3fs|gcsfs|huggingface_hub|wandb|grpc|google/cloud)/",
    ),
    "It waits for the network",
    ("Try the same address from this machine, and give the call a timeout and a retry.",),
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
        "If that takes so long, snooze for it: `stoker snooze 30m` right before, from within the job.",
        "If it should not, look at the disk: `df -h`, and how fast it writes.",
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
    ("Compilation needs no GPU: give it time with a longer {delay} or `--for`, or keep the compiler's cache.",),
)
LOADER: Final = Cause(
    _calls(
        r" torch/utils/data/",
        r" tensorflow/python/data/",
        r" (?:webdataset|litdata|streaming/base|nvidia/dali|datasets)/",
    ),
    "It waits for data",
    (
        "Run it once with `num_workers=0`: the error or the slow line then shows directly.",
        "Check that the data can still be read, and that `df -h /dev/shm` is not full.",
    ),
)
SERVER: Final = Cause(
    _calls(r" (?:ipykernel|uvicorn|gunicorn|tornado)/", r"serve_forever socketserver\.py"),
    "It is a notebook or a server, and nobody asked it for anything",
    ("Shut it down when it is not in use, or give it a policy with a longer `--for`.",),
)
CHILD: Final = Cause(
    _calls(r"(?:wait|communicate|_wait|_communicate) subprocess\.py"),
    "It waits for a program that it started",
    ("Look at the children in the process tree below: the one that does not end is the cause.",),
)
QUEUE: Final = Cause(
    _calls(
        r"\b(?:get|_?recv\w*|poll) (?:queue|multiprocessing/(?:queues|connection|managers|pool))\.py",
        r"\bresult concurrent/futures/",
    ),
    "It waits for another thread or process to hand it something",
    ("Its producer died, hangs, or was never started: look at the other stacks and the last output.",),
)
JOIN: Final = Cause(
    _calls(
        r"\bjoin (?:threading|multiprocessing/\w+|torch/multiprocessing/spawn)\.py",
        r"_wait_for_tstate_lock",
        r"\b(?:wait|poll) multiprocessing/popen_",
    ),
    "It waits for its own threads or child processes to end",
    ("Look at their stacks below: the one that does not end is the cause.",),
)
LOCK: Final = Cause(
    _calls(r"\b(?:acquire|__enter__) (?:threading|multiprocessing/synchronize)\.py"),
    "It waits for a lock",
    ("Find who holds it among the other stacks: two that wait for each other are a deadlock.",),
)
EVENT: Final = Cause(
    _calls(r"\b(?:wait|wait_for) (?:threading|multiprocessing/synchronize)\.py"),
    "It waits for an event or a condition that another thread or process sets",
    ("Its setter died, hangs, or was never started: look at the other stacks and the last output.",),
)
EVENT_LOOP: Final = Cause(
    _calls(r"\A(?:\S*\.)?select selectors\.py\n(?:\S*\.)?_run_once asyncio/base_events\.py"),
    "Its event loop has nothing to do: every task waits",
    (
        "For what does not show on a stack: it may be an `asyncio.Event`, a queue, a timer or the network.",
        "`asyncio.all_tasks()`, printed now and then, tells which tasks are there and where each waits.",
    ),
)

# The first that fits counts: what says most about the reason comes first, what any program may do comes last.
CAUSES: Final = (
    PERSON, EXIT, RENDEZVOUS, COLLECTIVE, LOCK_FILE, NETWORK, CHECKPOINT, COMPILE, LOADER, SERVER, CHILD, QUEUE, JOIN,
    LOCK, EVENT, EVENT_LOOP,
)  # fmt: skip

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
    """Why this thread waits, as far as its calls tell: those that the innermost own code made, not those around it."""
    calls = "\n".join(map(_call, _innermost(thread)))
    is_over = own_call(thread) is None
    return next((cause for cause in CAUSES if cause.calls.search(calls) and (cause is not EXIT or is_over)), None)


def waits_for_work(thread: Thread) -> bool:
    """Whether it is a helper of some library that does nothing until it is asked to: no sign of a hang."""
    return any(_WAITS_FOR_WORK.search(_call(frame)) for frame in _innermost(thread)[:_INNERMOST])


def own_call(thread: Thread) -> Frame | None:
    """The innermost call of the person's own code."""
    return next((frame for frame in thread.frames if frame.own), None)


def _innermost(thread: Thread) -> list[Frame]:
    """The library calls that the innermost own code made; all of them when there is none of it."""
    return list(itertools.takewhile(lambda frame: not frame.own, thread.frames))


def _call(frame: Frame) -> str:
    return f"{frame.function} {frame.short_file}"
