"""Curves from what a job prints: names, values and steps in the usual forms, bounded points, never an exception."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.logs.metrics import CurveReader, LogCurve, curves_of, figures_in, last_figures
from stoker.logs.search import LineFinder, LogIndex
from stoker.logs.writer import LogWriter


@pytest.mark.parametrize(
    ("line", "step", "values"),
    [
        ("step=100 loss=1.23", 100, {"loss": 1.23}),
        ('{"step": 7, "loss": 2.5e-1, "lr": 0.001}', 7, {"loss": 0.25, "lr": 0.001}),
        ("{'loss': 1.5, 'grad_norm': 3.0, 'iteration': 9}", 9, {"loss": 1.5, "grad_norm": 3.0}),
        (
            "Epoch 1:  32%|███▏      | 317/1000 [02:11<04:40, 2.44it/s, loss=1.23, acc=0.5]",
            317,
            {"loss": 1.23, "acc": 0.5},
        ),
        ("iter: 5, train/loss: .5, val-acc@1: -2", 5, {"train/loss": 0.5, "val-acc@1": -2.0}),
        (
            "loss=1.5 time: 3.2s mem: 12GiB eta: 0:01:02 torch: 2.1.0 at http://host:8080/x done: 45%",
            None,
            {"loss": 1.5},
        ),
        ("2026-11-18 14:00:01 INFO nothing", None, {}),
        ("\x1b[1;32mstep\x1b[0m=3 \x1b[38:2:1:2:3mloss=0.5\x1b[0m", 3, {"loss": 0.5}),
    ],
)
def test_figures_of_a_line(line: str, step: float | None, values: dict[str, float]) -> None:
    found = figures_in(line)
    assert (found.step, found.values) == (step, values)


def curves(text: str, *names: str) -> dict[str, LogCurve]:
    reader = CurveReader(names)
    reader.feed(text)
    return {curve.name: curve for curve in reader.curves()}


def test_curve_has_its_axis_and_a_gap_where_the_loss_is_no_number() -> None:
    found = curves("epoch=1 loss=2.0 rank=0\nepoch=2 loss=nan rank=1\nepoch=3 loss=1.0\nlr=1\nonce=5\nlr=2\n")
    assert list(found) == ["loss", "lr"]
    assert (found["loss"].axis, found["loss"].at, found["loss"].values) == ("epoch", [1, 2, 3], [2.0, None, 1.0])
    assert (found["lr"].axis, found["lr"].at, found["lr"].last) == ("line", [1, 2], 2.0)
    assert list(curves("rank=3 loss=1\n", "rank", "absent")) == ["rank"]


def test_chosen_curves_come_in_the_order_asked_for() -> None:
    text = "step=1 val_acc=0.1 loss=2 lr=1\nstep=2 loss=1 lr=1\n"
    assert list(curves(text, "lr", "val_acc", "absent", "loss")) == ["lr", "val_acc", "loss"]


def test_last_figures_are_the_newest_of_each_name() -> None:
    text = "loss=3 val_acc=0.25\nloss=2 rank=0\r\nloss=nan\rlr=1e-3 loss: 1.5\nsaved\n"
    assert last_figures(text, ("val_acc", "loss", "absent")) == {"val_acc": 0.25, "loss": 1.5}
    assert last_figures("loss=1\nloss=nan\n", ("loss",)) == {"loss": None}
    assert last_figures("", ("loss",)) == {}


def test_steps_that_restart_in_each_epoch_form_one_curve() -> None:
    text = "".join(f"step {step}/100: step={step} loss=1.0\n" for _epoch in range(3) for step in (50, 100))
    assert curves(text)["loss"].at == [50, 100, 150, 200, 250, 300]


BAR = "Epoch {epoch}: {share}%|###| {step}/100 [00:09<00:01, 9.7it/s, loss={loss:.4f}]"


def bar(epoch: int, *steps: int) -> str:
    return "\r".join(
        BAR.format(epoch=epoch, share=step, step=step, loss=1 / (100 * epoch + step + 1)) for step in steps
    )


def test_bars_of_successive_epochs_form_one_curve() -> None:
    text = "\n".join([bar(0, 100), "val loss 3", bar(1, 40, 100, 100), bar(2, 100), bar(3, 61)])
    assert curves(text)["loss"].at == [100, 140, 200, 200, 300, 361]
    both_ranks = "".join(f"step 50/100 loss={loss}\n" for loss in (1, 2))
    assert curves(both_ranks)["loss"].at == [50, 50]


def test_one_bar_is_a_curve(tmp_path: Path) -> None:
    clock = iter(range(1000))
    log = LogWriter(tmp_path / "output", 2**20, lambda: next(clock))
    for step in range(100):
        log.write(f"\r{bar(0, step)}".encode())
    log.close()
    with LogIndex(tmp_path).open() as view:
        (curve,) = curves_of(view)
        assert view.lines(0, 10) == [bar(0, 99).encode()]
        assert [match.text for match in view.after(LineFinder("epoch"))[0]] == [bar(0, 99)]
        assert view.after(LineFinder(" 41/100"))[0] == []
    assert len(curve.at) >= 20
    assert curve.at == sorted(curve.at)
    assert (curve.at[-1], curve.last) == (99, 0.01)


def test_many_points_are_merged_and_few_names_are_kept() -> None:
    found = curves("".join(f"step={step} loss={step} x{step}=1\n" for step in range(10_000)) * 1)["loss"]
    assert 500 <= len(found.at) <= 1000
    assert (found.at[-1], found.last) == (9999, 9999.0)
    assert all(abs(at - value) <= 16 for at, value in zip(found.at, found.values, strict=True) if value is not None)


def test_short_log_is_read_whole_from_both_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "output.1").write_text("step=1 loss=3\nstep=2 lo")
    (tmp_path / "output").write_text("ss=2\nstep=3 loss=1")
    with LogIndex(tmp_path).open() as view:
        (curve,) = curves_of(view)
    assert (curve.at, curve.values) == ([1, 2, 3], [3.0, 2.0, 1.0])


def test_long_log_is_read_in_parts_with_its_beginning_and_end(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as log:
        for step in range(300_000):
            log.write(f"step={step} loss={1 / (1 + step):.6f} and some words beside it\n")
    with LogIndex(tmp_path).open() as view:
        assert view.size > 3 * (4 << 20)
        (curve,) = curves_of(view)
    assert curve.at[0] < 1000
    assert curve.at[-1] == 299_999
    assert curve.at == sorted(curve.at)
    assert len(curve.at) <= 1000


@given(st.text("losep=:1.en{}\"' [/]%|\n\x1b", max_size=200))
def test_no_text_raises(text: str) -> None:
    for curve in curves(text).values():
        assert all(math.isfinite(at) for at in curve.at)
        assert all(value is None or math.isfinite(value) for value in curve.values)
