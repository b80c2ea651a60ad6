"""The path of `stoker.toml`. The command line needs it before all other imports, so this module imports nothing."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def config_path(environment: "Mapping[str, str]") -> str:
    if chosen := environment.get("STOKER_CONFIG"):
        return chosen
    base = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '')}/.config"
    return f"{base}/stoker/stoker.toml"
