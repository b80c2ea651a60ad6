"""Recognizes from the output of a failed run whether it ran out of GPU memory."""

import re
from pathlib import Path
from typing import Final

from stoker.logs.search import FAILURE

# Messages of frameworks about GPU memory, as narrow as possible to exclude host memory.
_SAYINGS: Final = (
    r"torch\.(?:cuda\.)?OutOfMemoryError",
    r"\b(?:CUDA|HIP|XPU|MPS|ROCm)\b[^.]{0,100}\bout of memory",
    r"\b(?:GPUassert|NCCL|thrust|cuMem\w+|cuda(?:Host)?Malloc\w*|hipMalloc\w*|RMM)\b.{0,120}\bout[ _]of[ _]memory",
    r"\bout[ _]of[ _]memory\b.{0,40}\b(?:CUDA error|RMM failure|on GPU \d)",
    r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b",
    r"\brocblas_status_memory_error\b|\bmiopenStatusAllocFailed\b",
    r"\bRESOURCE_EXHAUSTED: .{0,200}?(?:out of memory|allocat)",
    r"\bResourceExhaustedError\b",
    r"\bOOM when allocating tensor\b",
    r"\bcupy[\w.]*\.OutOfMemoryError\b",
    # The error number, independent of language.
    r"\b(?:cuda|hip)(?: runtime| driver)? ?error(?:_t)?(?: code)? ?[:=(]? ?2\b(?!\.\d)",
    r"\b(?:cudaGetLastError|cudaError|CUresult|hipError_t)\b\W{1,4}2\b",
    r"\bcudaErrorMemoryAllocation\b|\bhipErrorOutOfMemory\b|\bhipErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b",
)
_GPU: Final = re.compile("|".join(f"(?:{saying})" for saying in _SAYINGS), re.IGNORECASE)
# TensorFlow uses the same words for host memory and for a full disk.
_ELSEWHERE: Final = re.compile(r"No space left on device|device:CPU:\d|by allocator (?:cpu|mklcpu)\b", re.IGNORECASE)
# Lines that mention it negatively.
_DENIED_BEFORE: Final = re.compile(
    r"\b(?:no|not|none|never|without|checking for|in case of|avoids?)\s+$", re.IGNORECASE
)
_DENIED_AFTER: Final = re.compile(r"\s*(?:errors?|events?|check\w*)?\s*[:=]\s*(?:0|no|none|ok|passed)\b", re.IGNORECASE)
# Messages of cuDNN and PyTorch for a batch that is too large for any workspace or for 32-bit indices. They also appear
# for wrong types and strides, so they count only if a smaller batch is known to run.
_TOO_LARGE: Final = re.compile(
    r"\bCUDNN_STATUS_NOT_SUPPORTED\b|\bUnable to find a valid cuDNN algorithm\b"
    r"|\bunable to find an engine to execute this computation\b|\bcanUse32BitIndexMath\b",
    re.IGNORECASE,
)
# A program that fails without any of these gives no reason.
_REASON: Final = re.compile(FAILURE, re.IGNORECASE)
_REASON_WITHIN: Final = 40
# SIGKILL in the codes of shells and of Python, from the host's OOM killer or a person, not from the GPU.
_KILLED: Final = (137, -9)
# Earlier output does not explain the end.
_LAST_LINES: Final = 400
_SHOWN: Final = 300


def is_out_of_memory(output: str, exit_code: int | None, *, smaller_ran: bool = False) -> str | None:
    """The line about lack of GPU memory; None without one, or after a success.

    `smaller_ran`: the same program is known to run with a smaller batch.
    """
    if exit_code == 0 or exit_code in _KILLED:
        return None
    lines = output.replace("\r", "\n").splitlines()[-_LAST_LINES:]
    for line in reversed(lines):
        if _is_of_the_gpu(line) or (smaller_ran and _TOO_LARGE.search(line) is not None):
            return line.strip()[:_SHOWN]
    return None


def host_kills() -> int | None:
    """The kernel's count of OOM kills since the boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None


def was_killed(exit_code: int | None) -> bool:
    return exit_code in _KILLED


def is_silent(output: str) -> bool:
    """True if the end of the output gives no reason for the failure."""
    return not any(_REASON.search(line) for line in output.replace("\r", "\n").splitlines()[-_REASON_WITHIN:])


def _is_of_the_gpu(line: str) -> bool:
    found = _GPU.search(line)
    if found is None or _ELSEWHERE.search(line):
        return False
    return not _DENIED_BEFORE.search(line[: found.start()]) and not _DENIED_AFTER.match(line[found.end() :])
