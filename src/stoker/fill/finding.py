"""Which configuration is meant: a file that was named, `[fill]` in stoker.toml, or the one of gpu_mon."""

import os
from collections.abc import Mapping
from pathlib import Path

from stoker.errors import BadInputError
from stoker.fill import ini, toml
from stoker.fill.config import FillConfig
from stoker.paths import is_there
from stoker.settings_path import config_path


def find_config(named: str | None, environment: Mapping[str, str] = os.environ) -> FillConfig:
    """Raises a sentence for each mistake in it, or one that says where it should be."""
    if named is not None:
        path = Path(named).expanduser()
        return toml.read_file(path) if path.suffix == ".toml" else ini.read(path)
    settings = Path(config_path(environment))
    if is_there(settings) and (config := toml.read_file(settings, must_have=False)) is not None:
        return config
    seed = gpu_mon_path(environment)
    if is_there(seed):
        return ini.read(seed)
    raise BadInputError(
        f"there is nothing to fill with: write [[fill.program]] into {settings}, or a {seed}, or use --config"
    )


def gpu_mon_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where gpu_mon always looked."""
    return Path(environment.get("HOME") or Path.home()) / ".config/gpu_mon.conf"
