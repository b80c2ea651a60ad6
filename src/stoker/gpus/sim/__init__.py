"""Simulated GPUs: a source, processes that use memory and time, and faults on demand."""

from stoker.gpus.sim.machine import Shape, SimMachine, parse_shape
from stoker.gpus.sim.process import SimulatedOutOfMemoryError, SimulatedProcess
from stoker.gpus.sim.source import SimulatedSource, open_source

__all__ = [
    "Shape",
    "SimMachine",
    "SimulatedOutOfMemoryError",
    "SimulatedProcess",
    "SimulatedSource",
    "open_source",
    "parse_shape",
]
