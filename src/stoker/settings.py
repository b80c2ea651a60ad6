"""What a person set: flags over `STOKER_*` variables over `stoker.toml` over the defaults here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import BadInputError
from stoker.settings_path import config_path


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that more than one verb needs."""

    gpus: str = "auto"
    """Where readings come from: auto, nvml, nvidia-smi, drm, sim:4."""
    deadline: str = "5s"
    """How long one look may take before it counts as unknown."""
    queue: str = ""
    """Where jobs wait: a SQLite file, or postgresql://…; empty for a file in the state directory."""
    run: dict[str, Any] = {}
    """Options of `stoker run` as on its command line, without the dashes: `for = "20m"`."""
    watch: dict[str, Any] = {}
    """The same for `stoker watch`."""
    fill: dict[str, Any] = {}
    """Background programs on idle GPUs: see docs/fill.md."""
    fit: dict[str, dict[str, Any]] = {}
    """Presets of `stoker fit` by name, each with options as on its command line, without the dashes."""


def load_settings(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
    """The file's settings with the environment's over them. A file that was named must be there."""
    named = path is not None or "STOKER_CONFIG" in environment
    settings = _read(path or Path(config_path(environment)), must_exist=named)
    changes = {
        field: environment[variable]
        for field, variable in (("gpus", "STOKER_GPUS"), ("deadline", "STOKER_DEADLINE"), ("queue", "STOKER_QUEUE"))
        if environment.get(variable)
    }
    return msgspec.structs.replace(settings, **changes) if changes else settings


def _read(path: Path, *, must_exist: bool) -> Settings:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if must_exist:
            raise BadInputError(f"the configuration file {path} does not exist") from None
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"the configuration file {path} cannot be read: {error}") from None
    import tomllib

    try:
        return msgspec.convert(tomllib.loads(text), Settings)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadInputError(f"mistake in the configuration file {path}: {error}") from None
