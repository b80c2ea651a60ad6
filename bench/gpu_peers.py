"""Readers of the same eight mock GPUs, each a program of its own: `python -m bench.gpu_peers NAME LOOKS EVERY`.

Each looks so many times at a steady rhythm and prints the processor seconds that one look cost it and all that it
started, and the memory it then held.
"""

import contextlib
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Look = Callable[[], object]
# Graphics, SM, tensor, DRAM, PCIe out and in, NVLink in and out.
GPM_METRICS = (1, 2, 5, 10, 20, 21, 60, 61)


def ours() -> tuple[Look, list[int]]:
    from stoker.gpus.prober import Prober

    prober = Prober("nvml")
    prober.look()
    assert prober._helper is not None  # noqa: SLF001 - its processor time is ours too
    return prober.look, [prober._helper.pid]  # noqa: SLF001


def bare() -> tuple[Look, list[int]]:
    """The same driver calls through nvidia-ml-py's own functions, and nothing else."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    began = int((time.time() - 1) * 1e6)
    kinds = (pynvml.NVML_GPU_UTILIZATION_SAMPLES, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES)
    seen = {kind: [began] * len(handles) for kind in kinds}
    events = pynvml.nvmlEventSetCreate()
    for handle in handles:
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    samples_before = [pynvml.nvmlGpmSampleAlloc() for _ in handles]
    samples_now = [pynvml.nvmlGpmSampleAlloc() for _ in handles]
    for handle, sample in zip(handles, samples_before, strict=True):
        pynvml.nvmlGpmSampleGet(handle, sample)

    def highest(place: int, kind: int) -> int:
        try:
            _kind, samples = pynvml.nvmlDeviceGetSamples(handles[place], kind, seen[kind][place])
        except pynvml.NVMLError:
            rates = pynvml.nvmlDeviceGetUtilizationRates(handles[place])
            return int(rates.gpu if kind == kinds[0] else rates.memory)
        seen[kind][place] = max(sample.timeStamp for sample in samples)
        return max(int(sample.sampleValue.uiVal) for sample in samples)

    def look() -> object:
        found = []
        with contextlib.suppress(pynvml.NVMLError):  # nothing happened
            found.append(pynvml.nvmlEventSetWait_v2(events, 0).eventData)
        for place, handle in enumerate(handles):
            peak, traffic = (highest(place, kind) for kind in seen)
            clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            throttling = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            pynvml.nvmlGpmSampleGet(handle, samples_now[place])
            metrics = pynvml.c_nvmlGpmMetricsGet_t()
            metrics.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            metrics.numMetrics = len(GPM_METRICS)
            metrics.sample1, metrics.sample2 = samples_before[place], samples_now[place]
            for number, metric in enumerate(GPM_METRICS):
                metrics.metrics[number].metricId = metric
            pynvml.nvmlGpmMetricsGet(metrics)
            pipes = [metrics.metrics[number].value for number in range(len(GPM_METRICS))]
            samples_before[place], samples_now[place] = samples_now[place], samples_before[place]
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            temperature = pynvml.nvmlDeviceGetTemperature(handle, 0)
            processes = [(p.pid, p.usedGpuMemory) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            processes += [(p.pid, p.usedGpuMemory) for p in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
            try:
                shares = pynvml.nvmlDeviceGetProcessUtilization(handle, seen[kinds[0]][place])
                used = {share.pid: (share.smUtil, share.memUtil) for share in shares}
            except pynvml.NVMLError:
                used = {}
            found.append((peak, traffic, clock, throttling, memory.used, memory.total, energy, temperature))
            found.append((pipes, processes, used))
        return found

    return look, []


def nvitop() -> tuple[Look, list[int]]:
    from nvitop import Device

    devices = Device.all()

    def look() -> object:
        return [
            (d.gpu_utilization(), d.memory_used(), d.memory_total(), d.power_usage(), d.temperature(), d.processes())
            for d in devices
        ]

    return look, []


def gpustat() -> tuple[Look, list[int]]:
    from gpustat import new_query

    return new_query, []


def spawned() -> tuple[Look, list[int]]:
    """The seeds' way: one `nvidia-smi` per sample, here a stand-in in C that asks no driver and prints at once."""
    command = os.environ["BENCH_NVIDIA_SMI"]

    def look() -> object:
        query = "--query-gpu=uuid,utilization.gpu,memory.used,memory.total,power.draw"
        return subprocess.run([command, query, "--format=csv"], capture_output=True, check=True).stdout.splitlines()

    return look, []


PEERS = {"ours": ours, "bare": bare, "nvitop": nvitop, "gpustat": gpustat, "spawned": spawned}


def processor_seconds(helpers: list[int]) -> float:
    """Of this process, its ended children and its living helpers, to the nanosecond."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in ("self", *helpers))
    return living / 1e9 + ended.ru_utime + ended.ru_stime


def memory(pids: list[int]) -> tuple[float, float]:
    """MiB: resident in the first, and of all together, each page that they share counted once.

    By the pages themselves where that is permitted (root): a proportional share would be smaller whenever another
    Python happens to run on the machine.
    """
    rollup = Path(f"/proc/{pids[0]}/smaps_rollup").read_text().splitlines()[1:]
    resident = next(int(line.split()[1]) for line in rollup if line.startswith("Rss:")) / 1024
    pages: set[int] = set()
    for pid in pids:
        pages |= _pages(pid)
    return resident, len(pages) * resource.getpagesize() / 2**20


def _pages(pid: int) -> set[int]:
    """The numbers of the physical pages that a process has in memory."""
    size = resource.getpagesize()
    found: set[int] = set()
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if line.endswith("[vsyscall]"):
                continue
            begin, end = (int(word, 16) // size for word in line.split()[0].split("-"))
            pagemap.seek(begin * 8)
            entries = struct.unpack(f"{end - begin}Q", pagemap.read((end - begin) * 8))
            # Bit 63: it is in memory. Bits 0 to 54: its number, which reads as 0 without the permission to see it.
            found |= {entry & (2**55 - 1) for entry in entries if entry >> 63}
    if found == {0}:
        raise PermissionError("only root can see which pages are shared: run the benchmark as root")
    return found


def main() -> None:
    name, looks, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    look, helpers = PEERS[name]()
    look()
    due = time.monotonic()
    before = processor_seconds(helpers)
    for _ in range(looks):
        due += every
        time.sleep(max(due - time.monotonic(), 0))
        look()
    spent = processor_seconds(helpers) - before
    resident, together = memory([os.getpid(), *helpers])
    print(spent / looks, resident, together)


if __name__ == "__main__":
    main()
