"""A machine with NVIDIA GPUs that are not there: a mock `libnvidia-ml.so.1`, and the means to change it."""

from tests.support.mock_nvml.library import build
from tests.support.mock_nvml.machine import MockGpu, MockMachine, Samples

__all__ = ["MockGpu", "MockMachine", "Samples", "build"]
