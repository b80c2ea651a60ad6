"""Boards with the watts that were published for them, and which counters they have.

Idle with and without a context: sglang#27567 (H100 121.7/71.8 W, A100 80/53.7, L40S 102.1/35.6). Inside a collective
that waits: marin#7344, nccl#1550, nccl#199, horovod#3611, pytorch#22671, GLM-130B#32, sglang#10489, vllm-backport#14,
DeepSpeedExamples#310. Where nothing was published, a figure between the nearest boards is taken.
"""

from typing import Final, Literal, NamedTuple

Range = tuple[float, float]
MemoryCounter = Literal["alive", "stuck", "absent"]
"""Whether memory-controller utilization moves, stays at 0 whatever happens, or does not exist."""


class Board(NamedTuple):
    """One model of GPU."""

    name: str
    family: str
    memory: int
    """GiB."""
    limit: float | None
    """Watts; None: the driver does not report it."""
    bare: float
    """Watts while nobody uses it."""
    context: float
    """Watts with a CUDA context and no kernel."""
    spin: Range
    """Watts while a collective waits for a rank that does not come."""
    busy: Range
    """Watts in training."""
    clocks: Range
    """MHz of the SMs at rest and at work."""
    pipes: bool = False
    """Whether GPM reports the activity of the pipes."""
    memory_counter: MemoryCounter = "alive"
    vendor: str = "nvidia"
    slice: bool = False
    """Whether it is a MIG slice, which has neither utilization, power nor memory activity of its own."""


V100_PCIE: Final = Board("Tesla V100-PCIE-16GB", "volta", 16, 250, 26, 37, (40, 48), (150, 240), (135, 1380))
V100_SXM: Final = Board("Tesla V100-SXM2-32GB", "volta", 32, 300, 42, 56, (65, 77), (190, 292), (135, 1530))
T4: Final = Board("Tesla T4", "turing", 16, 70, 10, 27, (29, 36), (52, 70), (300, 1590))
RTX_2080: Final = Board("GeForce RTX 2080 Ti", "turing", 11, 250, 12, 22, (62, 92), (170, 248), (300, 1850))
RTX_3090: Final = Board("GeForce RTX 3090", "geforce", 24, 350, 21, 33, (108, 156), (250, 348), (210, 1860))
RTX_4090: Final = Board("GeForce RTX 4090", "geforce", 24, 450, 14, 29, (68, 118), (260, 440), (210, 2640))
A10: Final = Board("NVIDIA A10", "ampere", 24, 150, 16, 56, (60, 76), (108, 149), (210, 1695))
A6000: Final = Board("NVIDIA RTX A6000", "ampere", 48, 300, 21, 68, (82, 104), (190, 298), (210, 1800))
A100_40: Final = Board("NVIDIA A100-SXM4-40GB", "ampere", 40, 400, 46, 57, (66, 92), (230, 395), (210, 1410))
A100_80: Final = Board("NVIDIA A100 80GB PCIe", "ampere", 80, 300, 54, 80, (70, 94), (180, 297), (210, 1410))
L40S: Final = Board("NVIDIA L40S", "ada", 45, 350, 35.6, 102, (92, 106), (210, 345), (210, 2520))
H100: Final = Board("NVIDIA H100 80GB HBM3", "hopper", 80, 700, 71.8, 121.7, (100, 153), (430, 695), (345, 1980), True)
H200: Final = Board("NVIDIA H200", "hopper", 141, 700, 76, 119, (112, 158), (420, 690), (345, 1980), True)
B200: Final = Board("NVIDIA B200", "blackwell", 180, 1000, 142, 188, (206, 262), (620, 980), (120, 1965), True)
GB200: Final = Board("NVIDIA GB200", "blackwell", 186, 1200, 155, 205, (230, 282), (720, 1150), (120, 1950), True)
GB10: Final = Board("NVIDIA GB10", "gb10", 120, None, 4.5, 11, (14, 27), (38, 92), (208, 2418), memory_counter="stuck")
RADEON: Final = Board(
    "Radeon RX 7900 XTX", "radeon", 24, 339, 16, 34, (78, 118), (220, 336), (40, 2400), False, "absent", "amd"
)
A100_SLICE: Final = Board(
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "mig", 20, 400, 46, 57, (66, 92), (150, 300), (210, 1410), False, "absent",
    slice=True,
)  # fmt: skip
H100_SLICE: Final = Board(
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "mig", 40, 700, 72, 122, (100, 153), (250, 480), (345, 1980), True, "absent",
    slice=True,
)  # fmt: skip

WITH_MEMORY_COUNTER: Final = (
    V100_PCIE, V100_SXM, T4, RTX_2080, RTX_3090, RTX_4090, A10, A6000, A100_40, A100_80, L40S, H100, H200, B200, GB200
)  # fmt: skip
DATA_CENTRE: Final = (V100_PCIE, V100_SXM, T4, A10, A100_40, A100_80, L40S, H100, H200, B200, GB200)
SERVERS: Final = (V100_SXM, A100_40, A100_80, L40S, H100, H200, B200, GB200)
DESKTOPS: Final = (RTX_2080, RTX_3090, RTX_4090, A6000, GB10, RADEON)
# Whose utilization can be read; slices are in classes of their own.
WHOLE: Final = (*WITH_MEMORY_COUNTER, GB10, RADEON)
ALL: Final = (*WHOLE, A100_SLICE, H100_SLICE)
