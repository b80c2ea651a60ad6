"""Callbacks that report the steps of Lightning, Transformers and Keras trainings to Stoker.

Each class is created on first use, because its base class is in the training library.
"""

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, Final

from stoker.step_file import step


class _Source:
    """The base class of a callback, and the events after a step."""

    def __init__(self, modules: tuple[str, ...], base: str, *events: str) -> None:
        """`modules`: the names of the library. One that the program has imported takes precedence."""
        self._modules = modules
        self._base = base
        self._events = events

    def callback(self, name: str) -> type:
        base = getattr(self._module(), self._base)
        return type(name, (base,), {"__module__": __name__, "__doc__": _DOC, **dict.fromkeys(self._events, _on_event)})

    def _module(self) -> Any:
        imported = [name for name in self._modules if _library(name) in sys.modules]
        installed = imported or [name for name in self._modules if importlib.util.find_spec(_library(name))]
        return importlib.import_module([*installed, *self._modules][0])


def _library(module: str) -> str:
    return module.partition(".")[0]


_DOC: Final = "Reports every batch of training and evaluation to Stoker."


def _on_event(_self: object, *_arguments: object, **_more: object) -> None:
    step()


_SOURCES: Final[Mapping[str, _Source]] = {
    "LightningCallback": _Source(
        ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"),
        "Callback",
        "on_train_batch_end",
        "on_validation_batch_end",
        "on_test_batch_end",
        "on_predict_batch_end",
    ),
    "TransformersCallback": _Source(
        ("transformers",), "TrainerCallback", "on_substep_end", "on_step_end", "on_prediction_step"
    ),
    "KerasCallback": _Source(
        ("keras.callbacks", "tensorflow.keras.callbacks"),
        "Callback",
        "on_train_batch_end",
        "on_test_batch_end",
        "on_predict_batch_end",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _SOURCES[name].callback(name)
    return found
