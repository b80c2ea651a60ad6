"""Settings: flags override `STOKER_*` variables, which override `stoker.toml` and the defaults here."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from stoker.errors import BadInputError, did_you_mean
from stoker.paths import may_be_read_by_others
from stoker.settings_path import config_path
from stoker.streams import warn
from stoker.units import parse_memory, parse_positive_duration

OptionTable = dict[str, Any]
"""Options of a verb without the dashes, checked by the verb, because its options depend on the registered rules."""

# S-T-O-K on the keys of a phone.
DEFAULT_PORT: Final = 7865
LOOPBACK: Final = "127.0.0.1"
# The events that can be notified.
EVENTS: Final = (
    *("failed", "stopped", "warned", "succeeded", "group-done"),
    *("queue-empty", "gpu-unknown", "gpu-quarantined", "worker-gone"),
)
# Most jobs succeed, so successes are sent only on request.
USUAL_EVENTS: Final = tuple(event for event in EVENTS if event != "succeeded")


class Notifications(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """`[notify]`: see docs/how-to/notifications.md."""

    urls: tuple[str, ...] = ()
    """apprise URLs. Each is a secret."""
    events: tuple[str, ...] = USUAL_EVENTS
    unknown_after: str = "10m"
    """How long a GPU must be unreadable before a notification."""
    link: str = ""
    """The address of the page, for the links in messages."""

    def __repr__(self) -> str:
        return f"<Notifications of {', '.join(self.events)} to {len(self.urls)} URLs>"

    def check(self) -> None:
        """Raises BadInputError for invalid values, without showing a URL."""
        if unknown := [event for event in self.events if event not in EVENTS]:
            raise BadInputError(f"events: there is no event {unknown[0]!r}: use {', '.join(EVENTS)}")
        _check_duration("unknown-after", self.unknown_after)
        if self.link and not self.link.startswith(("http://", "https://")):
            raise BadInputError("link: this is not the URL of the page: write it like https://gpu-box:7865")


class WebSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[web]`: addresses and title of the page."""

    host: str = LOOPBACK
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = DEFAULT_PORT
    cert: Path | None = None
    key: Path | None = None
    names: tuple[str, ...] = ()
    """Additional host names of this machine for browsers."""
    url: str = ""
    """The public address, for links; empty if it is the listening address."""
    title: str = "Stoker"

    def check(self) -> None:
        """Raises BadInputError for an invalid public address."""
        if not self.url:
            return
        from urllib.parse import urlsplit

        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:
            parts = None
        if parts is None or not parts.hostname or not self.url.startswith(("http://", "https://")):
            raise BadInputError(f"url: {self.url!r} is not an address: write it like https://stoker.example.org")
        if self.url.rstrip("/") != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc:
            raise BadInputError(
                f"url: {self.url!r} is more than a host: the page cannot live below a path of another site,"
                " so write it like https://stoker.example.org"
            )


class Exemption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[slurm-watch.exempt]]`: jobs to which all criteria apply are exempt. Names may be patterns: `svc-*`."""

    users: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    hours: str = ""
    """`20:00-08:00`; empty: all day."""
    days: str = ""
    """`sat,sun`; empty: every day."""
    reason: str = ""
    """The reason, for the log."""


class SlurmWatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """`[slurm-watch]`: how `stoker watch --slurm` treats the jobs of a cluster."""

    owner: str = ""
    """The apprise URL for warnings to the owner of a job, with {user} as placeholder. A secret."""
    administrator: str = ""
    """The apprise URL for the weekly table. A secret."""
    notice: str = "15m"
    """Minimum time between the first warning and the cancellation."""
    interactive_for: str = "2h"
    """The window of interactive jobs, if longer than --for."""
    owners_may_keep: bool = True
    """Whether a comment like "stoker: keep until 2026-11-20" exempts a job."""
    most_steps: Annotated[int, msgspec.Meta(ge=1)] = 500
    """Maximum number of watched jobs: each needs one srun on this machine."""
    exempt: tuple[Exemption, ...] = ()

    def __repr__(self) -> str:
        return f"<SlurmWatch with {len(self.exempt)} exemptions>"

    def check(self) -> None:
        """Raises BadInputError for invalid values, without showing a URL."""
        for key, text in (("notice", self.notice), ("interactive-for", self.interactive_for)):
            _check_duration(key, text)
        if self.owner and "{user}" not in self.owner:
            raise BadInputError("owner: the URL needs {user} where the name of a job's owner goes")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings."""

    gpus: str = "auto"
    """The source of readings: see `gpus.source`."""
    deadline: str = "5s"
    """The deadline of a look."""
    queue: str = ""
    """The queue: a SQLite file, or postgresql://…; empty for a file in the state directory."""
    engine: str = "local"
    """The engine of `stoker work`."""
    snapshot_limit: str = msgspec.field(name="snapshot-limit", default="50MiB")
    """The largest snapshot that `stoker submit --snapshot` stores."""
    run: OptionTable = {}
    """Defaults of the options of `stoker run`: `for = "20m"`."""
    watch: OptionTable = {}
    """Defaults of the options of `stoker watch`."""
    work: dict[str, OptionTable] = {}
    """By engine: defaults of the options of `stoker work` and `stoker up` with it."""
    fill: dict[str, Any] | None = None
    """Background programs on idle GPUs: `fill.config_files` converts and checks it."""
    fit: dict[str, OptionTable] = {}
    """Presets of `stoker fit` by name."""
    notify: Notifications = Notifications()
    web: WebSettings = WebSettings()
    slurm_watch: SlurmWatch = msgspec.field(name="slurm-watch", default=SlurmWatch())

    @property
    def snapshot_bytes(self) -> int:
        return parse_memory(self.snapshot_limit)

    @property
    def has_secrets(self) -> bool:
        """Whether the file contains a password of the queue or a notification URL."""
        from stoker.masking import without_passwords

        urls = (*self.notify.urls, self.slurm_watch.owner, self.slurm_watch.administrator)
        return without_passwords(self.queue) != self.queue or any(urls)


def _check_duration(key: str, text: str) -> None:
    try:
        parse_positive_duration(text)
    except BadInputError as error:
        raise BadInputError(f"{key}: {error}") from None


def load_settings(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the file, overridden by the environment. An explicitly named file must exist."""
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
    """Whether the file's directory is inaccessible: HOME is another user's, as under `sudo -u`."""
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
        settings = settings_of(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, BadInputError) as error:
        raise BadInputError(f"error in the configuration file {path}: {error}") from None
    if settings.has_secrets and is_public:
        warn(f"other users of this machine can read the secrets in {path}: run `chmod 600 {path}`")
    return settings


def settings_of(tables: Mapping[str, Any]) -> Settings:
    """The settings in the tables of a file. Raises BadInputError with section and key of the first error."""
    try:
        settings = msgspec.convert(tables, Settings, dec_hook=_convert_path)
    except msgspec.ValidationError as error:
        raise BadInputError(_mistake(str(error))) from None
    _check_duration("deadline", settings.deadline)
    try:
        parse_memory(settings.snapshot_limit)
    except BadInputError as error:
        raise BadInputError(f"snapshot-limit: {error}") from None
    for section, content in (
        ("notify", settings.notify),
        ("web", settings.web),
        ("slurm-watch", settings.slurm_watch),
    ):
        try:
            content.check()
        except BadInputError as error:
            raise BadInputError(f"[{section}] {error}") from None
    return settings


def _convert_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise TypeError(f"Expected `str`, got `{type(value).__name__}`")


_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "": Settings,
    "notify": Notifications,
    "web": WebSettings,
    "slurm-watch": SlurmWatch,
    "slurm-watch.exempt": Exemption,
}


def _mistake(message: str) -> str:
    """A message of msgspec, with section and key as they are in the file: `[web] port: expected `int`, got `str``."""
    problem, _, where = message.partition(" - at `$")
    where = where.replace("[...]", "")  # any key of a table of tables
    section, _, key = where.strip(".`").rpartition(".")
    if not (unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem)):
        place = f"{_title(section)}{key}".strip()
        return f"{place}: {problem[:1].lower()}{problem[1:]}" if place else problem
    section = f"{section}.{key}".strip(".")
    section = re.sub(r"\[\d+\]", "", section)
    keys = [field.encode_name for field in msgspec.structs.fields(_SECTIONS[section])]
    return f"{_title(section)}has no key {unknown[1]!r}: {did_you_mean(unknown[1], keys)}"


def _title(section: str) -> str:
    return f"[{section}] " if section else ""
