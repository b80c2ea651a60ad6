"""Programs that do not count as GPU users: configured patterns and a list of monitors."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

# The kernel truncates the name of a process to this many bytes.
KERNEL_NAME: Final = 15

# Programs that hold a device node open without using the GPU.
SHIPPED: Final = (
    # Services of the driver.
    "nvidia-persistenced", "nvidia-powerd", "nvidia-fabricmanager", "nv-fabricmanager", "nvidia-device-plugin",
    "gpu-feature-discovery",
    # Monitoring agents.
    "nv-hostengine", "dcgm", "dcgmi", "dcgm-exporter", "nvidia_gpu_exporter", "nvidia_gpu_prometheus_exporter",
    "nvml_exporter", "telegraf", "netdata", "zabbix_agent2", "all-smi", "stoker-gpus",
    # Interactive monitors.
    "nvidia-smi", "nvidia-settings", "nvtop", "nvitop", "gpustat", "btop", "glances", "rocm-smi", "amd-smi",
    "amdgpu_top", "radeontop", "intel_gpu_top",
    # Display servers and login screens, which have the node open as long as there is a screen.
    "systemd-logind", "plymouthd", "Xorg", "X", "Xwayland", "gnome-shell", "mutter", "kwin_wayland", "kwin_x11",
    "plasmashell", "cinnamon", "xfwm4", "sway", "weston", "Hyprland", "cosmic-comp", "gdm", "gdm-x-session",
    "gdm-wayland-session", "lightdm", "lightdm-gtk-greeter", "sddm", "sddm-greeter", "sddm-greeter-qt6",
)  # fmt: skip


def is_ignored(patterns: Collection[str], name: str | None, executable: str | None = None) -> bool:
    """True if a pattern with * and ? matches the name of the process or of its executable."""
    return _is_ignored(tuple(patterns), name, executable)


# The same processes hold the GPUs at most looks.
@lru_cache(maxsize=1024)
def _is_ignored(patterns: tuple[str, ...], name: str | None, executable: str | None) -> bool:
    names = [known for known in (name, executable) if known]
    # Brackets are literal.
    if any(fnmatchcase(known, pattern.replace("[", "[[]")) for pattern in patterns for known in names):
        return True
    if not name or len(name.encode()) != KERNEL_NAME or (executable is not None and executable.startswith(name)):
        return False
    # The kernel may have truncated the name, so patterns are truncated, too.
    return any(pattern.encode()[:KERNEL_NAME].decode(errors="replace") == name for pattern in patterns)
