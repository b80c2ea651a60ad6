"""Loads the programs of scripts/, which have no suffix, as modules."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    module_name = name.replace("-", "_")
    loader = SourceFileLoader(module_name, str(REPOSITORY / "scripts" / name))
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module
