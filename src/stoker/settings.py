"""Settings: flags over `STOKER_*` variables over `stoker.toml` over the defaults here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stoker.errors import BadInputError
from stoker.masking import without_passwords
from stoker.paths import may_be_read_by_others
from stoker.settings_path import config_path
from stoker.streams import warn
from stoker.units import parse_duration

# The events that can be notified.
EVENTS: Final = ("failed", "stopped", "queue-empty", "gpu-unknown", "worker-gone")


class Notifications(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """`[notify]`: see docs/how-to/notifications.md."""

    urls: tuple[str, ...] = ()
    """apprise URLs. Each is a secret."""
    events: tuple[str, ...] = EVENTS
    unknown_after: str = "10m"
    """How long a GPU must be unreadable before a notification."""
    link: str = ""
    """The address of the page, for the links in messages."""

    def __repr__(self) -> str:
        return f"<Notifications of {', '.join(self.events)} to {len(self.urls)} URLs>"

    def check(self) -> None:
        """Raises BadInputError for invalid values, without showing a URL."""
        if unknown := [event for event in self.events if event not in EVENTS]:
            raise BadInputError(f"[notify] has no event {unknown[0]!r}: use {', '.join(EVENTS)}")
        try:
            parse_duration(self.unknown_after)
        except BadInputError as error:
            raise BadInputError(f"[notify] unknown-after: {error}") from None
        if self.link and not self.link.startswith(("http://", "https://")):
            raise BadInputError("[notify] link must be the URL of the page, such as https://gpu-box:7865")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that more than one verb needs."""

    gpus: str = "auto"
    """Where readings come from: see `gpus.source`."""
    deadline: str = "5s"
    """How long one look may take before it counts as unknown."""
    queue: str = ""
    """Where jobs wait: a SQLite file, or postgresql://…; empty for a file in the state directory."""
    engine: str = "local"
    """Where `stoker work` runs jobs."""
    run: dict[str, Any] = {}
    """Options of `stoker run` as on its command line, without the dashes: `for = "20m"`."""
    watch: dict[str, Any] = {}
    """The same for `stoker watch`."""
    fill: dict[str, Any] = {}
    """Background programs on idle GPUs: see docs/reference/fill.md."""
    fit: dict[str, dict[str, Any]] = {}
    """Presets of `stoker fit` by name, each with options as on its command line, without the dashes."""
    notify: Notifications = Notifications()
    """Notifications."""
    web: dict[str, Any] = {}
    """Options of the page: host, port, url, names, cert, key, title."""

    @property
    def has_secrets(self) -> bool:
        """Whether the file holds a password of the queue or a notification URL."""
        return without_passwords(self.queue) != self.queue or bool(self.notify.urls)


def load_settings(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the file, overridden by the environment. A file that was named must exist."""
    named = path is not None or "STOKER_CONFIG" in environment
    settings = _read(path or Path(config_path(environment)), must_exist=named)
    changes = {
        field: environment[variable]
        for field, variable in (
            ("gpus", "STOKER_GPUS"),
            ("deadline", "STOKER_DEADLINE"),
            ("queue", "STOKER_QUEUE"),
            ("engine", "STOKER_ENGINE"),
        )
        if environment.get(variable)
    }
    return msgspec.structs.replace(settings, **changes) if changes else settings


def _is_out_of_reach(path: Path) -> bool:
    """Whether this user may not even look for the file: HOME is another user's, as under `sudo -u`."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _read(path: Path, *, must_exist: bool) -> Settings:
    try:
        with path.open(encoding="utf-8") as file:
            text, is_public = file.read(), may_be_read_by_others(os.fstat(file.fileno()))
    except FileNotFoundError:
        if must_exist:
            raise BadInputError(f"the configuration file {path} does not exist") from None
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        if not must_exist and _is_out_of_reach(path):
            return Settings()
        raise BadInputError(f"the configuration file {path} cannot be read: {error}") from None
    import tomllib

    try:
        settings = msgspec.convert(tomllib.loads(text), Settings)
        settings.notify.check()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, BadInputError) as error:
        raise BadInputError(f"error in the configuration file {path}: {error}") from None
    if settings.has_secrets and is_public:
        warn(f"other users of this machine can read the secrets in {path}: run `chmod 600 {path}`")
    return settings
