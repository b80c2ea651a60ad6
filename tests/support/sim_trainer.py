"""A trainer on simulated GPUs whose memory is `--fixed` + `--slope` × the batch size, in MiB. For `stoker fit`."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from stoker.gpus.sim import SimulatedProcess

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=int(os.environ.get("BATCH", "8")))
    parser.add_argument("--fixed", type=int, default=2048)
    parser.add_argument("--slope", type=int, default=100)
    parser.add_argument("--state", type=int, default=0, help="appears at the second step, as an optimizer's does")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--step-time", type=float, default=0.05)
    parser.add_argument("--gpus", type=int, default=1, help="each takes as much more as its number")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--leave", type=Path, help="leave a process behind, and write its pid there")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--fails", default="", help="CODE or CODE:WORDS, in place of saying that memory ran out")
    parser.add_argument("--said", type=Path, help="append the command line there")
    options, _others = parser.parse_known_args()
    if options.said is not None:
        with options.said.open("a") as file:
            file.write(" ".join(sys.argv[1:]) + "\n")
    if options.leave is not None:
        left = subprocess.Popen(["sleep", "300"], start_new_session=True)
        options.leave.write_text(str(left.pid))
    if options.crash:
        raise KeyError("no such dataset: shakespeare")
    try:
        train(options)
    except Exception:
        if not options.fails:
            raise
        code, _, words = options.fails.partition(":")
        sys.stderr.write(words)
        sys.exit(int(code))


def train(options: argparse.Namespace) -> None:
    gpus = [SimulatedProcess.attach(number) for number in range(options.gpus)]
    for number, gpu in enumerate(gpus):
        gpu.allocate((options.fixed + number * 1024) * MIB)
        gpu.allocate(options.slope * options.batch_size * MIB)
        gpu.work(0.9)
    for step in range(options.steps):
        time.sleep(options.step_time)
        if step == 1:
            gpus[0].allocate(options.state * MIB)
        if not options.silent:
            sys.stdout.write(f"step {step}: loss 4.2\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
