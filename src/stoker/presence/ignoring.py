"""Programs that do not count as users of a GPU: the patterns of the configuration and a list of monitors."""

import re
from collections.abc import Sequence
from typing import Final

from stoker.presence.holders import DeviceHolder

# The kernel keeps this many bytes of a process's name.
KERNEL_NAME: Final = 15

SHIPPED_REASONS: Final[dict[str, str]] = {
    # Services of the driver.
    "nvidia-persistenced": "keeps the driver loaded",
    "nvidia-powerd": "shifts power between processor and GPU",
    "nvidia-fabricmanager": "runs the NVLink switches",
    "nv-fabricmanager": "runs the NVLink switches",
    "nvidia-device-plugin": "tells Kubernetes which GPUs there are",
    "gpu-feature-discovery": "tells Kubernetes what the GPUs can do",
    # Monitoring agents.
    "nv-hostengine": "the engine of DCGM, reads figures",
    "dcgm": "the engine of DCGM, as some images name it",
    "dcgmi": "asks DCGM",
    "dcgm-exporter": "exports figures of DCGM",
    "nvidia_gpu_exporter": "exports figures of nvidia-smi",
    "nvidia_gpu_prometheus_exporter": "exports figures of NVML",
    "nvml_exporter": "exports figures of NVML",
    "telegraf": "collects figures",
    "netdata": "collects figures",
    "zabbix_agent2": "collects figures",
    "all-smi": "shows figures",
    "stoker-gpus": "reads figures for any Stoker",
    # Interactive monitors.
    "nvidia-smi": "shows figures",
    "nvidia-settings": "shows and sets clocks and fans",
    "nvtop": "shows figures",
    "nvitop": "shows figures",
    "gpustat": "shows figures",
    "btop": "shows figures",
    "glances": "shows figures",
    "rocm-smi": "shows figures",
    "amd-smi": "shows figures",
    "amdgpu_top": "shows figures",
    "radeontop": "shows figures",
    "intel_gpu_top": "shows figures",
    # Display servers have the node open as long as there is a screen.
    "systemd-logind": "hands the screen to sessions",
    "plymouthd": "draws the screen while the machine starts",
    "Xorg": "draws the screen",
    "X": "draws the screen, as older systems call it",
    "Xwayland": "draws X11 windows on Wayland",
    "gnome-shell": "draws the screen",
    "mutter": "draws the screen",
    "kwin_wayland": "draws the screen",
    "kwin_x11": "draws the screen",
    "plasmashell": "draws the screen",
    "cinnamon": "draws the screen",
    "xfwm4": "draws the screen",
    "sway": "draws the screen",
    "weston": "draws the screen",
    "Hyprland": "draws the screen",
    "cosmic-comp": "draws the screen",
    "gdm": "shows the login screen",
    "gdm-x-session": "starts the login screen",
    "gdm-wayland-session": "starts the login screen",
    "lightdm": "shows the login screen",
    "lightdm-gtk-greeter": "shows the login screen",
    "sddm": "shows the login screen",
    "sddm-greeter": "shows the login screen",
    "sddm-greeter-qt6": "shows the login screen",
}
"""Programs that hold a device node open without using the GPU, and why."""

SHIPPED: Final[tuple[str, ...]] = tuple(SHIPPED_REASONS)


class Ignored:
    """Case-sensitive patterns with * and ? that match a whole name."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._whole = [_compiled(pattern) for pattern in patterns if pattern]
        self._cut = {_cut(pattern) for pattern in patterns if len(pattern.encode()) > KERNEL_NAME}

    def matches(self, holder: DeviceHolder) -> bool:
        return self.matches_names(holder.name, holder.executable)

    def matches_names(self, name: str | None, executable: str | None = None) -> bool:
        """By the process's name and the name of its executable, as far as they are known."""
        if any(pattern.fullmatch(known) for pattern in self._whole for known in (name, executable) if known):
            return True
        if not name or len(name.encode()) != KERNEL_NAME:
            return False
        # An executable that begins with the truncated name gives the whole name.
        whole_is_known = executable is not None and executable.startswith(name)
        return not whole_is_known and name in self._cut


def _compiled(pattern: str) -> re.Pattern[str]:
    wild = {"*": ".*", "?": "."}
    return re.compile("".join(wild.get(letter, re.escape(letter)) for letter in pattern), re.DOTALL)


def _cut(pattern: str) -> str:
    """The pattern truncated as the kernel truncates names. With * or ? left in it, it matches no name."""
    return pattern.encode()[:KERNEL_NAME].decode(errors="replace")
