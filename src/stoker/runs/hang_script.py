"""Two ranks that train for some steps and then hang in a collective: the program of `stoker doctor --hang-test`.

It may run in another Python, with PyTorch and without Stoker. `python hang_script.py STEPS SECONDS_PER_STEP`.
"""

import datetime
import os
import socket
import subprocess
import sys
import time

RANKS = 2


def launch() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # PyTorch's own watchdog would end the hang.
    shared |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | shared | {"RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return max(rank.wait() for rank in ranks)


def work(rank: int, steps: int, seconds: float) -> None:
    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", timeout=datetime.timedelta(hours=2))
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    gradient = torch.ones(2**24, device="cuda")
    for step in range(1, steps + 1):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(8):
                matrix = (matrix @ matrix).clamp_(-1, 1)
            torch.cuda.synchronize()
        distributed.all_reduce(gradient)
        torch.cuda.synchronize()
        if rank == 0:
            if step == 1:
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
                say(f"with PyTorch {torch.__version__}, NCCL {nccl}")
            say(f"step {step}/{steps}")
    if rank == 0:
        distributed.all_reduce(gradient)
        torch.cuda.synchronize()  # never returns: the other rank does not take part
    while True:
        time.sleep(60)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(sys.argv[1]), float(sys.argv[2]))
    else:
        sys.exit(launch())
