"""Step counts in what jobs print."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.logs.steps import StepCounter, step_numbers

STEPS = {
    "step 12": {("step", 12.0)},
    "step=100 loss=1.23": {("step", 100.0)},
    "Step 1,200 | loss 1.2": {("step", 1200.0)},
    '{"step": 12, "loss": 1.5}': {("step", 12.0)},
    "{'loss': 1.2, 'epoch': 0.31}": {("epoch", 0.31)},
    "iter 100: loss 2.31, time 12ms": {("iter", 100.0)},
    "eta: 0:12:33  iter: 19  total_loss: 2": {("iter", 19.0)},
    "loss = 0.2, step = 300 (0.3 sec)": {("step", 300.0)},
    "global_step=5": {("step", 5.0)},
    "training_iteration: 12": {("iteration", 12.0)},
    '"num_updates": "1200"': {("update", 1200.0)},
    "|    total_timesteps | 2048 |": {("timestep", 2048.0)},
    "Epoch: 3 | Batch: 7": {("epoch", 3.0), ("batch", 7.0)},
    "Epoch 3/10": {("epoch", 3.0), ("of 10.0", 3.0)},
    "Epoch(train) [1][100/1000]  lr: 1e-3": {("of 1000.0", 100.0)},
    " iteration      100/  500000 | consumed samples:   1234 |": {
        ("iteration", 100.0), ("sample", 1234.0), ("of 500000.0", 100.0),
    },
    " 32%|███▏      | 317/1000 [02:11<04:40,  2.44it/s]": {("of 1000.0", 317.0)},
    "317it [02:11,  2.44it/s]": {("of None", 317.0)},
    "Working ━━━━━━━━╸━━━━━━━━━━ 45% 0:00:12": {("share", 0.45)},
    "\x1b[1m12/938\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m━━━━\x1b[0m \x1b[1m4s\x1b[0m 5ms/step": {("of 938.0", 12.0)},
}  # fmt: skip
NOT_STEPS = [
    "still alive",
    "2026-11-18 04:49:42,123 heartbeat 17",
    "[04:49:42] waiting for rank 3, 312 s",
    "step time 12 ms",
    "step: 0.12s",
    "epoch 1700000000.5",
    "batch_size=32 warmup_steps=100",
    "3.2 steps/s, steps/s: 3.2",
    "GPU utilization [45%]",
    "status update 5",
    "saved /runs/step_500.pt and epoch=3-step=500.ckpt",
    "loss 3/4",
    "",
]


@pytest.mark.parametrize("line", STEPS)
def test_step_number_is_found(line: str) -> None:
    assert set(step_numbers(f"a word before it\n{line}\n")) == STEPS[line]


@pytest.mark.parametrize("line", NOT_STEPS)
def test_other_numbers_are_not_steps(line: str) -> None:
    assert list(step_numbers(f"{line}\n")) == []


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (["step 1", "step 2", "step 3"], 2),
        (["step 7", "alive at step 7", "alive at step 7"], 0),
        (["[rank0] step 1200", "[rank1] step 1199"] * 5, 0),
        (["Epoch 3/10", "step 5"] * 5, 0),
        (["step 98", "step 99", "step 1", "step 2"], 2),
        (["317/1000 [02:11<04:40, 2.44it/s]", "317/1000 [02:12<04:41, 2.43it/s]"], 0),
        (["317/1000 [02:11<04:40, 2.44it/s]", "318/1000 [02:12<04:41, 2.43it/s]"], 1),
        (["epoch 0.5", "epoch 0.75"], 1),
    ],
    ids=["counting", "heartbeat", "ranks in turns", "two kinds in turns", "next epoch", "redrawn", "bar", "fractions"],
)
@pytest.mark.parametrize("end", ["\n", "\r"])
def test_step_is_a_number_higher_than_before(lines: list[str], steps: int, end: str) -> None:
    together, apart = StepCounter(), StepCounter()
    assert together.feed(end.join(lines)) == steps
    assert sum(apart.feed(f"{line}{end}") for line in lines) == steps


@given(st.lists(st.text(alphabet=st.sampled_from("step 12/=:%[]epochiter\r\n\x1b[m\0|█"), max_size=200), max_size=5))
def test_any_text_can_be_counted(pieces: list[str]) -> None:
    counter = StepCounter()
    for piece in pieces:
        assert counter.feed(piece) >= 0


@pytest.mark.parametrize(
    "unit", ["step ", "step" + " " * 990 + "\n", "1 of " * 199 + "\n", "1%|" * 300 + "\n", "1/", "\r"]
)
def test_work_for_hostile_output_is_bounded(unit: str) -> None:
    text = (unit * 65536)[:65536]
    begun = time.process_time()
    StepCounter().feed(text)
    assert time.process_time() - begun < 1.0


def test_number_of_kinds_is_bounded() -> None:
    counter = StepCounter()
    for total in range(1000):
        counter.feed(f"step 1/{total + 1}")
    assert len(counter._highest) <= 64
