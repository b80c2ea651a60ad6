"""The `train.py` of the documentation: a short training on simulated GPUs, which takes any options."""

import sys
import time

from stoker.gpus.sim import SimulatedProcess

GIB = 2**30
options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
steps = 5 * int(options.get("epochs") or 1)
batch = int(options.get("batch_size") or 8)
with SimulatedProcess.attach(gpu=0) as gpu:
    gpu.allocate(2 * GIB + batch * GIB // 16)
    gpu.work(utilization=0.9)
    for step in range(1, steps + 1):
        sys.stdout.write(f"step {step}/{steps}: loss {4 / step:.3f}\n")
        sys.stdout.flush()
        time.sleep(0.05)
