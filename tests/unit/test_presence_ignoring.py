"""Patterns of ignored programs."""

import pytest

from stoker.presence.ignoring import KERNEL_NAME, SHIPPED, is_ignored


@pytest.mark.parametrize(
    ("pattern", "name", "executable"),
    [
        ("nvtop", "nvtop", "nvtop"),
        ("nvitop", "nvitop", "python3.11"),  # a script: the kernel names it after its file
        ("python3.11", "pt_main_thread", "python3.11"),
        ("dcgm-*", "dcgm-exporter", "dcgm-exporter"),
        ("nvto?", "nvtop", None),
        ("nvidia-persistenced", "nvidia-persistenced", "nvidia-persistenced"),
        ("nvidia-persistenced", "nvidia-persistenced", None),
        ("my-long-named-script", "my-long-named-script", "python3.11"),
        ("[kw]", "[kw]", None),
    ],
)
def test_pattern_matches_the_whole_name(pattern: str, name: str, executable: str | None) -> None:
    assert is_ignored([pattern], name[:KERNEL_NAME], executable)


@pytest.mark.parametrize(
    ("pattern", "name", "executable"),
    [
        ("", "python", "python3.11"),
        ("nv", "nvtop", "nvtop"),
        ("nvtop-of-mine", "nvtop", "nvtop"),
        ("Xorg", "xorg", "xorg"),
        ("python", "train.py", "python3.11"),
        ("nvidia-persistenced", "nvidia-persistent-training", "nvidia-persistent-training"),
        ("python-*-monitor", "python-training", "python-training"),
        ("python-*-monitor", "python-training", None),
        ("[kw]*", "kworker", None),
        ("nvidia-persist", "nvidia-persiste", None),
    ],
)
def test_pattern_does_not_match_part_of_a_name(pattern: str, name: str, executable: str | None) -> None:
    assert not is_ignored([pattern], name[:KERNEL_NAME], executable)


def test_process_without_a_known_name_is_not_ignored() -> None:
    assert not is_ignored(["*"], None, None)


def test_no_default_name_is_an_interpreter_or_pattern() -> None:
    assert not any({"*", "?"} & set(name) for name in SHIPPED)
    assert is_ignored(SHIPPED, "nvidia-persiste", "nvidia-persistenced")
    for program in ("python3.11", "bash", "java", "julia", "sleep", "ollama", "docker"):
        assert not is_ignored(SHIPPED, program, program)
