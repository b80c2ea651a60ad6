"""Programs that do not count as users of a GPU: the patterns of the configuration and a list of monitors."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Final

# The kernel keeps this many bytes of a process's name.
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
    """Whether a pattern with * and ? matches the process's name or the name of its executable, as far as known."""
    names = [known for known in (name, executable) if known]
    # Brackets stand for themselves.
    if any(fnmatchcase(known, pattern.replace("[", "[[]")) for pattern in patterns for known in names):
        return True
    if not name or len(name.encode()) != KERNEL_NAME or (executable is not None and executable.startswith(name)):
        return False
    # The kernel may have truncated the name, and the whole of it is not known: the patterns are truncated alike.
    return any(pattern.encode()[:KERNEL_NAME].decode(errors="replace") == name for pattern in patterns)
