"""Where Stoker keeps its state: `$STOKER_HOME`, or else the XDG state directory."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_home(environment: Mapping[str, str] = os.environ) -> Path:
    if home := environment.get("STOKER_HOME"):
        return Path(home)
    base = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.home()) / ".local/state"
    return Path(base) / "stoker"
