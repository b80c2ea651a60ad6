"""Progress of a job, parsed from the progress bars of training programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.status.model import Progress
from stoker.status.progress import progress_in

TQDM = " 32%|███▏      | 317/1000 [02:11<04:40,  2.44it/s]"

BARS: dict[str, tuple[str, float | None, float | None, str]] = {
    "tqdm": (TQDM, 0.317, 280.0, "317/1000 [02:11<04:40, 2.44it/s]"),
    "tqdm in ascii": (
        " 45%|####5     | 45/100 [00:10<00:12,  4.40it/s]", 0.45, 12.0, "45/100 [00:10<00:12, 4.40it/s]",
    ),
    "tqdm with custom characters": (
        " 45%|>>>>-     | 45/100 [00:10<00:12,  4.40it/s]", 0.45, 12.0, "45/100 [00:10<00:12, 4.40it/s]",
    ),
    "tqdm with a description and figures": (
        "Epoch 3:  32%|███▏      | 317/1000 [02:11<04:40,  2.44it/s, v_num=0, train_loss=0.310]",
        0.317, 280.0, "Epoch 3: 317/1000 [02:11<04:40, 2.44it/s, v_num=0, train_loss=0.310]",
    ),
    "tqdm of one epoch of several": (
        "Epoch 3/10:  32%|███▏      | 317/1000 [02:11<04:40,  2.44it/s]",
        0.2317, 280.0 + 7 * 411, "Epoch 3/10: 317/1000 [02:11<04:40, 2.44it/s]",
    ),
    "tqdm of the last epoch": (
        "Epoch 10/10:  50%|█████     | 5/10 [00:10<00:10,  2.00s/it]",
        0.95, 10.0, "Epoch 10/10: 5/10 [00:10<00:10, 2.00s/it]",
    ),
    "an epoch that counts from zero": (
        "Epoch 0/9:  50%|█████     | 5/10 [00:10<00:10,  2.00s/it]",
        0.05, 10.0 + 9 * 20, "Epoch 0/9: 5/10 [00:10<00:10, 2.00s/it]",
    ),
    "keras below its epoch": (
        "Epoch 3/4\n 50/100 [=====>......] - ETA: 30s - loss: 0.31",
        0.625, 30.0 + 60.0, "50/100 - ETA: 30s - loss: 0.31",
    ),
    "tqdm that has just begun": (
        "  0%|          | 0/1000 [00:00<?, ?it/s]", 0.0, None, "0/1000 [00:00<?, ?it/s]",
    ),
    "tqdm at its end": (
        "100%|██████████| 8/8 [01:02:03<00:00, 465.4s/it]", 1.0, 0.0, "8/8 [01:02:03<00:00, 465.4s/it]",
    ),
    "tqdm that takes days": (
        " 10%|█         | 10/100 [1:02:03<27:18:27, 1092.3s/it]", 0.1, 98307.0, "10/100 [1:02:03<27:18:27, 1092.3s/it]",
    ),
    "tqdm without an end": ("steps: 317it [02:11,  2.44it/s]", None, None, "steps: 317it [02:11, 2.44it/s]"),
    "tqdm without an end or a beginning": ("0it [00:00, ?it/s]", None, None, "0it [00:00, ?it/s]"),
    "tqdm of bytes without an end": ("12.3kB [00:01, 9.10kB/s]", None, None, "12.3kB [00:01, 9.10kB/s]"),
    "tqdm with scaled counts": (
        " 12%|█▏        | 1.23k/10.0k [00:10<01:12, 121it/s]", 0.123, 72.0, "1.23k/10.0k [00:10<01:12, 121it/s]",
    ),
    "tqdm with one scaled count": (
        " 42%|████▏     | 500/1.20k [00:10<00:14, 50.0it/s]", 500 / 1200, 14.0, "500/1.20k [00:10<00:14, 50.0it/s]",
    ),
    "a download": (
        "model.safetensors:  45%|████▌     | 4.50G/9.99G [01:02<01:15, 72.9MB/s]",
        4.5 / 9.99, 75.0, "model.safetensors: 4.50G/9.99G [01:02<01:15, 72.9MB/s]",
    ),
    "tqdm with its own unit": (
        " 30%|███       | 3/10 [00:03<00:07,  1.00s/files]", 0.3, 7.0, "3/10 [00:03<00:07, 1.00s/files]",
    ),
    "tqdm without a drawing": (
        " 45% 45/100 [00:10<00:12,  4.40it/s]", 0.45, 12.0, "45% 45/100 [00:10<00:12, 4.40it/s]",
    ),
    "tqdm with a bracket in its figures": (
        " 45%|████▌     | 45/100 [00:10<00:12,  4.40it/s, shape=[3, 4]]",
        0.45, 12.0, "45/100 [00:10<00:12, 4.40it/s, shape=[3, 4]]",
    ),
    "tqdm cut by a narrow terminal": ("Epoch 3:  45%|████", 0.45, None, "Epoch 3: 45%"),
    "tqdm with nothing but a percentage": ("Epoch 3: 45%|████▌     |", 0.45, None, "Epoch 3: 45%"),
    "rich": ("Working... ━━━━━━━━━━╸━━━━━━━━━━ 45% 0:00:12", 0.45, 12.0, "Working... 45% 0:00:12"),
    "rich that does not know how long": ("Working... ━━━━━━━━━━━━━━ 0% -:--:--", 0.0, None, "Working... 0% -:--:--"),
    "rich of Lightning": (
        "Epoch 3/9  ━━━━━╸━━━━━━━━━━ 317/1000 0:02:11 • 0:04:40 2.44it/s v_num: 0 train_loss: 0.31",
        2.317 / 9, 280.0 + 6 * 411, "Epoch 3/9 317/1000 0:02:11 • 0:04:40 2.44it/s v_num: 0 train_loss: 0.31",
    ),
    "pip": (
        "   ━━━━━━━━━━━╸━━━━━━━━━━ 45.2/100.0 MB 4.1 MB/s eta 0:00:12",
        0.452, 12.0, "45.2/100.0 MB 4.1 MB/s eta 0:00:12",
    ),
    "keras 2": (
        " 317/1000 [========>.....................] - ETA: 4:40 - loss: 0.3100",
        0.317, 280.0, "317/1000 - ETA: 4:40 - loss: 0.3100",
    ),
    "keras 2 near its end": ("990/1000 [============================>.] - ETA: 4s - loss: 0.3", 0.99, 4.0,
                             "990/1000 - ETA: 4s - loss: 0.3"),
    "keras 3": (
        "317/1000 ━━━━━━━━━━━━━━━━━━━━ 4:40 410ms/step - accuracy: 0.9000 - loss: 0.3100",
        0.317, 280.0, "317/1000 4:40 410ms/step - accuracy: 0.9000 - loss: 0.3100",
    ),
    "keras 3 near its end": (
        "990/1000 ━━━━━━━━━━━━━━━━━━━━ 4s 410ms/step - loss: 0.31", 0.99, 4.0, "990/1000 4s 410ms/step - loss: 0.31",
    ),
    "a step": ("step 317/1000", 0.317, None, "step 317/1000"),
    "a step with a colon": ("[2026-11-16 02:11:00] Step: 317 / 1,000 loss 0.31", 0.317, None,
                            "[2026-11-16 02:11:00] Step: 317 / 1,000 loss 0.31"),
    "a step of a total": ("iteration 317 of 1000, loss 0.31", 0.317, None, "iteration 317 of 1000, loss 0.31"),
    "steps behind the count": ("317/1000 steps, eta 4m40s", 0.317, 280.0, "317/1000 steps, eta 4m40s"),
    "an epoch": ("Epoch 3/10", 0.3, None, "Epoch 3/10"),
    "the steps of an epoch": ("Epoch 3/10: 317/1000 loss=0.31", 0.2317, None, "Epoch 3/10: 317/1000 loss=0.31"),
    "epoch and step in brackets": ("Epoch [3/10], Step [317/1000], Loss: 0.3100", 0.2317, None,
                                   "Epoch [3/10], Step [317/1000], Loss: 0.3100"),
    "epoch and batch in brackets": ("Epoch: [3][ 317/1000]\tTime  0.310 (0.320)\tLoss 3/4", 0.317, None,
                                    "Epoch: [3][ 317/1000] Time 0.310 (0.320) Loss 3/4"),
    "examples of an epoch": ("Train Epoch: 3 [20480/60000 (34%)]\tLoss: 0.310000", 20480 / 60000, None,
                             "Train Epoch: 3 [20480/60000 (34%)] Loss: 0.310000"),
    "an eta of a day": ("Epoch [3][317/1000] lr: 1e-3, eta: 1 day, 3:04:05, loss: 0.31", 0.317, 97445.0,
                        "Epoch [3][317/1000] lr: 1e-3, eta: 1 day, 3:04:05, loss: 0.31"),
    "a build": ("[ 45%] Building CXX object a.o", 0.45, None, "[ 45%] Building CXX object a.o"),
    "a build by number": ("[317/1000] Building CXX object a.o", 0.317, None, "[317/1000] Building CXX object a.o"),
    "a percentage by name": ("progress: 45.5%", 0.455, None, "progress: 45.5%"),
    "a percentage that is done": ("45% done", 0.45, None, "45% done"),
    "a step with a figure called t": ("step 317/1000 t=12.3s", 0.317, None, "step 317/1000 t=12.3s"),
    "a step with a figure called m": ("step 50/100 m=0.9", 0.5, None, "step 50/100 m=0.9"),
    "a batch with its precision": ("batch 3/4 P 0.91", 0.75, None, "batch 3/4 P 0.91"),
    "bytes of different scales": ("part 512 kB of 1 MB", 0.512, None, "part 512 kB of 1 MB"),
    "scales without a unit": ("files 512k/1M", 0.512, None, "files 512k/1M"),
    "the last epoch, which begins": ("Epoch 10/10", 1.0, None, "Epoch 10/10"),
    "the last of them, with more to come": ("Files 3/3 downloaded", 1.0, None, "Files 3/3 downloaded"),
    "the last of them, with a time": ("step 10/10, eta 0:00:04", 1.0, 4.0, "step 10/10, eta 0:00:04"),
    "rich at its end": ("Working... ━━━━━━━━━━━━━━ 100% 0:00:00", 1.0, 0.0, "Working... 100% 0:00:00"),
    "keras 3 at its end, which says how long it took": (
        "1000/1000 ━━━━━━━━━━━━━━━━━━━━ 131s 131ms/step - loss: 0.31", 1.0, None,
        "1000/1000 131s 131ms/step - loss: 0.31",
    ),
    "zero of them": ("step 0/1000", 0.0, None, "step 0/1000"),
}  # fmt: skip


@pytest.mark.parametrize("shape", BARS)
def test_progress_output_is_recognised(shape: str) -> None:
    line, fraction, remaining, text = BARS[shape]
    expected = None if fraction is None else pytest.approx(fraction)
    found = progress_in(f"some words before it\n{line}\n")
    assert found is not None
    assert (found.fraction, found.remaining, found.text) == (expected, remaining, text)


@pytest.mark.parametrize(
    "line",
    [
        "loss 3/4",
        "2026/11/16 02:11:00 INFO starting",
        "11/16/2026 training begins",
        "[11/16] 02:11:00 training begins",
        "loaded checkpoints/step/317/1000.pt",
        "reading /data/part/3/4",
        "torch 2.1/cu118, driver 550.54/12.4",
        "accuracy 45%, top-5 91.2%",
        "GPU utilization 97%",
        "epoch 3 loss 3/4 acc 9/10",
        "step 317: loss 2.31, time 310ms",
        "step 5/4",
        "step 3/0",
        "val 1/2 split",
        "----------------------------------------",
        "================ 45 passed in 3.2s ================",
        "| name | value |",
        "ratio 16/9 at 60 fps",
        "",
    ],
)
def test_other_output_is_not_progress(line: str) -> None:
    assert progress_in(f"{line}\n") is None


def test_last_state_of_a_rewritten_bar_counts() -> None:
    text = "".join(f"\r {n}%|#    | {n}/100 [00:10<00:12,  4.40it/s]" for n in range(10, 20))
    assert progress_in(text) == Progress(fraction=0.19, text="19/100 [00:10<00:12, 4.40it/s]", remaining=12.0)


def test_last_bar_counts_despite_later_output() -> None:
    text = "step 1/10\nstep 2/10\nsaved a checkpoint\nWARNING: a word\n"
    found = progress_in(text)
    assert found is not None
    assert found.fraction == 0.2


def test_last_changed_of_nested_bars_counts() -> None:
    outer, inner = (
        "all:  30%|███   | 3/10 [00:30<01:10,  1.0s/it]",
        "epoch:  50%|█████   | 5/10 [00:01<00:01,  5.0it/s]",
    )
    found = progress_in(f"{outer}\n{inner}\x1b[A\r{outer}\n\r{inner}")
    assert found is not None
    assert found.fraction == 0.5


def test_colours_do_not_matter() -> None:
    found = progress_in("\x1b[32m━━━━━━\x1b[0m\x1b[2m━━━━\x1b[0m \x1b[35m60%\x1b[0m \x1b[36m0:01:02\x1b[0m")
    assert found == Progress(fraction=0.6, text="60% 0:01:02", remaining=62.0)


def test_bar_far_above_other_output_has_ended() -> None:
    assert progress_in("step 3/10\n" + "a word\n" * 60) is None


# The last two are letters that case folding turns into k and s.
PIECES = st.sampled_from(
    ["\r", "\n", "%", "|", "[", "]", "/", "<", ":", "?", " ", ",", ".", "3", "10", "00:12", "step", "Epoch", "it/s",
     "█", "━", "\0", "\x1b[A", "eta", "days", "k", "G", "=", ">", "of", "9" * 20, "٣", "\u212a", "\u017f"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(PIECES, max_size=60).map("".join)))
def test_any_text_gives_a_valid_fraction_or_none(text: str) -> None:
    found = progress_in(text)
    if found is not None:
        assert found.fraction is None or 0.0 <= found.fraction <= 1.0
        assert found.remaining is None or found.remaining >= 0.0
        assert len(found.text) <= 160
        assert "\n" not in found.text
