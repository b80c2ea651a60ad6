"""The callbacks for training libraries, with stand-ins for the libraries."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import stoker
from stoker import integrations, step_file

PLACES = {
    "LightningCallback": ("lightning.pytorch.callbacks", "Callback"),
    "TransformersCallback": ("transformers", "TrainerCallback"),
    "KerasCallback": ("keras.callbacks", "Callback"),
}
EVENTS = [
    ("LightningCallback", "on_train_batch_end"),
    ("LightningCallback", "on_validation_batch_end"),
    ("TransformersCallback", "on_step_end"),
    ("TransformersCallback", "on_prediction_step"),
    ("KerasCallback", "on_train_batch_end"),
    ("KerasCallback", "on_test_batch_end"),
]


class Base:
    """What a library's own base class does at other events."""

    def on_train_begin(self) -> str:
        return "begun"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def install(path: str, base: str) -> None:
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        setattr(sys.modules[path], base, Base)

    for name in PLACES:
        monkeypatch.delitem(integrations.__dict__, name, raising=False)
    return install


@pytest.mark.parametrize(("name", "event"), EVENTS)
def test_event_of_the_library_is_a_step(
    name: str, event: str, library: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library(*PLACES[name])
    monkeypatch.setattr(step_file, "_count", 0)
    callback = getattr(integrations, name)()
    assert isinstance(callback, Base)
    assert callback.on_train_begin() == "begun"
    getattr(callback, event)("any", "arguments", of="the library")
    assert step_file._count == 1


def test_old_name_of_a_library_is_used_where_the_program_has_it(
    library: Callable[[str, str], None],
) -> None:
    library("pytorch_lightning.callbacks", "Callback")
    assert issubclass(integrations.LightningCallback, Base)


def test_missing_library_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(integrations.__dict__, "TransformersCallback", raising=False)
    with pytest.raises(ImportError, match="transformers"):
        _ = integrations.TransformersCallback


def test_unknown_callback_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'stoker\.integrations' has no attribute 'SklearnCallback'"):
        _ = integrations.SklearnCallback


def test_step_imports_nothing_heavy() -> None:
    program = "import sys, stoker; stoker.step(); print(*sorted(m for m in sys.modules if m.startswith('stoker')))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert loaded.split() == ["stoker", "stoker.step_file"]


class Odd:
    def __int__(self) -> int:
        raise RuntimeError("not a number")


@pytest.mark.parametrize("directory", ["", "/nonexistent/run", "/dev/null", "a\0b"])
@pytest.mark.parametrize("number", [None, 7, Odd(), "text"])
def test_step_never_raises(directory: str, number: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_file, "_due", 0.0)
    monkeypatch.setattr(step_file, "_count", 0)
    monkeypatch.setattr("os.environ", {"STOKER_RUN_DIR": directory})
    stoker.step(number)  # type: ignore[arg-type]
    stoker.step()


def test_loop_that_spins_writes_few_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(step_file, "_due", 0.0)
    monkeypatch.setattr(step_file, "_count", 0)
    monkeypatch.setenv("STOKER_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    written = []
    for number in range(11):
        clock[0] = 100.0 + number / 512
        stoker.step()
        (found,) = step_file.read_steps(str(tmp_path))
        written.append((found.rank, found.steps))
    assert written == [(3, 1)] * 6 + [(3, 7)] * 5
