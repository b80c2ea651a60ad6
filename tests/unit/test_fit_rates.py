"""Speed and steps as training programs print them."""

import pytest

from stoker.errors import BadInputError
from stoker.fit.measurements import Rates


def fed(text: str, pattern: str | None = None) -> Rates:
    rates = Rates(pattern)
    rates.feed(text)
    return rates


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(" 12%|█▏  | 12/100 [00:04<00:27,  3.25it/s]", 3.25 * 32, id="tqdm"),
        pytest.param(" 12%|█▏  | 12/100 [00:04<00:27,  2.50s/it, loss=3.1]", 32 / 2.5, id="slow tqdm"),
        pytest.param("iter 12: loss 3.2, time 125.00ms, mfu 4.20%", 32 / 0.125, id="nanoGPT"),
        pytest.param("step 12 | loss 3.2 | 410.5 examples/sec", 410.5, id="examples"),
        pytest.param("Epoch 1 [12/469] 1200 images/s", 1200, id="images"),
        pytest.param("12/469 ━━━━ 1:02 150ms/step - loss: 0.3", 32 / 0.15, id="Keras"),
        pytest.param("loss 3.2 lr 0.1", None, id="nothing"),
        pytest.param("Map: 100%|██| 900/1000 [00:01<00:00, 812.00 examples/s]", None, id="preparation"),
        pytest.param("step 12 at 0.0it/s", None, id="standstill"),
    ],
)
def test_speed_is_read_from_the_output(line: str, expected: float | None) -> None:
    rate = fed(line + "\n").rate(32)

    assert rate == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("pattern", "line", "expected"),
    [
        pytest.param(r"speed=([\d.]+)", "speed=44.5", 44.5, id="examples per second"),
        pytest.param(r"speed=([\d,]+)", "speed=1,044", 1044, id="with commas"),
        pytest.param(r"speed=(\w+)", "speed=fast", None, id="no number"),
        pytest.param(r"speed=([\d.]+)", "3.25it/s", None, id="only what was asked for"),
    ],
)
def test_speed_is_read_with_a_custom_pattern(pattern: str, line: str, expected: float | None) -> None:
    assert fed(line + "\n", pattern).rate(32) == expected


@pytest.mark.parametrize(("pattern", "complaint"), [("(", "is not a regular expression"), ("speed", "has no group")])
def test_invalid_pattern_is_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(BadInputError, match=complaint):
        Rates(pattern)


def test_slow_start_and_a_hiccup_do_not_count() -> None:
    rates = fed("".join(f"{speed}it/s\n" for speed in (0.1, 4, 0.2, 6, 5, 6)))

    assert rates.rate(1) == 5


def test_only_the_last_steps_count() -> None:
    rates = fed("1it/s\n" * 100 + "9it/s\n" * 20)

    assert rates.rate(1) == 9


def test_steps_are_timed_where_no_speed_is_printed() -> None:
    rates = Rates()
    for second in range(6):
        rates.feed(f"step {second * 4}: loss 3\n", now=100.0 + second)

    assert rates.rate(8) == pytest.approx(32)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param("loading data\nmodel has 12 layers\n", 0, id="no steps"),
        pytest.param("  0%|   | 0/100 [00:00<?, ?it/s]\r", 0, id="a bar before its first step"),
        pytest.param("| 0/100 [00:00<?, ?it/s]\r| 1/100 [00:01<, 1it/s]\r| 4/100 [00:04<, 1it/s]\r", 4, id="tqdm"),
        pytest.param("step 0: loss 3\nstep 10: loss 2\n", 11, id="every tenth step"),
        pytest.param("step 5000: loss 3\nstep 5001: loss 3\n", 2, id="resumed"),
        pytest.param("iter 0: loss 3\niter 1: loss 3\niter 2: loss 2\n", 3, id="iter"),
        pytest.param("global_step=3 loss=1\nglobal_step=4 loss=1\n", 2, id="global step"),
        pytest.param("Epoch: 1 [0/469]\nEpoch: 1 [100/469]\n", 101, id="epochs"),
        pytest.param(
            "Epoch 1 | 1/3 [00:01<, 1it/s]\rEpoch 1 | 3/3 [..]\r | 0/3 [..]\r | 1/3 [..]\r", 3, id="next epoch"
        ),
        pytest.param(
            "| 1/9 [a]\r| 5/99 [a]\r| 1/9 [a]\r| 6/99 [a]\r| 1/9 [a]\r| 7/99 [a]\r", 2, id="two bars at a time"
        ),
        pytest.param("Map: | 0/9 [..]\rMap: | 9/9 [..]\r", 0, id="preparation"),
        pytest.param("step 1\nstep 1\nstep 1\n", 1, id="the same step again"),
    ],
)
def test_steps_are_counted(text: str, steps: int) -> None:
    assert fed(text).steps_seen == steps


def test_line_is_assembled_from_chunks() -> None:
    rates = Rates()
    for piece in ("iter 1: lo", "ss 3, time 500", ".0ms\nit", "er 2: loss 3, time 500.0ms\n"):
        rates.feed(piece)

    assert rates.steps_seen == 2
    assert rates.rate(4) == 8


def test_unterminated_line_is_not_kept() -> None:
    rates = Rates()
    for _ in range(100):
        rates.feed("x" * 10_000)
    rates.feed(" 3.0it/s\n")

    assert rates.rate(1) == 3
    assert len(rates._rest) < 10_000
