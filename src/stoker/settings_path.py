"""Where `stoker.toml` is."""

import os
from collections.abc import Mapping
from pathlib import Path


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    if chosen := environment.get("STOKER_CONFIG"):
        return Path(chosen)
    base = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".config"
    return Path(base) / "stoker" / "stoker.toml"
