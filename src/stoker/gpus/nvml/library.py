"""NVML functions, looked up once through nvidia-ml-py, and explanations of their error codes.

A look calls the C functions directly with reused buffers. The wrappers of nvidia-ml-py first query a size and allocate
each time, which doubles the number of driver calls.
"""

from collections.abc import Callable
from typing import Final

import pynvml

from stoker.gpus.model import NOT_SUPPORTED, Unknown

Function = Callable[..., int]

SUCCESS: Final = 0
UNSUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
VERSION_MISMATCH: Final = 18
ARGUMENT_VERSION_MISMATCH: Final = 25
UNKNOWN_ERROR: Final = 999

# After these errors no value of this GPU is trusted until someone acts.
GONE: Final = frozenset({GPU_IS_LOST, RESET_REQUIRED})
# Permanent errors: the value is not queried again.
NEVER: Final = frozenset({UNSUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
# Errors of the initialization that mean that there is no NVIDIA GPU. All others mean unknown.
NOTHING_HERE: Final = frozenset({DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND})

_REASONS: Final = {
    UNSUPPORTED: NOT_SUPPORTED,
    NO_PERMISSION: "the driver does not permit this user to read it",
    DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    LIBRARY_NOT_FOUND: "the library libnvidia-ml.so.1 is not installed or cannot be loaded",
    FUNCTION_NOT_FOUND: "this driver is too old to report it",
    GPU_IS_LOST: "the GPU is lost: it fell off the bus and needs a reboot of the machine",
    RESET_REQUIRED: "the GPU needs a reset before it can be used or read again",
    VERSION_MISMATCH: (
        "the NVIDIA library and the loaded kernel driver are of different versions, "
        "which happens after a driver upgrade: reboot, or reload the nvidia kernel modules"
    ),
    UNKNOWN_ERROR: (
        "the NVIDIA driver answered 'unknown error'; in a container this means that it lost access to the GPU "
        "devices: restart the container"
    ),
}


def reason(code: int) -> str:
    """The reason of a failed call, as part of a sentence."""
    if code in _REASONS:
        return _REASONS[code]
    return f"the NVIDIA driver answered error {code} ({pynvml.NVMLError(code)})"


def unknown(code: int) -> Unknown:
    return Unknown(reason(code))


class GoneError(Exception):
    """The GPU is lost or needs a reset, so its values do not count."""


def failed(code: int) -> Unknown:
    """The unknown value for an error code. Raises GoneError if no value of this GPU counts."""
    if code in GONE:
        raise GoneError(reason(code))
    return unknown(code)


def function(*names: str) -> Function:
    """The first of these functions in this driver's library; later names are older versions."""
    for name in names:
        try:
            found: Function = pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001 - the one lookup that caches per library; gpustat and nvitop rely on it too
        except pynvml.NVMLError:
            continue
        return found
    return _absent


def has(name: str) -> bool:
    return function(name) is not _absent


def _absent(*_arguments: object) -> int:
    return FUNCTION_NOT_FOUND
